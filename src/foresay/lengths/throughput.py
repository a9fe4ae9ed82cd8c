"""The throughput policy: draft lengths of the most tokens per second, measured while decoding; 0 where no draft pays.

A pass over B rows that scores n draft tokens takes 1 + s n plain passes. Over many steps the throughput is highest if every step
maximises E[tokens] - rate E[plain passes], where rate is the number of tokens that the batch generates per plain pass
(Dinkelbach's condition for the maximum of a ratio). So token k of row i is drafted and scored while

    P_i(tokens 1..k are accepted) > rate (s + d)

d: plain passes that drafting one more token takes, shared by the rows that draft it; 0 for tokens that an n-gram drafter found.
In padded passes n is the length of the longest draft, and the rows share both s and d.

The acceptance probability a of a token is counted by what is known of it: the length of the n-gram match that it continues, the
draft model's confidence, or its depth in the draft. A row whose tokens fail e times as often as these counts predict has
P_i = (a_1 ... a_k)^e.

A drafter that does not pay spends a credit: it may lose two plain passes, which grow again by an allowance, a share of the time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean, median_low
from threading import Lock
from time import perf_counter
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from foresay.checks import check_int
from foresay.decoding.outcome import Step
from foresay.decoding.protocols import DraftStep, LengthPolicy
from foresay.decoding.rows import Rows
from foresay.decoding.state import StateKey
from foresay.lengths.constant import MAX_DRAFT_TOKENS

FloatArray = npt.NDArray[np.float64]
T = TypeVar("T")

DEFAULT_HIGH = 16
"""Default longest draft."""
_WINDOW = 32
"""Latest measurements of which a median is taken."""
_REMEASURE_PLAIN = 64
"""Steps with drafts after which a plain pass is measured again, since costs are relative to it."""
_INITIAL_SLOPE = 0.06
"""s, the cost of one more draft token in plain passes, until it is measured."""
_SLOPE_WEIGHT = 8
"""Weight of the initial slope, in draft tokens, and most of one measurement."""
_DECAY, _ROW_DECAY = 0.98, 0.95
"""Factors per step of all counts and of a row's own, so that failures are forgotten and tried again."""
_PRIOR_WEIGHT = 3.0
"""Weight of priors, in tokens or drafts."""
_ROW_WEIGHT = 1.0
"""Weight of all rows' failures in the estimate of one row, in failures."""
_MARGIN = 1.1
"""Least gain over cost: a row that ends early saves less than its share of the remaining passes, and costs are estimates."""
_LOAN, _ALLOWANCE = 2.0, 0.0075
"""Plain passes that a drafter may lose before it stops, and the share of the time by which that credit grows again."""

_DEPTH, _CONFIDENCE = slice(6, 12), slice(12, 22)
"""Kinds of tokens: the first six by match length (unknown, 1, 2, 3-4, 5-8, more), then by depth (1, 2, 3, 4, 5-8, more), then
by tenths of confidence."""
_PRIORS = np.array([0.5, 0.2, 0.5, 0.7, 0.85, 0.95, *[0.7] * 6, *[(i + 0.5) / 10 for i in range(10)]])
"""Prior acceptance probability by kind; those of matches were measured on chats, code, edits and extractions."""
_MATCH_KIND = np.array([0, 1, 2, 3, 3, *[4] * 4, *[5] * (2 * MAX_DRAFT_TOKENS)])
"""Kind of a token that continues a match of this length."""
_DEPTH_KIND = _DEPTH.start + np.array([0, 1, 2, 3, *[4] * 4, *[5] * MAX_DRAFT_TOKENS])
"""Kind of the token at this index of a draft."""


