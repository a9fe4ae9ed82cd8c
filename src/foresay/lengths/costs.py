"""Measured times of target passes and of drafting, for each batch size. Does not know how they are used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations
from statistics import fmean, median_low
from typing import Generic, TypeVar

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
    ordered = sorted(weighted)
    below = accumulate(weight for _, weight in ordered)
    whole = sum(weight for _, weight in weighted)
    return next(value for (value, _), total in zip(ordered, below, strict=True) if 2 * total >= whole)


class DraftCosts:
    """Times of drafting for one number of rows, by the length of the longest draft."""

    def __init__(self) -> None:
        self._times: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._token_share = 1.0
        """Share of its token in the time of a draft of one token, by the last drafts whose lengths differed; 1 before any."""
        self._line = 0.0, 0.0

    def add(self, length: int, seconds: float) -> None:
        """Add the time of drafting, of which the longest draft had `length` tokens."""
        self._times.append((length, seconds))
        self._line = self._fitted()

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
        """Return (seconds of a draft without tokens, seconds per token): the median slope between drafts of different lengths.

        While all but one have the same length, the time is divided as it was before, so that a policy that drafts one token at a
        time does not take the time of a start for that of a token, and never draft two again.
        """
        return self._line

    def _fitted(self) -> tuple[float, float]:
        if not self.is_known:
            return 0.0, self._times[0][1] / max(self._times[0][0], 1)
        by_length: dict[int, list[float]] = {}
        for length, seconds in self._times:
            by_length.setdefault(length, []).append(seconds)
        usual = median_low(length for length, _ in self._times)
        middles = {length: median_low(times) for length, times in by_length.items()}
        middle = max(middles[usual], 1e-9)
        if len(self._times) - len(by_length[usual]) > 1:
            slopes = [
                ((middles[one] - middles[two]) / (one - two), len(by_length[one]) * len(by_length[two]))
                for one, two in combinations(middles, 2)
            ]
            per_token = min(max(_weighted_median(slopes), 0.0), middle / max(usual, 1))
            self._token_share = max(per_token / max(middle - per_token * (usual - 1), 1e-9), 1e-3)
        else:
            per_token = middle / (1 / self._token_share - 1 + max(usual, 1))
        return max(median_low(seconds - per_token * length for length, seconds in self._times), 0.0), per_token
