"""The lengths that write most tokens per second, measured while decoding; 0 where no draft pays.

Keeps how long a pass takes by batch size and draft tokens, how long drafting takes, and how often drafts reach each length,
row by row. For every step it takes the budgets k_i that maximise

    E[tokens] / E[seconds],   E[tokens] = sum_i (1 + sum_{k <= k_i} P_i(k tokens are guessed and hold))

A look-up costs next to nothing, so it is asked for all it finds, and the policy keeps what is worth scoring: a guess that
continues a match of nine tokens nearly always holds, one that continues a single token seldom. Where a pass takes the
time of its real tokens, each row has a budget of its own: a row whose guesses fail drafts less, and neither pays for its
neighbours nor holds them back. Where the widest row sets what a pass takes, all have the same.

After two plain passes to compare with, a few steps try a draft. When none pays, they are tried again only as often as
the time they lost allows: at most a hundredth of the time in between, and less with every trial that fails, until other
requests join.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock

import numpy as np

from foresay.checks import check_int
from foresay.decoding.outcome import Step
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Row, Rows
from foresay.lengths.constant import MAX_DRAFT_TOKENS
from foresay.lengths.costs import Curve, DraftCosts, FloatArray, PassCosts
from foresay.lengths.reach import Reach, kind_of

LONGEST = 16
"""Of drafts, unless a policy is told otherwise."""
_TRIAL = 4
"""Steps of a trial: the first may pay for what the draft missed."""
_LOSS = 0.01
"""Share of the time that trials may lose."""
_PATIENCE = 5
"""Doublings of the pause between trials, at most."""
_SETTLED = 64
"""Steps after a trial before requests that join are reason for another."""
_OFFERED = "throughput length"
"""Where rows remember the budgets they were given: several engines may share one policy."""
_MATCHED, _TRIMMED = "throughput length: kinds", "throughput length: trimmed"
"""Where they remember the kinds of matches they were shown in this step, and whether guesses were chosen by them."""
_FREE = 0.05
"""Share of a plain pass below which looking for guesses costs nothing."""
_STALE = 64
"""Steps after which a plain pass is measured again: what drafts cost is known in terms of it."""
_REFRESH = 128
"""Plain passes after which one guess is scored to measure a wider one again, whatever it was thought to be worth."""
_STEEP = 0.06
"""Cost of a further column in plain passes, until two sizes were measured."""


class ThroughputLength(LengthPolicy):
    """Never slower than plain decoding: lengthens, shortens or stops drafting by what it measures.

    Estimates are kept between requests. Where a draft model is sampled, the output's law does not depend on them; its tokens
    do, unless `sampled` holds those rows to one length.
    """

    def __init__(self, *, start: int = 4, high: int = LONGEST, sampled: int | None = None) -> None:
        """start: length of the first drafts. high: longest. sampled: the length of every draft for a row that is sampled under
        a rule whose text depends on what was guessed, so that a seed keeps its text; None adapts those rows too.
        """
        self.high = check_int("high", high, 1, MAX_DRAFT_TOKENS)
        self.start = check_int("start", start, 1, self.high)
        self.sampled = None if sampled is None else check_int("sampled", sampled, 0, self.high)
        self._lock = Lock()
        self._passes, self._drafts, self._reach = PassCosts(_STEEP), DraftCosts(), Reach(self.high)
        self._trial = 0
        """Steps of the trial still to come."""
        self._lost = self._elapsed = self._resume_s = self._least_s = 0.0
        self._since_plain = self._num_plain = self._since_trial = 0
        self._failed = 0
        """Trials in a row after which no draft paid; each doubles the pause before the next."""
        self._since_kept = 0
        self._shown = False
        """Whether the drafter shows what it found, to be chosen from."""

    def budget(self, rows: Rows) -> list[int]:
        """Each row's own where a pass takes the time of its real tokens, else the same for all."""
        with self._lock:
            joined = _OFFERED not in rows.memo
            held = [self._held_to(row, rows) for row in rows]
            budgets = list(held) if all(n is not None for n in held) else self._choose(rows, held, joined)
            out = rows.memo[_OFFERED] = [int(n or 0) for n in budgets]
            rows.memo.pop(_MATCHED, None)
            rows.memo[_TRIMMED] = self._chooses(len(rows))
            return list(out)

    def keep(self, rows: Rows, counts: Sequence[int], matched: Sequence[int]) -> list[int]:
        """As many of the guesses as pay, by what each one matched; see `LengthPolicy.keep`."""
        with self._lock:
            self._shown = True
            rows.memo[_MATCHED] = kinds = [kind_of(n) for n in matched]
            passes = self._passes.curve(len(rows))
            rows.memo[_TRIMMED] = trimmed = passes is not None and self._is_free(len(rows))
            if passes is None or not trimmed:
                return list(counts)
            self._trial = 0
            held = [self._held_to(row, rows) for row in rows]
            out = self._worth(rows, counts, kinds, held, passes)
            self._since_kept = 0 if any(out) else self._since_kept + 1
            if self._since_kept >= _REFRESH:
                surest = max(range(len(rows)), key=lambda i: (counts[i] > 0, kinds[i]))
                out[surest], self._since_kept = min(counts[surest], self.start), 0
            return [n if one is None else most for n, one, most in zip(out, held, counts, strict=True)]

    def _held_to(self, row: Row, rows: Rows) -> int | None:
        """The length that keeps a seed's text; None for a row whose text depends on no length."""
        return None if row.params.greedy or rows.needs.ignores_drafts else self.sampled

    def _choose(self, rows: Rows, held: Sequence[int | None], joined: bool) -> Sequence[int | None]:
        """joined: requests have come or gone, so that what did not pay may now."""
        nothing, start, longest = ([n if k is None else k for k in held] for n in (0, self.start, self.high))
        if self._trial:
            return start
        free = not any(held)
        if free and (self._passes.curve(len(rows)) is None or self._num_plain < 2 or self._since_plain >= _STALE):
            return nothing
        if self._chooses(len(rows)):
            return longest  # `keep` chooses from what it finds
        best = self._best(rows, held)
        if best is not None:
            self._failed = 0
            return best
        if joined and self._since_trial >= _SETTLED:
            self._failed = 0
            self._resume_s = min(self._resume_s, self._least_s)
        if self._elapsed >= self._resume_s:
            self._trial, self._lost, self._since_trial = _TRIAL, 0.0, 0
            self._failed = min(self._failed + 1, _PATIENCE)  # until it turns out to pay
            return start
        return nothing

    def _chooses(self, batch: int) -> bool:
        """Whether the drafter is asked for all it finds."""
        return self._shown and self._is_free(batch)

    def _is_free(self, batch: int) -> bool:
        """Whether drafting takes next to no time of a pass, or none was timed yet."""
        passes = self._passes.curve(batch)
        return passes is None or bool(self._drafts.longest_s(batch) < _FREE * passes.at(0))

    def _best(self, rows: Rows, held: Sequence[int | None]) -> list[int] | None:
        """The budgets of the greatest expected throughput; None where that is plain decoding's, or nothing is known."""
        passes, drafts = self._passes.curve(len(rows)), self._drafts.curve(len(rows))
        if passes is None or drafts is None:
            return None
        most = min(self.high, self._reach.longest + 2)
        guessed = self._reach.guessed()[1 : most + 1]
        chances = self._reach.held(rows)[:, 1 : most + 1]
        drafting = drafts.at(np.arange(1, most + 1))
        if not rows.ragged:
            wide = self._reach.widest()[1 : most + 1]
            length = _best_for_all(guessed * chances.sum(0), wide, passes, drafting, len(rows))
            return [length if n is None else n for n in held] if length else None
        return _best_for_each(chances, np.broadcast_to(guessed, chances.shape), passes, drafting, held)

    def _worth(
        self, rows: Rows, counts: Sequence[int], kinds: Sequence[int], held: Sequence[int | None], passes: Curve
    ) -> list[int]:
        """How many of each row's guessed tokens make the greatest throughput."""
        most = max(counts)
        index = np.arange(1, most + 1)
        guessed = (index <= np.array(counts)[:, None]).astype(np.float64)
        chances = self._reach.held(rows, kinds)[:, 1 : most + 1]
        if rows.ragged:
            found = _best_for_each(chances, guessed, passes, np.zeros(most), held)
        else:
            length = _best_for_all((guessed * chances).sum(0), guessed.max(0), passes, np.zeros(most), len(rows))
            found = [length] * len(rows)
        return [min(n, most) for n, most in zip(found or [0] * len(rows), counts, strict=True)]

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        """Measure a step."""
        with self._lock:
            self._measure(rows, steps, rows.memo.get(_OFFERED) or [0] * len(rows))

    def _measure(self, rows: Rows, steps: Sequence[Step], offered: Sequence[int]) -> None:
        one, batch = steps[0], len(steps)
        drafted = [step.num_drafted for step in steps]
        self._passes.add(batch, sum(drafted) if rows.ragged else max(drafted), one.total_s - one.draft_s)
        self._since_plain = 0 if max(drafted) == 0 else self._since_plain + 1
        self._num_plain += max(drafted) == 0
        self._elapsed += one.total_s
        self._since_trial += 1
        if not any(offered):
            return
        kinds = rows.memo.get(_MATCHED) or [0] * batch
        trimmed = bool(rows.memo.get(_TRIMMED))
        self._drafts.add(batch, max(offered), one.draft_s)
        self._reach.add(rows, None if trimmed else offered, kinds, steps)
        if trimmed:
            return
        curve = self._passes.curve(batch)
        self._trial = max(0, self._trial - 1)
        tokens = sum(len(step.token_ids) for step in steps) / batch
        self._lost += one.total_s - tokens * (float(curve.at(0)) if curve else one.total_s)
        pause = max(self._lost / _LOSS, 16 * one.total_s)
        self._least_s = self._elapsed + pause  # whoever joins: no trial costs more than its share
        self._resume_s = self._elapsed + pause * 2 ** max(0, self._failed - 1)

    @property
    def estimates(self) -> Mapping[str, float]:
        """What is known at batch 1, for reports: seconds of a plain pass, and acceptance of the first draft token."""
        curve = self._passes.curve(1)
        return {"plain_pass_s": float(curve.at(0)) if curve else 0.0, "first_accepted": self._reach.first_held}


