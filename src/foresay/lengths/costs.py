"""Measured times of target passes and of drafting, as curves: seconds by number of draft tokens, for each batch size.

Owns the latest measurements and the curves fitted to them. Does not know how the curves are used.
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

_WINDOW = 9
"""Latest measurements of a bucket, of which the median is taken."""
_EXACT, _RATIO = 4, 1.3
"""Sizes up to _EXACT have a bucket each; larger sizes share a bucket if they are within this ratio."""
_PRIOR_WEIGHT = 4
"""Weight, in measurements, of the initial slope; and the number of measurements up to which a bucket is unreliable."""
_PROPORTIONAL_WEIGHT = 2.0
"""Weight, in measurements, of the assumption that drafting time is proportional to the number of tokens."""
_REFIT = 8
"""Measurements between two fits of a curve after the first _REFIT^2; fitting takes too long to do it in every step."""
_MIN_S = 1e-9
"""Shortest time in seconds; a coarse clock may measure 0."""
_MAX_SIZE = 1e6
"""Size at which curves end."""


@dataclass(slots=True)
class Curve:
    """Seconds by size: piecewise linear, never falling, extrapolated beyond the last measured size with the fitted slope."""

    sizes: FloatArray
    seconds: FloatArray

    def at(self, sizes: npt.ArrayLike) -> FloatArray:
        """Return the seconds at the given sizes, in an array of the same shape."""
        return np.interp(np.asarray(sizes, dtype=np.float64), self.sizes, self.seconds)


class _Bucket:
    """The latest measurements of about the same size: sizes, and seconds or times relative to a plain pass."""

    __slots__ = ("sizes", "values")

    def __init__(self) -> None:
        self.sizes: deque[float] = deque(maxlen=_WINDOW)
        self.values: deque[float] = deque(maxlen=_WINDOW)

    def add(self, size: float, value: float) -> None:
        self.sizes.append(size)
        self.values.append(value)

    @property
    def size(self) -> float:
        return statistics.fmean(self.sizes)

    @property
    def value(self) -> float:
        return statistics.median(self.values)


_Buckets = dict[int, _Bucket]


class _Costs(ABC):
    """Measurements by batch size and size, and the curves fitted to them."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Buckets] = {}
        self._curves: dict[int, Curve] = {}
        self._counts: dict[int, int] = {}
        """Number of measurements by batch size."""

    def curve(self, batch: int) -> Curve | None:
        """Return the curve of the measured batch size nearest to `batch`; None if none is within a factor of two."""
        best = self._nearest(batch)
        if best is None:
            return None
        if best not in self._curves:
            buckets = self._buckets[best]
            self._curves[best] = self._fit({number: buckets[number] for number in sorted(buckets)}, best)
        return self._curves[best]

    def _nearest(self, batch: int) -> int | None:
        near = [b for b in self._buckets if b <= 2 * batch and batch <= 2 * b]
        return min(near, key=lambda b: (abs(b - batch), b)) if near else None

    def _count(self, batch: int) -> _Buckets:
        """Count one more measurement, drop the curve if it is due for a fit, and return the buckets to add to."""
        count = self._counts[batch] = self._counts.get(batch, 0) + 1
        if count <= _REFIT**2 or count % _REFIT == 0:
            self._curves.pop(batch, None)
        return self._buckets.setdefault(batch, {})

    @abstractmethod
    def _fit(self, buckets: _Buckets, batch: int) -> Curve: ...


