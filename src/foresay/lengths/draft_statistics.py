"""Acceptance statistics: how often a drafter proposes k tokens, and how often k tokens are accepted, overall and for each row.

Owns exponentially decayed counts. Longer n-gram matches are accepted more often, so each bucket of match lengths has its own
counts. A row's own acceptance adjusts the shared estimate, the more the more of its tokens were tested: with h the acceptance
probability of a tested token in its match bucket, and h_i the one observed in row i,

    P_i(k tokens accepted | k drafted) = P(k tokens accepted | k drafted) ^ (log h_i / log h)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foresay.decoding.outcome import Step
from foresay.decoding.rows import Rows
from foresay.decoding.state import StateKey
from foresay.lengths.costs import FloatArray

_DECAY = 0.98
"""Factor per step of the counts over all rows."""
_IDLE_DECAY = 0.998
"""Factor per step of the counts of match buckets without a draft in the step: they drift back to the prior."""
_ROW_DECAY = 0.95
"""Factor per step of a row's own counts, so that old rejections are soon forgotten."""
_PRIOR_WEIGHT = 4
"""Weight, in observations, of the estimate extrapolated from shorter lengths, and of the prior of a tested token."""
_PRIOR = (0.5, 0.2, 0.5, 0.7, 0.85, 0.95)
"""Prior acceptance probability of a draft's first token by match bucket, measured on chats, code, edits and extractions."""
_ROW_PRIOR_WEIGHT, _ROW_PRIOR_WEIGHT_MATCHED = 4, 12
"""Weight, in tested tokens, of the shared estimate in a row's; more where match buckets already distinguish rows."""
_FIRST_PRIOR_WEIGHT = 2
"""Weight, in drafts, of `_PRIOR` in the estimate of a match bucket's first token."""
_NUM_BUCKETS = len(_PRIOR)
_MIN, _MAX = 0.02, 0.98
"""Bounds of a token's acceptance probability."""


def match_bucket(matched: int) -> int:
    """Return the bucket of a match length: 0 (unknown), 1, 2, 3 (for 3 and 4 tokens), 4 (5 to 8) or 5 (more)."""
    return matched if matched <= 2 else 3 if matched <= 4 else 4 if matched <= 8 else 5


