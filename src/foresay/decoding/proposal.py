"""What a drafter guessed, and what the target said to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a drafter guessed: a chain of tokens for each row, or a tree.

    token_ids: [B, K] int64, right-padded. num_tokens: B ints, 0 <= n <= K.
    laws: [N, V] float32, the laws that sampled tokens were drawn from. distribution_index: [B, K] into laws, -1 = point mass;
    None when no token was sampled. confidence: [B, K] float32, the draft model's softmax probability of each token at
    temperature 1, which no exact rule looks at; None where no model made a guess.
    parents: [B, K] int64, the column that each token follows, always an earlier one, -1 for the last committed token; None for
    a chain. Tokens of one parent differ from each other; of a tree, sampled ones name the law of their parent's place, from
    which they were drawn one after the other without replacement, in the order of their columns.
    failure: the exception that ended the drafting after these tokens; None if there was none. A drafter that fails after it drew
    tokens returns them, since dropping drawn tokens because of their values would change the distribution of the output.
    """

    token_ids: torch.Tensor
    num_tokens: Sequence[int]
    distributions: torch.Tensor | None = None
    distribution_index: torch.Tensor | None = None
    confidence: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    failure: BaseException | None = None

    @property
    def width(self) -> int:
        """K, the tokens of the largest guess."""
        return int(self.token_ids.shape[1])

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> Proposal:
        """No guesses: plain decoding."""
        return cls(torch.empty(batch, 0, dtype=torch.int64, device=device), [0] * batch)

    def depths(self) -> torch.Tensor:
        """How many tokens of the draft lie before each one, [B, K] int64; 0 for those that follow the committed text."""
        columns = torch.arange(self.width, device=self.token_ids.device).expand(self.token_ids.shape)
        return columns if self.parents is None else depths_of(self.parents)


def depths_of(parents: torch.Tensor) -> torch.Tensor:
    """Depth of each column of a forest, roots 0. parents: [B, T] int64, each before its column, -1 a root -> [B, T]."""
    out = torch.zeros_like(parents)
    for column in range(1, parents.shape[1]):
        above = parents[:, column]
        deeper = out.gather(1, above.clamp(min=0)[:, None])[:, 0] + 1
        out[:, column] = torch.where(above >= 0, deeper, 0)
    return out


@dataclass(frozen=True, slots=True)
class Verification:
    """What the target said to a proposal.

    num_accepted: [B] int64. token_ids: [B] int64, the residual after a rejection, else the bonus. num_tested: [B] int64, draft
    tokens that the rule looked at. path: [B, D] int64, the columns of the accepted tokens in order, padded with -1; None where
    they are the first ones. tried: [B, K] bool, which columns of a tree were looked at; None for a chain, whose tested ones are
    its first.
    """

    num_accepted: torch.Tensor
    token_ids: torch.Tensor
    num_tested: torch.Tensor
    path: torch.Tensor | None = None
    tried: torch.Tensor | None = None
