"""Stops inside a block, budgets inside a block, full contexts, K = 0, cancellation and refused requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from foresay import FinishReason, Proposal, Rows, SamplingParams, Step, TableModel
from foresay.decoding import clock
from foresay.decoding.protocols import KVCache, LengthPolicy, ModelInput, ModelOutput
from foresay.drafters import ModelDrafter, PromptLookup
from foresay.errors import ConfigError, ContextLengthError, PromptError
from foresay.lengths import ThroughputLength
from foresay.models.huggingface.causal import CausalModel
from helpers.families import VOCAB, make
from helpers.refusals import refused
from helpers.support import Always, Loop, Never, Sometimes, run

SIZE = 11
TARGET = TableModel.random(SIZE, seed=3, concentration=0.5)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [3, 3]]
PLAIN = run(TARGET, PROMPTS, SamplingParams(max_new_tokens=30), gamma=0)[0]


def written(
    drafter: Any = None, new: int = 30, target: Any = TARGET, **options: Any
) -> tuple[list[list[int]], list[Step]]:
    """Outputs of PROMPTS, and the steps; options: of `run`, and `params`, changes of the parameters."""
    params = SamplingParams(max_new_tokens=new, **options.pop("params", {}))
    outputs, steps, engine = run(target, options.pop("prompts", PROMPTS), params, drafter=drafter, **options)
    assert engine.draft_failures == 0
    return outputs, steps


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_an_output_ends_inside_an_accepted_block(gamma: int) -> None:
    """At a stop token, or at its budget."""
    stop = PLAIN[0][5]
    wanted = [out[: out.index(stop) + 1] if stop in out else out for out in PLAIN]
    ours, steps = written(Always(PLAIN), gamma=gamma, params={"stop_token_ids": (stop,)})
    assert ours == wanted and sum(len(s.token_ids) for s in steps) == sum(map(len, wanted))
    assert next(s for s in steps if s.request_id == 0 and s.finish_reason).finish_reason is FinishReason.STOP
    for new in (1, 2, 6):
        ours, steps = written(Always(PLAIN), new, gamma=gamma)
        assert ours == [out[:new] for out in PLAIN]
        assert all(s.num_drafted <= new - 1 for s in steps)
        assert {s.finish_reason for s in steps if s.finish_reason} == {FinishReason.LENGTH}


def test_a_full_context_ends_the_output() -> None:
    target = TableModel(TARGET.table, max_length=12)
    plain, _ = written(None, 50, target, gamma=0)
    assert [len(p) + len(o) for p, o in zip(PROMPTS, plain, strict=True)] == [12] * 4
    for drafter in (Always(plain), Never(plain, SIZE), ModelDrafter(target, SIZE)):
        ours, steps = written(drafter, 50, target, gamma=5)
        assert ours == plain and any(s.num_drafted for s in steps)
    ours, steps = written(ModelDrafter(target, SIZE), gamma=4)  # the context of the draft alone is full
    assert ours == PLAIN and {s.num_drafted for s in steps} >= {0, 4}


@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom", "phi3_longrope"])
def test_a_real_model_writes_up_to_its_last_position(family: str) -> None:
    """Pads past the context limit take spare slots and never reach a learned position table.

    Nor do those after a nearly full row make a model with LongRoPE change every row's frequencies.
    """
    name = {"gpt2": "n_positions", "bloom": "seq_length"}.get(family, "max_position_embeddings")
    model = CausalModel(make(family) if family == "phi3_longrope" else make(family, **{name: 24}))
    most = model.max_length
    assert most == (64 if family == "phi3_longrope" else 24)
    prompts = [[5, 6, 7], [5 + i % 40 for i in range(most - 4)], [9, 10, 11, 12, 13, 14, 15]]
    alone = [written(None, 99, model, prompts=[one], gamma=0)[0][0] for one in prompts]
    assert [len(p) + len(o) for p, o in zip(prompts, alone, strict=True)] == [most] * 3
    assert written(Sometimes(alone, VOCAB), 99, model, prompts=prompts, gamma=6)[0] == alone


@pytest.mark.parametrize(
    ("prompt", "params", "param", "value", "kind"),
    [
        ([], {}, "prompt", ANY, PromptError),
        ([1, 11], {}, "prompt", 11, PromptError),
        ([-1], {}, "prompt", -1, PromptError),
        ([1.7, 2.0], {}, "prompt", ANY, PromptError),
        ([1], {"stop_token_ids": (99,)}, "stop_token_ids", 99, ConfigError),
        ([1], {"banned_token_ids": tuple(range(11))}, "banned_token_ids", ANY, ConfigError),
        ([1], {"allowed_token_ids": (3,), "stop_token_ids": (3,), "min_new_tokens": 2}, "allowed_token_ids", ANY, ConfigError),
        ([1] * 4000, {"max_new_tokens": 300, "min_new_tokens": 300}, "min_new_tokens", 300, ContextLengthError),
    ],
)  # fmt: skip
def test_a_bad_request_is_refused_before_anything_is_decoded(
    prompt: list[int], params: dict[str, Any], param: str, value: Any, kind: type[Any]
) -> None:
    engine = Loop(TARGET, gamma=0).engine
    with refused(param, value, kind):
        engine.submit(prompt, SamplingParams(**params))
    with pytest.raises(ContextLengthError, match="has 4096 tokens; the model's context is 4096"):
        engine.submit([1] * 4096, SamplingParams())
    assert not engine.has_work
    with refused("max_batch_size", 0):
        Loop(TARGET, max_batch_size=0)


@pytest.mark.parametrize("rule", ["speculative", "block", "match", "coupled"])
def test_embeddings_larger_than_the_head(rule: str) -> None:
    """Ids that can be read but not written: prompts may hold them, drafts may copy them, nothing writes them."""
    reference = make("llama")
    reference.resize_token_embeddings(VOCAB + 8)
    reference.lm_head = torch.nn.Linear(32, VOCAB, bias=False)
    model = CausalModel(reference)
    prompts = [[100, 101, 102, 100, 101], [3, 4, 5], [102, 102, 102]]
    params = [SamplingParams(max_new_tokens=12, temperature=t, seed=i) for i, t in enumerate((1.0, 0.0, 2.0))]
    for drafter in (ModelDrafter(model, model.vocab_size), PromptLookup(min_ngram=1)):
        ours, steps, engine = run(model, prompts, params, drafter=drafter, rule=rule, gamma=3)
        assert engine.draft_failures == 0 and any(s.num_drafted for s in steps)
        assert all(token < VOCAB for output in ours for token in output)
        assert ours[1] == run(model, prompts[1:2], params[1], gamma=0)[0][0]


def test_a_draft_that_lacks_every_allowed_token_hurts_nobody() -> None:
    params = [SamplingParams(max_new_tokens=12), SamplingParams(max_new_tokens=12, allowed_token_ids=(7, 8))]
    plain = run(TARGET, PROMPTS[:2], params, gamma=0)[0]
    drafter = ModelDrafter(TableModel.random(5, seed=9), SIZE)
    ours, steps, engine = run(TARGET, PROMPTS[:2], params, drafter=drafter, gamma=3)
    assert ours == plain and engine.draft_failures == 0
    assert any(s.num_drafted for s in steps if s.request_id == 0)


class Costly(TableModel):
    """A table of which each token of a pass takes a millisecond, on a clock of its own."""

    now = 0.0

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        self.now += 0.001 * sum(model_input.num_tokens)
        return super().forward(model_input, cache)


def test_the_throughput_policy_changes_no_token_and_stops_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are always wrong, and slower than the target."""
    target = Costly(TARGET.table)
    monkeypatch.setattr(clock, "perf_counter", lambda: target.now)

    class Slow(Never):
        def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
            target.now += 0.02
            return super().propose(rows, budget, policy)

    plain, _ = written(None, 60, gamma=0)
    ours, steps = written(Slow(plain, SIZE), 60, target, policy=ThroughputLength())
    assert ours == plain and any(s.num_drafted for s in steps), "it never tried"
    assert sum(s.num_drafted == 0 for s in steps) > 0.5 * len(steps)


def test_an_admission_that_fails_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows at work decode on, and the new one is admitted when there is room again."""
    engine, params = Loop(TARGET, gamma=0).engine, SamplingParams(max_new_tokens=30)
    outputs: dict[int, list[int]] = {engine.submit(PROMPTS[0], params): []}
    intact: Callable[..., None] = engine.target.admit
    refuse = [True]

    def admit(rows: Rows, first: int, cache: KVCache) -> None:
        intact(rows, first, cache)
        if first and refuse.pop():
            raise MemoryError("no room for another row")

    def advance() -> None:
        for step in engine.step():
            outputs[step.request_id] += step.token_ids

    monkeypatch.setattr(engine.target, "admit", admit)
    advance()
    outputs[engine.submit(PROMPTS[1], params)] = []
    refuse[:] = [False, True]
    with pytest.raises(MemoryError):
        engine.step()
    assert engine.num_active == 1 and len(engine.cache.lengths) == 1
    while engine.has_work:
        advance()
    assert [outputs[i] for i in sorted(outputs)] == PLAIN[:2]
