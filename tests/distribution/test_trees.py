"""Trees of draft tokens: the distribution of what is written, with broken versions that the same samples must kill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from foresay.decoding import trees
from foresay.decoding.acceptance import Speculative, make_rule
from foresay.decoding.distributions import Distributions
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import Drafter, Rule
from foresay.decoding.randomness import Streams
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Memory, ModelTreeDrafter, SuffixTreeDrafter
from foresay.engine import Engine
from foresay.lengths import ConstantLength
from foresay.models.table import TableModel
from helpers.distribution_cells import ALPHA, DRAFT, LENGTH, PARAMS, PROMPT, SIZE, TARGET
from helpers.reference import joint, p_value
from helpers.refusals import refused
from helpers.sequential import decided, value_of
from helpers.support import Loop, run
from helpers.trees import TableTree

Patch = pytest.MonkeyPatch
SAMPLES = 1000
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


@pytest.mark.parametrize("drafter", ["drawn and named", "drawn"])
def test_siblings_tried_with_the_wrong_residual(drafter: str, monkeypatch: Patch) -> None:
    """After a rejection the next sibling is tried against p itself."""
    monkeypatch.setattr(trees, "residual", lambda p, q: p)
    assert value(DRAFTERS[drafter]()) < ALPHA


def test_a_rejected_sibling_left_in_q(monkeypatch: Patch) -> None:
    """Children drawn without replacement are verified as if each had been drawn from the whole distribution."""
    where, kept = torch.where, []

    def keeps(mask: torch.Tensor, a: object, b: object) -> torch.Tensor:
        if isinstance(a, float) and a == 0.0 and isinstance(b, torch.Tensor):
            kept.append(b)  # `q`, whose siblings that were tried would be taken away
            return b
        return where(mask, a, b)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(trees.torch, "where", keeps)
    assert value(TableTree(DRAFT, named=())) < ALPHA
    assert kept


class Off(Speculative):
    """Verifies by the distributions of the position before."""

    def verify(self, target: Distributions, proposal: Proposal, streams: Streams) -> Verification:
        assert target.probs_row is not None
        index = torch.cat([target.probs_row[:, :1], target.probs_row[:, :-1]], 1)
        return super().verify(Distributions(target.greedy_ids, target.probs, index), proposal, streams)


def test_a_path_one_position_off() -> None:
    assert value(TableTree(DRAFT), Off()) < ALPHA


@pytest.mark.parametrize("rule", ["speculative", "match"])
def test_a_path_of_chosen_tokens_one_position_off(rule: str, monkeypatch: Patch) -> None:
    """The tokens drawn at the position before the one where the walk stands."""
    intact = trees.draw
    monkeypatch.setattr(trees, "draw", lambda *given, **more: intact(*given, **more).roll(1, -1))
    assert value(TableTree(DRAFT, named=range(8)), rule) < ALPHA


@pytest.mark.parametrize("params", ["greedy", "plain"])
def test_chosen_tokens_are_followed_as_by_a_walk(params: str) -> None:
    """All nodes at once, and one after the other."""
    torch.manual_seed(0)
    width, size = 11, 4
    rows = Rows([Row(i, [1, 2], SamplingParams.of(PARAMS["plain"], seed=i), limit=99, seed=i) for i in range(200)])
    parents = torch.stack([torch.tensor([int(torch.randint(-1, n, ())) for n in range(width)]) for _ in rows])
    ids = torch.randint(0, size, (len(rows), width))
    counts = torch.randint(0, width + 1, (len(rows),)).tolist()
    if params == "greedy":
        target = Distributions(torch.randint(0, size, (len(rows), width + 1)))
    else:
        probs = torch.rand(len(rows) * (width + 1), size).softmax(-1)
        index = torch.arange(len(probs)).view(len(rows), -1)
        target = Distributions(probs.argmax(-1).view(len(rows), -1), probs, index)
    proposal = Proposal(ids, counts, parents=parents)
    streams = rows.streams(torch.device("cpu"))
    at_once, walked = trees.match_tree(target, proposal, streams), trees.speculative_tree(target, proposal, streams)
    for name in ("num_accepted", "token_ids", "num_tested", "path", "tried"):
        assert torch.equal(getattr(at_once, name), getattr(walked, name)), name
    assert int(at_once.num_accepted.max()) > 2


@pytest.mark.parametrize("rule", ["speculative", "match"])
def test_siblings_that_see_each_other(rule: str, monkeypatch: Patch) -> None:
    """A target that takes each column for a continuation of the column before it."""
    intact = TableModel.forward

    def linear(self: TableModel, model_input: object, cache: object) -> object:
        import dataclasses

        return intact(self, dataclasses.replace(model_input, parents=None), cache)  # type: ignore[arg-type, type-var]

    monkeypatch.setattr(TableModel, "forward", linear)
    assert value(TableTree(DRAFT), rule) < ALPHA


@pytest.mark.parametrize("rule", ["block", "lenience", "typical"])
def test_rules_of_chains_refuse_trees_by_name(rule: str) -> None:
    with refused("rule", rule):
        run(TARGET, [PROMPT], SamplingParams(max_new_tokens=4), drafter=TableTree(DRAFT), rule=rule)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("params", ["context", "nucleus"])
def test_a_tree_beside_a_row_with_one_token_left(params: str, width: int) -> None:
    """Row 0 has no room for a draft: its neighbours' trees are processed along their own paths all the same."""
    first, probs = (
        SamplingParams.of(PARAMS[params], seed=9, max_new_tokens=1),
        joint(TARGET, PARAMS[params], PROMPT, LENGTH),
    )
    drafter, written = ModelTreeDrafter(DRAFT, SIZE, branches=2, width=width), list[list[int]]()
    loop = Loop(TARGET, drafter=drafter, gamma=6, max_batch_size=1 + SAMPLES)

    def look(seeds: range) -> float:
        each = [SamplingParams.of(PARAMS[params], seed=seed) for seed in seeds]
        written.extend(loop.outputs([PROMPT] * (1 + len(each)), [first, *each])[1:])
        return p_value(written, probs, SIZE)

    assert decided(look, SAMPLES, probs) > ALPHA and any(step.num_drafted for step in loop.steps)
    assert loop.engine.draft_failures == 0, drafter.last_error


class Watches:
    """A processor that remembers the contexts it is shown."""

    def __init__(self) -> None:
        self.contexts: list[list[int]] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.contexts.append(ids[0].tolist())
        return scores


def test_the_drafts_processors_see_the_path_to_each_node() -> None:
    """With row 0 short of room, they once saw an empty path."""
    found = []
    for lengths in ([1, 8], [8, 8]):
        seen = Watches()
        params = [
            SamplingParams(max_new_tokens=lengths[0], temperature=1.0, seed=1),
            SamplingParams(max_new_tokens=lengths[1], temperature=1.0, seed=2, processors=(seen,)),
        ]
        engine = Engine(
            TARGET,
            ModelTreeDrafter(DRAFT, SIZE, branches=2),
            make_rule("speculative"),
            ConstantLength(6),
            max_batch_size=2,
        )
        for one in params:
            engine.submit(PROMPT, one)
        engine.step()
        found.append(sorted(map(tuple, seen.contexts)))
    assert found[0] == found[1] and max(map(len, found[0])) > len(PROMPT) + 1
