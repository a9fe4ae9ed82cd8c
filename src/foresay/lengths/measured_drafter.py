"""One drafter's measurements: costs, acceptance, the drafts that pay, and the credit of those that do not.

The rules are those of throughput.py. Does not know the drafter, nor a second one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foresay.decoding.outcome import Step
from foresay.decoding.rows import Rows
from foresay.decoding.state import StateKey
from foresay.lengths.constant import MAX_DRAFT_TOKENS
from foresay.lengths.costs import ByBatch, DraftCosts

FloatArray = npt.NDArray[np.float64]

DECAY, ROW_DECAY = 0.98, 0.95
"""Factors of all counts and of a row's own for each step with drafts, so that failures are forgotten."""
PRIOR_WEIGHT = 3.0
"""Weight of priors, in tokens or drafts."""
_ROW_WEIGHT = 1.0
"""Weight of all rows' failures in the estimate of one row, in failures."""
_LOAN, _FIRST_TRIAL, _ALLOWANCE = 2.0, 0.125, 0.0075
"""Plain passes that a drafter may lose before it stops, and in its next trial; the share of the time by which they grow again."""

_DEPTH, _CONFIDENCE = slice(6, 12), slice(12, 22)
"""Kinds of tokens: the first six by match length (unknown, 1, 2, 3-4, 5-8, more), then by depth (1, 2, 3, 4, 5-8, more), then
by tenths of confidence."""
_PRIORS = np.array([0.5, 0.2, 0.5, 0.7, 0.85, 0.95, *[0.7] * 6, *[(i + 0.5) / 10 for i in range(10)]])
"""Prior acceptance probability by kind; those of matches were measured on chats, code, edits and extractions."""
_FURTHER = 0.6
"""Prior acceptance probability of a token that was drafted after another one."""
_MATCH_KIND = np.array([0, 1, 2, 3, 3, *[4] * 4, *[5] * (2 * MAX_DRAFT_TOKENS)])
"""Kind of a token that continues a match of this length."""
_DEPTH_KIND = _DEPTH.start + np.array([0, 1, 2, 3, *[4] * 4, *[5] * MAX_DRAFT_TOKENS])
"""Kind of the token at this index of a draft."""


@dataclass(slots=True)
class Credit:
    """Plain passes that drafts which do not pay may still lose."""

    passes: float = _LOAN
    is_active: bool = True
    """False once they are lost, until `needed` have grown again."""
    needed: float = field(default_factory=lambda: _FIRST_TRIAL)
    """Twice as many after each trial that lost them, so that what got easier is found soon and what did not is seldom tried."""

    is_trial: bool = False
    """True while drafts are made that do not pay by what is known."""

    def add(self, allowance: float, lost: float) -> None:
        """Add plain passes; take those that drafts lost, negative if they paid. Only trials go into debt."""
        least = -_LOAN if self.is_trial else min(self.passes, 0.0)
        self.passes = min(max(self.passes + allowance - lost, least), _LOAN)
        self.is_active = self.is_active or self.passes >= self.needed
        if lost < 0 and self.passes == _LOAN:
            self.needed = _FIRST_TRIAL

    def check(self, pays: bool) -> bool:
        """Return whether drafts that pay, or do not, are made; no longer once the credit of those that do not is lost."""
        self.is_trial = not pays
        if not pays and self.passes <= 0:
            self.is_active, self.needed = False, min(2 * self.needed, _LOAN)
        return self.is_active


@dataclass(slots=True)
class Draft:
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
class Situation:
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


