"""What passes and drafting cost, measured while decoding: seconds by batch size and size of the draft.

Owns the latest measurements and the line between them. Knows neither what a size counts nor what is decided from it.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_SAMPLES = 9
"""Latest measurements of a kind, of which the median is taken."""
_EXACT, _RATIO = 4, 1.3
"""Sizes up to the first have measurements of their own; above, those within this ratio share theirs."""
_DOUBT = 4
"""Measurements that count as much as what other sizes make one expect, while there are few."""
_PROPORTION = 2.0
"""Measurements that count as much as the thought that drafts take time in proportion to their tokens."""
_REDRAW = 8
"""Measurements after which a curve is drawn anew, once there are many: drawing takes longer than many a step may wait."""
_TINY = 1e-9
"""Seconds; a clock may stand still."""
_FAR = 1e6
"""Where a curve is drawn to."""


@dataclass(slots=True)
class Curve:
    """Seconds by size, piecewise linear and never falling; beyond the last point it goes on as steeply as it rose."""

    sizes: FloatArray
    seconds: FloatArray

    def at(self, sizes: npt.ArrayLike) -> FloatArray:
        """Seconds at these sizes, of any shape."""
        return np.interp(np.asarray(sizes, dtype=np.float64), self.sizes, self.seconds)


class _Kind:
    """Measurements of about the same size: the latest sizes, and seconds or their ratio to another's."""

    __slots__ = ("sizes", "values")

    def __init__(self) -> None:
        self.sizes: deque[float] = deque(maxlen=_SAMPLES)
        self.values: deque[float] = deque(maxlen=_SAMPLES)

    def add(self, size: float, value: float) -> None:
        self.sizes.append(size)
        self.values.append(value)

    @property
    def size(self) -> float:
        return statistics.fmean(self.sizes)

    @property
    def value(self) -> float:
        return statistics.median(self.values)


_Kinds = dict[int, _Kind]


class _Costs(ABC):
    """Measurements by batch size and size, and the curves through them."""

    def __init__(self) -> None:
        self._kinds: dict[int, _Kinds] = {}
        self._curves: dict[int, Curve] = {}
        self._counts: dict[int, int] = {}
        """Measurements by batch size."""

    def curve(self, batch: int) -> Curve | None:
        """The curve of the batch size nearest to `batch`; None when no batch size within a factor of two was measured."""
        best = self._nearest(batch)
        if best is None:
            return None
        if best not in self._curves:
            kinds = self._kinds[best]
            self._curves[best] = self._drawn({number: kinds[number] for number in sorted(kinds)}, best)
        return self._curves[best]

    def _nearest(self, batch: int) -> int | None:
        near = [b for b in self._kinds if b <= 2 * batch and batch <= 2 * b]
        return min(near, key=lambda b: (abs(b - batch), b)) if near else None

    def _of(self, batch: int) -> _Kinds:
        count = self._counts[batch] = self._counts.get(batch, 0) + 1
        if count <= _REDRAW**2 or count % _REDRAW == 0:
            self._curves.pop(batch, None)
        return self._kinds.setdefault(batch, {})

    @abstractmethod
    def _drawn(self, kinds: _Kinds, batch: int) -> Curve: ...


class PassCosts(_Costs):
    """What a pass takes by its draft tokens.

    Machines are shared: their pace changes, and one measurement may be anything. So passes are kept in terms of a plain one at
    the time, and where a size was measured a few times two of them are where the median slope of all sizes would put it.
    """

    def __init__(self, steep: float) -> None:
        """steep: what one more draft token costs, in plain passes, before any was measured."""
        super().__init__()
        self._steep = steep
        self.column_cost: float | None = None
        """What a column adds to a pass over one row, as a share of it, where that is known beforehand."""

    def _steepness(self, batch: int) -> float:
        """Where a column costs c alone, n rows take 1 + (n - 1) c, and a column c / (1 + (n - 1) c) of that."""
        alone = self.column_cost
        return self._steep if alone is None else alone / (1 + (batch - 1) * alone)

    def add(self, batch: int, size: float, seconds: float) -> None:
        """Note a pass."""
        kinds = self._of(batch)
        plain = kinds.setdefault(0, _Kind())
        if size <= 0 or not plain.values:
            plain.add(0, seconds / (1 + self._steepness(batch) * size))
        if size > 0:
            kinds.setdefault(_kind(size), _Kind()).add(size, seconds / max(plain.value, _TINY))

    def _drawn(self, kinds: _Kinds, batch: int) -> Curve:
        above = [kind for number, kind in kinds.items() if number]
        rises = [(share - 1) / size for k in above for size, share in zip(k.sizes, k.values, strict=True)]
        steep = self._steepness(batch)
        slope = max(statistics.median([steep] * _DOUBT + rises), steep / 16)
        points = [(0.0, 1.0)]
        for kind in above:
            doubts = [1 + slope * kind.size] * (2 if len(kind.values) <= _DOUBT else 0)
            share = statistics.median([*kind.values, *doubts])
            points.append((kind.size, max(points[-1][1], share)))  # where more takes less, that is noise
        return _line(points, slope, kinds[0].value)


class DraftCosts(_Costs):
    """What drafting takes by the most tokens of a row: so much to begin with, and so much for each.

    The first draft of a prompt takes the draft's own pass over it along, so a few measurements of one size say little of the
    slope between two; in proportion is what is thought until there are more.
    """

    def add(self, batch: int, size: float, seconds: float) -> None:
        """Note a draft."""
        self._of(batch).setdefault(_kind(size), _Kind()).add(size, seconds)

    def _drawn(self, kinds: _Kinds, batch: int) -> Curve:
        found = [(kind.size, kind.value, float(len(kind.values))) for kind in kinds.values()]
        size, value, _ = max(found, key=lambda one: one[2])
        pairs = [(a, b) for i, a in enumerate(found) for b in found[i + 1 :] if b[0] > a[0]]
        slopes = [((b[1] - a[1]) / (b[0] - a[0]), min(a[2], b[2])) for a, b in pairs]
        slope = max(0.0, _middle([(value / size, _PROPORTION), *slopes]))
        begin = max(0.0, _middle([(value - slope * size, count) for size, value, count in found]))
        return _line([(0.0, 0.0), (1.0, begin + slope)], slope, 1.0)

    def longest_s(self, batch: int) -> float:
        """Seconds of the longest drafts that were measured; 0 where none was."""
        best = self._nearest(batch)
        return 0.0 if best is None else self._kinds[best][max(self._kinds[best])].value


def _middle(weighted: Sequence[tuple[float, float]]) -> float:
    """The weighted median of (value, weight)."""
    half = sum(weight for _, weight in weighted) / 2
    for value, weight in sorted(weighted):
        half -= weight
        if half <= 0:
            return value
    raise ValueError("of nothing")


def _line(points: Sequence[tuple[float, float]], slope: float, unit: float) -> Curve:
    """A curve through points in order of size, which goes on with a slope. unit: seconds of 1."""
    sizes, values = (np.array(part) for part in zip(*points, strict=True))
    end = values[-1] + slope * (_FAR - sizes[-1])
    return Curve(np.append(sizes, _FAR), unit * np.append(values, end))


def _kind(size: float) -> int:
    """Which measurements share a median."""
    if size <= _EXACT:
        return round(size)
    return _EXACT + 1 + int(math.log(size / (_EXACT + 1)) / math.log(_RATIO) + 1e-9) if size >= _EXACT + 1 else _EXACT
