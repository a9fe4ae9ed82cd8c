"""What drafts cost, as it is measured."""

from __future__ import annotations

import pytest

from foresay.lengths.costs import DraftCosts, PassCosts


def at(costs: DraftCosts, size: float, batch: int = 1) -> float:
    curve = costs.curve(batch)
    assert curve is not None
    return float(curve.at(size))


def test_begin_and_slope_are_told_apart() -> None:
    costs = DraftCosts()
    for _ in range(5):
        for size in (1, 2, 4):
            costs.add(1, size, 0.3 + 0.1 * size)
    for size in (1, 2, 3, 4, 9):
        assert at(costs, size) == pytest.approx(0.3 + 0.1 * size)
    assert at(costs, 0) == 0, "who drafts nothing pays nothing"


def test_of_one_size_a_draft_is_thought_to_cost_in_proportion() -> None:
    costs = DraftCosts()
    costs.add(1, 4, 0.8)
    assert [at(costs, size) for size in (1, 2, 4, 8)] == pytest.approx([0.2, 0.4, 0.8, 1.6])


def test_a_first_draft_that_took_the_prompt_along_is_soon_no_more_than_chance() -> None:
    costs = DraftCosts()
    costs.add(1, 4, 30.0)
    for _ in range(3):
        costs.add(1, 1, 0.4)
    assert at(costs, 1) < 0.5 and at(costs, 4) < 2
    for _ in range(6):
        costs.add(1, 1, 0.4)
        costs.add(1, 2, 0.5)
    assert at(costs, 3) == pytest.approx(0.6)


def test_the_longest_that_was_measured() -> None:
    costs = DraftCosts()
    assert costs.longest_s(1) == 0
    costs.add(1, 2, 0.5)
    costs.add(1, 16, 0.7)
    assert costs.longest_s(1) == 0.7
    assert costs.longest_s(2) == 0.7, "of the nearest batch size"
    assert costs.longest_s(8) == 0


def test_less_for_more_is_noise() -> None:
    costs = DraftCosts()
    for _ in range(4):
        costs.add(1, 1, 0.5)
        costs.add(1, 4, 0.4)
    assert at(costs, 8) >= at(costs, 1) > 0.3


def test_what_is_known_of_columns_beforehand_is_what_is_thought() -> None:
    """Of a row alone, and of rows together, whose own pass is longer by as much; measurements count all the same."""
    for known, batch, wanted in ((None, 1, 0.1), (None, 8, 0.1), (0.5, 1, 0.5), (0.5, 8, 0.5 / 4.5)):
        costs = PassCosts(0.1)
        costs.column_cost = known
        costs.add(batch, 0, 2.0)
        curve = costs.curve(batch)
        assert curve is not None and curve.at([0, 4, 20]) == pytest.approx([2.0 * (1 + n * wanted) for n in (0, 4, 20)])
        for _ in range(9):
            costs.add(batch, 4, 2.0 * (1 + 4 * 0.02))
        seen = costs.curve(batch)
        assert seen is not None and seen.at(4) == pytest.approx(2.0 * 1.08)
