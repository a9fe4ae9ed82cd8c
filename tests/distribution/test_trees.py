"""Trees of draft tokens: the distribution of what is written, with broken versions that the same samples must kill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from foresay.decoding import trees
from foresay.decoding.acceptance import Speculative
from foresay.decoding.distributions import Distributions
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import Drafter, Rule
from foresay.decoding.randomness import Streams
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Memory, ModelTreeDrafter, SuffixTreeDrafter
from foresay.models.table import TableModel
from helpers.distribution_cells import ALPHA, DRAFT, LENGTH, PARAMS, PROMPT, SIZE, TARGET
from helpers.making import make_rows
from helpers.reference import joint, p_value
from helpers.refusals import refused
from helpers.sequential import decided, value_of
from helpers.support import Loop, run
from helpers.trees import TableTree

Patch = pytest.MonkeyPatch
SAMPLES = 450
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "drawn and named": lambda: TableTree(DRAFT),
    "drawn": lambda: TableTree(DRAFT, named=()),
    "named": lambda: TableTree(DRAFT, named=range(8)),
    "model": lambda: ModelTreeDrafter(DRAFT, SIZE, branches=3, width=2),
    "suffix": lambda: SuffixTreeDrafter(Memory(max_tokens=256), branches=3),
}


def value(
    drafter: Drafter, rule: str | Rule = "speculative", params: str = "plain", *, batch: int = 300, gamma: int = 8
) -> float:
    loop = Loop(TARGET, drafter=drafter, rule=rule, gamma=gamma, max_batch_size=batch)
    found = value_of(loop, PROMPT, PARAMS[params], joint(TARGET, PARAMS[params], PROMPT, LENGTH), SAMPLES)
    assert any(sum(step.tested) > len(step.tested) for step in loop.steps), "siblings were tried"
    return found


def cells() -> list[Any]:
    """Every drafter with `speculative` and, by turns, `match` or `coupled`; the others are long."""
    pairs = [(drafter, rule) for drafter in DRAFTERS for rule in ("speculative", "match", "coupled")]
    by_turns = {(drafter, ("match", "coupled")[i % 2]) for i, drafter in enumerate(DRAFTERS)}
    default = [pair[1] == "speculative" or pair in by_turns for pair in pairs]
    return [pytest.param(*pair, marks=[pytest.mark.long] * (not one)) for pair, one in zip(pairs, default, strict=True)]


@pytest.mark.parametrize(("drafter", "rule"), cells())
def test_output_has_the_targets_law(drafter: str, rule: str, monkeypatch: Patch) -> None:
    if drafter == "suffix":  # its budget reaches past the three tokens that are written
        monkeypatch.setitem(PARAMS, "plain", SamplingParams.of(PARAMS["plain"], max_new_tokens=LENGTH))
    batch = 64 if drafter == "suffix" else 300  # which has siblings once some texts are finished
    assert value(DRAFTERS[drafter](), rule, batch=batch) > ALPHA


@pytest.mark.parametrize("params", ["nucleus", "top_k", "context"])
@pytest.mark.parametrize("drafter", ["drawn and named", "model"])
def test_output_has_the_targets_law_under_processing(drafter: str, params: str) -> None:
    assert value(DRAFTERS[drafter](), params=params, batch=40) > ALPHA


class Off(Speculative):
    """Verifies by the distributions of the position before."""

    def verify(self, target: Distributions, proposal: Proposal, streams: Streams) -> Verification:
        assert target.probs_row is not None
        index = torch.cat([target.probs_row[:, :1], target.probs_row[:, :-1]], 1)
        return super().verify(Distributions(target.greedy_ids, target.probs, index), proposal, streams)


def _wrong_residual(patch: Patch) -> None:
    """After a rejection the next sibling is tried against p itself."""
    patch.setattr(trees, "residual", lambda p, q: p)


def _rejected_sibling_left_in_q(patch: Patch) -> None:
    """Children drawn without replacement are verified as if each had been drawn from the whole distribution."""
    where = torch.where

    def keeps(mask: torch.Tensor, a: object, b: object) -> torch.Tensor:
        # `q`, whose siblings that were tried would be taken away
        is_q = isinstance(a, float) and a == 0.0 and isinstance(b, torch.Tensor)
        return b if is_q else where(mask, a, b)  # type: ignore[call-overload,no-any-return,return-value]

    patch.setattr(trees.torch, "where", keeps)


def _one_position_off(patch: Patch) -> None:
    """Chosen tokens are compared with those drawn at the position before the one where the walk stands."""
    intact = trees.draw
    patch.setattr(trees, "draw", lambda *given, **more: intact(*given, **more).roll(1, -1))


def _siblings_that_see_each_other(patch: Patch) -> None:
    """A target that takes each column for a continuation of the column before it."""
    intact: Any = TableModel.forward
    linear = lambda self, given, cache: intact(self, dataclasses.replace(given, parents=None), cache)  # noqa: E731
    patch.setattr(TableModel, "forward", linear)


@pytest.mark.parametrize(
    ("breaks", "drafter", "rule"),
    [
        (_wrong_residual, "drawn and named", "speculative"),
        (_wrong_residual, "drawn", "speculative"),
        (_rejected_sibling_left_in_q, "drawn", "speculative"),
        (lambda patch: None, "drawn and named", Off()),
        (_one_position_off, "named", "speculative"),
        (_one_position_off, "named", "match"),
        (_siblings_that_see_each_other, "drawn and named", "speculative"),
        (_siblings_that_see_each_other, "drawn and named", "match"),
    ],
    ids=[
        "residual, named",
        "residual, drawn",
        "left in q",
        "off",
        "one off",
        "one off, match",
        "linear",
        "linear, match",
    ],
)
def test_a_broken_walk_is_found(
    breaks: Callable[[Patch], None], drafter: str, rule: str | Rule, monkeypatch: Patch
) -> None:
    breaks(monkeypatch)
    assert value(DRAFTERS[drafter](), rule) < ALPHA


@pytest.mark.parametrize("params", ["greedy", "plain"])
def test_chosen_tokens_are_followed_as_by_a_walk(params: str) -> None:
    """All nodes at once, and one after the other."""
    torch.manual_seed(0)
    width, size, batch = 11, 4, 200
    rows = make_rows(*[{"temperature": 1.0}] * batch, prompt=[1, 2])
    parents = torch.stack([torch.tensor([int(torch.randint(-1, n, ())) for n in range(width)]) for _ in rows])
    ids, counts = torch.randint(0, size, (batch, width)), torch.randint(0, width + 1, (batch,)).tolist()
    target = Distributions(torch.randint(0, size, (batch, width + 1)))
    if params == "plain":
        probs = torch.rand(batch * (width + 1), size).softmax(-1)
        target = Distributions(target.greedy_ids, probs, torch.arange(len(probs)).view(batch, -1))
    proposal = Proposal(ids, counts, parents=parents)
    streams = rows.streams(torch.device("cpu"))
    at_once, walked = trees.match_tree(target, proposal, streams), trees.speculative_tree(target, proposal, streams)
    for name in ("num_accepted", "token_ids", "num_tested", "path", "tried"):
        assert torch.equal(getattr(at_once, name), getattr(walked, name)), name
    assert int(at_once.num_accepted.max()) > 2


@pytest.mark.parametrize("rule", ["block", "lenience", "typical"])
def test_rules_of_chains_refuse_trees_by_name(rule: str) -> None:
    with refused("rule", rule):
        run(TARGET, [PROMPT], SamplingParams(max_new_tokens=4), drafter=TableTree(DRAFT), rule=rule)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("params", ["context", "nucleus"])
def test_a_tree_beside_a_row_with_one_token_left(params: str, width: int) -> None:
    """Row 0 has no room for a draft: its neighbours' trees are processed along their own paths all the same."""
    first, probs = {"max_new_tokens": 1}, joint(TARGET, PARAMS[params], PROMPT, LENGTH)
    drafter, written = ModelTreeDrafter(DRAFT, SIZE, branches=2, width=width), list[list[int]]()
    loop = Loop(TARGET, drafter=drafter, gamma=6, max_batch_size=1 + SAMPLES)

    def look(seeds: range) -> float:
        each = [SamplingParams.of(PARAMS[params], seed=seed) for seed in seeds]
        each = [SamplingParams.of(each[0], **first), *each]
        written.extend(loop.outputs([PROMPT] * len(each), each)[1:])
        return p_value(written, probs, SIZE)

    assert decided(look, SAMPLES, probs) > ALPHA and any(step.num_drafted for step in loop.steps)
    assert loop.engine.draft_failures == 0


def test_the_drafts_processors_see_the_path_to_each_node() -> None:
    """With row 0 short of room, they once saw an empty path."""
    found = []
    for new in (1, 8):
        seen: list[tuple[int, ...]] = []
        watches = lambda ids, scores, seen=seen: seen.append(tuple(ids[0].tolist())) or scores  # noqa: E731
        drafter = ModelTreeDrafter(DRAFT, SIZE, branches=2)
        engine = Loop(TARGET, drafter=drafter, gamma=6, max_batch_size=2).engine
        engine.submit(PROMPT, SamplingParams(max_new_tokens=new, temperature=1.0, seed=1))
        engine.submit(PROMPT, SamplingParams(max_new_tokens=8, temperature=1.0, seed=2, processors=(watches,)))
        engine.step()
        found.append(sorted(seen))
    assert found[0] == found[1] and max(map(len, found[0])) > len(PROMPT) + 1
