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
from foresay.decoding.acceptance import make_rule
from foresay.decoding.distributions import Distributions
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import KVCache, LengthPolicy, ModelInput, ModelOutput
from foresay.decoding.sampling_params import SamplingParams
from foresay.decoding.stopping import Stopping
from foresay.drafters import ModelDrafter, ModelTreeDrafter, tree
from foresay.drafters.proposal_builder import Interruptible
from foresay.drafters.shortening import Shortening
from foresay.engine import Engine, guard
from foresay.lengths import ConfidenceLength, ConstantLength, ThroughputLength
from foresay.models.table import TableModel
from helpers.distribution_cells import ALPHA
from helpers.failing import BUDGETS, CHAINS, EVEN, KINDS, PROMPT, SKEWED, TREES, VOCAB, FailingTable, Make, first_tokens
from helpers.reference import p_value
from helpers.sequential import decided

SAMPLES, EVENLY = 450, np.full(VOCAB, 1 / VOCAB)
Patch = pytest.MonkeyPatch


def cells() -> list[tuple[str, str, str]]:
    """Every drafter with every rule it may have, kinds of failure by turns; a model that drafts or reviews with all kinds."""
    pairs = [(drafter, rule) for drafter in CHAINS for rule in ("speculative", "block")]
    pairs += [(drafter, "speculative") for drafter in TREES]
    turns = [(*pair, KINDS[i % len(KINDS)]) for i, pair in enumerate(pairs)]
    every = [("model", "speculative"), ("reviewed by the failing one", "speculative")]
    return sorted({*turns, *((*pair, kind) for pair in every for kind in KINDS)})


DRAFTERS: dict[str, Make] = {**CHAINS, **TREES}


@pytest.mark.parametrize(("drafter", "rule", "kind"), cells())
def test_a_failure_after_a_token_keeps_that_token(drafter: str, rule: str, kind: str) -> None:
    make = lambda: DRAFTERS[drafter](FailingTable(0, kind))  # noqa: E731
    value, failures = first_tokens(make, rule, SAMPLES, budget=BUDGETS.get(drafter, 2))
    assert failures > 0.1 and value > ALPHA


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[pytest.mark.long] * (i > 5)) for i in range(60)])
def test_failures_at_any_pass_and_token(seed: int) -> None:
    chosen = random.Random(seed)
    drafter, kind = chosen.choice(list(DRAFTERS)), chosen.choice(KINDS)
    rule = "speculative" if drafter in TREES else chosen.choice(["speculative", "block"])
    token, sound = chosen.randrange(VOCAB), chosen.randrange(4)
    value, _ = first_tokens(lambda: DRAFTERS[drafter](FailingTable(token, kind, sound=sound)), rule, 250, budget=4)
    assert value > ALPHA, (drafter, rule, kind, token, sound)


@contextmanager
def _raises_on(self: Interruptible) -> Iterator[None]:
    yield


@pytest.mark.parametrize(("drafter", "rule"), [("model", "speculative"), ("model", "block")])
def test_a_draft_lost_with_its_failure(drafter: str, rule: str, monkeypatch: Patch) -> None:
    """Control: an exception loses the tokens that were drawn before it."""
    monkeypatch.setattr(Interruptible, "keeping", _raises_on)
    value, failures = first_tokens(lambda: DRAFTERS[drafter](FailingTable(0, "raises")), rule, SAMPLES)
    assert failures > 0.1 and value < ALPHA


@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_a_draft_lost_with_a_bad_distribution(rule: str, monkeypatch: Patch) -> None:
    """Control: a NaN after one token loses the whole draft."""
    intact = guard.checked

    def whole(proposal: Proposal, budget: list[int], vocab: int, device: torch.device, *, trees: bool) -> Proposal:
        out = intact(proposal, budget, vocab, device, trees=trees)
        empty = Proposal.empty(len(budget), device)
        return out if out.failure is None else dataclasses.replace(empty, failure=out.failure)

    monkeypatch.setattr(guard, "checked", whole)
    value, _ = first_tokens(lambda: DRAFTERS["model"](FailingTable(0, "nan")), rule, SAMPLES)
    assert value < ALPHA