class DraftStatistics:
    """Counts of requested, drafted and accepted tokens by length from 0 to `high`."""

    def __init__(self, high: int) -> None:
        """high: longest draft."""
        self._size = high + 1
        self._row = StateKey[tuple[float, float, float]](lambda: (0.0, 0.0, 0.0))
        """A row's accepted tokens, tested tokens, and accepted tokens as expected by match bucket."""
        self._requested, self._drafted = np.zeros(high + 1), np.zeros(high + 1)
        """Rows with a budget of at least k tokens, and rows with at least k draft tokens."""
        self._batch_requested, self._batch_drafted = np.zeros(high + 1), np.zeros(high + 1)
        """Batches in which any row had a budget of at least k tokens, or at least k draft tokens."""
        self._drafts, self._accepted = np.zeros((_NUM_BUCKETS, high + 1)), np.zeros((_NUM_BUCKETS, high + 1))
        """By match bucket: drafts of at least k tokens, and drafts with at least k accepted tokens."""
        self._tokens = np.zeros((2, _NUM_BUCKETS))
        """Accepted tokens and tested tokens by match bucket."""

    def add(
        self,
        rows: Rows,
        budgets: Sequence[int] | None,
        buckets: Sequence[int],
        steps: Sequence[Step],
        is_own: Sequence[bool],
    ) -> None:
        """Count one step.

        budgets: tokens requested from the drafter; None if not all tokens that it found were scored. buckets: match buckets.
        is_own: rows whose draft came from this drafter.
        """
        drafted = [step.num_drafted * own for step, own in zip(steps, is_own, strict=True)]
        accepted = [step.num_accepted * own for step, own in zip(steps, is_own, strict=True)]
        tested = [a + (a < d) for a, d in zip(accepted, drafted, strict=True)]
        token_probs = self._token_probs().tolist()
        if budgets is not None:
            self._count_requests(np.array(budgets), np.array(drafted))
        decay = np.full(_NUM_BUCKETS, _IDLE_DECAY)
        decay[[bucket for bucket, d in zip(buckets, drafted, strict=True) if d]] = _DECAY
        self._drafts *= decay[:, None]
        self._accepted *= decay[:, None]
        self._tokens *= decay
        for row, bucket, d, a, num_tested in zip(rows, buckets, drafted, accepted, tested, strict=True):
            if d:
                self._drafts[bucket, : d + 1] += 1
                self._accepted[bucket, : a + 1] += 1
                self._tokens[:, bucket] += (a, num_tested)
            old_accepted, old_tested, old_expected = self._row.of(row)
            expected = num_tested * token_probs[bucket]
            self._row.put(
                row,
                (
                    old_accepted * _ROW_DECAY + a,
                    old_tested * _ROW_DECAY + num_tested,
                    old_expected * _ROW_DECAY + expected,
                ),
            )

    def _count_requests(self, budgets: npt.NDArray[np.int64], drafted: npt.NDArray[np.int64]) -> None:
        for counts in (self._requested, self._drafted, self._batch_requested, self._batch_drafted):
            counts *= _DECAY  # also at lengths that are no longer requested
        self._requested += self._at_least(budgets)
        self._drafted += self._at_least(drafted)
        self._batch_requested[: int(budgets.max()) + 1] += 1
        self._batch_drafted[: int(drafted.max()) + 1] += 1

    def _at_least(self, values: npt.NDArray[np.int64]) -> FloatArray:
        """Return how many values are at least 0, 1, ..., [high + 1]."""
        exactly = np.bincount(np.minimum(values, self._size - 1), minlength=self._size).astype(np.float64)
        return np.cumsum(exactly[::-1])[::-1]

    @property
    def longest(self) -> int:
        """Longest draft that was recently requested; 0 if there is none."""
        return int((self._requested[1:] >= 1).sum())

    @property
    def first_accepted(self) -> float:
        """Share of first draft tokens that were accepted; 0 before the first draft."""
        drafts = float(self._drafts[:, 1].sum())
        return float(self._accepted[:, 1].sum()) / drafts if drafts else 0.0

    def draft_probs(self) -> FloatArray:
        """Return P(a row drafts k tokens | k were requested), [high + 1]."""
        return _survival(self._drafted, self._requested)

    def width_probs(self) -> FloatArray:
        """Return P(any row of a batch drafts k tokens | k were requested), [high + 1]."""
        return _survival(self._batch_drafted, self._batch_requested)

    def accept_probs(self, rows: Rows, buckets: Sequence[int] | None = None, *, optimism: float = 0.0) -> FloatArray:
        """Return P(k tokens accepted | k drafted) for each row, [B, high + 1].

        buckets: [B] match buckets; None averages over all buckets. optimism: fully accepted drafts added to the counts, which
        matter while there are few others; only without buckets.
        """
        weight = _ROW_PRIOR_WEIGHT if buckets is None else _ROW_PRIOR_WEIGHT_MATCHED
        exponents = np.array([_row_exponent(self._row.of(row), weight) for row in rows])[:, None]
        if buckets is None:
            probs = _survival(self._accepted.sum(0) + optimism, self._drafts.sum(0) + optimism)[None]
        else:
            by_bucket = {b: _prior_survival(self._accepted[b], self._drafts[b], _PRIOR[b]) for b in set(buckets)}
            probs = np.array([by_bucket[b] for b in buckets])
        out: FloatArray = probs**exponents
        return out

    def _token_probs(self) -> FloatArray:
        """Return the acceptance probability h of a tested token by match bucket."""
        probs: FloatArray = (self._tokens[0] + _PRIOR_WEIGHT * np.array(_PRIOR)) / (self._tokens[1] + _PRIOR_WEIGHT)
        return probs.clip(_MIN, _MAX)


def _row_exponent(counts: tuple[float, float, float], weight: float) -> float:
    """Return log h_i / log h, where h averages over the row's match buckets.

    counts: the row's accepted tokens, tested tokens and expected accepted tokens.
    """
    accepted, tested, expected = counts
    if not tested:
        return 1.0
    shared = min(max(expected / tested, _MIN), _MAX)
    own = min(max((accepted + weight * shared) / (tested + weight), _MIN), _MAX)
    return float(np.log(own) / np.log(shared))


def _survival(counts: FloatArray, totals: FloatArray) -> FloatArray:
    """Return the probability of reaching k = 0, 1, ..., never rising.

    The prior for k extrapolates the last ratio between neighbours geometrically, with a weight of _PRIOR_WEIGHT observations.
    """
    out = [1.0, min(1.0, float(counts[1] / totals[1])) if totals[1] else 0.5]
    for k in range(2, len(counts)):
        expected = out[-1] * (out[-1] / out[-2] if out[-2] > 0 else 0.5)
        out.append(min(out[-1], float((counts[k] + _PRIOR_WEIGHT * expected) / (totals[k] + _PRIOR_WEIGHT))))
    return np.array(out)


def _prior_survival(counts: FloatArray, totals: FloatArray, first: float) -> FloatArray:
    """Return the same for a match bucket. Prior: `first` for one token; each further one fails half as often as the first."""
    out = [1.0, min(1.0, float((counts[1] + _FIRST_PRIOR_WEIGHT * first) / (totals[1] + _FIRST_PRIOR_WEIGHT)))]
    for k in range(2, len(counts)):
        expected = out[-1] * (1 + out[1]) / 2
        out.append(min(out[-1], float((counts[k] + _PRIOR_WEIGHT * expected) / (totals[k] + _PRIOR_WEIGHT))))
    return np.array(out)
