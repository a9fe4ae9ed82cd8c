"""One drafter's measurements: what its drafts cost, how many of their tokens are accepted, and which drafts pay.

Owns these measurements and the trials of one drafter. Of a step's other drafts it knows only the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foresay.decoding.outcome import Step
from foresay.decoding.rows import Rows
from foresay.decoding.state import StateKey
from foresay.lengths.budgets import StepContext, best_row_lengths, best_shared_length
from foresay.lengths.costs import Curve, DraftCosts
from foresay.lengths.draft_statistics import DraftStatistics
from foresay.lengths.early_stopping import DraftPlan, EarlyStopping, TokenCost
from foresay.lengths.trials import Trials

_REUSE = 4
"""Steps of the same rows that use the same best budgets: computing them takes a fortieth of a short pass."""
_TRIAL_MIN_PROB = 0.4
"""In a trial with early stopping, drafting goes on while all tokens so far are accepted with at least this probability."""
_OPTIMISM = 3.0
"""Fully accepted drafts added to the counts before a drafter is given up, since a few rejections may be chance."""


@dataclass(frozen=True, slots=True)
class Situation:
    """A step's rows, and the conditions under which one drafter's budgets are chosen."""

    rows: Rows
    eligible: Sequence[bool]
    """Rows that this drafter may draft for."""
    fixed: Sequence[int | None]
    """Each row's fixed length; None for a length to choose."""
    passes: Curve | None
    """Seconds of a target pass by draft tokens; None before any was measured."""
    context: StepContext


@dataclass(slots=True)
class _CachedBudgets:
    """The best budgets found for some rows."""

    key: Any
    budgets: list[int] | None
    steps_left: int = _REUSE
    """Steps that may still use them."""


