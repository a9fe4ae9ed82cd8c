"""The throughput policy: draft lengths of the most tokens per second, measured while decoding; 0 where no draft pays.

A pass over B rows that scores n > 0 draft tokens takes 1 + f + s n plain passes. Over many steps the throughput is highest if
every step maximises E[tokens] - rate E[plain passes], where rate is the number of tokens that the batch generates per plain pass
(Dinkelbach's condition for the maximum of a ratio). So token k of row i is drafted and scored while

    P_i(tokens 1..k are accepted) > rate (s + d)

and drafts are made only if all tokens of a pass together gain more than rate f.
d: plain passes that drafting one more token takes, shared by the rows that draft it; 0 for tokens that an n-gram drafter found.
In padded passes n is the length of the longest draft, and the rows share both s and d.

The acceptance probability a of a token is counted by what is known of it: the length of the n-gram match that it continues, the
draft model's confidence, or its depth in the draft. A row whose tokens fail e times as often as these counts predict has
P_i = (a_1 ... a_k)^e.

A drafter that does not pay spends a credit: it may lose two plain passes, which grow again by an allowance, a share of the time.
It is tried again after an eighth of a pass has grown, and after twice as much each time that was lost. In ragged passes a trial
drafts for an eighth of the rows; it has an eighth of the credit, and grows by the root of an eighth of the allowance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from threading import Lock
from time import perf_counter

from foresay.checks import check_int
from foresay.decoding.outcome import Step
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Rows
from foresay.decoding.state import StateKey
from foresay.decoding.stopping import CONFIDENCES, StoppingRule
from foresay.lengths.constant import MAX_DRAFT_TOKENS
from foresay.lengths.costs import ByBatch, PassCosts
from foresay.lengths.measured_drafter import DECAY, PRIOR_WEIGHT, Draft, MeasuredDrafter
from foresay.lengths.situation import Situation

DEFAULT_HIGH = 16
"""Default longest draft."""
_REMEASURE_PLAIN = 64
"""Steps with drafts after which a plain pass is measured again, since costs are relative to it."""
_INITIAL_SLOPE = 0.06
"""s, the cost of one more draft token in plain passes, until it is measured."""
_MARGIN = 1.1
"""Least gain over cost: a row that ends early saves less than its share of the remaining passes, and costs are estimates."""


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
        self._passes = ByBatch(PassCosts)
        self._primary, self._fallback = (MeasuredDrafter(self.start, self.high) for _ in range(2))
        """The drafter, or a hybrid's n-gram drafter; and a hybrid's drafter for rows without an n-gram match."""
        self._is_hybrid = False
        self._num_tokens = self._num_passes = PRIOR_WEIGHT
        """Tokens per row, and plain passes of the same time."""
        self._steps_since_plain = self._num_plain = 0

    def budget(self, rows: Rows) -> list[int]:
        """Return each row's own budget in ragged passes, else the same one for all rows."""
        _POLICY_S.put(rows, 0.0)
        with self._timed(rows):
            for kept in (self._primary.draft, self._fallback.draft, CONFIDENCES):
                kept.drop(rows)
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
        if not self._primary.selects:  # only n-gram drafters draft known text
            return list(out)
        return [
            self.high if fixed is None and row.knows_text else n
            for n, fixed, row in zip(out, now.fixed, rows, strict=True)
        ]

    def num_to_score(self, rows: Rows, counts: Sequence[int], matched: Sequence[int]) -> list[int]:
        """Return how many of the found tokens pay, by the length of their match; see `LengthPolicy.num_to_score`."""
        with self._timed(rows):
            self._primary.selects, now = True, self._situation(rows)
            if now is None:
                return list(counts)
            return list(
                self._primary.selected(now, counts, matched, self._fallback.worth(now) if self._is_hybrid else None)
            )

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

    def rule(self, rows: Rows) -> StoppingRule:
        """Return the rule by which one more token pays, by the confidence in the draft so far; fixed lengths are kept."""
        drafter = self._fallback if self._is_hybrid else self._primary
        draft = drafter.draft.find(rows)
        if draft is None:  # rows without a budget from this policy
            return StoppingRule()
        return drafter.rule(draft, [length is not None for length in self._fixed_lengths(rows)])

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
            self._num_tokens = self._num_tokens * DECAY + fmean(len(step.token_ids) for step in steps)
            self._num_passes = self._num_passes * DECAY + passed
            (self._fallback if self._is_hybrid else self._primary).read(CONFIDENCES.find(rows), rows)
            for drafter in (self._primary, self._fallback):
                draft = drafter.draft.find(rows)
                lost = None if draft is None else self._count(drafter, draft, now, steps)
                drafter.advance(rows, lost, passed)

    def _count(self, drafter: MeasuredDrafter, draft: Draft, now: Situation, steps: Sequence[Step]) -> float | None:
        """Count one drafter's part in a step; return the plain passes that its drafts lost, or gained if negative.

        None if it had no budget.
        """
        fallback = self._fallback.draft.find(now.rows)
        others = [0] * len(steps) if fallback is None or drafter is self._fallback else fallback.budgets
        draft.budgets = [n * (not other) for n, other in zip(draft.budgets, others, strict=True)]
        if not any(draft.budgets):
            return None
        drafter.observe(now.rows, steps, draft)
        own = [(s.num_drafted, s.num_accepted) for s, n in zip(steps, draft.budgets, strict=True) if n]
        count = sum(n > 0 for n in draft.budgets)
        size, longest = sum(n for n, _ in own), max(n for n, _ in own)
        if not any(others):
            spent = _POLICY_S.of(now.rows)
            if drafter is self._fallback:
                lookup = self._primary.costs.nearest(len(steps))
                spent += lookup.seconds if lookup else 0.0
            drafter.costs.of(count).line.add(longest, max(0.0, steps[0].draft_s - spent))
        costs = drafter.costs.nearest(count)
        spent_s = costs.line.at(longest) if costs and costs.is_known else 0.0
        start = now.start * size / max(sum(step.num_drafted for step in steps), 1)
        return (
            start
            + now.slope * (size if now.ragged else longest)
            + spent_s / now.plain_s
            - sum(n for _, n in own) / len(steps)
        )

    def _situation(self, rows: Rows) -> Situation | None:
        """Return the worth and costs of this step's tokens; None before a pass over about as many rows was measured."""
        passes = self._passes.nearest(len(rows))
        if passes is None:
            return None
        rate = _MARGIN * len(rows) * max(1.0, self._num_tokens / self._num_passes)
        return Situation(rows, self._fixed_lengths(rows), rate, passes.plain_s, passes.start, passes.slope)

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
        passes, (_, drafts, first, *_) = self._passes.nearest(1), self._primary.sums
        return {"plain_pass_s": passes.plain_s if passes else 0.0, "first_accepted": first / drafts if drafts else 0.0}
