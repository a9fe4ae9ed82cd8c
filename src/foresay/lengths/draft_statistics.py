"""How far drafts reach: how often a drafter guesses k tokens, and how often that many hold, for all rows and for each.

Owns the counts, which forget. Guesses that continue longer matches hold more often, so each kind of match has counts of its
own. What a row has seen of its own tilts what all rows have seen, the more the more it has seen: with h the chance that a
tested token holds by its kind of match, and h_i what row i saw,

    P_i(k tokens hold | k were guessed) = P(k tokens hold | k were guessed) ^ (log h_i / log h)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foresay.decoding.outcome import Step
from foresay.decoding.rows import Rows
from foresay.lengths.costs import FloatArray

_FORGET = 0.98
"""What a step leaves of the counts of all rows."""
_FADE = 0.998
"""What a step leaves of the counts of kinds that it did not meet: they are expected to be as usual again."""
_ROW_FORGETS = 0.95
"""What a step leaves of a row's own counts: guesses that failed are not held against it for long."""
_DOUBT = 4
"""Observations that count as much as what shorter lengths, other rows or `_USUAL` make one expect."""
_USUAL = (0.5, 0.2, 0.5, 0.7, 0.85, 0.95)
"""The chance of a guess's first token by kind, before anything is seen: measured on chats, code, edits and extractions."""
_ROW_DOUBT, _ROW_DOUBT_OF_KINDS = 4, 12
"""Tested tokens of all rows that count as much as a row's own; more where the kinds of matches tell rows apart already."""
_DOUBT_OF_KINDS = 2
"""As `_DOUBT`, of `_USUAL`."""
_KINDS = len(_USUAL)
_LOW, _HIGH = 0.02, 0.98
"""Bounds of the chance that a token holds."""


def kind_of(matched: int) -> int:
    """The kind of a match of so many tokens: 0 (unknown), 1, 2, up to 4, up to 8, longer."""
    return matched if matched <= 2 else 3 if matched <= 4 else 4 if matched <= 8 else 5


