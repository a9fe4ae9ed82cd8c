"""Early stopping of drafts by the draft model's confidence: which rows get a draft, and when one more token does not pay.

The draft model gives the j-th token the probability q_j. Acceptance is counted by q, which gives the calibrated probability a(q);
all tokens so far are accepted with probability S_j = a(q_1) ... a(q_j). One more token for each of n rows pays if

    sum S_j m > rate (d + n c)

m: acceptance probability of a further token; d: seconds of a draft pass, which the n rows share; c: seconds that one more token
adds to the target's pass; rate: see token_rate.py. A row gets a draft if the tokens recently accepted from such drafts are worth
their time. Owns these counts for one drafter. Knows neither how costs are measured nor distributions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from foresay.decoding.outcome import Step
from foresay.decoding.rows import IntArray, Rows
from foresay.decoding.state import StateKey
from foresay.lengths.budgets import StepContext
from foresay.lengths.costs import Curve, FloatArray

_BUCKETS = 10
"""Buckets of the confidence q, each with its own acceptance counts."""
_DECAY = 0.99
"""Factor per step of the counts over all rows."""
_ROW_DECAY = 0.97
"""Factor per step of a row's counts, also in steps without a draft, so that a row whose drafts failed is tried again."""
_PRIOR_WEIGHT = 6.0
"""Weight, in observations, of the priors: a(q) = q, and the next three constants."""
_FURTHER_PRIOR = 0.6
"""Prior acceptance probability m of a further token."""
_ACCEPTED_PRIOR, _DRAFTED_PRIOR = 1.0, 2.0
"""Prior number of accepted tokens and of all tokens of a draft."""
_ROW_PRIOR_WEIGHT = 24.0
"""Weight, in drafts, of the average over all rows in a row's estimate."""


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Cost of one more token for n rows in units of S: it pays if the sum of S over the rows exceeds shared + n per_row."""

    shared: float
    per_row: float


@dataclass(slots=True)
class _ActiveDrafts:
    """The drafts of the current step."""

    cost: TokenCost
    max_tokens: IntArray
    """[B], largest number of tokens of each draft."""
    active: npt.NDArray[np.bool_]
    """[B], True for rows whose draft has not ended."""
    accept_prob: FloatArray
    """[B], S: probability that all tokens so far are accepted."""
    confidence: FloatArray
    """[B, high], q of each token; NaN where none was drawn."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The drafts that pay in a step."""

    budgets: list[int]
    """[B], largest number of tokens of each row's draft."""
    cost: TokenCost
    """Cost of one more token, for `continuing`."""


class _Count(IntEnum):
    """Indices into the counts of drafts."""

    DRAFTS = 0
    ACCEPTED = 1
    DRAFTED = 2


