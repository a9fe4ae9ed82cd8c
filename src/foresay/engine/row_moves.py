"""Which rows move when some leave.

Rows lie in two zones: those that decode form a prefix of the cache, so that no pass gathers rows, and those still being
prefilled follow. Leaving rows are replaced by the last of their zone, and no row moves more than once.
"""

from __future__ import annotations

from collections.abc import Sequence

from foresay.decoding.protocols import Move


def plan_moves(alive: Sequence[bool], decoding: int) -> tuple[list[Move], list[Move], int]:
    """Moves that close the gaps of the dead rows.

    alive: for each place. decoding: places before it decode. Returns the moves within the decoding zone, then those of
    the others, both as (from, to) and to be carried out in this order, and the new number of decoding rows.
    """
    stay = sum(alive[:decoding])
    total = sum(alive)
    holes = [place for place in range(stay) if not alive[place]]
    tail = [place for place in range(stay, decoding) if alive[place]]
    front = list(zip(tail, holes, strict=True))
    others = [place for place in range(decoding, len(alive)) if alive[place]]
    fixed = {place for place in others if place < total}
    free = [place for place in range(stay, total) if place not in fixed]
    back = list(zip([place for place in others if place >= total], free, strict=True))
    return front, back, stay
