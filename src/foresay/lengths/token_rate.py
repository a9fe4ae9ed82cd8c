"""The value of time: tokens per second that the rows of a batch have recently generated.

Steps differ: one copies ten tokens that are nearly certain, the next drafts a single uncertain one. Over many steps the
throughput is highest if each step maximises

    E[tokens] - rate E[seconds],   rate = tokens per second over all steps

(Dinkelbach's condition for the maximum of a ratio; by renewal-reward, the average-reward rule of semi-Markov decision processes).
Maximising each step's own tokens per second would draft too little where acceptance is high and too much where it is low.
Owns the rate. Does not know drafters.
"""

from __future__ import annotations

from collections.abc import Sequence

from foresay.decoding.outcome import Step
from foresay.decoding.rows import Rows
from foresay.decoding.state import StateKey

_DECAY = 0.99
"""Factor per step of the counts over all rows."""
_ROW_DECAY = 0.97
"""Factor per step of a row's counts: within one output, copied and new text alternate."""
_PRIOR_WEIGHT = 8
"""Plain passes at the average rate that are added to a row's counts."""


class TokenRate:
    """Generated tokens by time, for each row and for all rows; in units of plain passes, so that the machine's speed cancels."""

    def __init__(self) -> None:
        self._row = StateKey[tuple[float, float]](lambda: (0.0, 0.0))
        """Tokens and time of a row."""
        self._tokens = self._passes = float(_PRIOR_WEIGHT)
        """Tokens per row and time over all rows; initially the rate of plain decoding."""

    def add(self, rows: Rows, steps: Sequence[Step], plain_s: float) -> None:
        """Count one step. plain_s: seconds of a plain pass over the same number of rows."""
        if plain_s <= 0:
            return
        passes = steps[0].total_s / plain_s
        self._tokens = self._tokens * _DECAY + sum(len(step.token_ids) for step in steps) / len(steps)
        self._passes = self._passes * _DECAY + passes
        for row, step in zip(rows, steps, strict=True):
            tokens, time = self._row.of(row)
            self._row.put(row, (tokens * _ROW_DECAY + len(step.token_ids), time * _ROW_DECAY + passes))

    def rate(self, rows: Rows, plain_s: float) -> float:
        """Return the tokens per second of all rows together, at least those of plain decoding; 0 if plain_s is 0."""
        average = max(1.0, self._tokens / self._passes)
        total = 0.0
        for row in rows:
            tokens, time = self._row.of(row)
            total += max(1.0, (tokens + _PRIOR_WEIGHT * average) / (time + _PRIOR_WEIGHT))
        return total / plain_s if plain_s > 0 else 0.0
