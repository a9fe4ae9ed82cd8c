"""The lengths that write most tokens per second, measured while decoding; 0 where no draft pays.

Keeps how long a pass takes by batch size and draft tokens, how long drafting takes, and how often drafts reach each length,
row by row. For every step it takes the budgets k_i that maximise

    E[tokens] - rate E[seconds],   E[tokens] = sum_i (1 + sum_{k <= k_i} P_i(k tokens are guessed and hold))

where the rate is what these rows write per second (pace.py says why).

A look-up costs next to nothing, so it is asked for all it finds, and the policy keeps what is worth scoring: a guess that
continues a match of nine tokens nearly always holds, one that continues a single token seldom. Where a pass takes the
time of its real tokens, each row has a budget of its own: a row whose guesses fail drafts less, and neither pays for its
neighbours nor holds them back. Where the widest row sets what a pass takes, all have the same.

After two plain passes to compare with, a few steps try a draft. When none pays, they are tried again only as often as
the time they lost allows: at most a hundredth of the time in between, and less with every trial that fails, until other
requests join.

A drafter that takes time behind a look-up that takes none (a hybrid) is measured and tried by itself: it is asked for the
rows without a match, when its guesses pay beside what the look-up brought.
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
from foresay.lengths.budgets import StepContext, best_for_all, best_for_each
from foresay.lengths.constant import MAX_DRAFT_TOKENS
from foresay.lengths.costs import Curve, PassCosts
from foresay.lengths.draft_statistics import kind_of
from foresay.lengths.measured_drafter import MeasuredDrafter
from foresay.lengths.token_rate import TokenRate

LONGEST = 16
"""Of drafts, unless a policy is told otherwise."""
_STATE = "throughput length"
"""Where rows remember their _StepState: several engines may share one policy."""
_FREE = 0.05
"""Share of a plain pass below which looking for guesses costs nothing."""
_STALE = 64
"""Steps after which a plain pass is measured again: what drafts cost is known in terms of it."""
_REFRESH = 128
"""Plain passes after which one guess is scored to measure a wider one again, whatever it was thought to be worth."""
_FIRST = 4
"""Such drafts, after which one counts all the same: where requests come and go all the time there are no others."""
_STEEP = 0.06
"""Cost of a further column in plain passes, until two sizes were measured."""


@dataclass(slots=True)
class _StepState:
    """What rows were given in the step under way."""

    offered: list[int]
    joined: bool
    """Whether these rows are together for the first time."""
    trimmed: bool
    """Whether guesses are chosen by what they match, so that nothing is told by how many of them there are."""
    kinds: list[int]
    """Of the matches that were shown; 0 where none was."""
    kept: list[int]
    """What was kept of a look-up's guesses."""
    behind: list[int]
    """What was asked of the drafter behind it."""
    candidates: int = 0
    """Rows that it might have been asked for."""
    drawn: bool = False
    """Whether a model drew guesses token by token."""
    own_s: float = 0.0
    """Seconds of the time of drafting that this policy took itself."""


