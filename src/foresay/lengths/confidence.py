"""Lengths that end where the draft model becomes unsure: by its probability of the token just drawn, or by its entropy.

The unsure token itself stays: dropping it for its own value would condition its law. A greedy draft's law is a point mass,
so there the softmax at temperature 1 is looked at. Drafters without a model are never unsure.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from foresay.checks import check_float, check_int
from foresay.decoding.distributions import entropy
from foresay.decoding.protocols import DraftStep, LengthPolicy
from foresay.decoding.rows import Rows
from foresay.lengths.constant import MAX_DRAFT_TOKENS


class _UntilUnsure(LengthPolicy):
    """Draft until a measure of doubt passes a bound, within [low, high]."""

    remembers = False

    def __init__(self, low: int, high: int) -> None:
        self.high = check_int("high", high, 1, MAX_DRAFT_TOKENS)
        self.low = check_int("low", low, 1, self.high)

    def budget(self, rows: Rows) -> list[int]:
        """The upper bound."""
        return [self.high] * len(rows)

    def keep_drafting(self, step: DraftStep) -> torch.Tensor | None:
        """Rows whose last token the draft was sure of draft on; all of them up to the lower bound."""
        return self.sure(step) | (step.index + 1 < self.low)

    @abstractmethod
    def sure(self, step: DraftStep) -> torch.Tensor:
        """[B] bool."""


class ConfidenceLength(_UntilUnsure):
    """Stop after a token whose probability q(x) is below a threshold."""

    def __init__(self, threshold: float = 0.4, *, low: int = 1, high: int = 20) -> None:
        super().__init__(low, high)
        self.threshold = check_float("threshold", threshold, 0.0, 1.0)

    def sure(self, step: DraftStep) -> torch.Tensor:
        """q(x) >= threshold."""
        ids, distributions = step.token_ids[:, None], step.distributions
        if distributions.probs_row is None:
            return distributions.confidence(ids)[:, 0] >= self.threshold
        drawn = distributions.prob_of(ids)[:, 0]
        greedy = distributions.probs_row[:, 0] < 0
        if bool(greedy.any()):
            drawn = torch.where(greedy, distributions.confidence(ids)[:, 0], drawn)
        return drawn >= self.threshold


class EntropyLength(_UntilUnsure):
    """Stop after a token that was drawn from a law of high entropy (in nats)."""

    def __init__(self, threshold: float = 2.0, *, low: int = 1, high: int = 20) -> None:
        super().__init__(low, high)
        self.threshold = check_float("threshold", threshold, 0.0, 100.0)

    def sure(self, step: DraftStep) -> torch.Tensor:
        """H(q) <= threshold."""
        distributions = step.distributions
        assert distributions.scores is not None
        raw = entropy(distributions.scores[:, 0].float().softmax(-1))
        if distributions.probs is None or distributions.probs_row is None:
            return raw <= self.threshold
        index = distributions.probs_row[:, 0]
        return torch.where(index >= 0, entropy(distributions.probs)[index.clamp(min=0)], raw) <= self.threshold
