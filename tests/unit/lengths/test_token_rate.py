"""What a second is worth, and that lengths chosen by it write the most tokens per second over many steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from foresay.decoding.outcome import Step
from foresay.decoding.rows import Rows
from foresay.lengths.budgets import StepContext, best_shared_length
from foresay.lengths.costs import Curve
from foresay.lengths.token_rate import TokenRate
from helpers.making import make_row

HIGH = 16


def steps(*tokens: int, total_s: float = 1.0) -> list[Step]:
    return [Step(0, (0,) * n, (), n - 1, n - 1, batch_size=len(tokens), total_s=total_s) for n in tokens]


def test_at_first_it_is_the_pace_of_plain_decoding() -> None:
    rows = Rows([make_row(), make_row()])
    assert TokenRate().rate(rows, 0.5) == pytest.approx(4.0), "two rows, a token each, every half second"


def test_it_learns_what_rows_write() -> None:
    pace, rows = TokenRate(), Rows([make_row()])
    for _ in range(200):
        pace.add(rows, steps(3, total_s=1.5), 1.0)
    assert pace.rate(rows, 1.0) == pytest.approx(2.0, rel=0.03)


def test_a_machine_that_slows_down_changes_seconds_and_no_share() -> None:
    pace, rows = TokenRate(), Rows([make_row()])
    for plain_s in (1.0,) * 100 + (4.0,) * 100:
        pace.add(rows, steps(3, total_s=1.5 * plain_s), plain_s)
    assert pace.rate(rows, 4.0) == pytest.approx(0.5, rel=0.05)


def test_each_row_has_its_own_pace_and_a_new_one_the_usual() -> None:
    pace, rows = TokenRate(), Rows([make_row(), make_row()])
    for _ in range(100):
        pace.add(rows, steps(5, 1, total_s=1.25), 1.0)
    fast, slow, new = (pace.rate(Rows([row]), 1.0) for row in (*rows, make_row()))
    assert fast == pytest.approx(4.0, rel=0.15)
    assert slow == pytest.approx(1.0, rel=0.15), "never less than plain decoding, which it could do"
    assert new == pytest.approx(2.4, rel=0.1)


def test_a_slow_stretch_is_no_reason_to_draft_what_costs_more_than_it_brings() -> None:
    pace, rows = TokenRate(), Rows([make_row()])
    for _ in range(200):
        pace.add(rows, steps(1, total_s=3.0), 1.0)
    assert pace.rate(rows, 1.0) >= 1.0


CASES = {
    "copies and guesses": ((0.2, 0.95, 0.0), (0.8, 0.5, 0.25), 0.08),
    "dear columns": ((0.3, 0.9, 0.0), (0.7, 0.3, 0.05), 0.2),
    "one kind": ((0.5, 0.7, 0.1), (0.5, 0.7, 0.1), 0.05),
}
"""Two kinds of steps, each: how often, the chance that a token holds, what drafting one takes; and what a column takes."""


@pytest.mark.parametrize("case", CASES)
def test_no_lengths_write_more_per_second(case: str) -> None:
    """Against all pairs of constant lengths for two kinds of steps; control: each step at its own greatest tokens per second."""
    *kinds, column = CASES[case]
    index = np.arange(1, HIGH + 1)
    passes = Curve(np.array([0.0, 1e6]), np.array([1.0, 1.0 + column * 1e6]))

    def rate_of(lengths: tuple[int, ...]) -> float:
        tokens = sum(often * sum(p**i for i in range(n + 1)) for (often, p, _), n in zip(kinds, lengths, strict=True))
        seconds = sum(often * (1 + (column + draft) * n) for (often, _, draft), n in zip(kinds, lengths, strict=True))
        return float(tokens / seconds)

    best = max(map(rate_of, itertools.product(range(HIGH + 1), repeat=2)))
    rate, chosen = 1.0, (0, 0)
    for _ in range(20):  # it settles: what is chosen at a rate writes at least at that rate
        ground = StepContext(rate)
        chosen = tuple(
            best_shared_length(p**index, np.ones(HIGH), passes, draft * index, ground) for _, p, draft in kinds
        )
        rate = max(1.0, rate_of(chosen))
    assert rate_of(chosen) == pytest.approx(best, rel=1e-9), chosen
    alone = tuple(
        max(range(HIGH + 1), key=lambda n: sum(p**i for i in range(n + 1)) / (1 + (column + draft) * n))
        for _, p, draft in kinds
    )
    if case != "one kind":
        assert rate_of(alone) < 0.99 * best, alone
