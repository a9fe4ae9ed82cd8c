"""The throughput policy: draft lengths of the most tokens per second, measured while decoding; 0 where no draft pays.

Measures how long a target pass takes by batch size and number of draft tokens, how long drafting takes, and how often k tokens
are drafted and accepted in each row. In every step it chooses the budgets k_i that maximise

    E[tokens] - rate E[seconds],   E[tokens] = sum_i (1 + sum_{k <= k_i} P_i(k tokens are drafted and accepted))

where rate is the tokens per second of these rows (see token_rate.py for the reason).

N-gram drafters cost next to nothing, so they get the largest budget, and the policy selects how many of the found tokens are
worth scoring: the continuation of a nine-token match is nearly always accepted, that of a single token seldom. In ragged passes,
whose time depends on the real tokens alone, each row has its own budget, so that a row with many rejections drafts less without
shortening the drafts of others. In padded passes, whose time depends on the longest row, all rows share one length.

After two plain passes for comparison, a trial of a few steps drafts. If no draft pays, trials are repeated only as often as their
loss allows: at most a hundredth of the time in between, and less with every failed trial, until new requests join.

The fallback drafter of a hybrid, which costs time where the n-gram drafter costs none, has its own measurements and trials: it
drafts for rows without an n-gram match if that pays in addition to the n-gram drafter's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from time import perf_counter

import numpy as np
import torch

from foresay.checks import check_int
from foresay.decoding.outcome import Step
from foresay.decoding.protocols import DraftStep, LengthPolicy
from foresay.decoding.rows import Rows
from foresay.decoding.state import StateKey
from foresay.lengths.budgets import StepContext, best_row_lengths, best_shared_length
from foresay.lengths.constant import MAX_DRAFT_TOKENS
from foresay.lengths.costs import Curve, PassCosts
from foresay.lengths.draft_statistics import match_bucket
from foresay.lengths.measured_drafter import MeasuredDrafter, Situation
from foresay.lengths.token_rate import TokenRate

DEFAULT_HIGH = 16
"""Default longest draft."""
_CHEAP = 0.01
"""Share of a plain pass below which n-gram drafting counts as free."""
_REMEASURE_PLAIN = 64
"""Steps with drafts after which a plain pass is measured again, since costs are relative to it."""
_REMEASURE_DRAFT = 128
"""Plain passes after which a draft is scored regardless of its value, to measure the cost of draft tokens again."""
_MAX_SKIPPED = 4
"""First drafts in a row whose time is skipped; with requests joining in every step there are no other drafts to measure."""
_INITIAL_SLOPE = 0.06
"""Cost of one more draft token, in plain passes, until it is measured."""


@dataclass(slots=True)
class _StepState:
    """The policy's decisions in the current step."""

    budgets: list[int]
    batch_changed: bool
    """True in the first step of these rows."""
    is_selected: bool
    """True if found tokens are selected by match length; the number drafted is then not the number found."""
    buckets: list[int]
    """Match buckets; 0 for rows without a match."""
    num_selected: list[int]
    """Tokens of the n-gram drafter that are scored."""
    fallback_budgets: list[int]
    """Budgets of the fallback drafter."""
    fallback_candidates: int = 0
    """Rows that the fallback drafter could draft for."""
    model_drafted: bool = False
    """True if a model drafted token by token."""
    policy_s: float = 0.0
    """Seconds of the drafting time that the policy itself took."""


_STATE = StateKey[_StepState | None](lambda: None)
"""State of the current step; not kept in the policy, which several engines may share."""


