from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.decoding.protocols import Move
from foresay.engine.row_moves import plan_moves


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[bool], int]:
    alive = draw(st.lists(st.booleans(), max_size=24))
    return alive, draw(st.integers(0, len(alive)))


def carried_out(alive: list[bool], moves: list[Move]) -> list[int]:
    places = list(range(len(alive)))
    for source, target in moves:
        places[target] = places[source]
    return places[: sum(alive)]


@given(batches())
@settings(max_examples=500, deadline=None)
def test_survivors_are_kept_in_two_contiguous_zones(batch: tuple[list[bool], int]) -> None:
    alive, decoding = batch
    front, back, stay = plan_moves(alive, decoding)
    kept = carried_out(alive, [*front, *back])
    survivors = [place for place, lives in enumerate(alive) if lives]
    assert sorted(kept) == survivors
    assert stay == sum(alive[:decoding])
    assert all(row < decoding for row in kept[:stay])
    assert all(row >= decoding for row in kept[stay:])


@given(batches())
@settings(max_examples=500, deadline=None)
def test_no_row_moves_more_often_than_it_must(batch: tuple[list[bool], int]) -> None:
    alive, decoding = batch
    front, back, stay = plan_moves(alive, decoding)
    sources = [source for source, _ in (*front, *back)]
    targets = [target for _, target in (*front, *back)]
    assert len(set(sources)) == len(sources)
    assert len(set(targets)) == len(targets)
    assert all(alive[source] for source in sources)
    total = sum(alive)
    # a row whose position is still in its zone stays where it is
    moved = {p for p in range(decoding) if alive[p] and p >= stay}
    moved |= {p for p in range(decoding, len(alive)) if alive[p] and p >= total}
    assert set(sources) == moved


@given(batches())
@settings(max_examples=300, deadline=None)
def test_the_front_moves_alone_close_the_decoding_zone(batch: tuple[list[bool], int]) -> None:
    """A drafter holds the decoding rows only and is given the front moves only."""
    alive, decoding = batch
    front, _, stay = plan_moves(alive, decoding)
    assert all(source < decoding and target < stay for source, target in front)
    assert sorted(carried_out(alive[:decoding], front)) == [p for p in range(decoding) if alive[p]]


def test_by_hand() -> None:
    # decoding 0-3, prefilling 4-6; 1 and 4 leave: 3 fills 1, then the prefilling zone begins at 3
    front, back, stay = plan_moves([True, False, True, True, False, True, True], 4)
    assert (front, back, stay) == ([(3, 1)], [(5, 3), (6, 4)], 3)


def test_nothing_moves_when_nobody_leaves() -> None:
    assert plan_moves([True] * 5, 3) == ([], [], 3)
