"""The length that writes most tokens per second, measured while decoding; 0 where no draft pays.

Keeps how long a pass takes by batch size and columns, how long drafting takes, and how often a draft reaches each length.
For every step it takes the K that maximises

    E[tokens | K] / E[seconds | K],   E[tokens | K] = 1 + sum_{k <= K} P(k tokens accepted)

After two plain passes to compare with, a few steps try a draft. When none pays, they are tried again only as often as
the time they lost allows: at most a hundredth of the time in between, and less with every trial that fails, until other
requests join.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from threading import Lock

from foresay.checks import check_int
from foresay.decoding.outcome import Step
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Rows
from foresay.lengths.constant import MAX_DRAFT_TOKENS

_SAMPLES = 9
"""Latest measurements of a kind, of which the median is taken."""
_FORGET = 0.98
"""What a step leaves of the counts before it."""
_DOUBT = 4
"""Steps with a length that count as much as what shorter lengths make one expect of it."""
_TRIAL = 4
"""Steps of a trial: the first may pay for what the draft missed."""
_LOSS = 0.01
"""Share of the time that trials may lose."""
_PATIENCE = 5
"""Doublings of the pause between trials, at most."""
_SETTLED = 64
"""Steps after a trial before requests that join are reason for another."""
_OFFERED = "throughput length"
"""Where rows remember the length they were given: several engines may share one policy."""
_STALE = 256
"""Steps after which a plain pass is measured again."""
_STEEP = 0.03
"""Cost of a further column in plain passes, until two widths were measured."""


class _Times:
    """Seconds by (batch size, width): medians of the latest, straight lines between widths."""

    def __init__(self) -> None:
        self._samples: dict[tuple[int, int], deque[float]] = {}
        self._curves: dict[int, dict[int, float]] = {}

    def add(self, batch: int, width: int, seconds: float) -> None:
        """Note a measurement."""
        latest = self._samples.setdefault((batch, width), deque(maxlen=_SAMPLES))
        latest.append(seconds)
        curve = self._curves.setdefault(batch, {})
        known = width in curve
        curve[width] = statistics.median(latest)
        if not known:
            self._curves[batch] = dict(sorted(curve.items()))

    def curve(self, batch: int, width: int) -> list[tuple[int, float]]:
        """(width, seconds), in order of width, at the batch size nearest to `batch` that was measured at `width`.

        Empty when no size within a factor of two was.
        """
        sizes = [b for b, at in self._curves.items() if width in at and b <= 2 * batch and batch <= 2 * b]
        return list(self._curves[min(sizes, key=lambda b: (abs(b - batch), b))].items()) if sizes else []


def at(curve: Sequence[tuple[int, float]], width: float, steep: float) -> float:
    """A curve's value: a straight line between points, `steep` of the first value per unit beyond the last."""
    place = bisect_left(curve, (int(width), 0.0))
    if place < len(curve) and curve[place][0] == width:
        return curve[place][1]
    if place == 0:
        return curve[0][1]
    (x0, y0) = curve[place - 1]
    if place == len(curve):
        slope = curve[0][1] * steep
        if len(curve) > 1:  # a narrow noisy pair must not make wide passes free
            slope = max((y0 - curve[0][1]) / (x0 - curve[0][0]), slope / 3)
        return y0 + slope * (width - x0)
    (x1, y1) = curve[place]
    return y0 + (y1 - y0) * (width - x0) / (x1 - x0)


