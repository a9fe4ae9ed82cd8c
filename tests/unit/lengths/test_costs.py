"""Measured costs of target passes and of drafts."""

from __future__ import annotations

import pytest

from foresay.lengths.costs import ByBatch, DraftCosts, PassCosts


def costs(*measured: tuple[int, float]) -> DraftCosts:
    out = DraftCosts()
    for length, seconds in measured:
        out.line.add(length, seconds)
    return out


def fit(*measured: tuple[int, float]) -> tuple[float, float]:
    """Seconds of a draft's start, and of each of its tokens."""
    line = costs(*measured).line
    return line.start, line.per_token


MIXED = [(1, 0.4), (2, 0.5)] * 8 + [(1, 0.4)] * 40
"""Drafts of one token cost what they did next to longer ones; else no second token would be drafted again."""


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([(size, 0.3 + 0.1 * size) for size in (1, 2, 4) * 5], (0.3, 0.1)),
        (MIXED, (0.3, 0.1)),
        ([*MIXED, (5, 0.7)], (0.3, 0.1)),  # one other length is no slope
        ([*MIXED, (5, 0.7), *[(1, 0.8)] * 40], (0.6, 0.2)),  # a machine that got twice as slow
        ([(4, 0.8), (4, 0.8)], (0.0, 0.2)),  # one length is taken to cost in proportion
    ],
    ids=["three lengths", "next to longer ones", "one other length", "twice as slow", "one length"],
)
def test_start_and_slope_are_separated(measured: list[tuple[int, float]], expected: tuple[float, float]) -> None:
    assert fit(*measured) == pytest.approx(expected)


def test_a_prompt_in_the_first_draft_is_soon_forgotten_and_less_time_for_more_tokens_is_noise() -> None:
    first = costs((4, 30.0))
    assert not first.is_known and first.seconds == 0
    assert costs((4, 30.0), (1, 0.4)).seconds == 0.4
    start, per_token = fit((4, 30.0), *[(1, 0.4), (2, 0.5)] * 6)
    assert start + 3 * per_token == pytest.approx(0.6)
    start, per_token = fit(*[(1, 0.5), (4, 0.4)] * 4)
    assert per_token < 1e-3 and 0.3 < start <= 0.5


def passes(*measured: tuple[int, float]) -> PassCosts:
    out = PassCosts()
    for tokens, seconds in measured:
        out.add(tokens, seconds, 0.1)
    return out


def test_slopes_are_relative_to_the_plain_pass_of_their_moment() -> None:
    """A machine that gets four times slower changes seconds, not slopes. Control: one plain pass for all would."""
    one = passes(*[(0, 1.0), (4, 1.2)] * 20, *[(0, 4.0), (4, 4.8)] * 20)
    assert one.plain_s == 4.0 and one.slope == pytest.approx(0.05)
    assert passes(*[(0, 1.0)] * 9, *[(4, 4.8)] * 20).slope > 0.5
    assert passes((4, 1.4)).plain_s == pytest.approx(1.0), "a batch size without a plain pass gets one from its drafts"


def test_neither_the_cost_of_the_first_token_nor_one_slow_pass_is_a_slope() -> None:
    both = [(0, 1.0), *[(n, 1.3 + 0.05 * n) for n in (1, 2, 6)] * 6]
    for one in (passes(*both), passes(*both, *[(6, 1.6)] * 60)):  # then of one length only, divided as before
        assert (one.start, one.slope) == pytest.approx((0.3, 0.05), rel=0.05)
    for later, slope in (([], 0.1), ([(4, 1.2)], 0.1), ([(4, 1.2)] * 4, 0.05)):
        assert passes((0, 1.0), (16, 30.0), *later).slope == pytest.approx(slope)


def test_the_nearest_batch_size_within_a_factor_of_two() -> None:
    by_batch = ByBatch(PassCosts)
    one, eight = by_batch.of(1), by_batch.of(8)
    assert [by_batch.nearest(size) for size in (2, 5, 16, 3, 17)] == [one, eight, eight, None, None]