class DraftStatistics:
    """Counts by length, 0 to `high`: of rows asked for so many tokens, of those that guessed them, of those where they held."""

    def __init__(self, high: int, own: str) -> None:
        """high: longest draft. own: where a row remembers what it has seen of these."""
        self._size, self._own = high + 1, own
        self._offered, self._drafted = np.zeros(high + 1), np.zeros(high + 1)
        self._asked, self._widest = np.zeros(high + 1), np.zeros(high + 1)
        """The same of batches: where any row was asked for so many tokens, and where any guessed them."""
        self._tried, self._held = np.zeros((_KINDS, high + 1)), np.zeros((_KINDS, high + 1))
        """By kind: guesses, and those that held."""
        self._tokens = np.zeros((2, _KINDS))
        """Tokens that held, and all that were tested, by kind."""

    def add(
        self,
        rows: Rows,
        budgets: Sequence[int] | None,
        kinds: Sequence[int],
        steps: Sequence[Step],
        mine: Sequence[bool],
    ) -> None:
        """Count one step.

        budgets: what the drafter was asked for; None where less of its guesses was taken. mine: the rows whose guesses are this
        drafter's.
        """
        drafted = [step.num_drafted * on for step, on in zip(steps, mine, strict=True)]
        held = [step.num_accepted * on for step, on in zip(steps, mine, strict=True)]
        tested = [h + (h < d) for h, d in zip(held, drafted, strict=True)]
        chances = self._token_chances().tolist()
        if budgets is not None:
            self._ask(np.array(budgets), np.array(drafted))
        leave = np.full(_KINDS, _FADE)
        leave[[kind for kind, d in zip(kinds, drafted, strict=True) if d]] = _FORGET
        self._tried *= leave[:, None]
        self._held *= leave[:, None]
        self._tokens *= leave
        for row, kind, d, h, of_all in zip(rows, kinds, drafted, held, tested, strict=True):
            if d:
                self._tried[kind, : d + 1] += 1
                self._held[kind, : h + 1] += 1
                self._tokens[:, kind] += (h, of_all)
            before = row.extras.get(self._own, (0.0, 0.0, 0.0))
            seen = (h, of_all, of_all * chances[kind])
            row.extras[self._own] = tuple(a * _ROW_FORGETS + b for a, b in zip(before, seen, strict=True))

    def _ask(self, budgets: npt.NDArray[np.int64], drafted: npt.NDArray[np.int64]) -> None:
        for counts in (self._offered, self._drafted, self._asked, self._widest):
            counts *= _FORGET  # lengths that are no longer offered too
        self._offered += self._at_least(budgets)
        self._drafted += self._at_least(drafted)
        self._asked[: int(budgets.max()) + 1] += 1
        self._widest[: int(drafted.max()) + 1] += 1

    def _at_least(self, seen: npt.NDArray[np.int64]) -> FloatArray:
        """[high + 1] how many are at least 0, 1, ..."""
        exactly = np.bincount(np.minimum(seen, self._size - 1), minlength=self._size).astype(np.float64)
        return np.cumsum(exactly[::-1])[::-1]

    @property
    def longest(self) -> int:
        """The longest draft that was asked for lately; 0 for none."""
        return int((self._offered[1:] >= 1).sum())

    @property
    def first_held(self) -> float:
        """The share of first draft tokens that held; 0 before any was seen."""
        tried = float(self._tried[:, 1].sum())
        return float(self._held[:, 1].sum()) / tried if tried else 0.0

    def drafted(self) -> FloatArray:
        """[high + 1] the chance that a row guesses k tokens when it is asked for that many."""
        return _shares(self._drafted, self._offered)

    def widest(self) -> FloatArray:
        """[high + 1] the chance that any row of a batch does."""
        return _shares(self._widest, self._asked)

    def held(self, rows: Rows, kinds: Sequence[int] | None = None, *, hoped: float = 0.0) -> FloatArray:
        """[B, high + 1] the chance that k tokens of a row hold where it guesses as many. kinds: of matches; None, of any.

        hoped: guesses that are thought to have held beside those that were seen, which matters while few were.
        """
        doubt = _ROW_DOUBT if kinds is None else _ROW_DOUBT_OF_KINDS
        tilt = np.array([_tilt(row.extras.get(self._own, (0.0, 0.0, 0.0)), doubt) for row in rows])[:, None]
        if kinds is None:
            shares = _shares(self._held.sum(0) + hoped, self._tried.sum(0) + hoped)[None]
        else:
            known = {k: _usual_shares(self._held[k], self._tried[k], _USUAL[k]) for k in set(kinds)}
            shares = np.array([known[k] for k in kinds])
        out: FloatArray = shares**tilt
        return out

    def _token_chances(self) -> FloatArray:
        """[kinds] the chance h that a tested token holds."""
        chances: FloatArray = (self._tokens[0] + _DOUBT * np.array(_USUAL)) / (self._tokens[1] + _DOUBT)
        return chances.clip(_LOW, _HIGH)


def _tilt(seen: tuple[float, float, float], doubt: float) -> float:
    """log h_i / log h, h over the kinds of matches that the row has met. seen: by a row: held, tested, expected to hold."""
    held, tested, expected = seen
    if not tested:
        return 1.0
    mean = min(max(expected / tested, _LOW), _HIGH)
    own = min(max((held + doubt * mean) / (tested + doubt), _LOW), _HIGH)
    return float(np.log(own) / np.log(mean))


def _shares(counts: FloatArray, of: FloatArray) -> FloatArray:
    """The share that reached k = 0, 1, ...

    Past what was counted it falls as it last fell, and what was counted a few times is held half for that.
    """
    out = [1.0, min(1.0, float(counts[1] / of[1])) if of[1] else 0.5]
    for k in range(2, len(counts)):
        expected = out[-1] * (out[-1] / out[-2] if out[-2] > 0 else 0.5)
        out.append(min(out[-1], float((counts[k] + _DOUBT * expected) / (of[k] + _DOUBT))))
    return np.array(out)


def _usual_shares(counts: FloatArray, of: FloatArray, first: float) -> FloatArray:
    """The same of a kind of match: `first` is usual of one token, and each further one fails half as often as the first."""
    out = [1.0, min(1.0, float((counts[1] + _DOUBT_OF_KINDS * first) / (of[1] + _DOUBT_OF_KINDS)))]
    for k in range(2, len(counts)):
        expected = out[-1] * (1 + out[1]) / 2
        out.append(min(out[-1], float((counts[k] + _DOUBT * expected) / (of[k] + _DOUBT))))
    return np.array(out)
