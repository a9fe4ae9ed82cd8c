"""How many tokens of trees are accepted, over the number that the draft's probabilities predict. Does not know how it is used."""

from __future__ import annotations

from foresay.decoding.rows import Row
from foresay.decoding.state import StateKey

_DECAY, _ROW_DECAY = 0.98, 0.9
"""Factors of the counts of all rows and of a row's own for each of their trees."""
_PRIOR, _ROW_PRIOR = 4.0, 4.0
"""Weight of the prior 1, and of all rows in the ratio of one, in predicted tokens."""


class TreeCounts:
    """Accepted and predicted tokens of all rows and of each."""

    def __init__(self) -> None:
        self._all = (0.0, 0.0)
        self._row = StateKey[tuple[float, float]](lambda: (0.0, 0.0))

    def add(self, row: Row, accepted: int, predicted: float) -> None:
        """Count a tree. predicted: sum of the path probabilities of its nodes."""
        self._all = self._all[0] * _DECAY + accepted, self._all[1] * _DECAY + predicted
        mine = self._row.of(row)
        self._row.put(row, (mine[0] * _ROW_DECAY + accepted, mine[1] * _ROW_DECAY + predicted))

    def ratio(self, row: Row | None = None) -> float:
        """Return accepted tokens over predicted ones, of a row if one is given."""
        whole = (self._all[0] + _PRIOR) / (self._all[1] + _PRIOR)
        if row is None:
            return whole
        accepted, predicted = self._row.of(row)
        return (accepted + _ROW_PRIOR * whole) / (predicted + _ROW_PRIOR)
