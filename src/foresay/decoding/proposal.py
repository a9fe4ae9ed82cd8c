"""What a drafter guessed, and what the target said to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a drafter guessed.

    token_ids: [B, K] int64, right-padded. num_tokens: B ints, 0 <= n <= K.
    laws: [N, V] float32, the laws that sampled tokens were drawn from. law_index: [B, K] into laws, -1 = point mass;
    None when no token was sampled. confidence: [B, K] float32, the draft model's softmax probability of each token at
    temperature 1, which no exact rule looks at; None where no model made a guess.
    """

    token_ids: torch.Tensor
    num_tokens: Sequence[int]
    laws: torch.Tensor | None = None
    law_index: torch.Tensor | None = None
    confidence: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """K, the length of the longest guess."""
        return int(self.token_ids.shape[1])

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> Proposal:
        """No guesses: plain decoding."""
        return cls(torch.empty(batch, 0, dtype=torch.int64, device=device), [0] * batch)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target said: num_accepted [B] int64, and token_ids [B], the residual after a rejection, else the bonus."""

    num_accepted: torch.Tensor
    token_ids: torch.Tensor
