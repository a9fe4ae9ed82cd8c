"""What a second is worth: the tokens that are written in one, lately, by the rows at hand.

Decoding is a chain of steps of different worth: one copies ten tokens that are nearly certain, the next guesses one. Over many
steps the most tokens per second are written when each step maximises

    E[tokens] - rate E[seconds],   rate = tokens per second over all steps

(Dinkelbach's condition; the average-reward rule of semi-Markov decisions), and not its own tokens per second: that would draft
too little where guesses are good, and too much where they are poor. Owns the rate. Knows nothing of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from foresay.decoding.outcome import Step
from foresay.decoding.rows import Rows

_OWN = "throughput length: own pace"
"""Where a row remembers its tokens and its time."""
_FORGET = 0.99
"""What a step leaves of what all rows did."""
_ROW_FORGETS = 0.97
"""What a step leaves of what a row did: texts change from copying to telling."""
_DOUBT = 8
"""Plain passes whose tokens, at the usual pace, are counted with a row's own."""


class TokenRate:
    """Tokens by the time of a plain pass, of each row and of all."""

    def __init__(self) -> None:
        self._tokens = self._passes = float(_DOUBT)
        """Of all rows, at first at the pace of plain decoding."""

    def add(self, rows: Rows, steps: Sequence[Step], plain_s: float) -> None:
        """Note a step. plain_s: seconds of a plain pass over as many rows."""
        if plain_s <= 0:
            return
        passes = steps[0].total_s / plain_s
        self._tokens = self._tokens * _FORGET + sum(len(step.token_ids) for step in steps) / len(steps)
        self._passes = self._passes * _FORGET + passes
        for row, step in zip(rows, steps, strict=True):
            tokens, time = row.extras.get(_OWN, (0.0, 0.0))
            row.extras[_OWN] = (tokens * _ROW_FORGETS + len(step.token_ids), time * _ROW_FORGETS + passes)

    def rate(self, rows: Rows, plain_s: float) -> float:
        """Tokens per second of all rows together, never less than what plain decoding writes."""
        usual = max(1.0, self._tokens / self._passes)
        total = 0.0
        for row in rows:
            tokens, time = row.extras.get(_OWN, (0.0, 0.0))
            total += max(1.0, (tokens + _DOUBT * usual) / (time + _DOUBT))
        return total / plain_s if plain_s > 0 else 0.0