class _Reach:
    """How often drafts reach each length, forgetting: proposed by anyone of the batch, accepted per row."""

    def __init__(self, high: int) -> None:
        self.offered = [0.0] * (high + 1)
        self.wide = [0.0] * (high + 1)
        self.accepted = [0.0] * (high + 1)

    def add(self, budget: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Count one step with a budget."""
        width = max(drafted)
        for counts in (self.offered, self.wide, self.accepted):
            counts[:] = [count * _FORGET for count in counts]  # lengths that are no longer offered too
        for k in range(1, budget + 1):
            self.offered[k] += 1
            self.wide[k] += width >= k
            self.accepted[k] += sum(n >= k for n in accepted) / len(accepted)

    def shares(self, counts: Sequence[float]) -> list[float]:
        """The share of steps that reached k = 0, 1, ...

        Past what was offered it falls as it last fell, and a length that was offered a few times is held half for that.
        """
        out = [1.0, min(1.0, counts[1] / self.offered[1]) if self.offered[1] else 0.5]
        for k in range(2, len(counts)):
            expected = out[-1] * (out[-1] / out[-2] if out[-2] > 0 else 0.5)
            out.append(min(out[-1], (counts[k] + _DOUBT * expected) / (self.offered[k] + _DOUBT)))
        return out


class ThroughputLength(LengthPolicy):
    """Never slower than plain decoding: lengthens, shortens or stops drafting by what it measures.

    Estimates are kept between requests. Where a draft is sampled, the output's law does not depend on it; its tokens may,
    as they do on every length.
    """

    def __init__(self, *, start: int = 4, high: int = 16) -> None:
        """start: length of the first drafts. high: longest."""
        self.high = check_int("high", high, 1, MAX_DRAFT_TOKENS)
        self.start = check_int("start", start, 1, self.high)
        self._lock = Lock()
        self._passes, self._drafts, self._reach = _Times(), _Times(), _Reach(self.high)
        self._trial = 0
        """Steps of the trial still to come."""
        self._lost = self._elapsed = self._resume_s = self._least_s = 0.0
        self._since_plain = self._num_plain = self._since_trial = 0
        self._failed = 0
        """Trials in a row after which no draft paid; each doubles the pause before the next."""

    def budget(self, rows: Rows) -> list[int]:
        """The same for every row: the widest draft sets what a pass costs."""
        with self._lock:
            length = rows.memo[_OFFERED] = self._choose(len(rows), _OFFERED not in rows.memo)
            return [length] * len(rows)

    def _choose(self, batch: int, joined: bool) -> int:
        """joined: requests have come or gone, so that what did not pay may now."""
        if self._trial:
            return self.start
        passes = self._passes.curve(batch, 1)
        if not passes or self._num_plain < 2 or self._since_plain >= _STALE:
            return 0
        best = self._best(batch, passes)
        if best:
            self._failed = 0
            return best
        if joined and self._since_trial >= _SETTLED:
            self._failed = 0
            self._resume_s = min(self._resume_s, self._least_s)
        if self._elapsed >= self._resume_s:
            self._trial, self._lost, self._since_trial = _TRIAL, 0.0, 0
            self._failed = min(self._failed + 1, _PATIENCE)  # until it turns out to pay
            return self.start
        return 0

    def _best(self, batch: int, passes: Sequence[tuple[int, float]]) -> int:
        """The K of the greatest expected throughput. passes: the curve of a pass at this batch size."""
        drafts = self._drafts.curve(batch, self.start)
        if not drafts:
            return 0
        reached, wide = self._reach.shares(self._reach.accepted), self._reach.shares(self._reach.wide)
        longest = max((k for k in range(1, self.high + 1) if self._reach.offered[k] >= 1), default=0)
        drafts = [(0, 0.0), *drafts]  # no draft takes no time
        plain = at(passes, 1, _STEEP)
        tokens, seconds, best, best_rate = 1.0, plain, 0, 1 / plain
        before = plain
        for k in range(1, min(self.high, longest + 2) + 1):
            tokens += reached[k]
            # one more column in the steps whose drafts are that long; where it takes less than a plain pass that is noise
            wider = max(plain, at(passes, k + 1, _STEEP))
            seconds += wide[k] * (wider - before)
            before = wider
            rate = tokens / (seconds + at(drafts, k, 1 / max(1, longest)))
            if rate > best_rate:
                best, best_rate = k, rate
        return best

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        """Measure a step."""
        with self._lock:
            self._measure(steps, int(rows.memo.get(_OFFERED, 0)))

    def _measure(self, steps: Sequence[Step], offered: int) -> None:
        one, batch = steps[0], len(steps)
        drafted = [step.num_drafted for step in steps]
        self._passes.add(batch, 1 + max(drafted), one.total_s - one.draft_s)
        self._since_plain = 0 if max(drafted) == 0 else self._since_plain + 1
        self._num_plain += max(drafted) == 0
        self._elapsed += one.total_s
        self._since_trial += 1
        if not offered:
            return
        self._drafts.add(batch, offered, one.draft_s)
        self._reach.add(offered, drafted, [step.num_accepted for step in steps])
        self._trial = max(0, self._trial - 1)
        tokens = sum(len(step.token_ids) for step in steps) / batch
        curve = self._passes.curve(batch, 1)
        self._lost += one.total_s - tokens * (at(curve, 1, _STEEP) if curve else one.total_s)
        pause = max(self._lost / _LOSS, 16 * one.total_s)
        self._least_s = self._elapsed + pause  # whoever joins: no trial costs more than its share
        self._resume_s = self._elapsed + pause * 2 ** max(0, self._failed - 1)

    @property
    def estimates(self) -> Mapping[str, float]:
        """What is known at batch 1, for reports: seconds of a plain pass, and acceptance of the first draft token."""
        curve = self._passes.curve(1, 1)
        offered = self._reach.offered[1]
        return {
            "plain_pass_s": at(curve, 1, _STEEP) if curve else 0.0,
            "first_accepted": self._reach.accepted[1] / offered if offered else 0.0,
        }
