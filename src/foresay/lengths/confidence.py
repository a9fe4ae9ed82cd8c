"""Draft until the draft model is unsure: by the probability of the token just drawn, or by the entropy of its distribution.

The unsure token itself stays in the draft: dropping it because of its own value would condition its distribution. A greedy
draft's distribution is a point mass, so the softmax at temperature 1 is used instead. Drafters without a model never stop early.
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
    """Draft between low and high tokens, until `sure` is False."""

    remembers = False

    def __init__(self, low: int, high: int) -> None:
        self.high = check_int("high", high, 1, MAX_DRAFT_TOKENS)
        self.low = check_int("low", low, 1, self.high)

    def budget(self, rows: Rows) -> list[int]:
        """Return the upper bound for each row."""
        return [self.high] * len(rows)

    def keep_drafting(self, step: DraftStep) -> torch.Tensor | None:
        """Return True for rows below the lower bound or with a sure last token, [B] bool."""
        return self.sure(step) | (step.index + 1 < self.low)

    @abstractmethod
    def sure(self, step: DraftStep) -> torch.Tensor:
        """Return True for rows in which the draft model is sure, [B] bool."""


class ConfidenceLength(_UntilUnsure):
    """Stop after a draft token whose probability q(x) is below a threshold in [0, 1]."""

    def __init__(self, threshold: float = 0.4, *, low: int = 1, high: int = 20) -> None:
        super().__init__(low, high)
        self.threshold = check_float("threshold", threshold, 0.0, 1.0)

    def sure(self, step: DraftStep) -> torch.Tensor:
        """Return q(x) >= threshold, [B] bool."""
        ids, distributions = step.token_ids[:, None], step.distributions
        if distributions.probs_row is None:
            return distributions.confidence(ids)[:, 0] >= self.threshold
        drawn = distributions.prob_of(ids)[:, 0]
        greedy = distributions.probs_row[:, 0] < 0
        if bool(greedy.any()):
            drawn = torch.where(greedy, distributions.confidence(ids)[:, 0], drawn)
        return drawn >= self.threshold


class EntropyLength(_UntilUnsure):
    """Stop after a draft token whose distribution q has an entropy above a threshold, in nats."""

    def __init__(self, threshold: float = 2.0, *, low: int = 1, high: int = 20) -> None:
        super().__init__(low, high)
        self.threshold = check_float("threshold", threshold, 0.0, 100.0)

    def sure(self, step: DraftStep) -> torch.Tensor:
        """Return H(q) <= threshold, [B] bool."""
        distributions = step.distributions
        assert distributions.scores is not None
        raw = entropy(distributions.scores[:, 0].float().softmax(-1))
        if distributions.probs is None or distributions.probs_row is None:
            return raw <= self.threshold
        index = distributions.probs_row[:, 0]
        return torch.where(index >= 0, entropy(distributions.probs)[index.clamp(min=0)], raw) <= self.threshold