def test_a_review_lost_with_its_pass(monkeypatch: Patch) -> None:
    """Control: a reviewer that fails on an inner draft token loses its review."""
    monkeypatch.setattr(Shortening, "forward", lambda self, model_input, cache: self.inner.forward(model_input, cache))
    make = lambda: DRAFTERS["reviewed by the failing one"](FailingTable(0, "raises"))  # noqa: E731
    value, failures = first_tokens(make, "speculative", SAMPLES)
    assert failures > 0.1 and value < ALPHA


# -- wide trees ----------------------------------------------------------------------------------------------------------

DRAFT = TableModel(SKEWED.expand(VOCAB, VOCAB, VOCAB))


def wide(width: int, branches: int) -> ModelTreeDrafter:
    return ModelTreeDrafter(DRAFT, VOCAB, branches=branches, width=width)


@pytest.mark.parametrize(
    ("width", "branches", "budget"), [(2, 2, 4), (2, 2, 5), (2, 2, 7), (3, 2, 4), (2, 3, 5), (4, 1, 4)]
)
def test_a_node_budget_that_ends_inside_a_level(width: int, branches: int, budget: int) -> None:
    """In one batch: a drafter that never fails treats every row as it would alone."""
    firsts: list[tuple[int, ...]] = []

    def look(seeds: range) -> float:
        rule, policy = make_rule("speculative"), ConstantLength(budget)
        engine = Engine(EVEN, wide(width, branches), rule, policy, max_batch_size=SAMPLES)
        for seed in seeds:
            engine.submit(PROMPT, SamplingParams(temperature=1.0, seed=seed, max_new_tokens=budget + 1))
        steps = engine.step()
        assert len(steps) == len(seeds) and all(step.num_drafted for step in steps) and engine.draft_failures == 0
        firsts.extend(step.token_ids[:1] for step in steps)
        return p_value(firsts, EVENLY, VOCAB)

    assert decided(look, SAMPLES, EVENLY) > ALPHA


def test_a_tree_dropped_where_its_budget_ends(monkeypatch: Patch) -> None:
    """Control: a node without children ends in an exception, which loses the tree."""
    intact = tree.Grower._expand

    def expand(self: tree.Grower, places: list[list[int]], distributions: Distributions, stopping: Stopping) -> None:
        intact(self, places, distributions, stopping)
        for one, some in zip(self._trees, places, strict=True):
            if some:
                one.parents.index(max(some, key=lambda slot: one.scores[slot]) - 1)

    monkeypatch.setattr(tree.Grower, "_expand", expand)
    monkeypatch.setattr(Interruptible, "keeping", _raises_on)
    value, failures = first_tokens(lambda: wide(2, 2), "speculative", SAMPLES, budget=4)
    assert failures > 0.1 and value < ALPHA


# -- drafts that are slow after a token -----------------------------------------------------------------------------------


class Slow(TableModel):
    """A draft whose passes take a hundred times as long when they are fed token 0, on a clock of their own."""

    def __init__(self) -> None:
        super().__init__(SKEWED.expand(VOCAB, VOCAB, VOCAB))
        self.now = 0.0

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        self.now += 0.1 if bool((model_input.token_ids == 0).any()) else 0.001
        return super().forward(model_input, cache)


@pytest.mark.parametrize(
    ("rule", "policy"),
    [
        ("speculative", lambda: ThroughputLength(start=2, high=4)),
        ("block", lambda: ConfidenceLength(0.3, high=4)),
    ],
)
def test_a_draft_that_is_slow_after_a_token(rule: str, policy: Callable[[], LengthPolicy], monkeypatch: Patch) -> None:
    """Lengths that follow measured time are learned from tokens that were drawn, over many requests."""
    draft, shared, ticks = Slow(), policy(), itertools.count()
    firsts: list[list[int]] = []
    monkeypatch.setattr(clock, "perf_counter", lambda: draft.now + next(ticks) * 1e-4)

    def look(seeds: range) -> float:
        for seed in seeds:
            engine = Engine(EVEN, ModelDrafter(draft, VOCAB), make_rule(rule), shared)
            engine.submit(PROMPT, SamplingParams(temperature=1.0, seed=seed, max_new_tokens=4))
            tokens: list[int] = []
            while engine.has_work:
                tokens += [token for step in engine.step() for token in step.token_ids]
            firsts.append(tokens[:1])
            assert engine.draft_failures == 0
        return p_value(firsts, EVENLY, VOCAB)

    assert decided(look, SAMPLES, EVENLY) > ALPHA
