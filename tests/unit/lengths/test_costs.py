"""Measured costs of target passes and of drafts."""

from __future__ import annotations

import pytest

from foresay.lengths.costs import ByBatch, DraftCosts, Line, PassCosts


def costs(*measured: tuple[int, float]) -> DraftCosts:
    out = DraftCosts()
    for length, seconds in measured:
        out.line.add(length, seconds)
    return out


def line(*measured: tuple[int, float]) -> Line:
    return costs(*measured).line


def fit(one: Line) -> tuple[float, float]:
    return one.start, one.per_token


def test_start_and_slope_are_told_apart() -> None:
    start, per_token = fit(line(*((size, 0.3 + 0.1 * size) for size in (1, 2, 4) * 5)))
    assert per_token == pytest.approx(0.1) and start == pytest.approx(0.3)


def test_drafts_of_one_token_cost_what_they_did_next_to_longer_ones() -> None:
    """Else the start of a draft would be taken for the cost of a token, and a second token never drafted again."""
    one = line(*[(1, 0.4), (2, 0.5)] * 8, *[(1, 0.4)] * 40)
    assert fit(one) == pytest.approx((0.3, 0.1))
    one.add(5, 0.7)
    assert fit(one) == pytest.approx((0.3, 0.1)), "one other length is no slope"
    for _ in range(40):
        one.add(1, 0.8)
    assert fit(one) == pytest.approx((0.6, 0.2)), "twice as slow a machine"


def test_one_length_is_taken_to_cost_in_proportion() -> None:
    assert fit(line((4, 0.8), (4, 0.8))) == pytest.approx((0.0, 0.2))


def test_a_prompt_in_the_first_draft_is_soon_forgotten() -> None:
    first = costs((4, 30.0))
    assert not first.is_known and first.seconds == 0
    assert costs((4, 30.0), (1, 0.4)).seconds == 0.4
    start, per_token = fit(line((4, 30.0), *[(1, 0.4), (2, 0.5)] * 6))
    assert start + 3 * per_token == pytest.approx(0.6)


def test_less_time_for_more_tokens_is_noise() -> None:
    start, per_token = fit(line(*[(1, 0.5), (4, 0.4)] * 4))
    assert per_token < 1e-3 and 0.3 < start <= 0.5


def passes(*measured: tuple[int, float], initial: float = 0.1) -> PassCosts:
    out = PassCosts()
    for tokens, seconds in measured:
        out.add(tokens, seconds, initial)
    return out


def test_slopes_are_relative_to_the_plain_pass_of_their_moment() -> None:
    """A machine that gets four times slower changes seconds, not slopes. Control: one plain pass for all would."""
    one = passes(*[(0, 1.0), (4, 1.2)] * 20, *[(0, 4.0), (4, 4.8)] * 20)
    assert one.plain_s == 4.0 and one.slope == pytest.approx(0.05)
    assert passes(*[(0, 1.0)] * 9, *[(4, 4.8)] * 20).slope > 0.5


def test_what_the_first_token_costs_is_no_slope() -> None:
    one = passes((0, 1.0), *[(n, 1.3 + 0.05 * n) for n in (1, 2, 6)] * 6)
    assert (one.start, one.slope) == pytest.approx((0.3, 0.05))
    for _ in range(60):  # of one length only, divided as before
        one.add(6, 1.6, 0.1)
    assert (one.start, one.slope) == pytest.approx((0.3, 0.05), rel=0.05)


def test_one_slow_pass_is_no_slope() -> None:
    assert passes((0, 1.0), (16, 30.0)).slope == 0.1, "one measurement is none"
    assert passes((0, 1.0), (16, 30.0), (4, 1.2)).slope == 0.1
    assert passes((0, 1.0), (16, 30.0), *[(4, 1.2)] * 4).slope == pytest.approx(0.05)


def test_a_batch_size_without_a_plain_pass_gets_one_from_its_drafts() -> None:
    assert passes((4, 1.4)).plain_s == pytest.approx(1.0)


def test_the_nearest_batch_size_within_a_factor_of_two() -> None:
    by_batch = ByBatch(PassCosts)
    one, eight = by_batch.of(1), by_batch.of(8)
    assert by_batch.nearest(2) is one and by_batch.nearest(5) is eight and by_batch.nearest(16) is eight
    assert by_batch.nearest(3) is None and by_batch.nearest(17) is None