class _ByBatch(Generic[T]):
    """One value for each batch size."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}

    def of(self, batch: int) -> T:
        if batch not in self._values:
            self._values[batch] = self._make()
        return self._values[batch]

    def nearest(self, batch: int) -> T | None:
        """Return the value of the nearest batch size; None if none is within a factor of two."""
        near = [size for size in self._values if size <= 2 * batch and batch <= 2 * size]
        return self._values[min(near, key=lambda size: (abs(size - batch), size))] if near else None


class _PassCosts:
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


class _DraftCosts:
    """Times of drafting for one number of rows, by the length of the longest draft."""

    def __init__(self) -> None:
        self._times: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def add(self, length: int, seconds: float) -> None:
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


@dataclass(slots=True)
class _Credit:
    """Plain passes that drafts which do not pay may still lose."""

    passes: float = _LOAN
    is_active: bool = True
    """False once they are lost, until they have grown again."""

    def add(self, passes: float) -> None:
        self.passes = min(max(self.passes + passes, -_LOAN), _LOAN)
        self.is_active = self.is_active or self.passes >= _LOAN


@dataclass(slots=True)
class _Draft:
    """The draft of one drafter in the current step."""

    budgets: list[int]
    """[B]; 0 for rows that it does not draft for."""
    kinds: npt.NDArray[np.int64]
    """[B, high], kind of each token."""
    shared: float = 0.0
    per_row: float = 0.0
    """Cost of one more token for n rows that stop by confidence: it pays if their accept_prob add up to shared + n per_row."""
    active: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    """[B], rows that continue."""
    scored: Sequence[int] = ()
    """[B], tokens of an n-gram drafter that are scored."""
    accept_prob: FloatArray = field(default_factory=lambda: np.zeros(0))
    """[B], P(all tokens so far are accepted)."""


@dataclass(frozen=True, slots=True)
class _Situation:
    """The worth and the costs of tokens in a step."""

    rows: Rows
    fixed: Sequence[int | None]
    """[B], a row's fixed draft length; None for a length to choose."""
    rate: float
    """Tokens that all rows together generate per plain pass."""
    plain_s: float
    slope: float
    base: int = 0
    """Draft tokens that a padded pass scores in any case."""

    @property
    def token_cost(self) -> float:
        """Tokens that the batch loses by one more draft token in a ragged pass, or by one more for all rows in a padded one."""
        return self.rate * self.slope


