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
_TRUSTED = 4
"""Passes with draft tokens from which on their fit is trusted."""
_REFIT = 4
"""Measurements after which a line is fitted again; the first ones change it one by one."""
_SMOOTHED = 8
"""A fit changes the share of start and tokens by an eighth, the first ones by more: each is uncertain if most n are alike."""


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
        if batch in self._values:
            return self._values[batch]
        near = [size for size in self._values if size <= 2 * batch and batch <= 2 * size]
        return self._values[min(near, key=lambda size: (abs(size - batch), size))] if near else None


class Line:
    """Costs of n tokens as start + per_token * n: the median slope between different n, and the median of what is left.

    n is compared between powers of two, so that one slow measurement of a rare n is not compared with all others. Until two
    such ranges have two measurements each, the cost is divided as it was before, so that a policy that drafts one token at a time
    does not take the cost of a start for that of a token, and never draft two again.
    """

    def __init__(self) -> None:
        self._measured: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._num_added = 0
        self._num_fits = 0
        self._token_share = 1.0
        """Share of its token in the cost of one token, by the last measurements whose n differed; 1 before any."""
        self.start = self.per_token = self.median = self.width = 0.0
        """median: of all costs. width: mean n."""

    def add(self, n: int, cost: float) -> None:
        """Add the cost of n tokens, n >= 0."""
        self._measured.append((n, cost))
        self._num_added += 1
        if self._num_added <= 2 * _REFIT or self._num_added % _REFIT == 0:
            self.width = fmean(n for n, _ in self._measured)
            self.median = median_low(cost for _, cost in self._measured)
            self.start, self.per_token = self._fitted()

    def __len__(self) -> int:
        return len(self._measured)

    def at(self, n: int) -> float:
        """Return the cost of n tokens by the fit."""
        return self.start + self.per_token * n

    def _fitted(self) -> tuple[float, float]:
        by_size: dict[int, list[tuple[int, float]]] = {}
        for n, cost in self._measured:
            by_size.setdefault(n.bit_length(), []).append((n, cost))
        sizes = [_middle(one) for one in by_size.values() if len(one) > 1]
        usual = max(reversed([_middle(one) for one in by_size.values()]), key=lambda one: one[2])
        n, middle = max(usual[0], 1), max(usual[1], 1e-9)
        if len(sizes) > 1:
            slopes = [
                ((one[1] - two[1]) / (one[0] - two[0]), one[2] * two[2] * abs(one[0] - two[0]))
                for one, two in combinations(sizes, 2)
            ]
            per_token = min(max(_weighted_median(slopes), 0.0), middle / n)
            share = max(per_token / max(middle - per_token * (n - 1), 1e-9), 1e-3)
            self._num_fits = min(self._num_fits + 1, _SMOOTHED)
            self._token_share += (share - self._token_share) / self._num_fits
        per_token = middle / (1 / self._token_share - 1 + n)
        return max(median_low(cost - per_token * n for n, cost in self._measured), 0.0), per_token


def _middle(measured: Sequence[tuple[int, float]]) -> tuple[int, float, int]:
    """Return the median n, the median cost, and the number of measurements."""
    return median_low(n for n, _ in measured), median_low(cost for _, cost in measured), len(measured)


def _weighted_median(weighted: Sequence[tuple[float, float]]) -> float:
    ordered = sorted(weighted)
    below = accumulate(weight for _, weight in ordered)
    whole = sum(weight for _, weight in weighted)
    return next(value for (value, _), total in zip(ordered, below, strict=True) if 2 * total >= whole)


class PassCosts:
    """Times of target passes over one batch size: plain_s (1 + start + slope n) seconds for n > 0 draft tokens.

    Machines are shared, so each time is taken relative to the plain pass of its moment.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_WINDOW // 4)
        self._more = Line()
        """Plain passes that n draft tokens take beyond one."""
        self.plain_s = self.start = self.slope = 0.0

    def add(self, tokens: int, seconds: float, initial: float) -> None:
        """Add the time of a pass that scored `tokens` draft tokens (per row if padded). initial: slope until it is measured."""
        if not tokens or not self._plain:
            more = self.start + self.slope * tokens if self.slope else initial * tokens
            self._plain.append(max(seconds, 1e-9) / (1 + (more if tokens else 0.0)))
            self.plain_s = median_low(self._plain)
        if tokens:
            self._more.add(tokens, seconds / self.plain_s - 1)
        if len(self._more) < _TRUSTED:
            self.start, self.slope = 0.0, initial
        else:
            self.start, self.slope = self._more.start, max(self._more.per_token, initial / 16)


class DraftCosts:
    """Times of drafting for one number of rows, by the length of the longest draft, in seconds."""

    def __init__(self) -> None:
        self.line = Line()

    @property
    def seconds(self) -> float:
        """Median; 0 until it is known."""
        return self.line.median if self.is_known else 0.0

    @property
    def is_known(self) -> bool:
        """True once there are two measurements: the first one may include the prefill of a prompt."""
        return len(self.line) > 1
