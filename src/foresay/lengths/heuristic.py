"""The heuristic of transformers' assisted generation: a longer draft after a fully accepted one, else a shorter one."""

from __future__ import annotations

from collections.abc import Sequence

from foresay.checks import check_int
from foresay.decoding.outcome import Step
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Rows
from foresay.decoding.state import StateKey
from foresay.lengths.constant import MAX_DRAFT_TOKENS


class HeuristicLength(LengthPolicy):
    """Start each row at `start`; add `up` after a fully accepted draft, else subtract `down`, within [low, high]."""

    remembers = False

    def __init__(self, start: int = 5, *, up: int = 2, down: int = 1, low: int = 1, high: int = 20) -> None:
        self.high = check_int("high", high, 1, MAX_DRAFT_TOKENS)
        self._length = StateKey[int](lambda: self.start)
        self.low = check_int("low", low, 1, self.high)  # a length of 0 could never grow again
        self.start = check_int("start", start, self.low, self.high)
        self.up, self.down = check_int("up", up, 0, MAX_DRAFT_TOKENS), check_int("down", down, 0, MAX_DRAFT_TOKENS)

    def budget(self, rows: Rows) -> list[int]:
        """Return each row's current length."""
        return [self._length.of(row) for row in rows]

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        """Adapt each row's length to its last draft; a step without a draft changes nothing."""
        for row, step in zip(rows, steps, strict=True):
            if step.num_drafted:
                length = self._length.of(row)
                length += self.up if step.num_accepted == step.num_drafted else -self.down
                self._length.put(row, min(max(length, self.low), self.high))