class _Drafter:
    """The measurements of one drafter, and the budgets that follow from them."""

    def __init__(self, start: int, high: int) -> None:
        self.start, self.high = start, high
        self.costs = _ByBatch(_DraftCosts)
        self._accepted, self._tested = np.zeros(len(_PRIORS)), np.zeros(len(_PRIORS))
        """Accepted and tested tokens by kind."""
        self.sums = np.zeros(5)
        """Rows whose budget was not 0, rows with a draft, with an accepted first token; accepted tokens, scored tokens."""
        self.hazards = -np.log(_PRIORS)
        """-log a by kind."""
        self._row = StateKey[tuple[float, float, int]](lambda: (0.0, 0.0, 0))
        """Failed tokens of a row, those that `hazards` predicted, and the step of these counts."""
        self._num_steps = 0
        self.draft = StateKey[_Draft | None](lambda: None)
        self._credits: defaultdict[int, _Credit] = defaultdict(_Credit)
        """By the bit length of the batch size: what pays for few rows does not for many."""
        self.selects = False
        """True for an n-gram drafter: of the tokens that it finds, `selected` are scored."""
        self.stops_early = False
        """True if each token comes with a confidence that is cheap to read."""

    def choose(self, now: _Situation, eligible: Sequence[bool]) -> list[int]:
        """Return the budgets that pay; those of a trial while that has credit; else 0. Rows with a fixed length keep it."""
        free = np.array([on and n is None for on, n in zip(eligible, now.fixed, strict=True)])
        fixed = np.array([(n or 0) * on for on, n in zip(eligible, now.fixed, strict=True)])
        draft = _Draft([], np.tile(_DEPTH_KIND[: self.high], (len(free), 1)))
        self.draft.put(now.rows, draft)
        draft.budgets = fixed.tolist()
        credit = self.credit(len(free))
        if credit.is_active:
            find = self._best_drafts if self.selects or self.stops_early else self._best_lengths
            pays, best = find(now, free, fixed, draft)
            credit.is_active = pays or credit.passes > 0
            draft.budgets = np.where(free, best * credit.is_active, fixed).tolist()
        draft.active, draft.accept_prob = np.array(draft.budgets) > 0, np.ones(len(free))
        return draft.budgets

    def credit(self, batch: int) -> _Credit:
        """Return the credit of drafts for about as many rows."""
        return self._credits[batch.bit_length()]

    def _best_lengths(
        self, now: _Situation, free: npt.NDArray[np.bool_], fixed: npt.NDArray[np.int64], draft: _Draft
    ) -> tuple[bool, npt.NDArray[np.int64]]:
        """Return whether drafts pay, and their best lengths; those that lose least if not."""
        costs = self.costs.nearest(int(free.sum()))
        if costs is None:
            return False, self.start * free
        probs = self.accept_probs(now.rows, draft.kinds) * free[:, None]
        depths, sunk = np.arange(1, self.high + 1), int(fixed.max())
        start, per_token = costs.line()
        drafting = now.rate / now.plain_s * (start * (not sunk) + per_token * np.maximum(depths - sunk, 0))
        if now.rows.capabilities.ragged:
            gains = np.maximum(probs - now.token_cost, 0.0).sum(0)
        else:
            gains = probs.sum(0) - now.token_cost * (depths > max(sunk, now.base))
        values = self._mean(1, 1.0) * gains.cumsum() - drafting
        length = int(values.argmax()) + 1
        if values[length - 1] <= 0 or not costs.is_known:
            return False, min(length, self.start) * free
        pays = probs[:, :length] > (now.token_cost if now.rows.capabilities.ragged else -1)
        return True, pays.sum(1)

    def _best_drafts(
        self, now: _Situation, free: npt.NDArray[np.bool_], fixed: npt.NDArray[np.int64], draft: _Draft
    ) -> tuple[bool, npt.NDArray[np.int64]]:
        """Return whether drafts pay whose lengths are chosen later, by what earlier ones were worth, and their limits."""
        costs, ragged = self.costs.nearest(int(free.sum())), now.rows.capabilities.ragged
        accepted = self._mean(3, 1.0) / (1.0 if self.selects else self._exponents(now.rows))
        scored = self._mean(4, 2.0)
        seconds, per_token, width = (
            (0.0, 0.0, scored) if costs is None else (costs.seconds, costs.line()[1], costs.width)
        )
        worth = (accepted - (now.token_cost * scored if ragged else 0.0)) * free
        shared = now.rate * seconds / now.plain_s * (not fixed.any()) + (0.0 if ragged else now.token_cost * width)
        further = (self._accepted.sum() + _PRIOR_WEIGHT * 0.6) / (self._tested.sum() + _PRIOR_WEIGHT)
        draft.shared = now.rate * per_token / now.plain_s / further
        draft.per_row = now.token_cost / further if ragged else 0.0
        draft.shared += 0.0 if ragged else now.token_cost / further
        chosen = free & (worth > 0) if ragged and not self.selects else free
        if (worth * chosen).sum() > shared:
            return True, self.high * chosen
        return False, (self.high if self.selects else self.start) * free

    def accept_probs(self, rows: Rows, kinds: npt.NDArray[np.int64]) -> FloatArray:
        """Return P(the tokens up to k are accepted), [B, K], for tokens of these kinds, [B, K]."""
        out: FloatArray = np.exp(-self._exponents(rows)[:, None] * self.hazards[kinds].cumsum(1))
        return out

    def _exponents(self, rows: Rows) -> FloatArray:
        """Return e, [B]: how many times as often as predicted a row's tokens fail."""
        failed, expected, step = np.array([self._row.of(row) for row in rows]).T
        decay = _ROW_DECAY ** (self._num_steps - step)
        out: FloatArray = (failed * decay + _ROW_WEIGHT) / (expected * decay + _ROW_WEIGHT)
        return out

    def selected(self, now: _Situation, counts: Sequence[int], matched: Sequence[int]) -> Sequence[int]:
        """Return how many of the found tokens pay. counts: [B] tokens found. matched: [B] length of the match, 0 if unknown."""
        lengths, draft = np.array(matched)[:, None], self.draft.find(now.rows)
        if draft is None:
            return list(counts)
        draft.budgets = [max(n, m) for n, m in zip(draft.budgets, counts, strict=True)]
        draft.kinds = _MATCH_KIND[np.minimum(lengths + np.arange(self.high) * (lengths > 0), len(_MATCH_KIND) - 1)]
        found = np.arange(self.high) < np.array(counts)[:, None]
        probs = self.accept_probs(now.rows, draft.kinds) * found
        if now.rows.capabilities.ragged:
            out = (probs > now.token_cost).sum(1)
        else:
            values = (probs.sum(0) - now.token_cost * found.any(0)).cumsum()
            out = np.minimum(counts, int(values.argmax()) + 1 if values.max() > 0 else 0)
        if not out.any() and self.credit(len(counts)).passes >= _LOAN:
            # else a slope that was measured too high would never be corrected
            surest = int(probs[:, 0].argmax())
            out[surest] = min(counts[surest], self.start)
        draft.scored = [
            n if length is not None else int(m) for n, m, length in zip(counts, out, now.fixed, strict=True)
        ]
        return draft.scored

    def continuing(self, draft: _Draft, index: npt.NDArray[np.int64], confidence: FloatArray) -> npt.NDArray[np.bool_]:
        """Return the rows that draft one more token, [B] bool.

        index: [B], draft positions of the tokens just drawn. confidence: [B], their probabilities under the draft model.
        """
        kinds = _CONFIDENCE.start + np.clip((confidence * 10).astype(np.int64), 0, 9)
        draft.kinds[np.arange(len(kinds)), np.minimum(index, self.high - 1)] = kinds
        draft.accept_prob = draft.accept_prob * np.exp(-self.hazards[kinds])
        able = draft.active & (index + 1 < np.array(draft.budgets))  # only these rows share the cost of a draft pass
        probs = np.where(able, draft.accept_prob, 0.0)
        best = np.sort(probs)[::-1]
        values = best.cumsum() - draft.shared - draft.per_row * np.arange(1, len(best) + 1)
        count = int(values.argmax())
        draft.active = able & (probs >= best[count]) & bool(values[count] > 0)
        return draft.active

    def observe(self, rows: Rows, steps: Sequence[Step], draft: _Draft) -> None:
        """Count the tokens of a step in which this drafter had a budget."""
        for row, step, kinds, budget in zip(rows, steps, draft.kinds, draft.budgets, strict=True):
            if not budget:
                continue
            drafted, accepted = step.num_drafted, step.num_accepted
            self.sums += (1, drafted > 0, accepted > 0, accepted, drafted)
            if drafted:
                tested = kinds[: min(accepted + 1, drafted)]
                np.add.at(self._tested, tested, 1.0)
                np.add.at(self._accepted, tested[:accepted], 1.0)
                failed, expected, at = self._row.of(row)
                decay = _ROW_DECAY ** (self._num_steps - at)
                predicted = float((1 - np.exp(-self.hazards[tested])).sum())
                new = failed * decay + (accepted < drafted), expected * decay + predicted, self._num_steps
                self._row.put(row, new)

    def advance(self, batch: int, lost: float, passed: float) -> None:
        """End a step that took `passed` plain passes, of which this drafter's drafts lost `lost` (negative if they paid)."""
        self.credit(batch).add(_ALLOWANCE * passed - lost)
        for counts in (self.sums, self._accepted, self._tested):
            counts *= _DECAY
        self._num_steps += 1
        priors = _PRIORS.copy()
        weights = self._tested + _PRIOR_WEIGHT
        for kind in range(
            _DEPTH.start + 1, _DEPTH.stop
        ):  # a deeper token is expected to be accepted as often as the last
            priors[kind] = (self._accepted[kind - 1] + _PRIOR_WEIGHT * priors[kind - 1]) / weights[kind - 1]
        self.hazards = -np.log(np.clip((self._accepted + _PRIOR_WEIGHT * priors) / weights, 0.02, 0.98))

    def _mean(self, which: int, prior: float) -> float:
        """Return one of `sums` per row with a budget."""
        return float((self.sums[which] + _PRIOR_WEIGHT * prior) / (self.sums[0] + _PRIOR_WEIGHT))