def forget_own_time(rows: Rows) -> None:
    """Say that the time of the step under way is not a clock's, so that nothing of it was the policy's own."""
    state: _StepState | None = rows.memo.get(_STATE)
    if state is not None:
        state.own_s = 0.0


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
        self.remembers = self.sampled is None
        self._lock = Lock()
        self._passes, self._pace = PassCosts(_STEEP), TokenRate()
        self._first = MeasuredDrafter(self.start, self.high, "throughput length: own counts")
        """What budgets are given to."""
        self._behind = MeasuredDrafter(self.start, self.high, "throughput length: own counts behind")
        """What drafts for the rows without a match."""
        self._since_plain = self._num_plain = self._since_kept = 0
        self._drafting = self._first
        """What drafts token by token."""
        self._shown = False
        """Whether the drafter shows what it found, to be chosen from."""
        self._passed = 0
        """Drafts in a row whose time was passed over, since they took a prompt along."""
        self._gated = False
        """Whether the drafter says how sure it is of each token."""

    def budget(self, rows: Rows) -> list[int]:
        """Each row's own where a pass takes the time of its real tokens, else the same for all."""
        nothing = [0] * len(rows)
        state = _StepState(nothing, _STATE not in rows.memo, False, nothing, nothing, nothing)
        rows.memo[_STATE] = state
        with self._at_work(rows):
            state.trimmed, held = self._chooses(len(rows)), self._held(rows)
            state.offered = (
                [int(n or 0) for n in held] if all(n is not None for n in held) else self._choose(rows, held)
            )
            return list(state.offered)

    def num_to_score(self, rows: Rows, counts: Sequence[int], matched: Sequence[int]) -> list[int]:
        """As many of the guesses as pay, by what each one matched; see `LengthPolicy.num_to_score`."""
        with self._at_work(rows):
            self._shown, state = True, self._state(rows)
            state.kinds, state.kept = [kind_of(n) for n in matched], list(counts)
            passes = self._passes.curve(len(rows))
            state.trimmed = passes is not None and self._is_free(len(rows))
            if passes is None or not state.trimmed:
                return list(counts)
            self._first.trials.left = 0
            held = self._held(rows)
            out = self._worth(rows, counts, state.kinds, held, passes)
            self._since_kept = 0 if any(out) else self._since_kept + 1
            if self._since_kept >= _REFRESH:
                surest = max(range(len(rows)), key=lambda i: (counts[i] > 0, state.kinds[i]))
                out[surest], self._since_kept = min(counts[surest], self.start), 0
            state.kept = [n if one is None else most for n, one, most in zip(out, held, counts, strict=True)]
            return list(state.kept)

    def fallback_budget(self, rows: Rows, most: Sequence[int]) -> list[int]:
        """As many tokens as pay of the drafter behind a look-up; see `LengthPolicy.fallback_budget`."""
        with self._at_work(rows):
            self._shown, self._drafting, state = True, self._behind, self._state(rows)
            if self._is_free(len(rows)):  # what it looks up is not tried: it is always asked for
                state.trimmed, self._first.trials.left = True, 0
            asked = [n > 0 for n in most]
            held = [n if n and one is not None else None for n, one in zip(most, self._held(rows), strict=True)]
            chosen = self._choose_behind(rows, asked, held)
            state.behind, state.candidates = [min(n, limit) for n, limit in zip(chosen, most, strict=True)], sum(asked)
            self._behind.gate.limit(rows, state.behind)
            return list(state.behind)

    @contextmanager
    def _at_work(self, rows: Rows) -> Iterator[None]:
        """The policy's own time is not what drafting takes: it would be taken by drafting nothing too."""
        with self._lock:
            began = perf_counter()
            yield
            self._state(rows).own_s += perf_counter() - began

    def _state(self, rows: Rows) -> _StepState:
        state: _StepState = rows.memo[_STATE]
        return state

    def _choose_behind(self, rows: Rows, asked: Sequence[bool], held: Sequence[int | None]) -> list[int]:
        passes, state = self._passes.curve(len(rows)), self._state(rows)
        ground = self._ground(rows)
        return self._behind.choose(rows, asked, held, passes, ground, joined=state.joined, gated=self._gated)

    def keep_drafting(self, step: DraftStep) -> torch.Tensor | None:
        """Rows that are sure enough of their last token draft on; those that are held to a length do whatever it was."""
        distributions, gate, rows = step.distributions, self._drafting.gate, step.rows
        state: _StepState | None = None if rows is None else rows.memo.get(_STATE)
        if rows is None or state is None:  # a tree, or rows of somebody else's
            return None
        state.drawn = True
        # on a device it would be waited for
        self._gated = distributions.scores is not None and distributions.scores.device.type == "cpu"
        if not self._gated or not gate.is_begun(rows):
            return None
        said = distributions.confidence(step.token_ids[:, None])[:, 0]
        sure = torch.from_numpy(gate.goes_on(rows, step.index.numpy(), said.numpy()))
        held = [one is not None for one in self._held(rows)]
        return sure | torch.tensor(held) if any(held) else sure

    def _ground(self, rows: Rows) -> StepContext:
        """What the guesses that were kept come to."""
        state = self._state(rows)
        return StepContext(self._rate(rows), sum(state.kept) if rows.ragged else max(state.kept))

    def _rate(self, rows: Rows) -> float:
        """Tokens per second of these rows; 0 before any pass was measured."""
        passes = self._passes.curve(len(rows))
        return 0.0 if passes is None else self._pace.rate(rows, float(passes.at(0)))

    def _held(self, rows: Rows) -> list[int | None]:
        """The lengths that keep seeds' texts; None for a row whose text depends on no length."""
        return [None if row.params.greedy or rows.needs.ignores_drafts else self.sampled for row in rows]

    def _choose(self, rows: Rows, held: Sequence[int | None]) -> list[int]:
        passes, plain = self._passes.curve(len(rows)), not any(held) and not self._first.trials.left
        if plain and (passes is None or self._num_plain < 2 or self._since_plain >= _STALE):
            return [0] * len(rows)
        if self._chooses(len(rows)) and not self._first.trials.left:
            return [self.high if n is None else n for n in held]  # `num_to_score` chooses from what it finds
        every, gated = [True] * len(rows), self._gated and self._drafting is self._first
        ground, joined = StepContext(self._rate(rows)), self._state(rows).joined
        out = self._first.choose(rows, every, held, passes, ground, joined=joined, gated=gated)
        if any(out) or self._drafting is self._first:
            return out
        return self._choose_behind(rows, every, held)  # a look-up that does not pay costs nobody else a place

    def _chooses(self, batch: int) -> bool:
        """Whether the drafter is asked for all it finds."""
        return self._shown and self._is_free(batch)

    def _is_free(self, batch: int) -> bool:
        """Whether looking for guesses takes next to no time of a pass, or none was timed yet."""
        passes = self._passes.curve(batch)
        return passes is None or bool(self._first.drafts.longest_s(batch) < _FREE * passes.at(0))

    def _worth(
        self, rows: Rows, counts: Sequence[int], kinds: Sequence[int], held: Sequence[int | None], passes: Curve
    ) -> list[int]:
        """How many of each row's guessed tokens make the greatest throughput."""
        most = max(counts)
        index = np.arange(1, most + 1)
        drafted = (index <= np.array(counts)[:, None]).astype(np.float64)
        chances = self._first.reach.held(rows, kinds)[:, 1 : most + 1]
        nothing, ground = np.zeros(most), StepContext(self._rate(rows))
        if rows.ragged:
            found = best_for_each(chances, drafted, passes, nothing, held, ground) or [0] * len(rows)
        else:
            found = [best_for_all((drafted * chances).sum(0), drafted.max(0), passes, nothing, ground)] * len(rows)
        return [min(n, most) for n, most in zip(found, counts, strict=True)]

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        """Measure a step."""
        with self._lock:
            self._count_pass(rows, steps)
            state = rows.memo.get(_STATE)
            if state is not None and any(state.offered):
                self._count_drafts(rows, steps, state)

    def _count_pass(self, rows: Rows, steps: Sequence[Step]) -> None:
        one, drafted = steps[0], [step.num_drafted for step in steps]
        self._passes.column_cost = rows.column_cost
        self._passes.add(len(steps), sum(drafted) if rows.ragged else max(drafted), one.total_s - one.draft_s)
        plain = self._passes.curve(len(rows))
        if plain is not None:
            self._pace.add(rows, steps, float(plain.at(0)))
        self._since_plain = 0 if max(drafted) == 0 else self._since_plain + 1
        self._num_plain += max(drafted) == 0
        for each in (self._first, self._behind):
            each.trials.went_on(one.total_s)

    def _count_drafts(self, rows: Rows, steps: Sequence[Step], state: _StepState) -> None:
        one, batch, behind = steps[0], len(steps), state.behind
        draft_s = max(0.0, one.draft_s - state.own_s)
        mine = [0 if other else n for n, other in zip(state.offered, behind, strict=True)]
        asked = behind if any(behind) else state.offered
        which = self._behind if any(behind) else self._first
        drawn = [step.num_drafted if n else 0 for step, n in zip(steps, asked, strict=True)]
        longest = max(drawn) if state.drawn else 0
        self._passed = self._passed + 1 if state.drawn and which.gate.is_first(rows, drawn) else 0
        if not 0 < self._passed <= _FIRST:
            which.drafts.add(state.candidates if any(behind) else batch, longest or max(asked), draft_s)
        if any(behind):
            self._behind.measure(rows, behind, steps, [0] * batch, self._lost(rows, steps, behind))
        if state.trimmed:
            self._first.reach.add(rows, None, state.kinds, steps, [not n for n in behind])
        elif any(mine):
            self._first.measure(rows, mine, steps, state.kinds, self._lost(rows, steps, mine))

    def _lost(self, rows: Rows, steps: Sequence[Step], budgets: Sequence[int]) -> float | None:
        """Seconds that a step took longer than its tokens would have without these drafts; None where all rows must have them."""
        curve, one = self._passes.curve(len(steps)), steps[0]
        if curve is None or not any(n for n, held in zip(budgets, self._held(rows), strict=True) if held is None):
            return None
        others = [step.num_drafted for step, n in zip(steps, budgets, strict=True) if not n]
        alone = float(curve.at(sum(others) if rows.ragged else max(others, default=0)))
        gained = sum(step.num_accepted for step, n in zip(steps, budgets, strict=True) if n)
        rate = self._rate(rows)
        return one.total_s - alone - (gained / rate if rate else 0.0)

    @property
    def estimates(self) -> Mapping[str, float]:
        """What is known at batch 1, for reports: seconds of a plain pass, and acceptance of the first draft token."""
        curve = self._passes.curve(1)
        return {"plain_pass_s": float(curve.at(0)) if curve else 0.0, "first_accepted": self._first.reach.first_held}
