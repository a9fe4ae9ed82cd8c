"""Moves of rows when others leave the batch.

Decoding rows come first in the cache, so that no pass has to gather rows; rows being prefilled follow. A leaving row is
replaced by the last one of its group, and no row moves more than once.
"""

from __future__ import annotations

from collections.abc import Sequence

from foresay.decoding.protocols import Move


def plan_moves(alive: Sequence[bool], decoding: int) -> tuple[list[Move], list[Move], int]:
    """Return the moves that fill the gaps of leaving rows.

    alive: by row index. decoding: number of decoding rows. Returns the moves of decoding rows, then those of the others, as
    (from, to) pairs to be carried out in this order, and the new number of decoding rows.
    """
    stay = sum(alive[:decoding])
    total = sum(alive)
    gaps = [i for i in range(stay) if not alive[i]]
    tail = [i for i in range(stay, decoding) if alive[i]]
    front = list(zip(tail, gaps, strict=True))
    others = [i for i in range(decoding, len(alive)) if alive[i]]
    fixed = {i for i in others if i < total}
    free = [i for i in range(stay, total) if i not in fixed]
    back = list(zip([i for i in others if i >= total], free, strict=True))
    return front, back, stay
