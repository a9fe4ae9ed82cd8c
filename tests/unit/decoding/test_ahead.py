"""Steps that find their scores ready return what steps with passes of their own do, in fewer passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import foresay
from foresay import KVCache, ModelInput, ModelOutput, OutOfMemoryError, Rows, Step, TableModel, Verification
from foresay.decoding import ahead, step
from foresay.drafters.suffix_tree import SuffixTreeDrafter
from helpers.support import Loop, Mixed, Sometimes, run

VOCAB = 7
PROMPTS = [[1, 2, 3, 1, 2, 3], [4], [5, 6], [2] * 11, [3, 1]]
SAMPLED = {"temperature": 1.0, "frequency_penalty": 0.5, "seed": 3}


class Early(TableModel):
    """Runs ahead; hidden states are the tokens fed and their positions."""

    ahead = True

    def __init__(self) -> None:
        super().__init__(TableModel.random(VOCAB, seed=0).table)
        self.fed: list[int] = []
        self.is_full = False

    @property
    def capabilities(self) -> Any:  # type: ignore[override]
        return dataclasses.replace(TableModel.capabilities, runs_ahead=self.ahead, num_layers=0)

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        starts = torch.tensor(cache.lengths[model_input.first_row :][: len(model_input.num_tokens)])
        output = super().forward(model_input, cache)
        if self.is_full:
            raise OutOfMemoryError("no page is left")
        self.fed.append(sum(model_input.num_tokens))
        ids = model_input.token_ids
        states = torch.stack([ids, starts[:, None] + torch.arange(ids.shape[1])], -1).float()
        return dataclasses.replace(output, hidden=dict.fromkeys(model_input.hidden_layers, states))


class Watching(Sometimes):
    """Compares the hidden states of a step with the tokens that its row has."""

    hidden_layers = (0,)
    seen = 0

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        if target is None or verification is None:
            return
        for i, row in enumerate(rows):
            start, before = (target.starts or ())[i], (target.num_before or (0,) * len(rows))[i]
            count = before + 1 + int(verification.num_accepted[i])
            if row.remaining:
                states = target.hidden[0][i, :count]
                assert states[:, 0].tolist() == row.tokens[start : start + count].tolist()
                assert states[:, 1].tolist() == [*range(start, start + count)]
                self.seen += count
        for row in rows:
            if row.num_new == 1 and row.prompt_length > 1:
                assert row.prompt_hidden[0][:, 0].tolist() == row.tokens[: row.prompt_length - 1].tolist()


def decoded(model: Early, kind: str, params: dict[str, Any], **options: Any) -> tuple[list[list[int]], list[Step]]:
    each = [foresay.SamplingParams(max_new_tokens=5 + 3 * i, **params) for i in range(len(PROMPTS))]
    drafter: Any = None
    if kind != "plain":
        wanted = decoded(Early(), "plain", params, **options)[0]
        drafters = {"watched": Watching(wanted, VOCAB), "mixed": Mixed(VOCAB), "tree": SuffixTreeDrafter()}
        drafter = drafters[kind]
    options["gamma"] = 0 if drafter is None else 3
    found, steps, _ = run(
        model, PROMPTS, each, drafter=drafter, max_batch_size=3, join_later=2, eos=frozenset([6]), **options
    )
    assert kind != "watched" or drafter.seen > 10
    return found, steps


def told(steps: Sequence[Step]) -> list[Any]:
    """Steps without times, by request: rows may join at other steps."""
    return sorted(
        ((one.request_id, one.token_ids, one.origins, one.num_drafted, one.finish_reason) for one in steps),
        key=lambda one: one[0],
    )


@pytest.mark.parametrize("params", [{"seed": 1}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("kind", "rule"),
    [*((kind, "speculative") for kind in ("plain", "watched", "mixed", "tree")), ("watched", "coupled")],
)
def test_steps_are_those_of_passes_of_their_own(
    kind: str, rule: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = Early(), Early()
    found = decoded(early, kind, params, rule=rule)
    monkeypatch.setattr(Early, "ahead", False)
    expected = decoded(late, kind, params, rule=rule)
    assert found[0] == expected[0] and told(found[1]) == told(expected[1])
    assert any(step.finish_reason == "stop" for step in found[1])
    assert len(early.fed) <= len(late.fed) or kind == "plain"


def _another_row(patch: pytest.MonkeyPatch) -> None:
    known = ahead.keep
    patch.setattr(ahead, "keep", lambda row, size, output, index: known(row, size, output, 0))


def _states_of_drafts_alone(patch: pytest.MonkeyPatch) -> None:
    known = ahead.merged

    def merged(found: Any, output: ModelOutput | None) -> ModelOutput:
        states = None if output is None else dict(output.hidden)
        both = known(found, output)
        return both if states is None else dataclasses.replace(both, hidden=states)

    patch.setattr(ahead, "merged", merged)


@pytest.mark.parametrize(("breaks", "kind"), [(_another_row, "plain"), (_states_of_drafts_alone, "watched")])
def test_scores_and_states_of_others_are_found(breaks: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls."""
    breaks(monkeypatch)
    with pytest.raises(AssertionError):
        test_steps_are_those_of_passes_of_their_own(kind, "speculative", {"seed": 1}, monkeypatch)


def test_a_pass_begins_before_the_last_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, order = Early(), list[str]()
    later, forward = step.later, model.forward
    monkeypatch.setattr(step, "later", lambda values: lambda: order.append("read") or later(values)())
    monkeypatch.setattr(model, "forward", lambda *given: order.append("pass") or forward(*given))
    run(model, [[1, 2]], foresay.SamplingParams(max_new_tokens=4, ignore_eos=True), gamma=0)
    assert order == ["pass", "pass", "read", "pass", "read", "pass", "read", "read"], "the prompt's pass returns scores"


def test_a_step_is_done_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An observer fails, and memory ends in a pass that begins early."""
    wanted, _ = decoded(Early(), "plain", {})
    begin, calls = ahead.begin, list[int]()

    def often_full(rows: Rows, tokens: torch.Tensor, target: Any, cache: KVCache) -> None:
        calls.append(len(rows))
        target.is_full = len(calls) % 3 == 0
        begin(rows, tokens, target, cache)
        target.is_full = False

    def observer(*given: Any) -> None:
        if len(calls) % 4 == 1 and calls[-1]:
            calls[-1] = 0  # once
            raise ValueError

    monkeypatch.setattr(ahead, "begin", often_full)
    loop = Loop(Early(), gamma=0, max_batch_size=3, observers=[observer])
    known = loop.engine.step

    def again() -> list[Step]:
        try:
            return known()
        except ValueError:
            return []

    monkeypatch.setattr(loop.engine, "step", again)
    each = [foresay.SamplingParams(max_new_tokens=5 + 3 * i) for i in range(len(PROMPTS))]
    assert loop.outputs(PROMPTS, each, join_later=2, eos=frozenset([6])) == wanted
    assert 0 in calls and len(calls) > 6