class MeasuredDrafter:
    """The measurements of one drafter, and the budgets that follow from them."""

    def __init__(self, start: int, high: int) -> None:
        self.start, self.high = start, high
        self.costs = ByBatch(DraftCosts)
        self._accepted, self._tested = np.zeros(len(_PRIORS)), np.zeros(len(_PRIORS))
        """Accepted and tested tokens by kind."""
        self.sums = np.zeros(5)
        """Rows whose budget was not 0, rows with a draft, with an accepted first token; accepted tokens, scored tokens."""
        self._further = np.zeros(2)
        """Accepted and tested tokens that were drafted after another one."""
        self.hazards = -np.log(_PRIORS)
        """-log a by kind."""
        self._row = StateKey[tuple[float, float, int]](lambda: (0.0, 0.0, 0))
        """Failed tokens of a row, those that `hazards` predicted, and the step of these counts."""
        self._num_steps = 0
        self.draft = StateKey[Draft | None](lambda: None)
        self._credits: defaultdict[int, Credit] = defaultdict(Credit)
        """By the bit length of the batch size: what pays for few rows does not for many."""
        self.selects = False
        """True for an n-gram drafter: of the tokens that it finds, `selected` are scored."""
        self.stops_early = False
        """True if each token comes with a confidence that is cheap to read."""

    def choose(self, now: Situation, eligible: Sequence[bool]) -> list[int]:
        """Return the budgets that pay; those of a trial while that has credit; else 0. Rows with a fixed length keep it."""
        free = np.array([on and n is None for on, n in zip(eligible, now.fixed, strict=True)])
        fixed = np.array([(n or 0) * on for on, n in zip(eligible, now.fixed, strict=True)])
        draft = Draft([], np.tile(_DEPTH_KIND[: self.high], (len(free), 1)))
        self.draft.put(now.rows, draft)
        draft.budgets = fixed.tolist()
        credit = self.credit(len(free))
        if credit.is_active:
            find = self._best_drafts if self.selects or self.stops_early else self._best_lengths
            pays, best = find(now, free, fixed, draft)
            draft.budgets = np.where(free, best * credit.check(pays), fixed).tolist()
        draft.active, draft.accept_prob = np.array(draft.budgets) > 0, np.ones(len(free))
        return draft.budgets

    def credit(self, batch: int) -> Credit:
        """Return the credit of drafts for about as many rows."""
        return self._credits[batch.bit_length()]

    def _best_lengths(
        self, now: Situation, free: npt.NDArray[np.bool_], fixed: npt.NDArray[np.int64], draft: Draft
    ) -> tuple[bool, npt.NDArray[np.int64]]:
        """Return whether drafts pay, and their best lengths; those that lose least if not."""
        costs = self.costs.nearest(int(free.sum()))
        if costs is None:
            return False, self._trial(now, free) * free
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
            return False, min(length, self._trial(now, free)) * free
        pays = probs[:, :length] > (now.token_cost if now.rows.capabilities.ragged else -1)
        return True, pays.sum(1)

    def _best_drafts(
        self, now: Situation, free: npt.NDArray[np.bool_], fixed: npt.NDArray[np.int64], draft: Draft
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
        further = (self._further[0] + PRIOR_WEIGHT * _FURTHER) / (self._further[1] + PRIOR_WEIGHT)
        draft.shared = now.rate * per_token / now.plain_s / further
        draft.per_row = now.token_cost / further if ragged else 0.0
        draft.shared += 0.0 if ragged else now.token_cost / further
        chosen = free & (worth > 0) if ragged and not self.selects else free
        if (worth * chosen).sum() > shared:
            return True, self.high * chosen
        return False, (self.high if self.selects else self._trial(now, free)) * free

    def worth(self, now: Situation) -> FloatArray | None:
        """Return the tokens that a draft of each row gains beyond its costs, [B]; None before that is known or if none pays."""
        costs, share = self.costs.nearest(len(now.rows)), 1 / len(now.rows)
        if costs is None or not costs.is_known or not self.credit(len(now.rows)).is_active:
            return None
        columns = now.token_cost * (1 if now.rows.capabilities.ragged else share) * self._mean(4, 2.0)
        accepted: FloatArray = self._mean(3, 1.0) / self._exponents(now.rows)
        return accepted - columns - share * now.rate * costs.seconds / now.plain_s

    def _trial(self, now: Situation, free: npt.NDArray[np.bool_]) -> int:
        """Return the length of drafts that do not pay by what is known: at most one plain pass is lost if all of them fail."""
        count = int(free.sum()) if now.rows.capabilities.ragged else 1
        return max(1, min(self.start, int(1 / max(now.slope * count, 1e-9))))

    def accept_probs(self, rows: Rows, kinds: npt.NDArray[np.int64]) -> FloatArray:
        """Return P(the tokens up to k are accepted), [B, K], for tokens of these kinds, [B, K]."""
        out: FloatArray = np.exp(-self._exponents(rows)[:, None] * self.hazards[kinds].cumsum(1))
        return out

    def _exponents(self, rows: Rows) -> FloatArray:
        """Return e, [B]: how many times as often as predicted a row's tokens fail."""
        failed, expected, step = np.array([self._row.of(row) for row in rows]).T
        decay = ROW_DECAY ** (self._num_steps - step)
        out: FloatArray = (failed * decay + _ROW_WEIGHT) / (expected * decay + _ROW_WEIGHT)
        return out

    def selected(
        self, now: Situation, counts: Sequence[int], matched: Sequence[int], other: FloatArray | None = None
    ) -> Sequence[int]:
        """Return how many of the found tokens pay. counts: [B] tokens found. matched: [B] length of the match, 0 if unknown.

        other: [B], what a draft of another drafter is worth; none are scored where that is more.
        """
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
        if other is not None:
            scored = np.arange(self.high) < out[:, None]
            column = now.token_cost if now.rows.capabilities.ragged else now.token_cost / len(out)
            out = np.where(((probs - column) * scored).sum(1) < other, 0, out)
        draft.scored = [
            n if length is not None else int(m) for n, m, length in zip(counts, out, now.fixed, strict=True)
        ]
        return draft.scored

    def continuing(self, draft: Draft, index: npt.NDArray[np.int64], confidence: FloatArray) -> npt.NDArray[np.bool_]:
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

    def observe(self, rows: Rows, steps: Sequence[Step], draft: Draft) -> None:
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
                self._further += max(accepted - 1, 0), len(tested) - 1
                failed, expected, at = self._row.of(row)
                decay = ROW_DECAY ** (self._num_steps - at)
                predicted = float((1 - np.exp(-self.hazards[tested])).sum())
                new = failed * decay + (accepted < drafted), expected * decay + predicted, self._num_steps
                self._row.put(row, new)

    def advance(self, batch: int, lost: float | None, passed: float) -> None:
        """End a step that took `passed` plain passes, of which this drafter's drafts lost `lost` (negative if they paid).

        lost: None if it had no budget. Counts are kept then: what is known of its drafts does not depend on steps without any.
        """
        self.credit(batch).add(_ALLOWANCE * passed, lost or 0.0)
        if lost is None:
            return
        for counts in (self.sums, self._accepted, self._tested, self._further):
            counts *= DECAY
        self._num_steps += 1
        priors = _PRIORS.copy()
        weights = self._tested + PRIOR_WEIGHT
        for kind in range(
            _DEPTH.start + 1, _DEPTH.stop
        ):  # a deeper token is expected to be accepted as often as the last
            priors[kind] = (self._accepted[kind - 1] + PRIOR_WEIGHT * priors[kind - 1]) / weights[kind - 1]
        self.hazards = -np.log(np.clip((self._accepted + PRIOR_WEIGHT * priors) / weights, 0.02, 0.98))

    def _mean(self, which: int, prior: float) -> float:
        """Return one of `sums` per row with a budget."""
        return float((self.sums[which] + PRIOR_WEIGHT * prior) / (self.sums[0] + PRIOR_WEIGHT))
