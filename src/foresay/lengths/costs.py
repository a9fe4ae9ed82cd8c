"""Measured times of target passes and of drafting, for each batch size. Does not know how they are used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median_low
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")

_WINDOW = 32
"""Latest measurements of which a median is taken."""
_SLOPE_WEIGHT = 8
"""Weight of the initial slope, in draft tokens, and most of one measurement."""


class ByBatch(Generic[T]):
    """One value for each batch size."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}

    def of(self, batch: int) -> T:
        """Return the value of a batch size; create it if there is none."""
        if batch not in self._values:
            self._values[batch] = self._make()
        return self._values[batch]

    def nearest(self, batch: int) -> T | None:
        """Return the value of the nearest batch size; None if none is within a factor of two."""
        near = [size for size in self._values if size <= 2 * batch and batch <= 2 * size]
        return self._values[min(near, key=lambda size: (abs(size - batch), size))] if near else None


class PassCosts:
    """Times of target passes over one batch size: plain_s (1 + slope n) seconds for n draft tokens.

    Machines are shared, so each time is taken relative to the plain pass of its moment, and slope is a weighted median.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_WINDOW // 4)
        self._slopes: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self.plain_s = self.slope = 0.0

    def add(self, tokens: int, seconds: float, initial: float) -> None:
        """Add the time of a pass that scored `tokens` draft tokens (per row if padded). initial: slope until it is measured."""
        if not tokens or not self._plain:
            self._plain.append(max(seconds, 1e-9) / (1 + (self.slope or initial) * tokens))
            self.plain_s = median_low(self._plain)
        if tokens:
            self._slopes.append(((seconds / self.plain_s - 1) / tokens, min(tokens, _SLOPE_WEIGHT)))
        weighted = [*self._slopes, (initial, _SLOPE_WEIGHT)] if len(self._slopes) > 1 else [(initial, 1)]
        self.slope = max(_weighted_median(weighted), initial / 16)


def _weighted_median(weighted: Sequence[tuple[float, int]]) -> float:
    values, weights = np.array(sorted(weighted)).T
    return float(values[weights.cumsum().searchsorted(weights.sum() / 2)])


class DraftCosts:
    """Times of drafting for one number of rows, by the length of the longest draft."""

    def __init__(self) -> None:
        self._times: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def add(self, length: int, seconds: float) -> None:
        """Add the time of drafting, of which the longest draft had `length` tokens."""
        self._times.append((length, seconds))

    @property
    def seconds(self) -> float:
        """Median; 0 until it is known."""
        return median_low(s for _, s in self._times) if self.is_known else 0.0

    @property
    def is_known(self) -> bool:
        """True once there are two measurements: the first one may include the prefill of a prompt."""
        return len(self._times) > 1

    @property
    def width(self) -> float:
        """Mean length of the longest draft."""
        return fmean(length for length, _ in self._times) if self._times else 0.0

    def line(self) -> tuple[float, float]:
        """Return (seconds of a draft without tokens, seconds per token), through the medians of the shorter and longer drafts."""
        ordered, half = sorted(self._times), len(self._times) // 2
        if not half:
            return 0.0, ordered[0][1] / max(ordered[0][0], 1)
        (x0, y0), (x1, y1) = (
            (median_low(n for n, _ in part), median_low(s for _, s in part))
            for part in (ordered[:half], ordered[half:])
        )
        per_token = min(max((y1 - y0) / (x1 - x0), 0.0) if x1 > x0 else np.inf, y1 / max(x1, 1))
        return y1 - per_token * x1, per_token
