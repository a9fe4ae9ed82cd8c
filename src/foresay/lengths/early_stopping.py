"""Drafts that end where they are no longer sure: which rows are drafted for, and when one more token does not pay.

A draft says q_j of its j-th token. How often tokens held of which it said as much is counted, a(q): the chance that all of
them hold is S_j = a(q_1) ... a(q_j). One more token of each of n rows pays where

    sum S_j m > rate (d + n c)

m: how often a further token holds; d: a pass of the draft, which the n rows share; c: what a column takes of the target's pass;
the rate is pace.py's. A row is drafted for where the tokens that such drafts brought lately are worth the time
that they took. Owns these counts of one drafter. Knows neither costs nor laws.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from foresay.decoding.outcome import Step
from foresay.decoding.rows import IntArray, Rows
from foresay.lengths.budgets import StepContext
from foresay.lengths.costs import Curve, FloatArray

_BUCKETS = 10
"""Of what a draft says, each with counts of its own."""
_FORGET = 0.99
"""What a step leaves of the counts of all rows."""
_ROW_FORGETS = 0.97
"""What a step leaves of a row's own, whether it was drafted for or not: what failed once is tried again."""
_DOUBT = 6.0
"""Observations that count as much as what is thought before any: that a draft is as sure as it says, and the next three."""
_FURTHER = 0.6
"""Of further tokens, those that hold."""
_HELD, _DRAWN = 1.0, 2.0
"""Of a draft: tokens that hold, and all."""
_ROW_DOUBT = 24.0
"""Drafts of all rows that count as much as those of a row itself."""


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Of one more token of n rows, in what S must come to: all of theirs together more than shared + n each."""

    shared: float
    each: float


@dataclass(slots=True)
class _Chains:
    """The drafts of a step under way."""

    price: TokenCost
    room: IntArray
    """[B], tokens that each draft may have."""
    going: npt.NDArray[np.bool_]
    """[B], rows that have not ended."""
    chance: FloatArray
    """[B], S."""
    said: FloatArray
    """[B, high], q; NaN where nothing was drawn."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What pays."""

    most: list[int]
    """[B] tokens there may be of each row's draft."""
    price: TokenCost
    """What `goes_on` asks for."""


class _Seen(IntEnum):
    """Places of what is counted of drafts."""

    DRAFTS = 0
    HELD = 1
    DRAWN = 2


