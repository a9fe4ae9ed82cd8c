"""A drafter that takes time: what its guesses cost, how far they reach, and how many of them pay.

Owns these measurements of one drafter, and its trials. Knows nothing of what else a step drafts but how much there is of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foresay.decoding.outcome import Step
from foresay.decoding.rows import Rows
from foresay.lengths.budgets import StepContext, best_for_all, best_for_each
from foresay.lengths.costs import Curve, DraftCosts
from foresay.lengths.draft_statistics import DraftStatistics
from foresay.lengths.early_stopping import DraftPlan, EarlyStopping, TokenCost
from foresay.lengths.trials import Trials

_LATELY = 4
"""Steps of the same rows for which what was found best is taken to be best still: finding it takes a fortieth of a short pass."""
_TRIED = 0.4
"""How sure a drafter must be of a token in a trial to draw another, where it says how sure it is."""
_HOPED = 3.0
"""Guesses that are thought to have held before a drafter is given up, beside those that were seen: a few failures are chance."""


@dataclass(slots=True)
class _Lately:
    """What was found best for rows."""

    question: Any
    best: list[int] | None
    left: int = _LATELY
    """Steps for which it is taken as it is."""


class MeasuredDrafter:
    """One drafter."""

    def __init__(self, start: int, high: int, own: str) -> None:
        """start: tokens of a draft of the first trial. high: most of any. own: names what rows remember of it."""
        self.start, self.high = start, high
        self.drafts, self.reach, self.trials = DraftCosts(), DraftStatistics(high, own), Trials()
        self._memo = f"{own} lately"
        self.gate = EarlyStopping(high, f"{own} of drafts that end")
        """Where it says how sure it is of its tokens."""

    def best(
        self,
        rows: Rows,
        asked: Sequence[bool],
        held: Sequence[int | None],
        passes: Curve | None,
        ground: StepContext,
        *,
        hoped: float = 0.0,
    ) -> list[int] | None:
        """Budgets of the greatest throughput; None where that is none at all, or nothing is known.

        asked: the rows that it may draft for. held: what some of them must have. hoped: see `DraftStatistics.held`.
        """
        drafts = self.drafts.curve(sum(asked))
        if passes is None or drafts is None:
            return None
        most = min(self.high, self.reach.longest + 2)
        mine = np.array(asked)[:, None]
        drafted = self.reach.drafted()[1 : most + 1] * mine
        chances = self.reach.held(rows, hoped=hoped)[:, 1 : most + 1] * mine
        drafting = drafts.at(np.arange(1, most + 1))
        if rows.ragged:
            out = best_for_each(chances, drafted, passes, drafting, held, ground)
        else:
            wide = self.reach.widest()[1 : most + 1]
            length = best_for_all((drafted * chances).sum(0), wide, passes, drafting, ground)
            out = [length * on if n is None else n for n, on in zip(held, asked, strict=True)] if length else None
        return out

    def choose(
        self, rows: Rows, asked: Sequence[bool], held: Sequence[int | None], passes: Curve | None, ground: StepContext,
        *, joined: bool, gated: bool = False,
    ) -> list[int]:  # fmt: skip
        """Budgets, those of a trial and of rows that are held to theirs among them. joined: see `Trials.begin`.

        gated: it says how sure it is, so that drafts end by themselves.
        """
        gated = gated and self.gate.is_whole
        if not gated:
            self.gate.leave(rows)

        if not self.trials.left:
            find = self._pay if gated else self._lately
            found = find(rows, asked, held, passes, ground)
            if found is not None:
                self.trials.paid()
                return found
            hopeful = self.trials.just_ended and self._is_hopeful(rows, asked, held, passes, ground, gated=gated)
            if not self.trials.goes_on(hopeful):
                self.trials.begin(joined)
        length = 0
        if self.trials.left:
            length = self.start if gated else self._of_trial(rows, asked, passes, ground)
        out = [length * on if n is None else n for n, on in zip(held, asked, strict=True)]
        if gated:
            self.gate.begin(rows, TokenCost(0.0, _TRIED), out)
        return out

    def _worth(
        self, rows: Rows, asked: Sequence[bool], held: Sequence[int | None], passes: Curve | None, ground: StepContext,
        *, hoped: float = 0.0,
    ) -> DraftPlan | None:  # fmt: skip
        """`best` of drafts that end by themselves: all or nothing."""
        drafts = self.drafts.curve(sum(asked))
        if passes is None or drafts is None:
            return None
        return self.gate.worth(rows, asked, held, passes, drafts, ground, hoped=hoped)

    def _pay(
        self, rows: Rows, asked: Sequence[bool], held: Sequence[int | None], passes: Curve | None, ground: StepContext
    ) -> list[int] | None:
        """Begin the drafts that are worth it; None where none is."""
        found = self._worth(rows, asked, held, passes, ground)
        most = [0] * len(asked) if found is None else found.most
        free = [on and n is None for on, n in zip(asked, held, strict=True)]
        self.gate.forget(rows, [i for i, n in enumerate(most) if free[i] and not n])
        if found is None:
            return None
        self.gate.begin(rows, found.price, found.most)
        return found.most

    def _is_hopeful(
        self, rows: Rows, asked: Sequence[bool], held: Sequence[int | None], passes: Curve | None, ground: StepContext,
        *, gated: bool,
    ) -> bool:  # fmt: skip
        """Whether drafts would pay if a few more had held."""
        if gated:
            return self._worth(rows, asked, held, passes, ground, hoped=_HOPED) is not None
        return self.best(rows, asked, held, passes, ground, hoped=_HOPED) is not None

    def _lately(
        self, rows: Rows, asked: Sequence[bool], held: Sequence[int | None], passes: Curve | None, ground: StepContext
    ) -> list[int] | None:
        """`best`, of this step or one of the last few that asked the same."""
        question = (*asked, *held, ground.columns)
        known: _Lately | None = rows.memo.get(self._memo)
        if known is None or known.question != question or not known.left or self.trials.just_ended:
            known = rows.memo[self._memo] = _Lately(question, self.best(rows, asked, held, passes, ground))
        known.left -= 1
        return None if known.best is None else list(known.best)

    def _of_trial(self, rows: Rows, asked: Sequence[bool], passes: Curve | None, ground: StepContext) -> int:
        """The length that loses least if it does not pay, by what is known; the first trial's before anything is."""
        drafts, count = self.drafts.curve(sum(asked)), sum(asked)
        if passes is None or drafts is None or not count:
            return self.start
        most = np.arange(1, self.start + 1)
        chances = self.reach.held(rows, hoped=_HOPED)[:, 1 : self.start + 1] * np.array(asked)[:, None]
        wide = ground.columns + most * count if rows.ragged else np.maximum(ground.columns, most)
        widths = passes.at(wide) - passes.at(ground.columns)
        gains = chances.sum(0).cumsum() - ground.rate * (widths + drafts.at(most))
        return int(gains.argmax()) + 1

    def measure(
        self, rows: Rows, budgets: Sequence[int], steps: Sequence[Step], kinds: Sequence[int], lost_s: float | None
    ) -> None:
        """A step in which it was asked for these. kinds: of matches. lost_s: see `Trials.drafted`; None where nobody chose."""
        mine = [n > 0 for n in budgets]
        self.reach.add(rows, budgets, kinds, steps, mine)
        self.gate.learn(rows, steps, mine)
        if lost_s is not None:
            self.trials.drafted(lost_s, steps[0].total_s)