class EarlyStopping:
    """Acceptance by confidence for one drafter, and the decisions that follow from it."""

    def __init__(self, high: int) -> None:
        """high: longest draft."""
        self._high = high
        self._row = StateKey[tuple[float, float]](lambda: (0.0, 0.0))
        """Drafts and accepted tokens of a row; none before its first draft."""
        self._active = StateKey[_ActiveDrafts | None](lambda: None)
        """The drafts of the current step, if they stop early."""
        self._accepted, self._tested = np.zeros(_BUCKETS), np.zeros(_BUCKETS)
        """Accepted tokens and tested tokens by bucket of confidence."""
        self._further = np.zeros(2)
        """Accepted tokens and tested tokens after a draft's first."""
        self._drafts = np.zeros(3)
        """Drafts, their accepted tokens, and all of their tokens."""
        self.sees_all_tokens = True
        """True if every tested token was passed to `continuing`; else parts of drafts cannot be stopped early."""
        self._depths: dict[int, FloatArray] = {}
        """By the bit length of the number of drafting rows: steps, and the sum of their longest drafts."""

    def plan(
        self,
        rows: Rows,
        eligible: Sequence[bool],
        fixed: Sequence[int | None],
        passes: Curve,
        drafting: Curve,
        context: StepContext,
        *,
        optimism: float = 0.0,
    ) -> DraftPlan | None:
        """Choose the rows whose drafts pay; None if no draft pays or no row may choose.

        eligible: rows that this drafter may draft for. fixed: each row's fixed length, None for a length to choose. optimism:
        fully accepted drafts added to the counts, which matter while there are few others.
        """
        expected = self._expected(rows, optimism)
        fixed_lengths = [n or 0 for n in fixed]
        free = sorted((i for i, on in enumerate(eligible) if on and fixed[i] is None), key=lambda i: -expected[i])
        if not free:
            return None
        numbers = np.arange(1, len(free) + 1)
        drafted = self._mean(_Count.DRAFTED, _DRAFTED_PRIOR)
        base = (
            context.base_tokens + sum(fixed_lengths)
            if rows.capabilities.ragged
            else max(context.base_tokens, *fixed_lengths)
        )
        scored = base + numbers * drafted if rows.capabilities.ragged else np.maximum(base, np.full(len(free), drafted))
        depths = np.array([self._depth(n) for n in numbers.tolist()])
        fixed_s = float(drafting.at(max(fixed_lengths))) if any(fixed_lengths) else 0.0
        seconds = np.maximum(drafting.at(depths) - fixed_s, 0.0) + passes.at(scored) - passes.at(base)
        gains = expected[free].cumsum() - context.rate * seconds
        count = int(gains.argmax()) + 1 if rows.capabilities.ragged else len(free)
        if gains[count - 1] <= 0:
            return None
        cost = self._token_cost(
            count, float(scored[count - 1]), passes, drafting, context.rate, ragged=rows.capabilities.ragged
        )
        chosen = set(free[:count])
        return DraftPlan([self._high if i in chosen else n for i, n in enumerate(fixed_lengths)], cost)

    def decay(self, rows: Rows, indices: Iterable[int]) -> None:
        """Decay the counts of rows that got no draft, so that they are eventually tried again."""
        for i in indices:
            counts = self._row.find(rows[i])
            if counts is not None:
                self._row.put(rows[i], (_ROW_DECAY * counts[0], _ROW_DECAY * counts[1]))

    def _token_cost(
        self, count: int, scored: float, passes: Curve, drafting: Curve, rate: float, *, ragged: bool
    ) -> TokenCost:
        """Return the cost of one more token for `count` rows. scored: draft tokens of the target's pass (per row if padded)."""
        rate_per_accepted = rate * float(
            (self._further[1] + _PRIOR_WEIGHT) / (self._further[0] + _PRIOR_WEIGHT * _FURTHER_PRIOR)
        )
        draft_s = float(drafting.at(3) - drafting.at(2))
        pass_s = float(passes.at(scored + (count if ragged else 1)) - passes.at(scored))
        return (
            TokenCost(rate_per_accepted * draft_s, rate_per_accepted * pass_s / count)
            if ragged
            else TokenCost(rate_per_accepted * (draft_s + pass_s), 0.0)
        )

    def begin(self, rows: Rows, cost: TokenCost, budgets: Sequence[int]) -> None:
        """Begin drafts that stop once a token is not worth its cost. budgets: [B], largest number of tokens of each draft."""
        max_tokens = np.array([min(n, row.remaining - 1) for n, row in zip(budgets, rows, strict=True)])
        confidence = np.full((len(rows), self._high), np.nan)
        self._active.put(rows, _ActiveDrafts(cost, max_tokens, max_tokens > 0, np.ones(len(rows)), confidence))

    def limit(self, rows: Rows, budgets: Sequence[int]) -> None:
        """Reduce the largest number of tokens of each draft to `budgets`, [B]."""
        drafts = self._active.find(rows)
        if drafts is not None:
            drafts.max_tokens = np.minimum(drafts.max_tokens, np.array(budgets))
            drafts.active = drafts.active & (drafts.max_tokens > 0)

    def continuing(self, rows: Rows, index: IntArray, confidence: FloatArray) -> npt.NDArray[np.bool_]:
        """Return the rows that continue to draft, [B] bool.

        index: [B], draft positions of the tokens just drawn. confidence: [B], their probabilities q under the draft model.
        """
        drafts = self._active.find(rows)
        assert drafts is not None
        drafts.confidence[np.arange(len(confidence)), np.minimum(index, self._high - 1)] = confidence
        drafts.accept_prob = drafts.accept_prob * self._accept_probs()[_bucket(confidence)]
        able = drafts.active & (index + 1 < drafts.max_tokens)  # only these rows share the cost of a draft pass
        probs = np.where(able, drafts.accept_prob, 0.0)
        best = np.sort(probs)[::-1]
        gains = best.cumsum() - drafts.cost.shared - drafts.cost.per_row * np.arange(1, len(best) + 1)
        count = int(gains.argmax())
        drafts.active = able & (probs >= best[count]) & bool(gains[count] > 0)
        return drafts.active

    def is_active(self, rows: Rows) -> bool:
        """Return True if drafts of these rows stop early."""
        return self._active.find(rows) is not None

    def deactivate(self, rows: Rows) -> None:
        """Let drafts of these rows use their whole budgets."""
        self._active.drop(rows)

    def is_first_draft(self, rows: Rows, drafted: Sequence[int]) -> bool:
        """Return True if any of the rows drafted for the first time, so that its draft included the prefill of its prompt."""
        return any(n and self._row.find(row) is None for row, n in zip(rows, drafted, strict=True))

    def observe(self, rows: Rows, steps: Sequence[Step], is_own: Sequence[bool]) -> None:
        """Count the accepted tokens of a step. is_own: rows whose draft came from this drafter."""
        drafts = self._active.find(rows)
        self._drafts *= _DECAY
        self._further *= _DECAY
        self._accepted *= _DECAY
        self._tested *= _DECAY
        deepest = count = 0
        for i, (row, step, own) in enumerate(zip(rows, steps, is_own, strict=True)):
            drafted, accepted = step.num_drafted, step.num_accepted
            if not own or not drafted:
                continue
            deepest, count = max(deepest, drafted), count + 1
            tested = min(accepted + 1, drafted)
            self._drafts += (1, accepted, drafted)
            self._further += (max(0, accepted - 1), tested - 1)
            num_drafts, num_accepted = self._row.find(row) or (0.0, 0.0)
            self._row.put(row, (num_drafts * _ROW_DECAY + 1, num_accepted * _ROW_DECAY + accepted))
            if drafts is not None:
                confidence = drafts.confidence[i, :tested]
                known = ~np.isnan(confidence)
                self.sees_all_tokens = self.sees_all_tokens and bool(known.all())
                buckets = _bucket(confidence[known])
                np.add.at(self._tested, buckets, 1.0)
                np.add.at(self._accepted, buckets, (np.arange(len(confidence)) < accepted)[known])
        if count:
            counts = self._depths.setdefault(count.bit_length(), np.zeros(2))
            counts *= _DECAY
            counts += (1, deepest)

    def _expected(self, rows: Rows, optimism: float) -> FloatArray:
        """Return the expected accepted tokens of each row's next draft, [B]."""
        mean = self._mean(_Count.ACCEPTED, _ACCEPTED_PRIOR, optimism)
        own = np.array([self._row.find(row) or (0.0, 0.0) for row in rows])
        out: FloatArray = (own[:, 1] + _ROW_PRIOR_WEIGHT * mean) / (own[:, 0] + _ROW_PRIOR_WEIGHT)
        return out

    def _mean(self, which: _Count, prior: float, optimism: float = 0.0) -> float:
        """Return a count's mean per draft. optimism: fully accepted drafts added to the counts."""
        total = self._drafts[which] + _PRIOR_WEIGHT * prior + optimism * _DRAFTED_PRIOR
        return float(total / (self._drafts[_Count.DRAFTS] + _PRIOR_WEIGHT + optimism))

    def _depth(self, count: int) -> float:
        """Return the expected length of the longest draft of `count` rows."""
        counts = self._depths.get(count.bit_length())
        drafted = self._mean(_Count.DRAFTED, _DRAFTED_PRIOR)
        return drafted if counts is None else float((counts[1] + drafted) / (counts[0] + 1))

    def _accept_probs(self) -> FloatArray:
        """Return a(q) for each bucket of q."""
        middles = (np.arange(_BUCKETS) + 0.5) / _BUCKETS
        out: FloatArray = (self._accepted + _PRIOR_WEIGHT * middles) / (self._tested + _PRIOR_WEIGHT)
        return out


def _bucket(confidence: FloatArray) -> IntArray:
    out: IntArray = np.clip((confidence * _BUCKETS).astype(np.int64), 0, _BUCKETS - 1)
    return out