class EarlyStopping:
    """One drafter that says how sure it is of its tokens."""

    def __init__(self, high: int, own: str) -> None:
        """high: most tokens of a draft. own: names what rows remember of it."""
        self._high, self._own, self._memo = high, own, f"{own} of a step"
        self._held, self._tested = np.zeros(_BUCKETS), np.zeros(_BUCKETS)
        """By what was said: tokens that held, and that were tested."""
        self._further = np.zeros(2)
        """The same of tokens behind a draft's first."""
        self._drafts = np.zeros(3)
        """Drafts, their tokens that held, and all of them."""
        self.is_whole = True
        """Whether it was heard about every token that was drafted: else drafts have parts that nothing ends."""
        self._depths: dict[int, FloatArray] = {}
        """By the logarithm of how many rows are drafted for: steps, and the longest drafts of them."""

    def worth(
        self,
        rows: Rows,
        asked: Sequence[bool],
        held: Sequence[int | None],
        passes: Curve,
        drafting: Curve,
        ground: StepContext,
        *,
        hoped: float = 0.0,
    ) -> DraftPlan | None:
        """The rows whose drafts pay; None where none does.

        asked: rows that it may draft for. held: what some must have. hoped: drafts that are thought to have held whole beside
        those that were seen, which matters while few were.
        """
        expected = self._expected(rows, hoped)
        must = [n or 0 for n in held]
        free = sorted((i for i, on in enumerate(asked) if on and held[i] is None), key=lambda i: -expected[i])
        if not free:
            return None
        numbers = np.arange(1, len(free) + 1)
        drawn = self._mean(_Seen.DRAWN, _DRAWN)
        columns = ground.columns + sum(must) if rows.ragged else max(ground.columns, *must)
        wide = columns + numbers * drawn if rows.ragged else np.maximum(columns, np.full(len(free), drawn))
        depths = np.array([self._depth(n) for n in numbers.tolist()])
        alone = float(drafting.at(max(must))) if any(must) else 0.0
        seconds = np.maximum(drafting.at(depths) - alone, 0.0) + passes.at(wide) - passes.at(columns)
        gains = expected[free].cumsum() - ground.rate * seconds
        count = int(gains.argmax()) + 1 if rows.ragged else len(free)
        if gains[count - 1] <= 0:
            return None
        price = self._price(count, float(wide[count - 1]), passes, drafting, ground.rate, ragged=rows.ragged)
        chosen = set(free[:count])
        return DraftPlan([self._high if i in chosen else n for i, n in enumerate(must)], price)

    def forget(self, rows: Rows, places: Iterable[int]) -> None:
        """These rows were not drafted for: what is known of them fades, so that they are asked for again."""
        for i in places:
            extras = rows.rows[i].extras
            if self._own in extras:
                extras[self._own] = tuple(_ROW_FORGETS * count for count in extras[self._own])

    def _price(
        self, count: int, wide: float, passes: Curve, drafting: Curve, rate: float, *, ragged: bool
    ) -> TokenCost:
        """Of one more token of so many rows, whose drafts are `wide` columns."""
        further = rate * float((self._further[1] + _DOUBT) / (self._further[0] + _DOUBT * _FURTHER))
        draft_s = float(drafting.at(3) - drafting.at(2))
        wider = float(passes.at(wide + (count if ragged else 1)) - passes.at(wide))
        return (
            TokenCost(further * draft_s, further * wider / count)
            if ragged
            else TokenCost(further * (draft_s + wider), 0.0)
        )

    def begin(self, rows: Rows, price: TokenCost, most: Sequence[int]) -> None:
        """Drafts of these rows go on while they are worth the price. most: tokens of each."""
        room = np.array([min(n, row.remaining - 1) for n, row in zip(most, rows, strict=True)])
        said = np.full((len(rows), self._high), np.nan)
        rows.memo[self._memo] = _Chains(price, room, room > 0, np.ones(len(rows)), said)

    def limit(self, rows: Rows, most: Sequence[int]) -> None:
        """Drafts of these rows are to have no more tokens than these."""
        if self.is_begun(rows):
            chains: _Chains = rows.memo[self._memo]
            chains.room = np.minimum(chains.room, np.array(most))
            chains.going = chains.going & (chains.room > 0)

    def goes_on(self, rows: Rows, index: IntArray, said: FloatArray) -> npt.NDArray[np.bool_]:
        """Which rows draft on, [B]. index: [B], the places of the tokens just drawn. said: [B], how sure it is of each."""
        chains: _Chains = rows.memo[self._memo]
        chains.said[np.arange(len(said)), np.minimum(index, self._high - 1)] = said
        chains.chance = chains.chance * self._chances()[_bucket(said)]
        able = chains.going & (index + 1 < chains.room)  # who has no room left shares no price
        chances = np.where(able, chains.chance, 0.0)
        best = np.sort(chances)[::-1]
        gains = best.cumsum() - chains.price.shared - chains.price.each * np.arange(1, len(best) + 1)
        count = int(gains.argmax())
        chains.going = able & (chances >= best[count]) & bool(gains[count] > 0)
        return chains.going

    def is_begun(self, rows: Rows) -> bool:
        """Whether drafts of these rows end where they are unsure."""
        return self._memo in rows.memo

    def leave(self, rows: Rows) -> None:
        """Drafts of these rows go on to their ends."""
        rows.memo.pop(self._memo, None)

    def is_first(self, rows: Rows, drafted: Sequence[int]) -> bool:
        """Whether one of the rows that drafted so many tokens never did before, so that its draft took its prompt along."""
        return any(n and self._own not in row.extras for row, n in zip(rows, drafted, strict=True))

    def learn(self, rows: Rows, steps: Sequence[Step], mine: Sequence[bool]) -> None:
        """What became of the drafts of a step. mine: the rows that were drafted for."""
        chains: _Chains | None = rows.memo.get(self._memo)
        self._drafts *= _FORGET
        self._further *= _FORGET
        self._held *= _FORGET
        self._tested *= _FORGET
        deepest = count = 0
        for i, (row, step, on) in enumerate(zip(rows, steps, mine, strict=True)):
            drawn, held = step.num_drafted, step.num_accepted
            if not on or not drawn:
                continue
            deepest, count = max(deepest, drawn), count + 1
            tested = min(held + 1, drawn)
            self._drafts += (1, held, drawn)
            self._further += (max(0, held - 1), tested - 1)
            drafts, brought = row.extras.get(self._own, (0.0, 0.0))
            row.extras[self._own] = (drafts * _ROW_FORGETS + 1, brought * _ROW_FORGETS + held)
            if chains is not None:
                said = chains.said[i, :tested]
                known = ~np.isnan(said)
                self.is_whole = self.is_whole and bool(known.all())
                where = _bucket(said[known])
                np.add.at(self._tested, where, 1.0)
                np.add.at(self._held, where, (np.arange(len(said)) < held)[known])
        if count:
            seen = self._depths.setdefault(count.bit_length(), np.zeros(2))
            seen *= _FORGET
            seen += (1, deepest)

    def _expected(self, rows: Rows, hoped: float) -> FloatArray:
        """[B] tokens that hold of each row's next draft."""
        mean = self._mean(_Seen.HELD, _HELD, hoped)
        own = np.array([row.extras.get(self._own, (0.0, 0.0)) for row in rows])
        out: FloatArray = (own[:, 1] + _ROW_DOUBT * mean) / (own[:, 0] + _ROW_DOUBT)
        return out

    def _mean(self, which: _Seen, usual: float, hoped: float = 0.0) -> float:
        """Of a draft. usual: before any was seen. hoped: drafts that are thought to have held whole beside those."""
        seen = self._drafts[which] + _DOUBT * usual + hoped * _DRAWN
        return float(seen / (self._drafts[_Seen.DRAFTS] + _DOUBT + hoped))

    def _depth(self, count: int) -> float:
        """Tokens of the longest of so many rows' drafts."""
        seen = self._depths.get(count.bit_length())
        drawn = self._mean(_Seen.DRAWN, _DRAWN)
        return drawn if seen is None else float((seen[1] + drawn) / (seen[0] + 1))

    def _chances(self) -> FloatArray:
        """[buckets] a(q)."""
        middles = (np.arange(_BUCKETS) + 0.5) / _BUCKETS
        out: FloatArray = (self._held + _DOUBT * middles) / (self._tested + _DOUBT)
        return out


def _bucket(said: FloatArray) -> IntArray:
    out: IntArray = np.clip((said * _BUCKETS).astype(np.int64), 0, _BUCKETS - 1)
    return out
