"""Chains and trees of draft tokens that a model draws by itself, without the host between its tokens.

Owns what such a model receives and returns. Knows no model and no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from foresay.decoding.passes import ModelInput
from foresay.decoding.randomness import Purpose
from foresay.decoding.rows import Rows


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters by which the tokens of B rows are drawn."""

    greedy: Sequence[bool]
    """[B], rows that take the likeliest token."""
    temperature: Sequence[float]
    top_k: Sequence[int]
    top_p: Sequence[float]
    min_p: Sequence[float]
    uniforms: torch.Tensor
    """[B, K] float64, that of each token of a row."""

    @property
    def kinds(self) -> tuple[bool, bool, bool]:
        """Whether any row has top-k, top-p and min-p."""
        return any(self.top_k), any(p < 1 for p in self.top_p), any(self.min_p)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Chains of B rows, of which R draft."""

    token_ids: torch.Tensor
    """[B, K] int64; meaningless from a row's own number of tokens on."""
    probs: torch.Tensor | None
    """[K * R, V] float32, the distributions of token 0 of each row that drafts, then of token 1, and so on; None if all rows are
    greedy."""


@runtime_checkable
class DrawsChains(Protocol):
    """A model that may draw chains."""

    @property
    def draws_chains(self) -> bool:
        """True if it can now."""
        ...

    def draw_chains(
        self, known: ModelInput, cache: Any, room: Sequence[int], sampling: Sampling | None
    ) -> Drawn | None:
        """Append known tokens to the cache and draw chains after them.

        The cache's lengths count all tokens that were read then, the last of a chain not among them.

        Args:
            known: At least one token of each row that drafts.
            cache: A cache of this model.
            room: [B], tokens of each row's chain, 0 for a row that does not draft.
            sampling: None takes the likeliest tokens.

        Returns:
            The chains; None if there are more rows, or longer chains, than it draws at once. Then nothing was read.
        """
        ...


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Sizes of the trees of B rows."""

    budget: Sequence[int]
    """[B], most nodes of each row's tree, 0 for a row that does not draft."""
    depths: Sequence[int]
    """[B], most nodes of a path."""
    branches: int
    """Children of a node."""
    width: int
    """Most nodes of a level that get children."""


@dataclass(frozen=True, slots=True)
class Grown:
    """Trees of B rows."""

    token_ids: torch.Tensor
    """[B, K] int64; meaningless from a row's own number of nodes on."""
    parents: torch.Tensor
    """[B, K] int64, see Proposal."""
    num_tokens: Sequence[int]
    """[B], nodes of each row."""
    row_passes: int
    """Rows scored over all levels."""


@runtime_checkable
class DrawsTrees(Protocol):
    """A model that may draw trees of likeliest tokens, where it draws chains."""

    def draw_trees(self, known: ModelInput, cache: Any, limits: TreeLimits) -> Grown | None:
        """Append known tokens to the cache and grow trees after them; nodes are not added to the cache's lengths.

        Args:
            known: At least one token of each row that drafts.
            cache: A cache of this model.
            limits: Sizes of the trees.

        Returns:
            The trees; None if there are more rows or nodes than it draws at once. Then nothing was read.
        """
        ...


def sampling_of(rows: Rows, device: torch.device, most: int) -> Sampling | None:
    """Return the sampling parameters of rows that draft at most `most` tokens; None if all are greedy."""
    params = [row.params for row in rows]
    if all(one.greedy for one in params):
        return None
    offsets = torch.arange(most, device=device)
    return Sampling(
        [one.greedy for one in params],
        [one.temperature for one in params],
        [one.top_k for one in params],
        [one.top_p for one in params],
        [one.min_p for one in params],
        rows.streams(device, most).uniform(Purpose.DRAFT, offsets),
    )


def widened(probs: torch.Tensor, token_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Return probabilities [N, outputs] over all tokens, [N, V]. token_ids: [outputs], the token of each; None if the same."""
    if probs.shape[1] == vocab_size and token_ids is None:
        return probs
    ids = torch.arange(probs.shape[1], device=probs.device) if token_ids is None else token_ids
    return probs.new_zeros(len(probs), vocab_size).index_copy_(1, ids, probs)
