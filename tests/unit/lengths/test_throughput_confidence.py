"""The throughput policy over drafts that know how sure they are, against a simulated clock."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from foresay import Distributions, Rows
from foresay.decoding.stopping import DraftStep, Reads, StoppingRule
from foresay.lengths import ConstantLength, ThroughputLength, measured_drafter
from helpers.making import make_row
from helpers.simulated_steps import observe, rows_of

SURE, UNSURE = 0.95, 0.2


def distributions(confidences: list[float], *, sampled: bool = False) -> Distributions:
    """The distributions of one position for each row, whose token 0 has that probability."""
    scores = torch.tensor([[[math.log(q), math.log(1 - q)]] for q in confidences])
    zeros = torch.zeros(len(confidences), 1, dtype=torch.int64)
    return Distributions(zeros, scores.softmax(-1)[:, 0] if sampled else None, zeros if sampled else None, scores)


def rate(
    policy: Any,
    batch: int,
    ragged: bool,
    steps: int,
    *,
    start_s: float = 0.0,
    token_s: float = 0.08,
    column: float = 0.05,
    confidences: tuple[float, ...] = (SURE, UNSURE),
) -> float:
    """Tokens per second and row; tokens hold as often as the draft is sure of them."""
    rows = rows_of(batch, ragged=ragged)
    seconds = tokens = 0.0
    for step in range(steps):
        rng = random.Random(step)
        budget = policy.budget(rows)
        going, drafted, held, alive = list(budget), [0] * batch, [0] * batch, [True] * batch
        depth, stopping = 0, policy.stopping(rows)
        while any(n > depth for n in going):
            sure = [rng.choice(confidences) for _ in rows]
            luck = [rng.random() for _ in rows]
            for i in range(batch):
                if going[i] > depth:
                    drafted[i] += 1
                    alive[i] = alive[i] and luck[i] < sure[i]
                    held[i] += alive[i]
            depth += 1
            if stopping.rule.reads is Reads.NOTHING:
                continue
            zeros = torch.zeros(batch, dtype=torch.int64)
            able = [n > depth for n in going]
            go_on = stopping.keep(DraftStep(zeros + depth - 1, zeros, distributions(sure), None, able))
            if go_on is not None:
                going = [n if on else min(n, depth) for n, on in zip(going, go_on.tolist(), strict=True)]
        wide = sum(drafted) if ragged else max(drafted) * batch
        draft_s = (start_s + token_s * depth) if depth else 0.0
        total = draft_s + 1 + column * wide
        observe(policy, rows, drafted, held, total, draft_s)
        seconds += total
        tokens += sum(held) / batch + 1
    return tokens / seconds


def settled(
    policy: ThroughputLength | None = None, batch: int = 1, ragged: bool = True, steps: int = 400, **world: Any
) -> ThroughputLength:
    """A policy that has seen some steps."""
    policy = policy or ThroughputLength()
    rate(policy, batch, ragged, steps, **world)
    return policy


class Deaf(ThroughputLength):
    """Control: does not use the confidence of a draft."""

    def rule(self, rows: Rows) -> StoppingRule:
        return StoppingRule()


class Sure(ConstantLength):
    """Ends after a token that is unsure, by a bound that suits this world."""

    def rule(self, rows: Rows) -> StoppingRule:
        return StoppingRule(Reads.PROBABILITY, 0.5)


@pytest.mark.parametrize(("batch", "ragged", "gain"), [(1, True, 1.05), (1, False, 1.05), (4, True, 1.02)])
def test_drafts_end_where_they_are_unsure(batch: int, ragged: bool, gain: float) -> None:
    """As fast as the best bound on one token, which it does not know, and faster than any length."""
    best = max(rate(ConstantLength(k), batch, ragged, 500) for k in range(6))
    bounded = max(rate(Sure(k), batch, ragged, 500) for k in (1, 2, 4, 8))
    got = {kind: rate(settled(kind(), batch, ragged), batch, ragged, 500) for kind in (ThroughputLength, Deaf)}
    assert got[ThroughputLength] > max(gain * best, 0.985 * bounded), (got, best, bounded)
    assert 0.96 * best < got[Deaf] < 1.01 * best, (got, best)
    short = max(rate(Sure(k), batch, ragged, 60) for k in (1, 2, 4, 8))
    assert batch > 1 or rate(ThroughputLength(), 1, ragged, 60) > 0.95 * short, "learned within a short answer"


def test_what_a_draft_says_of_itself_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is sure where it fails and unsure where it holds drafts as well. Control: it does not where it is believed."""
    honest, known = rate(settled(), 1, True, 800), distributions
    monkeypatch.setitem(
        globals(), "distributions", lambda says, **more: known([SURE + UNSURE - q for q in says], **more)
    )
    assert rate(settled(), 1, True, 800) > 0.97 * honest
    believed = -np.log(measured_drafter._PRIORS)
    monkeypatch.setattr(
        measured_drafter.MeasuredDrafter, "hazards", property(lambda self: believed, lambda self, value: None), False
    )
    assert rate(settled(), 1, True, 800) < 0.9 * honest


@pytest.mark.parametrize("unsure", [0.2, 0.4])
def test_the_start_of_a_draft_is_paid_once(unsure: float) -> None:
    world: Any = {"start_s": 0.13, "token_s": 0.07, "confidences": (unsure, 0.6, 0.8)}
    best = max(rate(ConstantLength(k), 1, True, 800, **world) for k in range(6))
    assert rate(settled(**world), 1, True, 800, **world) > 0.99 * best