def _best_for_all(reached: FloatArray, wide: FloatArray, passes: Curve, drafting: FloatArray, batch: int) -> int:
    """The length of the greatest throughput where all rows have the same; 0 for plain decoding.

    reached: [K] draft tokens of all rows that hold at each place. wide: [K] the chance that a pass gets so wide. drafting: [K]
    seconds of drafting 1, 2, ... tokens.
    """
    widths = passes.at(np.arange(len(wide) + 1))
    seconds = widths[0] + (wide * np.diff(widths)).cumsum() + drafting
    rates = (batch + reached.cumsum()) / seconds
    best = int(rates.argmax())
    return best + 1 if rates[best] > batch / widths[0] else 0


def _best_for_each(
    chances: FloatArray, guessed: FloatArray, passes: Curve, drafting: FloatArray, held: Sequence[int | None]
) -> list[int] | None:
    """Each row's length; None for plain decoding.

    Under every bound on the length, the draft tokens of all rows are taken in the order of their chance to hold, as many as
    give the greatest throughput. chances, guessed: [B, K], falling along K. drafting: [K]. held: what rows must have.
    """
    batch, most = chances.shape
    index = np.arange(most)
    must = np.array([-1 if n is None else min(n, most) for n in held])
    fixed = index < must[:, None]
    columns, tokens = float((fixed * guessed).sum()), batch + float((fixed * guessed * chances).sum())
    weights = guessed.ravel()
    free = np.broadcast_to((must < 0)[:, None], chances.shape).ravel()
    order = np.argsort(-np.where(free, chances.ravel(), -1.0), kind="stable")[: int(free.sum())]
    places = order % most
    within = places <= index[:, None]  # [K, tokens]: under each bound
    cost = np.where(within, weights[order], 0.0).cumsum(1)
    gain = np.where(within, weights[order] * chances.ravel()[order], 0.0).cumsum(1)
    rates = (tokens + gain) / (passes.at(columns + cost) + drafting[:, None])
    bound, last = divmod(int(rates.argmax()), rates.shape[1])
    spent = drafting[min(most, int(must.max())) - 1] if must.max() > 0 else 0.0
    if rates[bound, last] <= tokens / (float(passes.at(columns)) + spent):
        return None
    chosen = order[: last + 1][within[bound, : last + 1]]
    counts = np.bincount(chosen // most, minlength=batch)
    return [int(counts[i]) if n is None else n for i, n in enumerate(held)]