class PassCosts(_Costs):
    """Time of a target pass by the number of draft tokens that it scores.

    Machines are shared, so their speed changes and a single measurement may be far off. Passes are therefore measured relative to
    a plain pass at the time, and a bucket with few measurements gets two more on the line fitted through all sizes.
    """

    def __init__(self, initial_slope: float) -> None:
        """initial_slope: cost of one more draft token, in plain passes, until it is measured."""
        super().__init__()
        self._slope = initial_slope
        self.column_cost: float | None = None
        """Cost of one more token in a pass over one row, in plain passes; None if not known in advance."""

    def _initial_slope(self, batch: int) -> float:
        """Cost of one more token: c / (1 + (n - 1) c) plain passes of n rows, which take 1 + (n - 1) c passes of one row."""
        alone = self.column_cost
        return self._slope if alone is None else alone / (1 + (batch - 1) * alone)

    def add(self, batch: int, size: float, seconds: float) -> None:
        """Add the time of a pass over `batch` rows that scored `size` draft tokens."""
        buckets = self._count(batch)
        plain = buckets.setdefault(0, _Bucket())
        if size <= 0 or not plain.values:
            plain.add(0, seconds / (1 + self._initial_slope(batch) * size))
        if size > 0:
            buckets.setdefault(_bucket_of(size), _Bucket()).add(size, seconds / max(plain.value, _MIN_S))

    def _fit(self, buckets: _Buckets, batch: int) -> Curve:
        drafted = [bucket for number, bucket in buckets.items() if number]
        slopes = [(ratio - 1) / size for b in drafted for size, ratio in zip(b.sizes, b.values, strict=True)]
        initial = self._initial_slope(batch)
        slope = max(statistics.median([initial] * _PRIOR_WEIGHT + slopes), initial / 16)
        points = [(0.0, 1.0)]
        for bucket in drafted:
            fitted = [1 + slope * bucket.size] * (2 if len(bucket.values) <= _PRIOR_WEIGHT else 0)
            ratio = statistics.median([*bucket.values, *fitted])
            points.append((bucket.size, max(points[-1][1], ratio)))  # a lower cost for more tokens is noise
        return _line(points, slope, buckets[0].value)


class DraftCosts(_Costs):
    """Time of drafting by the longest draft of the batch: a constant, and a cost for each token.

    The first draft of a prompt includes the draft model's prefill, so a few measurements of one size do not determine the slope.
    Until there are more, the time is assumed to be proportional to the number of tokens.
    """

    def add(self, batch: int, size: float, seconds: float) -> None:
        """Add the time of drafting for `batch` rows, up to `size` tokens per row."""
        self._count(batch).setdefault(_bucket_of(size), _Bucket()).add(size, seconds)

    def _fit(self, buckets: _Buckets, batch: int) -> Curve:
        found = [(bucket.size, bucket.value, float(len(bucket.values))) for bucket in buckets.values()]
        size, value, _ = max(found, key=lambda one: one[2])
        pairs = [(a, b) for i, a in enumerate(found) for b in found[i + 1 :] if b[0] > a[0]]
        slopes = [((b[1] - a[1]) / (b[0] - a[0]), min(a[2], b[2])) for a, b in pairs]
        slope = max(0.0, _weighted_median([(value / size, _PROPORTIONAL_WEIGHT), *slopes]))
        constant = max(0.0, _weighted_median([(value - slope * size, count) for size, value, count in found]))
        return _line([(0.0, 0.0), (1.0, constant + slope)], slope, 1.0)

    def longest_s(self, batch: int) -> float:
        """Return the seconds of the longest measured drafts; 0 if there are none."""
        best = self._nearest(batch)
        return 0.0 if best is None else self._buckets[best][max(self._buckets[best])].value


def _weighted_median(weighted: Sequence[tuple[float, float]]) -> float:
    """Return the weighted median of (value, weight) pairs."""
    half = sum(weight for _, weight in weighted) / 2
    for value, weight in sorted(weighted):
        half -= weight
        if half <= 0:
            return value
    raise ValueError("the median of an empty list")


def _line(points: Sequence[tuple[float, float]], slope: float, unit: float) -> Curve:
    """Return a curve through points sorted by size, extrapolated with `slope`. unit: seconds of the value 1."""
    sizes, values = (np.array(part) for part in zip(*points, strict=True))
    end = values[-1] + slope * (_MAX_SIZE - sizes[-1])
    return Curve(np.append(sizes, _MAX_SIZE), unit * np.append(values, end))


def _bucket_of(size: float) -> int:
    """Return the number of the bucket that a size belongs to."""
    if size <= _EXACT:
        return round(size)
    return _EXACT + 1 + int(math.log(size / (_EXACT + 1)) / math.log(_RATIO) + 1e-9) if size >= _EXACT + 1 else _EXACT
