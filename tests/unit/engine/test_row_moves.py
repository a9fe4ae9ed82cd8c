from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.decoding.protocols import Move
from foresay.engine.row_moves import plan_moves


def carried_out(alive: list[bool], moves: list[Move]) -> list[int]:
    places = list(range(len(alive)))
    for source, target in moves:
        places[target] = places[source]
    return places[: sum(alive)]


@given(st.data())
@settings(max_examples=500, deadline=None)
def test_survivors_are_kept_in_two_contiguous_zones(data: st.DataObject) -> None:
    """No row moves more often than it must; the front moves alone, which a drafter gets, close the decoding zone."""
    alive = data.draw(st.lists(st.booleans(), max_size=24))
    decoding, total = data.draw(st.integers(0, len(alive))), sum(alive)
    front, back, stay = plan_moves(alive, decoding)
    kept = carried_out(alive, [*front, *back])
    assert sorted(kept) == [row for row, lives in enumerate(alive) if lives]
    assert stay == sum(alive[:decoding])
    assert all(row < decoding for row in kept[:stay]) and all(row >= decoding for row in kept[stay:])
    sources, targets = ([move[i] for move in (*front, *back)] for i in (0, 1))
    assert len(set(sources)) == len(sources) and len(set(targets)) == len(targets)
    # a row whose position is still in its zone stays where it is
    assert set(sources) == {p for p, lives in enumerate(alive) if lives and p >= (stay if p < decoding else total)}
    assert all(source < decoding and target < stay for source, target in front)
    assert sorted(carried_out(alive[:decoding], front)) == [p for p in range(decoding) if alive[p]]


def test_by_hand() -> None:
    # decoding 0-3, prefilling 4-6; 1 and 4 leave: 3 fills 1, then the prefilling zone begins at 3
    front, back, stay = plan_moves([True, False, True, True, False, True, True], 4)
    assert (front, back, stay) == ([(3, 1)], [(5, 3), (6, 4)], 3)
