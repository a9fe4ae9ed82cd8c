"""Drafters that fail after particular tokens: tokens drawn before a failure stay, so that the output keeps its distribution.

Each cell compares the first token of SAMPLES requests with the target's distribution; the controls lose drawn tokens as earlier
versions did, and must be rejected at the same sample size.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from foresay.decoding import clock
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import Drafter, KVCache, LengthPolicy, ModelInput, ModelOutput
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, Hybrid, MaxGram, ModelDrafter, ModelTreeDrafter, tree
from foresay.drafters.cross_tokenizer import CrossTokenizerDrafter
from foresay.drafters.proposal_builder import Interruptible
from foresay.drafters.shortening import Shortening
from foresay.engine import guard
from foresay.lengths import ConfidenceLength, ThroughputLength
from foresay.models.table import TableModel
from helpers.distribution_cells import ALPHA
from helpers.reference import p_value
from helpers.sequential import decided
from helpers.support import Loop, Renumbered

VOCAB, SAMPLES = 4, 300
PROBS = np.array([0.4, 0.2, 0.2, 0.2])
TARGET = TableModel(torch.from_numpy(PROBS).float().expand(VOCAB, VOCAB, VOCAB))
"""A target to which token 0, after which drafts fail, is as likely as to the draft: its loss is seen by few samples."""
SKEWED = torch.tensor([0.4, 0.3, 0.2, 0.1]).expand(VOCAB, VOCAB, VOCAB)
SOUND = TableModel(SKEWED)
"""A draft with the same distribution after any context."""
KINDS = ["raises", "exits", "nan", "shape"]
Patch = pytest.MonkeyPatch


class Failing(TableModel):
    """A draft that fails in the passes that are fed one token, after the first `sound` passes."""

    def __init__(self, token: int, kind: str, *, sound: int = 0) -> None:
        """kind: "raises", "exits" (SystemExit), "nan" (scores after that token are NaN), or "shape" (scores without a batch)."""
        super().__init__(SKEWED)
        self.token, self.kind, self.sound, self.passes = token, kind, sound, 0

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        self.passes += 1
        output = super().forward(model_input, cache)
        met = model_input.token_ids == self.token
        for i, count in enumerate(model_input.num_tokens):
            met[i, count:] = False
        if self.passes <= self.sound or not bool(met.any()) or output.logits is None:
            return output
        if self.kind == "raises":
            raise RuntimeError(f"token {self.token} was fed")
        if self.kind == "exits":
            raise SystemExit(3)
        if self.kind == "shape":
            return ModelOutput(output.logits[0, 0])
        bad = met[:, -1:] if output.logits.shape[1] == 1 else met
        return ModelOutput(output.logits.masked_fill(bad[..., None], float("nan")))


def _model(table: TableModel) -> ModelDrafter:
    return ModelDrafter(table, VOCAB)


def wide(width: int, branches: int, table: TableModel = SOUND) -> ModelTreeDrafter:
    return ModelTreeDrafter(table, VOCAB, branches=branches, width=width)


Make = Callable[[TableModel], Drafter]
CHAINS: dict[str, tuple[Make, int]] = {
    "model": (_model, 2),
    "hybrid": (lambda table: Hybrid(MaxGram(), _model(table), min_match=9, k=4), 2),
    "another tokenizer": (lambda table: CrossTokenizerDrafter(table, VOCAB, Renumbered(VOCAB)), 2),
    "horizontal cascade": (lambda table: Cascade([_model(SOUND), _model(table)], [[1, 3], [0, 0]]), 3),
    "reviewed by the failing one": (lambda table: Cascade([_model(table), _model(SOUND)], [[4, 0], [0, 2]]), 3),
    "reviewed by a sound one": (lambda table: Cascade([_model(SOUND), _model(table)], [[4, 0], [0, 2]]), 3),
}
TREES: dict[str, tuple[Make, int]] = {
    "tree": (lambda table: wide(1, 2, table), 4),
    "wide tree": (lambda table: wide(2, 2, table), 4),
}
DRAFTERS = CHAINS | TREES
"""With draft tokens of a step: 2 where a failure depends on the first token alone."""


def first_tokens(
    make: Callable[[], Drafter], rule: str, budget: int, *, samples: int = SAMPLES, batch: int = 1
) -> tuple[float, float]:
    """The p-value of the first token of requests, each batch in an engine of its own, and the share of drafters that failed."""
    firsts, failures = list[tuple[int, ...]](), 0

    def look(seeds: range) -> float:
        nonlocal failures
        for some in (seeds[i : i + batch] for i in range(0, len(seeds), batch)):
            engine = Loop(TARGET, drafter=make(), rule=rule, gamma=budget, max_batch_size=len(some)).engine
            for seed in some:
                engine.submit([1, 2], SamplingParams(temperature=1.0, seed=seed, max_new_tokens=budget + 1))
            steps = engine.step()
            assert len(steps) == len(some) and (batch == 1 or all(step.num_drafted for step in steps))
            firsts.extend(step.token_ids[:1] for step in steps)
            failures += engine.draft_failures
        return p_value(firsts, PROBS, VOCAB)

    return decided(look, samples, PROBS), failures / len(firsts)


def failing(drafter: str, rule: str, kind: str) -> float:
    """The p-value with a drafter that fails after token 0."""
    make, budget = DRAFTERS[drafter]
    value, failures = first_tokens(lambda: make(Failing(0, kind)), rule, budget)
    assert failures > 0.1
    return value


def cells() -> list[tuple[str, str, str]]:
    """Every drafter with every rule it may have, kinds of failure by turns; a model that drafts or reviews with all kinds."""
    pairs = [(drafter, rule) for drafter in CHAINS for rule in ("speculative", "block")]
    pairs += [(drafter, "speculative") for drafter in TREES]
    turns = [(*pair, KINDS[i % len(KINDS)]) for i, pair in enumerate(pairs)]
    every = [("model", "speculative"), ("reviewed by the failing one", "speculative")]
    return sorted({*turns, *((*pair, kind) for pair in every for kind in KINDS)})


@pytest.mark.parametrize(("drafter", "rule", "kind"), cells())
def test_a_failure_after_a_token_keeps_that_token(drafter: str, rule: str, kind: str) -> None:
    assert failing(drafter, rule, kind) > ALPHA


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[pytest.mark.long] * (i > 5)) for i in range(60)])
def test_failures_at_any_pass_and_token(seed: int) -> None:
    chosen = random.Random(seed)
    drafter, kind = chosen.choice(list(DRAFTERS)), chosen.choice(KINDS)
    rule = "speculative" if drafter in TREES else chosen.choice(["speculative", "block"])
    token, sound = chosen.randrange(VOCAB), chosen.randrange(4)
    make = lambda: DRAFTERS[drafter][0](Failing(token, kind, sound=sound))  # noqa: E731
    assert first_tokens(make, rule, 4, samples=250)[0] > ALPHA, (drafter, rule, kind, token, sound)


@contextmanager
def _raises_on(self: Interruptible) -> Iterator[None]:
    yield


def _lost_with_an_exception(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Interruptible, "keeping", _raises_on)


def _lost_with_a_bad_distribution(monkeypatch: Patch) -> None:
    intact = guard.checked

    def whole(proposal: Proposal, budget: list[int], vocab: int, device: torch.device, *, trees: bool) -> Proposal:
        out = intact(proposal, budget, vocab, device, trees=trees)
        empty = Proposal.empty(len(budget), device)
        return out if out.failure is None else dataclasses.replace(empty, failure=out.failure)

    monkeypatch.setattr(guard, "checked", whole)


def _lost_with_its_pass(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Shortening, "forward", lambda self, model_input, cache: self.inner.forward(model_input, cache))


@pytest.mark.parametrize(
    ("breaks", "drafter", "rule", "kind"),
    [
        (_lost_with_an_exception, "model", "speculative", "raises"),
        (_lost_with_an_exception, "model", "block", "raises"),
        (_lost_with_a_bad_distribution, "model", "speculative", "nan"),
        (_lost_with_a_bad_distribution, "model", "block", "nan"),
        (_lost_with_its_pass, "reviewed by the failing one", "speculative", "raises"),
    ],
)
def test_a_lost_draft_or_review(
    breaks: Callable[[Patch], None], drafter: str, rule: str, kind: str, monkeypatch: Patch
) -> None:
    """Controls: tokens that were drawn before a failure are lost."""
    breaks(monkeypatch)
    assert failing(drafter, rule, kind) < ALPHA


@pytest.mark.parametrize(
    ("width", "branches", "budget"), [(2, 2, 4), (2, 2, 5), (2, 2, 7), (3, 2, 4), (2, 3, 5), (4, 1, 4)]
)
def test_a_node_budget_that_ends_inside_a_level(width: int, branches: int, budget: int) -> None:
    """In one batch: a drafter that never fails treats every row as it would alone."""
    value, failures = first_tokens(lambda: wide(width, branches), "speculative", budget, batch=SAMPLES)
    assert value > ALPHA and failures == 0


def test_a_tree_dropped_where_its_budget_ends(monkeypatch: Patch) -> None:
    """Control: a node without children ends in an exception, which loses the tree."""
    next_slots, level = tree.Tree.next_slots, list[int]()

    def begun(self: tree.Tree, width: int) -> list[int]:
        level[:] = next_slots(self, width)
        return level[:]

    def ended(self: tree.Tree) -> None:
        self.parents.index(max(level, key=lambda slot: self.scores[slot]) - 1)

    monkeypatch.setattr(tree.Tree, "next_slots", begun)
    monkeypatch.setattr(tree.Tree, "prune", ended)  # of drawn nodes, all of which are kept
    _lost_with_an_exception(monkeypatch)
    value, failures = first_tokens(lambda: wide(2, 2), "speculative", 4)
    assert failures > 0.1 and value < ALPHA


class Slow(TableModel):
    """A draft whose passes take a hundred times as long when they are fed token 0, on a clock of their own."""

    now = 0.0

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        self.now += 0.1 if bool((model_input.token_ids == 0).any()) else 0.001
        return super().forward(model_input, cache)


@pytest.mark.parametrize(
    ("rule", "policy"),
    [("speculative", ThroughputLength(start=2, high=4)), ("block", ConfidenceLength(0.3, high=4))],
    ids=["throughput", "confidence"],
)
def test_a_draft_that_is_slow_after_a_token(rule: str, policy: LengthPolicy, monkeypatch: Patch) -> None:
    """Lengths that follow measured time are learned from tokens that were drawn, over many requests."""
    draft, ticks, firsts = Slow(SKEWED), itertools.count(), list[list[int]]()
    monkeypatch.setattr(clock, "perf_counter", lambda: draft.now + next(ticks) * 1e-4)

    def look(seeds: range) -> float:
        for seed in seeds:
            loop = Loop(TARGET, drafter=_model(draft), rule=rule, policy=policy)
            params = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=4)
            firsts.append(loop.outputs([[1, 2]], params)[0][:1])
            assert loop.engine.draft_failures == 0
        return p_value(firsts, PROBS, VOCAB)

    assert decided(look, SAMPLES, PROBS) > ALPHA
