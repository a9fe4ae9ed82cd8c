"""Input and output of one forward pass.

Owns what a model receives and returns, and the distributions of its logits. Knows no model. Letters in docstrings: B rows, K
draft tokens, T tokens per row in a pass, V vocabulary, H hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from foresay.decoding.devices import to_device
from foresay.decoding.distributions import Distributions, VocabularySubset, build_distributions, subset_distributions
from foresay.decoding.proposal import Proposal
from foresay.decoding.rows import Rows


class Logits(StrEnum):
    """Logits that a pass returns."""

    ALL = "all"
    """After every token: [B, T, V]."""
    LAST = "last"
    """After the last real token of each row: [B, 1, V]."""
    NONE = "none"
    """None: the pass only fills the cache."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Input of one forward pass."""

    token_ids: torch.Tensor
    """[B, T] int64, right-padded."""
    num_tokens: Sequence[int]
    """Number of real tokens of each row."""
    first_row: int = 0
    """Cache row of row 0; row i belongs to cache row `first_row + i`."""
    parents: torch.Tensor | None = None
    """[B, T] int64, the node that each token follows, always an earlier one, -1 for the end of the cached row; None for
    chains."""
    logits: Logits = Logits.ALL
    """The positions whose logits are returned."""
    hidden_layers: tuple[int, ...] = ()
    """Layers whose hidden states are returned, 0 for the embeddings, l for the output of the l-th layer."""
    features: torch.Tensor | None = None
    """[B, T, F], further input of draft heads, made of the target's hidden states."""
    mtp_layer: int = 0
    """The layer that runs, of several for multi-token prediction."""
    is_prompt: bool = False
    """The tokens are a chunk of prompts, in which products may sum in another order than in steps."""

    def last_columns(self) -> torch.Tensor:
        """Index of the last real token of each row, [B] int64; 0 for a row without tokens."""
        return to_device([max(count, 1) - 1 for count in self.num_tokens], self.token_ids.device)

    def of_last(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states of each row's last real token, [B, 1, ...].

        Args:
            states: [B, T, ...].
        """
        if min(self.num_tokens) == states.shape[1]:
            return states[:, -1:]
        batch, last = torch.arange(len(states), device=states.device), self.last_columns().to(states.device)
        return states[batch, last][:, None]

    def scored(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states whose logits are wanted: all, or [B, 1, ...] for `Logits.LAST`.

        Args:
            states: [B, T, ...].
        """
        return self.of_last(states) if self.logits is Logits.LAST and states.shape[1] > 1 else states

    def part(self, start: int, end: int) -> ModelInput:
        """Return some rows as a separate input.

        Args:
            start: Index of the first row.
            end: Index after the last row.
        """
        parents = None if self.parents is None else self.parents[start:end]
        rows = self.token_ids[start:end], self.num_tokens[start:end], self.first_row + start
        features = None if self.features is None else self.features[start:end]
        how = self.logits, self.hidden_layers
        return ModelInput(*rows, parents, *how, features, self.mtp_layer, self.is_prompt)


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Output of one forward pass: logits, or token ids from a model that has a text and no logits (a recording)."""

    logits: torch.Tensor | None
    """[B, T, V], or [B, T, K] of the tokens in `subset`."""
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Hidden states, layer -> [B, T, H]."""
    token_ids: torch.Tensor | None = None
    """[B, T] int64, instead of logits."""
    num_before: tuple[int, ...] | None = None
    """In the target's pass of a step, the number of tokens fed before each row's last committed one. `logits` then begin after
    the last committed token, `hidden` at the first token fed."""
    subset: VocabularySubset | None = None
    """The tokens that have logits; None for the whole vocabulary."""
    starts: tuple[int, ...] | None = None
    """In the target's pass of a step, the position of the first token fed of each row."""

    def scores(self) -> torch.Tensor:
        """Logits [B, T, V] of a pass that returns logits."""
        assert self.logits is not None
        return self.logits if self.subset is None else self.subset.widened(self.logits)

    def distributions(self, rows: Rows, proposal: Proposal) -> Distributions:
        """Distributions of a step, [B, 1 + K]: after each row's last token and after each draft token.

        Args:
            rows: The rows of the step.
            proposal: The draft tokens that the pass scored.
        """
        if self.token_ids is not None:
            return Distributions(self.token_ids)
        return build_distributions(
            self.scores(), rows, proposal.token_ids, counts=proposal.num_tokens, parents=proposal.parents
        )

    def draft_distributions(self, rows: Rows, drafted: torch.Tensor, *, greedy: bool) -> Distributions:
        """Distributions [B, T] that the next draft tokens are drawn from.

        Args:
            rows: The rows of the step.
            drafted: [B, n] int64, the tokens already drafted.
            greedy: Point masses for sampled rows too.
        """
        if self.subset is not None and self.logits is not None:
            distributions = subset_distributions(self.logits, self.subset, rows, greedy=greedy)
            if distributions is not None:
                return distributions
        return build_distributions(self.scores(), rows, drafted, num_before=drafted.shape[1], greedy=greedy)

    def at(self, columns: torch.Tensor, num_before: Sequence[int]) -> ModelOutput:
        """Return the logits, or token ids, at some indices of each row; hidden states stay complete.

        Args:
            columns: [B, n] int64, indices along T.
            num_before: The new `num_before`.
        """
        batch = torch.arange(len(columns), device=columns.device)[:, None]
        logits = None if self.logits is None else self.logits[batch, columns]
        tokens = None if self.token_ids is None else self.token_ids[batch, columns]
        return dataclasses.replace(self, logits=logits, token_ids=tokens, num_before=tuple(num_before))
