"""A drafter that takes time: what its guesses cost, how far they reach, and how many of them pay.

Owns these measurements of one drafter, and its trials. Knows nothing of what else a step drafts but how much there is of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foresay.decoding.outcome import Step
from foresay.decoding.rows import Rows
from foresay.lengths.budgets import Ground, best_for_all, best_for_each, least_confidence
from foresay.lengths.costs import Curve, DraftCosts, FloatArray
from foresay.lengths.reach import Reach
from foresay.lengths.trials import Trials


class Paid:
    """One drafter."""

    def __init__(self, start: int, high: int, own: str) -> None:
        """start: tokens of a draft of a trial. high: most of any. own: names what rows remember of it."""
        self.start, self.high = start, high
        self.drafts, self.reach, self.trials = DraftCosts(), Reach(high, own), Trials()
        self.least: FloatArray | None = None
        """How sure it must be of each token for one more to pay; None where it drafts all that it is asked for."""

    def best(
        self, rows: Rows, asked: Sequence[bool], held: Sequence[int | None], passes: Curve | None, ground: Ground
    ) -> list[int] | None:
        """Budgets of the greatest throughput; None where that is none at all, or nothing is known.

        asked: the rows that it may draft for. held: what some of them must have.
        """
        drafts = self.drafts.curve(sum(asked))
        if passes is None or drafts is None:
            return None
        most = min(self.high, self.reach.longest + 2)
        mine = np.array(asked)[:, None]
        guessed = self.reach.guessed()[1 : most + 1] * mine
        chances = self.reach.held(rows)[:, 1 : most + 1] * mine
        drafting = drafts.at(np.arange(1, most + 1))
        if rows.ragged:
            out = best_for_each(chances, guessed, passes, drafting, held, ground)
        else:
            wide = self.reach.widest()[1 : most + 1]
            length = best_for_all((guessed * chances).sum(0), wide, passes, drafting, ground)
            out = [length * on if n is None else n for n, on in zip(held, asked, strict=True)] if length else None
        if out is not None and any(out):
            self.least = least_confidence(out, chances, passes, drafting, ground, ragged=rows.ragged)
        return out

    def choose(
        self, rows: Rows, asked: Sequence[bool], held: Sequence[int | None], passes: Curve | None, ground: Ground,
        *, joined: bool,
    ) -> list[int]:  # fmt: skip
        """Budgets, those of a trial and of rows that are held to theirs among them. joined: see `Trials.begin`."""
        trial, nothing = (
            [n * on if k is None else k for on, k in zip(asked, held, strict=True)] for n in (self.start, 0)
        )
        self.least = None
        if self.trials.left:
            return trial
        best = self.best(rows, asked, held, passes, ground)
        if best is not None:
            self.trials.paid()
            return best
        return trial if self.trials.begin(joined) else nothing

    def measure(
        self, rows: Rows, budgets: Sequence[int], steps: Sequence[Step], kinds: Sequence[int], lost_s: float | None
    ) -> None:
        """A step in which it was asked for these. kinds: of matches. lost_s: see `Trials.drafted`; None where nobody chose."""
        self.reach.add(rows, budgets, kinds, steps, [n > 0 for n in budgets])
        if lost_s is not None:
            self.trials.drafted(lost_s, steps[0].total_s)