_POLICY_S = StateKey[float](lambda: 0.0)
"""Seconds of the current step's drafting time that the policy itself took; not kept in it, since engines may share it."""


def exclude_policy_time(rows: Rows) -> None:
    """Exclude the policy's own run time from the current step. For simulated step times, which do not include it."""
    _POLICY_S.put(rows, 0.0)


class ThroughputLength(LengthPolicy):
    """Adapt draft lengths to the measured throughput, so that decoding is not slower than without drafts.

    Estimates are kept between requests. Where a draft model samples, the distribution of the output does not depend on them, but
    the sampled tokens do, unless `sampled` fixes the draft length of such rows.
    """

    def __init__(self, *, start: int = 4, high: int = DEFAULT_HIGH, sampled: int | None = None) -> None:
        """start: length of the first drafts. high: longest draft. sampled: fixed draft length of rows that are sampled under a
        rule whose output depends on the draft tokens, so that a seed always gives the same text; None adapts these rows too.
        """
        self.high = check_int("high", high, 1, MAX_DRAFT_TOKENS)
        self.start = check_int("start", start, 1, self.high)
        self.sampled = None if sampled is None else check_int("sampled", sampled, 0, self.high)
        self.remembers = self.sampled is None
        self._lock = Lock()
        self._passes = _ByBatch(_PassCosts)
        self._primary, self._fallback = (_Drafter(self.start, self.high) for _ in range(2))
        """The drafter, or a hybrid's n-gram drafter; and a hybrid's drafter for rows without an n-gram match."""
        self._is_hybrid = False
        self._rate = np.array([_PRIOR_WEIGHT, _PRIOR_WEIGHT])
        """Tokens per row, and plain passes."""
        self._steps_since_plain = self._num_plain = 0

    def budget(self, rows: Rows) -> list[int]:
        """Return each row's own budget in ragged passes, else the same one for all rows."""
        _POLICY_S.put(rows, 0.0)
        with self._timed(rows):
            for drafter in (self._primary, self._fallback):
                drafter.draft.drop(rows)
            return self._budgets(rows)

    def _budgets(self, rows: Rows) -> list[int]:
        now, every = self._situation(rows), [True] * len(rows)
        is_due = self._num_plain < 2 or self._steps_since_plain >= _REMEASURE_PLAIN
        if now is None or (is_due and not any(now.fixed)):
            return [n or 0 for n in self._fixed_lengths(rows)]
        out = self._primary.choose(now, every)
        if not any(out) and self._is_hybrid:  # the n-gram drafter does not pay, but the fallback drafter may
            out = self._fallback.choose(now, every)
            self._fallback.draft.drop(rows)
        return list(out)

    def num_to_score(self, rows: Rows, counts: Sequence[int], matched: Sequence[int]) -> list[int]:
        """Return how many of the found tokens pay, by the length of their match; see `LengthPolicy.num_to_score`."""
        with self._timed(rows):
            self._primary.selects, now = True, self._situation(rows)
            return list(counts if now is None else self._primary.selected(now, counts, matched))

    def fallback_budget(self, rows: Rows, most: Sequence[int]) -> list[int]:
        """Return how many tokens of the fallback drafter pay; see `LengthPolicy.fallback_budget`."""
        with self._timed(rows):
            self._is_hybrid, self._primary.selects, now = True, True, self._situation(rows)
            if now is None:
                return [min(n or 0, m) for n, m in zip(self._fixed_lengths(rows), most, strict=True)]
            selected = self._primary.draft.find(rows)
            base = 0 if selected is None else max(selected.scored, default=0)
            self._fallback.choose(replace(now, base=base), [n > 0 for n in most])
            draft = self._fallback.draft.find(rows)
            assert draft is not None
            draft.budgets = [min(n, m) for n, m in zip(draft.budgets, most, strict=True)]
            return list(draft.budgets)

    def keep_drafting(self, step: DraftStep) -> torch.Tensor | None:
        """Return the rows whose next token pays, by the confidence in their draft so far; rows with a fixed length continue."""
        drafter, rows = self._fallback if self._is_hybrid else self._primary, step.rows
        draft = None if rows is None else drafter.draft.find(rows)
        if rows is None or draft is None:  # a tree, or rows without a budget from this policy
            return None
        # on other devices, reading the confidence would synchronize
        drafter.stops_early = step.distributions.scores is not None and step.distributions.scores.device.type == "cpu"
        if not drafter.stops_early:
            return None
        confidence = step.distributions.confidence(step.token_ids[:, None])[:, 0]
        continuing = torch.from_numpy(drafter.continuing(draft, step.index.numpy(), confidence.numpy()))
        is_fixed = [length is not None for length in self._fixed_lengths(rows)]
        return continuing | torch.tensor(is_fixed) if any(is_fixed) else continuing

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        """Measure a step: its times, its generated tokens and the acceptance of its drafts."""
        with self._lock:
            one, drafted = steps[0], [step.num_drafted for step in steps]
            size = sum(drafted) if rows.capabilities.ragged else max(drafted)
            self._passes.of(len(rows)).add(size, one.total_s - one.draft_s, self._initial_slope(rows))
            self._steps_since_plain = self._steps_since_plain + 1 if size else 0
            self._num_plain += not size
            now = self._situation(rows)
            assert now is not None
            passed = one.total_s / now.plain_s
            self._rate = self._rate * _DECAY + (fmean(len(step.token_ids) for step in steps), passed)
            for drafter in (self._primary, self._fallback):
                draft = drafter.draft.find(rows)
                lost = 0.0 if draft is None else self._count(drafter, draft, now, steps)
                drafter.advance(len(rows), lost, passed)

    def _count(self, drafter: _Drafter, draft: _Draft, now: _Situation, steps: Sequence[Step]) -> float:
        """Count one drafter's part in a step; return the plain passes that its drafts lost, or gained if negative."""
        fallback = self._fallback.draft.find(now.rows)
        others = [0] * len(steps) if fallback is None or drafter is self._fallback else fallback.budgets
        draft.budgets = [n * (not other) for n, other in zip(draft.budgets, others, strict=True)]
        if not any(draft.budgets):
            return 0.0
        drafter.observe(now.rows, steps, draft)
        own = [(s.num_drafted, s.num_accepted) for s, n in zip(steps, draft.budgets, strict=True) if n]
        count = sum(n > 0 for n in draft.budgets)
        if not any(others):
            spent = _POLICY_S.of(now.rows)
            if drafter is self._fallback:
                lookup = self._primary.costs.nearest(len(steps))
                spent += lookup.seconds if lookup else 0.0
            drafter.costs.of(count).add(max(n for n, _ in own), max(0.0, steps[0].draft_s - spent))
        costs = drafter.costs.nearest(count)
        size = sum(n for n, _ in own) if now.rows.capabilities.ragged else max(n for n, _ in own)
        start, per_token = costs.line() if costs and costs.is_known else (0.0, 0.0)
        spent_s = start + per_token * max(n for n, _ in own)
        return now.slope * size + spent_s / now.plain_s - sum(n for _, n in own) / len(steps)

    def _situation(self, rows: Rows) -> _Situation | None:
        """Return the worth and costs of this step's tokens; None before a pass over about as many rows was measured."""
        passes = self._passes.nearest(len(rows))
        if passes is None:
            return None
        rate = _MARGIN * len(rows) * max(1.0, float(self._rate[0] / self._rate[1]))
        return _Situation(rows, self._fixed_lengths(rows), rate, passes.plain_s, passes.slope)

    @staticmethod
    def _initial_slope(rows: Rows) -> float:
        """Cost of one more token: c / (1 + (n - 1) c) plain passes of n rows, which take 1 + (n - 1) c passes of one row."""
        alone = rows.capabilities.column_cost
        return _INITIAL_SLOPE if alone is None else alone / (1 + (len(rows) - 1) * alone)

    def _fixed_lengths(self, rows: Rows) -> list[int | None]:
        """Return `sampled` for rows whose text depends on the draft length, else None."""
        return [None if row.params.greedy or rows.needs.ignores_drafts else self.sampled for row in rows]

    @contextmanager
    def _timed(self, rows: Rows) -> Iterator[None]:
        """Take the lock and time the policy itself: plain steps pay for it as well, so it is no cost of drafting."""
        with self._lock:
            start = perf_counter()
            yield
            _POLICY_S.put(rows, _POLICY_S.of(rows) + perf_counter() - start)

    @property
    def estimates(self) -> Mapping[str, float]:
        """Estimates for reports: seconds of a plain pass at batch size 1, and the acceptance rate of first draft tokens."""
        passes, (_, drafts, first, *_) = self._passes.nearest(1), self._primary.sums.tolist()
        return {"plain_pass_s": passes.plain_s if passes else 0.0, "first_accepted": first / drafts if drafts else 0.0}
