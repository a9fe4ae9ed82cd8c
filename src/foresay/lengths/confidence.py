"""Draft until the draft model is unsure: by the probability of the token just drawn, or by the entropy of its distribution.

Drafters without a model have neither.
"""

from __future__ import annotations

from foresay.checks import check_float, check_int
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Rows
from foresay.decoding.stopping import Reads, StoppingRule
from foresay.lengths.constant import MAX_DRAFT_TOKENS


class ConfidenceLength(LengthPolicy):
    """Stop after a draft token whose probability q(x) is below a threshold in [0, 1]."""

    remembers, needs_probabilities, reads, most = False, True, Reads.PROBABILITY, 1.0

    def __init__(self, threshold: float = 0.4, *, low: int = 1, high: int = 20) -> None:
        """low, high: bounds of the draft length."""
        self.high = check_int("high", high, 1, MAX_DRAFT_TOKENS)
        self.low = check_int("low", low, 1, self.high)
        self.threshold = check_float("threshold", threshold, 0.0, self.most)

    def budget(self, rows: Rows) -> list[int]:
        """Return the upper bound for each row."""
        return [self.high] * len(rows)

    def rule(self, rows: Rows) -> StoppingRule:
        """See LengthPolicy."""
        return StoppingRule(self.reads, self.threshold, self.low)


class EntropyLength(ConfidenceLength):
    """Stop after a draft token whose distribution q has an entropy above a threshold, in nats."""

    reads, most = Reads.ENTROPY, 100.0

    def __init__(self, threshold: float = 2.0, *, low: int = 1, high: int = 20) -> None:
        """low, high: bounds of the draft length."""
        super().__init__(threshold, low=low, high=high)
