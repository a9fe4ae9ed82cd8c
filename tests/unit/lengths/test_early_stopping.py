"""Drafts that end where they are unsure: by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.outcome import Step
from foresay.decoding.rows import Rows
from foresay.lengths.budgets import StepContext
from foresay.lengths.costs import Curve
from foresay.lengths.early_stopping import EarlyStopping, TokenCost
from helpers.making import make_row


def line(begin: float, slope: float) -> Curve:
    return Curve(np.array([0.0, 1e6]), np.array([begin, begin + slope * 1e6]))


def rows_of(count: int, *, ragged: bool = True) -> Rows:
    return Rows([make_row() for _ in range(count)], capabilities=Capabilities(ragged=ragged))


def said(gate: EarlyStopping, rows: Rows, index: int, q: Sequence[float]) -> list[bool]:
    return gate.continuing(rows, np.full(len(q), index), np.array(q)).tolist()  # type: ignore[no-any-return]


def learn(gate: EarlyStopping, rows: Rows, drawn: Sequence[int], held: Sequence[int]) -> None:
    steps = [Step(0, (0,) * (h + 1), (), d, h) for d, h in zip(drawn, held, strict=True)]
    gate.observe(rows, steps, [d > 0 for d in drawn])


def test_chances_are_multiplied_along_a_draft() -> None:
    gate, rows = EarlyStopping(8), rows_of(1)
    gate.begin(rows, TokenCost(0.0, 0.5), [8])
    # nothing is known of what it says: the middle of each tenth
    assert said(gate, rows, 0, [0.86]) == [True]
    assert said(gate, rows, 1, [0.72]) == [True], "0.85 x 0.75"
    assert said(gate, rows, 2, [0.72]) == [False], "0.85 x 0.75 x 0.75 is less than a half"
    assert said(gate, rows, 3, [0.99]) == [False], "what has ended stays so"


def test_rows_share_a_pass_of_the_draft() -> None:
    """The least sure of them goes on where others pay the pass, and not alone."""
    gate = EarlyStopping(8)
    for q, wanted in (([0.95, 0.95, 0.35], [True, True, True]), ([0.0, 0.0, 0.35], [False] * 3)):
        rows = rows_of(3)
        gate.begin(rows, TokenCost(0.5, 0.3), [8] * 3)
        assert said(gate, rows, 0, q) == wanted


def test_who_was_not_asked_pays_for_nobody() -> None:
    gate, rows = EarlyStopping(8), rows_of(2)
    gate.begin(rows, TokenCost(0.8, 0.1), [8, 0])
    assert said(gate, rows, 0, [0.75, 0.99]) == [False, False]


def test_what_is_said_is_compared_with_what_happens() -> None:
    gate, rows = EarlyStopping(8), rows_of(1)
    for _ in range(60):
        gate.begin(rows, TokenCost(0.0, 0.0), [8])
        said(gate, rows, 0, [0.95])
        said(gate, rows, 1, [0.15])
        learn(gate, rows, [2], [0])
    gate.begin(rows, TokenCost(0.0, 0.3), [8])
    assert said(gate, rows, 0, [0.95]) == [False], "it says so and is wrong"
    gate.begin(rows, TokenCost(0.0, 0.1), [8])
    assert said(gate, rows, 0, [0.15]) == [True], "tokens behind one that failed were not tested"


def budgets(gate: EarlyStopping, *args: Any) -> list[int] | None:
    """Of the rows that are worth it."""
    found = gate.plan(*args)
    return None if found is None else found.budgets


@pytest.mark.parametrize("ragged", [True, False])
def test_asked_for_where_it_pays(ragged: bool) -> None:
    gate, rows, passes = EarlyStopping(8), rows_of(4, ragged=ragged), line(1.0, 0.02)
    every, free, ground = [True] * 4, [None] * 4, StepContext(4.0)
    assert budgets(gate, rows, every, free, passes, line(0.05, 0.02), ground) == [8] * 4
    assert budgets(gate, rows, every, free, passes, line(3.0, 0.02), ground) is None
    for _ in range(80):
        learn(gate, rows, [2, 2, 2, 2], [0, 2, 2, 2])
    found = budgets(gate, rows, every, free, line(1.0, 0.12), line(0.1, 0.1), ground)
    assert found == ([0, 8, 8, 8] if ragged else [8] * 4), "a row whose guesses fail is left out where it can be"
    for _ in range(200):
        learn(gate, rows, [2, 2, 2, 2], [0] * 4)
    assert budgets(gate, rows, every, free, passes, line(0.1, 0.1), ground) is None


def test_a_row_that_was_left_out_is_tried_again() -> None:
    gate, rows, passes = EarlyStopping(8), rows_of(2), line(1.0, 0.2)
    for _ in range(60):
        learn(gate, rows, [2, 2], [0, 2])

    def asked(forgets: bool) -> list[list[int] | None]:
        out = []
        for _ in range(200):
            out.append(budgets(gate, rows, [True] * 2, [None] * 2, passes, line(0.05, 0.15), StepContext(2.0)))
            if forgets:
                gate.decay(rows, [i for i, n in enumerate(out[-1] or [0, 0]) if not n])
        return out

    assert asked(False)[-1] == [0, 8], "to ask changes nothing"
    found = asked(True)
    assert found[0] == [0, 8] and found[-1] == [8, 8]


def test_rows_that_are_held_keep_their_lengths() -> None:
    gate, rows = EarlyStopping(8), rows_of(3)
    found = budgets(gate, rows, [True] * 3, [None, 5, None], line(1.0, 0.02), line(0.05, 0.02), StepContext(3.0))
    assert found == [8, 5, 8]
    assert (
        gate.plan(rows, [True, False, False], [3, None, None], line(1, 0.02), line(0.05, 0.02), StepContext(3.0))
        is None
    )


def test_who_has_no_room_left_shares_no_price() -> None:
    """Of three rows that would pay a pass together, one is at its limit; control: with room they go on."""
    for room, wanted in (([8, 8, 1], [False] * 3), ([8, 8, 8], [True] * 3)):
        gate, rows = EarlyStopping(8), rows_of(3)
        gate.begin(rows, TokenCost(2.0, 0.0), [8] * 3)
        gate.limit(rows, room)
        assert said(gate, rows, 0, [0.85] * 3) == wanted


def test_held_rows_do_not_add_up_where_the_widest_counts() -> None:
    """Three tokens of four rows make a pass three wider, so that two of another row cost nothing."""
    passes, draft = line(1.0, 0.4), line(0.0, 0.05)
    rows = rows_of(5, ragged=False)
    found = budgets(EarlyStopping(8), rows, [True] * 5, [3, 3, 3, 3, None], passes, draft, StepContext(5.0))
    assert found == [3, 3, 3, 3, 8]


def test_drafts_with_parts_of_which_nothing_was_heard() -> None:
    gate, rows = EarlyStopping(8), rows_of(1)
    gate.begin(rows, TokenCost(0.0, 0.0), [8])
    said(gate, rows, 0, [0.9])
    learn(gate, rows, [1], [1])
    assert gate.sees_all_tokens
    gate.begin(rows, TokenCost(0.0, 0.0), [8])
    said(gate, rows, 1, [0.9])
    learn(gate, rows, [2], [2])
    assert not gate.sees_all_tokens


def test_a_first_draft_is_one_of_a_row_that_drafted() -> None:
    gate, rows = EarlyStopping(8), rows_of(2)
    assert gate.is_first_draft(rows, [2, 0])
    learn(gate, rows, [2, 0], [1, 0])
    assert not gate.is_first_draft(rows, [2, 0]), "who drafted nothing is nobody's first"
    assert gate.is_first_draft(rows, [2, 1])