HARD_AND_EASY = [((0.2, 0.3), (0.5, 0.6, 0.7)), ((0.3, 0.4), (0.6,)), ((0.1, 0.3), (0.5, 0.7)), ((0.3,), (0.5, 0.6))]
"""Confidences in a text where drafts do not pay, and in the one after it."""


def test_drafts_are_soon_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the 400 steps after a hard text. Control: without trials that begin small, they come back much later."""

    @functools.cache
    def best(easy: tuple[float, ...], start_s: float, token_s: float) -> float:
        costs = {"start_s": start_s, "token_s": token_s}
        return max(rate(ConstantLength(k), 1, True, 400, **costs, confidences=easy) for k in (1, 2, 3, 4))

    def regained(warm: int, hard: tuple[float, ...], easy: tuple[float, ...], **costs: float) -> float:
        policy = settled(steps=warm, **costs, confidences=hard)
        return rate(policy, 1, True, 400, **costs, confidences=easy) / best(easy, **costs)

    def mean(*warm: int) -> float:
        costs = ({"start_s": 0.13, "token_s": 0.07}, {"start_s": 0.2, "token_s": 0.05})
        return float(np.mean([regained(n, *texts, **c) for n in warm for texts in HARD_AND_EASY for c in costs]))

    assert mean(200, 350) > 0.87
    add, loan = measured_drafter.Credit.add, measured_drafter.Credit(1.0).passes

    def begun_large(self: measured_drafter.Credit, passed: float, lost: float) -> None:
        self.needed = loan
        add(self, passed, lost)

    monkeypatch.setattr(measured_drafter.Credit, "add", begun_large)
    assert mean(350) < 0.85


TEXTS = ((0.99, 0.98, 0.95), (0.95, 0.9, 0.5), (0.98, 0.95, 0.75))
"""Confidences in three texts in which the draft of a model a third as large pays: much, little, and well."""


def test_no_text_in_which_drafts_pay_is_decoded_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts in any order, against constant drafts of four. Controls: failures of a long draft, which pays on average,
    exhaust the credit; a token after the first is expected to be poor until it is measured, and never is."""
    costs = {"start_s": 0.2, "token_s": 0.33, "column": 0.18}
    constant = {text: rate(ConstantLength(4), 1, True, 25, **costs, confidences=text) for text in TEXTS}

    def shares() -> tuple[float, float]:
        out = []
        for order in itertools.permutations(TEXTS):
            policy = ThroughputLength()
            out += [rate(policy, 1, True, 25, **costs, confidences=text) / constant[text] for text in order]
        return float(np.mean(out)), min(out)

    mean, least = shares()
    assert mean > 1.0 and least > 0.93
    rule = measured_drafter.MeasuredDrafter.rule

    def stricter(self: measured_drafter.MeasuredDrafter, draft: measured_drafter.Draft, always: Any) -> Any:
        return rule(self, replace(draft, shared=1.5 * draft.shared, per_row=1.5 * draft.per_row), always)

    with monkeypatch.context() as patch:
        patch.setattr(measured_drafter.MeasuredDrafter, "rule", stricter)
        assert shares()[1] < least - 0.05
    add = measured_drafter.Credit.add

    def exhausted(self: measured_drafter.Credit, passed: float, lost: float) -> None:
        before = self.passes
        add(self, passed, lost)
        if not self.is_trial:
            self.passes = min(self.passes, max(before - lost, 0.0))

    monkeypatch.setattr(measured_drafter.Credit, "add", exhausted)
    assert shares()[1] < least - 0.05


def test_a_drafter_whose_guesses_fail_is_left_alone() -> None:
    """Control: one that drafts in any case."""
    world = {"token_s": 0.3, "column": 0.3}
    assert rate(settled(**world), 1, True, 800, **world) > 0.97
    assert rate(ConstantLength(4), 1, True, 800, **world) < 0.9


def test_rows_that_are_held_to_a_length_draft_on() -> None:
    """Else what a clock measured would decide which text a seed gives; whatever distribution their tokens were drawn from."""
    policy = settled(ThroughputLength(sampled=4))
    zeros = torch.zeros(2, dtype=torch.int64)
    rows = Rows([make_row(), make_row(temperature=1.0)])
    for sampled in (False, True):
        assert policy.budget(rows)[1] == 4
        step = DraftStep(zeros, zeros, distributions([1e-4, 1e-4], sampled=sampled), None, [True, True])
        found = policy.stopping(rows).keep(step)
        assert found is not None and found.tolist() == [False, True]
    step = DraftStep(zeros, zeros, distributions([1e-4, 1e-4]))
    assert policy.stopping(rows).keep(step) is None, "not the nodes of a tree"


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("behind", [True, False])
def test_a_row_that_is_held_to_more_than_others_ever_drafted(ragged: bool, behind: bool) -> None:
    policy = ThroughputLength(sampled=8, start=2)

    def go(rows: Rows, steps: int) -> list[int]:
        for _ in range(steps):
            budget = asked = policy.budget(rows)
            if behind and any(budget):
                asked = policy.fallback_budget(rows, budget)
            total = 1 + 0.1 * max(asked) + 0.02 * sum(asked)
            observe(policy, rows, asked, [min(n, 1) for n in asked], total, 0.1 * max(asked))
        return asked

    assert 0 < max(go(rows_of(2, ragged=ragged), 300)) < 4
    assert go(rows_of(2, make_row(temperature=1.0), ragged=ragged), 60)[2] == 8
