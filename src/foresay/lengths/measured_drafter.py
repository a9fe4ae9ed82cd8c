"""One drafter's measurements: costs, acceptance, the drafts that pay, and the credit of those that do not.

The rules are those of throughput.py. Does not know the drafter, nor a second one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foresay.decoding.outcome import Step
from foresay.decoding.rows import Row, Rows
from foresay.decoding.state import StateKey
from foresay.decoding.stopping import Reads, StoppingRule, tenth
from foresay.lengths.constant import MAX_DRAFT_TOKENS
from foresay.lengths.costs import ByBatch, DraftCosts
from foresay.lengths.situation import Situation

DECAY, ROW_DECAY = 0.98, 0.95
"""Factors of all counts and of a row's own for each step with drafts, so that failures are forgotten."""
PRIOR_WEIGHT = 2.0
"""Weight of priors, in tokens or drafts; of all rows' failures in the estimate of one row, in failures."""
_LOAN, _FIRST_TRIAL, _ALLOWANCE = 2.0, 0.125, 0.0075
"""Plain passes that a drafter may lose before it stops, and in its next trial; the share of the time by which they grow again."""

_DEPTH, _CONFIDENCE = range(6, 12), range(12, 22)
"""Kinds of tokens: the first six by match length (unknown, 1, 2, 3-4, 5-8, more), then by depth (1, 2, 3, 4, 5-8, more), then
by tenths of confidence."""
_PRIORS = (0.5, 0.2, 0.5, 0.7, 0.85, 0.95, *[0.7] * 6, *((i + 0.5) / 10 for i in range(10)))
"""Prior acceptance probability by kind; those of matches were measured on chats, code, edits and extractions."""
_MATCH_KIND = (0, 1, 2, 3, 3, *[4] * 4, *[5] * (2 * MAX_DRAFT_TOKENS))
"""Kind of a token that continues a match of this length."""
_DEPTH_KIND = (*_DEPTH[:4], *[_DEPTH[4]] * 4, *[_DEPTH[5]] * MAX_DRAFT_TOKENS)
"""Kind of the token at this index of a draft."""


class Credit:
    """Plain passes that drafts which do not pay may still lose."""

    def __init__(self, share: float) -> None:
        """share: of the rows, those that a trial drafts for. It loses as much less; half of that is spent on more trials."""
        self._loan, self._first, self._allowance = _LOAN * share, _FIRST_TRIAL * share, _ALLOWANCE * math.sqrt(share)
        self.passes, self.needed = self._loan, self._first
        """needed: those of the next trial, twice as many after each trial that lost them, so that what got easier is found soon
        and what did not is seldom tried."""
        self.is_active = True
        """False once they are lost, until `needed` have grown again."""
        self.is_trial = False
        """True while drafts are made that do not pay by what is known."""

    @property
    def is_full(self) -> bool:
        """True if nothing of the loan is lost."""
        return self.passes >= self._loan

    def add(self, passed: float, lost: float) -> None:
        """Add the allowance of a time in plain passes; take those that drafts lost in it, negative if they paid.

        Only trials go into debt: a long draft that pays on average and fails leaves half of the loan, to try shorter ones.
        """
        least = -self._loan if self.is_trial else min(self.passes, self._loan / 2)
        self.passes = min(max(self.passes + self._allowance * passed - lost, least), self._loan)
        self.is_active = self.is_active or self.passes >= self.needed
        if lost < 0 and self.is_full:
            self.needed = self._first

    def check(self, pays: bool) -> bool:
        """Return whether drafts that pay, or do not, are made; no longer once the credit of those that do not is lost."""
        self.is_trial = not pays
        if not pays and self.passes <= 0:
            self.is_active, self.needed = False, min(2 * self.needed, self._loan)
        return self.is_active


@dataclass(slots=True)
class Draft:
    """The draft of one drafter in the current step."""

    budgets: list[int]
    """[B]; 0 for rows that it does not draft for."""
    kinds: list[list[int]]
    """[B, high], kind of each token."""
    shared: float = 0.0
    per_row: float = 0.0
    """Cost of one more token for n rows that stop by confidence: it pays if their probabilities add up to shared + n per_row."""
    scored: Sequence[int] = ()
    """[B], tokens of an n-gram drafter that are scored."""