class MeasuredDrafter:
    """The measurements of one drafter, and the budgets that follow from them."""

    def __init__(self, start: int, high: int) -> None:
        """start: draft length of the first trial. high: longest draft."""
        self.start, self.high = start, high
        self.costs, self.statistics, self.trials = DraftCosts(), DraftStatistics(high), Trials()
        self._cached = StateKey[_CachedBudgets | None](lambda: None)
        self.early_stopping = EarlyStopping(high)
        """Used if the drafter reports a confidence for each token."""

    def best(self, now: Situation, *, optimism: float = 0.0) -> list[int] | None:
        """Return the budgets of the highest throughput; None if no draft pays, or before costs were measured.

        optimism: see `DraftStatistics.accept_probs`.
        """
        rows, eligible, fixed, passes, context = now.rows, now.eligible, now.fixed, now.passes, now.context
        costs = self.costs.curve(sum(eligible))
        if passes is None or costs is None:
            return None
        most = min(self.high, self.statistics.longest + 2)
        mask = np.array(eligible)[:, None]
        draft_probs = self.statistics.draft_probs()[1 : most + 1] * mask
        accept_probs = self.statistics.accept_probs(rows, optimism=optimism)[:, 1 : most + 1] * mask
        drafting = costs.at(np.arange(1, most + 1))
        if rows.capabilities.ragged:
            out = best_row_lengths(accept_probs, draft_probs, passes, drafting, fixed, context)
        else:
            widths = self.statistics.width_probs()[1 : most + 1]
            length = best_shared_length((draft_probs * accept_probs).sum(0), widths, passes, drafting, context)
            out = [length * on if n is None else n for n, on in zip(fixed, eligible, strict=True)] if length else None
        return out

    def choose(self, now: Situation, *, batch_changed: bool, stops_early: bool = False) -> list[int]:
        """Return each row's budget: the best one, that of a trial, or 0; rows with a fixed length keep it.

        batch_changed: see `Trials.begin`. stops_early: the drafter reports its confidence, so that drafts can be stopped early.
        """
        stops_early = stops_early and self.early_stopping.sees_all_tokens
        if not stops_early:
            self.early_stopping.deactivate(now.rows)

        if not self.trials.steps_left:
            find = self._begin_best if stops_early else self._cached_best
            found = find(now)
            if found is not None:
                self.trials.succeed()
                return found
            inconclusive = self.trials.just_ended and self._is_inconclusive(now, stops_early=stops_early)
            if not self.trials.extend(inconclusive):
                self.trials.begin(batch_changed)
        length = 0
        if self.trials.steps_left:
            length = self.start if stops_early else self._trial_length(now)
        out = [length * on if n is None else n for n, on in zip(now.fixed, now.eligible, strict=True)]
        if stops_early:
            self.early_stopping.begin(now.rows, TokenCost(0.0, _TRIAL_MIN_PROB), out)
        return out

    def _plan(self, now: Situation, *, optimism: float = 0.0) -> DraftPlan | None:
        """Return the plan of drafts that stop early; None if no draft pays, or before costs were measured."""
        costs = self.costs.curve(sum(now.eligible))
        if now.passes is None or costs is None:
            return None
        return self.early_stopping.plan(
            now.rows, now.eligible, now.fixed, now.passes, costs, now.context, optimism=optimism
        )

    def _begin_best(self, now: Situation) -> list[int] | None:
        """Begin the drafts that pay with early stopping, and return their budgets; None if no draft pays."""
        plan = self._plan(now)
        budgets = [0] * len(now.eligible) if plan is None else plan.budgets
        free = [on and n is None for on, n in zip(now.eligible, now.fixed, strict=True)]
        self.early_stopping.decay(now.rows, [i for i, n in enumerate(budgets) if free[i] and not n])
        if plan is None:
            return None
        self.early_stopping.begin(now.rows, plan.cost, plan.budgets)
        return plan.budgets

    def _is_inconclusive(self, now: Situation, *, stops_early: bool) -> bool:
        """Return True if drafts would pay had a few more of them been accepted."""
        if stops_early:
            return self._plan(now, optimism=_OPTIMISM) is not None
        return self.best(now, optimism=_OPTIMISM) is not None

    def _cached_best(self, now: Situation) -> list[int] | None:
        """Return `best`, computed in this step or in one of the last few with the same rows and arguments."""
        key = (*now.eligible, *now.fixed, now.context.base_tokens)
        cached = self._cached.find(now.rows)
        if cached is None or cached.key != key or not cached.steps_left or self.trials.just_ended:
            cached = _CachedBudgets(key, self.best(now))
            self._cached.put(now.rows, cached)
        cached.steps_left -= 1
        return None if cached.budgets is None else list(cached.budgets)

    def _trial_length(self, now: Situation) -> int:
        """Return the length that loses least by current estimates if it does not pay; `start` before there are any."""
        rows, eligible, passes, context = now.rows, now.eligible, now.passes, now.context
        costs, count = self.costs.curve(sum(eligible)), sum(eligible)
        if passes is None or costs is None or not count:
            return self.start
        lengths = np.arange(1, self.start + 1)
        probs = (
            self.statistics.accept_probs(rows, optimism=_OPTIMISM)[:, 1 : self.start + 1] * np.array(eligible)[:, None]
        )
        scored = (
            context.base_tokens + lengths * count
            if rows.capabilities.ragged
            else np.maximum(context.base_tokens, lengths)
        )
        pass_s = passes.at(scored) - passes.at(context.base_tokens)
        gains = probs.sum(0).cumsum() - context.rate * (pass_s + costs.at(lengths))
        return int(gains.argmax()) + 1

    def observe(
        self, rows: Rows, budgets: Sequence[int], steps: Sequence[Step], buckets: Sequence[int], lost_s: float | None
    ) -> None:
        """Observe a step in which this drafter had the given budgets.

        buckets: [B] match buckets. lost_s: see `Trials.record`; None if no row's length was chosen.
        """
        is_own = [n > 0 for n in budgets]
        self.statistics.add(rows, budgets, buckets, steps, is_own)
        self.early_stopping.observe(rows, steps, is_own)
        if lost_s is not None:
            self.trials.record(lost_s, steps[0].total_s)