def exclude_policy_time(rows: Rows) -> None:
    """Exclude the policy's own run time from the current step. For simulated step times, which do not include it."""
    state = _STATE.find(rows)
    if state is not None:
        state.policy_s = 0.0


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
        self._passes, self._token_rate = PassCosts(_INITIAL_SLOPE), TokenRate()
        self._primary = MeasuredDrafter(self.start, self.high)
        """Measurements of the drafter, or of a hybrid's n-gram drafter."""
        self._fallback = MeasuredDrafter(self.start, self.high)
        """Measurements of a hybrid's drafter for rows without an n-gram match."""
        self._steps_since_plain = self._num_plain = self._steps_since_selected = 0
        self._model_drafter = self._primary
        """The drafter that drafts token by token, `_primary` or `_fallback`."""
        self._reports_matches = False
        """True if the drafter calls `num_to_score`, so that found tokens can be selected."""
        self._num_skipped = 0
        """Drafts in a row whose time was skipped because it included the prefill of a prompt."""
        self._stops_early = False
        """True if the drafter reports its confidence in each token."""

    def budget(self, rows: Rows) -> list[int]:
        """Return each row's own budget in ragged passes, else the same one for all rows."""
        nothing = [0] * len(rows)
        state = _StepState(nothing, _STATE.find(rows) is None, False, nothing, nothing, nothing)
        _STATE.put(rows, state)
        with self._timed(rows):
            state.is_selected, fixed = self._selects(len(rows)), self._fixed_lengths(rows)
            state.budgets = (
                [int(n or 0) for n in fixed] if all(n is not None for n in fixed) else self._choose(rows, fixed)
            )
            return list(state.budgets)

    def num_to_score(self, rows: Rows, counts: Sequence[int], matched: Sequence[int]) -> list[int]:
        """Return how many of the found tokens pay, by the length of their match; see `LengthPolicy.num_to_score`."""
        with self._timed(rows):
            self._reports_matches, state = True, self._state(rows)
            state.buckets, state.num_selected = [match_bucket(n) for n in matched], list(counts)
            passes = self._passes.curve(len(rows))
            state.is_selected = passes is not None and self._is_cheap(len(rows))
            if passes is None or not state.is_selected:
                return list(counts)
            self._primary.trials.steps_left = 0
            fixed = self._fixed_lengths(rows)
            out = self._select(rows, counts, state.buckets, fixed, passes)
            self._steps_since_selected = 0 if any(out) else self._steps_since_selected + 1
            if self._steps_since_selected >= _REMEASURE_DRAFT:
                surest = max(range(len(rows)), key=lambda i: (counts[i] > 0, state.buckets[i]))
                out[surest], self._steps_since_selected = min(counts[surest], self.start), 0
            state.num_selected = [n if length is None else m for n, length, m in zip(out, fixed, counts, strict=True)]
            return list(state.num_selected)

    def fallback_budget(self, rows: Rows, most: Sequence[int]) -> list[int]:
        """Return how many tokens of the fallback drafter pay; see `LengthPolicy.fallback_budget`."""
        with self._timed(rows):
            self._reports_matches, self._model_drafter, state = True, self._fallback, self._state(rows)
            if self._is_cheap(len(rows)):  # a cheap n-gram drafter needs no trials: it drafts in every step
                state.is_selected, self._primary.trials.steps_left = True, 0
            eligible = [n > 0 for n in most]
            fixed = [n if n and f is not None else None for n, f in zip(most, self._fixed_lengths(rows), strict=True)]
            chosen = self._choose_fallback(rows, eligible, fixed)
            state.fallback_budgets, state.fallback_candidates = (
                [min(n, m) for n, m in zip(chosen, most, strict=True)],
                sum(eligible),
            )
            self._fallback.early_stopping.limit(rows, state.fallback_budgets)
            return list(state.fallback_budgets)

    @contextmanager
    def _timed(self, rows: Rows) -> Iterator[None]:
        """Take the lock and time the policy itself: plain steps pay for it as well, so it is no cost of drafting."""
        with self._lock:
            start = perf_counter()
            yield
            self._state(rows).policy_s += perf_counter() - start

    def _state(self, rows: Rows) -> _StepState:
        state = _STATE.find(rows)
        assert state is not None
        return state

    def _choose_fallback(self, rows: Rows, eligible: Sequence[bool], fixed: Sequence[int | None]) -> list[int]:
        now = Situation(rows, eligible, fixed, self._passes.curve(len(rows)), self._context(rows))
        changed = self._state(rows).batch_changed
        return self._fallback.choose(now, batch_changed=changed, stops_early=self._stops_early)

    def keep_drafting(self, step: DraftStep) -> torch.Tensor | None:
        """Return the rows whose next token pays, by the confidence in their draft so far; rows with a fixed length continue."""
        distributions, stopping, rows = step.distributions, self._model_drafter.early_stopping, step.rows
        state = None if rows is None else _STATE.find(rows)
        if rows is None or state is None:  # a tree, or rows without a budget from this policy
            return None
        state.model_drafted = True
        # on other devices, reading the confidence would synchronize
        self._stops_early = distributions.scores is not None and distributions.scores.device.type == "cpu"
        if not self._stops_early or not stopping.is_active(rows):
            return None
        confidence = distributions.confidence(step.token_ids[:, None])[:, 0]
        continuing = torch.from_numpy(stopping.continuing(rows, step.index.numpy(), confidence.numpy()))
        is_fixed = [length is not None for length in self._fixed_lengths(rows)]
        return continuing | torch.tensor(is_fixed) if any(is_fixed) else continuing

    def _context(self, rows: Rows) -> StepContext:
        """Return the context of the fallback drafter's choice: the rate, and the n-gram drafter's tokens."""
        state = self._state(rows)
        return StepContext(
            self._rate(rows), sum(state.num_selected) if rows.capabilities.ragged else max(state.num_selected)
        )

    def _rate(self, rows: Rows) -> float:
        """Return the tokens per second of these rows; 0 before a pass was measured."""
        passes = self._passes.curve(len(rows))
        return 0.0 if passes is None else self._token_rate.rate(rows, float(passes.at(0)))

    def _fixed_lengths(self, rows: Rows) -> list[int | None]:
        """Return `sampled` for rows whose text depends on the draft length, else None."""
        return [None if row.params.greedy or rows.needs.ignores_drafts else self.sampled for row in rows]

    def _choose(self, rows: Rows, fixed: Sequence[int | None]) -> list[int]:
        passes, may_be_plain = self._passes.curve(len(rows)), not any(fixed) and not self._primary.trials.steps_left
        if may_be_plain and (passes is None or self._num_plain < 2 or self._steps_since_plain >= _REMEASURE_PLAIN):
            return [0] * len(rows)
        if self._selects(len(rows)) and not self._primary.trials.steps_left:
            return [self.high if n is None else n for n in fixed]  # `num_to_score` selects from the found tokens
        all_rows, stops_early = [True] * len(rows), self._stops_early and self._model_drafter is self._primary
        now, changed = (
            Situation(rows, all_rows, fixed, passes, StepContext(self._rate(rows))),
            self._state(rows).batch_changed,
        )
        out = self._primary.choose(now, batch_changed=changed, stops_early=stops_early)
        if any(out) or self._model_drafter is self._primary:
            return out
        return self._choose_fallback(rows, all_rows, fixed)  # even if the n-gram drafter does not pay

    def _selects(self, batch: int) -> bool:
        """Return True if the drafter gets the largest budget, and the found tokens are selected afterwards."""
        return self._reports_matches and self._is_cheap(batch)

    def _is_cheap(self, batch: int) -> bool:
        """Return True if n-gram drafting takes a negligible share of a pass, or no pass was measured."""
        passes = self._passes.curve(batch)
        return passes is None or bool(self._primary.costs.longest_s(batch) < _CHEAP * passes.at(0))

    def _select(
        self, rows: Rows, counts: Sequence[int], buckets: Sequence[int], fixed: Sequence[int | None], passes: Curve
    ) -> list[int]:
        """Return how many of each row's found tokens give the highest throughput."""
        most = max(counts)
        index = np.arange(1, most + 1)
        drafted = (index <= np.array(counts)[:, None]).astype(np.float64)
        accept_probs = self._primary.statistics.accept_probs(rows, buckets)[:, 1 : most + 1]
        no_cost, context = np.zeros(most), StepContext(self._rate(rows))
        if rows.capabilities.ragged:
            found = best_row_lengths(accept_probs, drafted, passes, no_cost, fixed, context) or [0] * len(rows)
        else:
            found = [
                best_shared_length((drafted * accept_probs).sum(0), drafted.max(0), passes, no_cost, context)
            ] * len(rows)
        return [min(n, most) for n, most in zip(found, counts, strict=True)]

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        """Measure a step: its times, its generated tokens and the acceptance of its drafts."""
        with self._lock:
            self._count_pass(rows, steps)
            state = _STATE.find(rows)
            if state is not None and any(state.budgets):
                self._count_drafts(rows, steps, state)

    def _count_pass(self, rows: Rows, steps: Sequence[Step]) -> None:
        one, drafted = steps[0], [step.num_drafted for step in steps]
        self._passes.column_cost = rows.capabilities.column_cost
        self._passes.add(
            len(steps), sum(drafted) if rows.capabilities.ragged else max(drafted), one.total_s - one.draft_s
        )
        passes = self._passes.curve(len(rows))
        if passes is not None:
            self._token_rate.add(rows, steps, float(passes.at(0)))
        self._steps_since_plain = 0 if max(drafted) == 0 else self._steps_since_plain + 1
        self._num_plain += max(drafted) == 0
        for each in (self._primary, self._fallback):
            each.trials.advance(one.total_s)

    def _count_drafts(self, rows: Rows, steps: Sequence[Step], state: _StepState) -> None:
        one, batch, fallback = steps[0], len(steps), state.fallback_budgets
        draft_s = max(0.0, one.draft_s - state.policy_s)
        primary = [0 if other else n for n, other in zip(state.budgets, fallback, strict=True)]
        budgets = fallback if any(fallback) else state.budgets
        which = self._fallback if any(fallback) else self._primary
        drafted = [step.num_drafted if n else 0 for step, n in zip(steps, budgets, strict=True)]
        longest = max(drafted) if state.model_drafted else 0
        self._num_skipped = (
            self._num_skipped + 1 if state.model_drafted and which.early_stopping.is_first_draft(rows, drafted) else 0
        )
        if not 0 < self._num_skipped <= _MAX_SKIPPED:
            which.costs.add(state.fallback_candidates if any(fallback) else batch, longest or max(budgets), draft_s)
        if any(fallback):
            self._fallback.observe(rows, fallback, steps, [0] * batch, self._lost_s(rows, steps, fallback))
        if state.is_selected:
            self._primary.statistics.add(rows, None, state.buckets, steps, [not n for n in fallback])
        elif any(primary):
            self._primary.observe(rows, primary, steps, state.buckets, self._lost_s(rows, steps, primary))

    def _lost_s(self, rows: Rows, steps: Sequence[Step], budgets: Sequence[int]) -> float | None:
        """Return the seconds that a step took longer than its tokens take without the drafts of `budgets`.

        None if no pass was measured or all of these drafts have fixed lengths.
        """
        curve, one = self._passes.curve(len(steps)), steps[0]
        if curve is None or not any(n for n, f in zip(budgets, self._fixed_lengths(rows), strict=True) if f is None):
            return None
        others = [step.num_drafted for step, n in zip(steps, budgets, strict=True) if not n]
        without_s = float(curve.at(sum(others) if rows.capabilities.ragged else max(others, default=0)))
        gained = sum(step.num_accepted for step, n in zip(steps, budgets, strict=True) if n)
        rate = self._rate(rows)
        return one.total_s - without_s - (gained / rate if rate else 0.0)

    @property
    def estimates(self) -> Mapping[str, float]:
        """Estimates for reports: seconds of a plain pass at batch size 1, and the acceptance rate of first draft tokens."""
        curve = self._passes.curve(1)
        return {
            "plain_pass_s": float(curve.at(0)) if curve else 0.0,
            "first_accepted": self._primary.statistics.first_accepted,
        }