class MeasuredDrafter:
    """The measurements of one drafter, and the budgets that follow from them."""

    def __init__(self, start: int, high: int) -> None:
        self.start, self.high = start, high
        self.costs = ByBatch(DraftCosts)
        self._accepted, self._tested = [0.0] * len(_PRIORS), [0.0] * len(_PRIORS)
        """Accepted and tested tokens by kind."""
        self.sums = [0.0] * 5
        """Rows whose budget was not 0, rows with a draft, with an accepted first token; accepted tokens, scored tokens."""
        self._further = [0.0, 0.0]
        """Accepted and tested tokens that were drafted after another one."""
        self.hazards = [-math.log(prior) for prior in _PRIORS]
        """-log a by kind."""
        self._row = StateKey[tuple[float, float, int]](lambda: (0.0, 0.0, 0))
        """Failed tokens of a row, those that `hazards` predicted, and the step of these counts."""
        self._num_steps = 0
        self.draft = StateKey[Draft | None](lambda: None)
        self._credits = dict[int, Credit]()
        """By the bit length of the batch size: what pays for few rows does not for many."""
        self.selects = False
        """True for an n-gram drafter: of the tokens that it finds, `selected` are scored."""
        self.stops_early = False
        """True if each token comes with a confidence that is cheap to read."""

    def choose(self, now: Situation, eligible: Sequence[bool]) -> list[int]:
        """Return the budgets that pay; those of a trial while that has credit; else 0. Rows with a fixed length keep it."""
        free = [on and n is None for on, n in zip(eligible, now.fixed, strict=True)]
        fixed = [(n or 0) * on for on, n in zip(eligible, now.fixed, strict=True)]
        draft = Draft(fixed, [list(_DEPTH_KIND[: self.high]) for _ in free])
        self.draft.put(now.rows, draft)
        credit = self.credit(len(free), ragged=now.ragged)
        if credit.is_active:
            find = self._best_drafts if self.selects or self.stops_early else self._best_lengths
            pays, best = find(now, free, fixed, draft)
            if credit.check(pays):
                drafts = self._few(free) if now.ragged and not pays else free
                draft.budgets = [n if on else m for on, n, m in zip(drafts, best, fixed, strict=True)]
        return draft.budgets

    def _few(self, free: Sequence[bool]) -> list[bool]:
        """Return the rows that a trial of ragged passes drafts for: an eighth of them, others in each step, one at least."""
        among = [i for i, on in enumerate(free) if on]
        count = _num_tried(len(among))
        first = self._num_steps * count
        chosen = {among[(first + k) % len(among)] for k in range(count)} if among else set[int]()
        return [i in chosen for i in range(len(free))]

    def _costs(self, count: int) -> DraftCosts | None:
        """Return the costs of drafting for `count` rows; until they are known, those of a trial, which are lower."""
        costs = self.costs.nearest(count)
        return costs if costs is not None and costs.is_known else self.costs.nearest(_num_tried(count)) or costs

    def credit(self, batch: int, *, ragged: bool) -> Credit:
        """Return the credit of drafts for about as many rows."""
        return self._credits.setdefault(batch.bit_length(), Credit(_num_tried(batch) / batch if ragged else 1.0))

    def _best_lengths(
        self, now: Situation, free: Sequence[bool], fixed: Sequence[int], draft: Draft
    ) -> tuple[bool, list[int]]:
        """Return whether drafts pay, and their best lengths; those that lose least if not."""
        costs = self._costs(sum(free))
        if costs is None:
            return False, [self._trial(now, free)] * len(free)
        probs = np.array(self.accept_probs(now.rows, draft.kinds)) * np.array(free)[:, None]
        depths, sunk = np.arange(1, self.high + 1), max(fixed)
        line = costs.line
        drafting = now.rate / now.plain_s * (line.start * (not sunk) + line.per_token * np.maximum(depths - sunk, 0))
        if now.ragged:
            gains = np.maximum(probs - now.token_cost, 0.0).sum(0)
        else:
            gains = probs.sum(0) - now.token_cost * (depths > max(sunk, now.base))
        values = self._mean(1, 1.0) * (gains.cumsum() - now.start_cost) - drafting
        length = int(values.argmax()) + 1
        if values[length - 1] <= 0 or not costs.is_known:
            return False, [min(length, self._trial(now, free))] * len(free)
        pays = probs[:, :length] > (now.token_cost if now.ragged else -1)
        return True, pays.sum(1).tolist()

    def _best_drafts(
        self, now: Situation, free: Sequence[bool], fixed: Sequence[int], draft: Draft
    ) -> tuple[bool, list[int]]:
        """Return whether drafts pay whose lengths are chosen later, by what earlier ones were worth, and their limits."""
        costs, num_free = self._costs(sum(free)), sum(free)
        if not self.selects and (costs is None or not costs.is_known):
            return False, [self._trial(now, free)] * len(free)
        accepted, scored = self._mean(3, 1.0), self._mean(4, 2.0)
        columns = now.token_cost * scored if now.ragged else 0.0
        if self.selects:
            worths = [accepted - columns] * num_free
        else:
            worths = [accepted * f - columns for f, on in zip(self._factors(now.rows), free, strict=True) if on]
        seconds, per_token, width = 0.0, 0.0, scored
        if costs is not None:
            seconds, per_token, width = costs.seconds, costs.line.per_token, costs.line.width
        no_draft = 1 - min(1.0, self._mean(1, 1.0))  # of a row with a budget
        shared = now.rate * seconds / now.plain_s * (not any(fixed)) + now.start_cost * (1 - no_draft**num_free)
        shared += 0.0 if now.ragged else now.token_cost * width
        further = self._further_accepted()
        drafting = now.rate * per_token / now.plain_s / further
        draft.per_row = now.token_cost / further if now.ragged else 0.0
        draft.shared = drafting + (0.0 if now.ragged else now.token_cost / further)
        if not now.ragged or self.selects:
            chosen = [self.high * on for on in free]
            total = sum(worths)
        else:
            paying = iter(worths)
            chosen = [self.high * (on and next(paying) > 0) for on in free]
            total = sum(max(worth, 0.0) for worth in worths)
        if total > shared:
            return True, chosen
        return False, [self.high if self.selects else self._trial(now, free)] * len(free)

    def _further_accepted(self) -> float:
        """Return the share of tokens after another one that are accepted; a priori that of first tokens."""
        first = (self.sums[2] + PRIOR_WEIGHT * _PRIORS[_DEPTH[0]]) / (self.sums[1] + PRIOR_WEIGHT)
        return (self._further[0] + PRIOR_WEIGHT * first) / (self._further[1] + PRIOR_WEIGHT)

    def worth(self, now: Situation) -> list[float] | None:
        """Return the tokens that a draft of each row gains beyond its costs, [B]; None before that is known or if none pays.

        Without `start_cost`, which another draft would cost as well.
        """
        costs, share = self.costs.nearest(len(now.rows)), 1 / len(now.rows)
        if costs is None or not costs.is_known or not self.credit(len(now.rows), ragged=now.ragged).is_active:
            return None
        cost = now.token_cost * (1 if now.ragged else share) * self._mean(4, 2.0)
        cost += share * now.rate * costs.seconds / now.plain_s
        accepted = self._mean(3, 1.0)
        return [accepted * factor - cost for factor in self._factors(now.rows)]

    def _trial(self, now: Situation, free: Sequence[bool]) -> int:
        """Return the length of drafts that do not pay by what is known: if possible, failure costs a plain pass at most."""
        count = sum(free) if now.ragged else 1
        return max(1, min(self.start, int((1 - now.start) / max(now.slope * count, 1e-9))))

    def accept_probs(self, rows: Rows, kinds: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return P(the tokens up to k are accepted), [B, K], for tokens of these kinds, [B, K]."""
        out = []
        for e, row in zip(self._exponents(rows), kinds, strict=True):
            hazard, probs = 0.0, []
            for kind in row:
                hazard += self.hazards[kind]
                probs.append(math.exp(-e * hazard))
            out.append(probs)
        return out

    def _exponents(self, rows: Rows) -> list[float]:
        """Return e, [B]: how many times as often as predicted a row's tokens fail."""
        out = []
        for row in rows:
            failed, expected, step = self._row.of(row)
            decay = ROW_DECAY ** (self._num_steps - step)
            out.append((failed * decay + PRIOR_WEIGHT) / (expected * decay + PRIOR_WEIGHT))
        return out

    def _factors(self, rows: Rows) -> list[float]:
        """Return how many times as many tokens of a row are accepted as of all, [B]."""
        return [1 / e for e in self._exponents(rows)]

    def selected(
        self, now: Situation, counts: Sequence[int], matched: Sequence[int], other: Sequence[float] | None = None
    ) -> Sequence[int]:
        """Return how many of the found tokens pay. counts: [B] tokens found. matched: [B] length of the match, 0 if unknown.

        other: [B], what a draft of another drafter is worth; none are scored where that is more.
        """
        draft, cost = self.draft.find(now.rows), now.token_cost
        if draft is None:
            return list(counts)
        draft.budgets = [max(n, m) for n, m in zip(draft.budgets, counts, strict=True)]
        draft.kinds = [_match_kinds(length, self.high) for length in matched]
        found = [kinds[:n] for kinds, n in zip(draft.kinds, counts, strict=True)]
        probs = self.accept_probs(now.rows, found)
        if now.ragged:
            out = [sum(p > cost for p in row) for row in probs]
            gain = sum(sum(row[:n]) - cost * n for row, n in zip(probs, out, strict=True))
            column = cost
        else:
            length, gain = _best_length(probs, cost)
            out = [min(n, length) for n in counts]
            column = cost / len(out)
        if gain + sum(max(n, 0.0) for n in other or ()) <= now.start_cost:  # the other drafter pays it as well
            out = [0] * len(out)
        if not any(out) and self.credit(len(counts), ragged=now.ragged).is_full:
            # else a slope that was measured too high would never be corrected
            surest = max(range(len(out)), key=lambda i: probs[i][0] if probs[i] else 0.0)
            out[surest] = min(counts[surest], self.start)
        if other is not None:
            worths = [sum(row[:n]) - column * n for row, n in zip(probs, out, strict=True)]
            out = [0 if mine < theirs else n for mine, theirs, n in zip(worths, other, out, strict=True)]
        draft.scored = [n if length is not None else m for n, m, length in zip(counts, out, now.fixed, strict=True)]
        return draft.scored

    def rule(self, draft: Draft, always: Sequence[bool]) -> StoppingRule:
        """Return the rule by which one more token pays. always: [B], rows that continue in any case."""
        weights = tuple(math.exp(-self.hazards[kind]) for kind in _CONFIDENCE)
        start = tuple(1.0 if n else 0.0 for n in draft.budgets)
        return StoppingRule(Reads.CONFIDENCE, draft.shared, 0, start, weights, draft.per_row, tuple(always))

    def read(self, confidences: Sequence[Sequence[float]] | None, rows: Rows) -> None:
        """Note the confidences of a step's draft tokens, as far as they were read; None if they cannot be read."""
        draft = self.draft.find(rows)
        if draft is None or confidences is None:
            return
        self.stops_early = True
        for kinds, row in zip(draft.kinds, confidences, strict=True):
            for i, certain in enumerate(row):
                kinds[min(i, self.high - 1)] = _CONFIDENCE[tenth(certain)]

    def observe(self, rows: Rows, steps: Sequence[Step], draft: Draft) -> None:
        """Count the tokens of a step in which this drafter had a budget."""
        for row, step, kinds, budget in zip(rows, steps, draft.kinds, draft.budgets, strict=True):
            if not budget:
                continue
            drafted, accepted = step.num_drafted, step.num_accepted
            for i, n in enumerate((1, drafted > 0, accepted > 0, accepted, drafted)):
                self.sums[i] += n
            if drafted:
                self._count(row, kinds[: min(accepted + 1, drafted)], accepted)

    def _count(self, row: Row, tested: Sequence[int], accepted: int) -> None:
        """Count a row's tested tokens by kind, of which the first ones were accepted."""
        predicted = 0.0
        for i, kind in enumerate(tested):
            self._tested[kind] += 1.0
            self._accepted[kind] += i < accepted
            predicted += 1 - math.exp(-self.hazards[kind])
        self._further[0] += max(accepted - 1, 0)
        self._further[1] += max(len(tested) - 1, 0)
        failed, expected, at = self._row.of(row)
        decay = ROW_DECAY ** (self._num_steps - at)
        self._row.put(row, (failed * decay + (accepted < len(tested)), expected * decay + predicted, self._num_steps))

    def advance(self, rows: Rows, lost: float | None, passed: float) -> None:
        """End a step that took `passed` plain passes, of which this drafter's drafts lost `lost` (negative if they paid).

        lost: None if it had no budget. Counts are kept then: what is known of its drafts does not depend on steps without any.
        """
        self.credit(len(rows), ragged=rows.capabilities.ragged).add(passed, lost or 0.0)
        if lost is None:
            return
        for counts in (self.sums, self._accepted, self._tested, self._further):
            counts[:] = [n * DECAY for n in counts]
        self._num_steps += 1
        hazards, before = [], 0.0
        for kind, (accepted, tested, prior) in enumerate(zip(self._accepted, self._tested, _PRIORS, strict=True)):
            if kind in _DEPTH[1:]:  # a deeper token is expected to be accepted as often as the last
                prior = before
            before = (accepted + PRIOR_WEIGHT * prior) / (tested + PRIOR_WEIGHT)
            hazards.append(-math.log(min(max(before, 0.02), 0.98)))
        self.hazards = hazards

    def _mean(self, which: int, prior: float) -> float:
        """Return one of `sums` per row with a budget."""
        return (self.sums[which] + PRIOR_WEIGHT * prior) / (self.sums[0] + PRIOR_WEIGHT)


def _num_tried(count: int) -> int:
    """Return for how many of `count` rows a trial drafts."""
    return max(1, count // 8)


def _match_kinds(length: int, count: int) -> list[int]:
    """Return the kinds of `count` tokens after a match of this length, 0 if it is unknown."""
    if not length:
        return [_MATCH_KIND[0]] * count
    last = len(_MATCH_KIND) - 1
    return [_MATCH_KIND[min(n, last)] for n in range(length, length + count)]


def _best_length(probs: Sequence[Sequence[float]], cost: float) -> tuple[int, float]:
    """Return the draft length of most gain in a padded pass, and the gain; 0 if none gains. probs: [B], by length."""
    best, gain, total = 0, 0.0, 0.0
    for k in range(max(map(len, probs))):
        total += sum(row[k] for row in probs if k < len(row)) - cost
        if total > gain:
            best, gain = k + 1, total
    return best, gain
