"""A drafter's proposal, and the result of its verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foresay.decoding.devices import to_device

INVALID = "a drafted token, or the distribution it was drawn from, is invalid"
"""Message of a defect that was found on a device."""


class Defects:
    """Rows of a proposal with a token that a drafter must not propose, which only a device knows before the step reads it."""

    __slots__ = ("found", "rows")

    def __init__(self, rows: torch.Tensor) -> None:
        """rows: [B] bool."""
        self.rows = rows
        self.found = False
        """True if the step has read that there are such rows."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens of each row: a chain or a tree."""

    token_ids: torch.Tensor
    """[B, K] int64, right-padded."""
    num_tokens: Sequence[int]
    """[B] number of draft tokens, 0 <= n <= K."""
    distributions: torch.Tensor | None = None
    """[N, V] float32, from which tokens were sampled; None if no token was sampled."""
    distribution_index: torch.Tensor | None = None
    """[B, K] int64, rows of `distributions`, -1 for a point mass; None if no token was sampled."""
    confidence: torch.Tensor | None = None
    """[B, K] float32, the draft model's softmax probability of each token at temperature 1, which no exact rule reads; None
    without a draft model."""
    parents: torch.Tensor | None = None
    """[B, K] int64, the node that each token follows, always an earlier one, -1 for the last committed token; None for a chain.
    Children of one node differ; sampled ones share the distribution of their parent's position and were drawn from it without
    replacement, in the order of the nodes."""
    failure: BaseException | None = None
    """The exception that ended drafting after these tokens, or None. A drafter that fails after it has drawn tokens returns them,
    because dropping drawn tokens for their values would change the output distribution."""
    matched: Sequence[int] | None = None
    """[B] length of the n-gram match that each row's draft continues, 0 if unknown; None for other drafters."""
    defects: Defects | None = None
    """Defects that are not known on the host yet; None if there are none."""
    ends: torch.Tensor | None = None
    """[B] int64, number of tokens up to the first end token, which only a device knows; the rest is padding. None if `num_tokens`
    are all that count."""

    @property
    def counts(self) -> torch.Tensor:
        """Number of draft tokens of each row that count, [B] int64 on the tokens' device."""
        given = to_device(self.num_tokens, self.token_ids.device)
        return given if self.ends is None else torch.minimum(given, self.ends)

    @property
    def width(self) -> int:
        """K, the length of the longest draft (nodes of the largest tree)."""
        return int(self.token_ids.shape[1])

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> Proposal:
        """Return a proposal without draft tokens: plain decoding.

        Args:
            batch: Number of rows, B.
            device: Device of the proposal.
        """
        return cls(torch.empty(batch, 0, dtype=torch.int64, device=device), [0] * batch)

    @classmethod
    def of_lists(
        cls,
        tokens: Sequence[Sequence[int]],
        device: torch.device,
        *,
        parents: Sequence[Sequence[int]] | None = None,
        distributions: torch.Tensor | None = None,
        index: Sequence[Sequence[int]] | None = None,
        confidence: Sequence[Sequence[float]] | None = None,
        failure: BaseException | None = None,
        matched: Sequence[int] | None = None,
    ) -> Proposal:
        """Return B lists of draft tokens, and of what is known of each token, as a proposal.

        Args:
            tokens: Draft tokens of each row.
            device: Device of the proposal.
            parents: Nodes that the tokens follow; None for chains. Trees of one path become chains.
            distributions: As in the field.
            index: Rows of `distributions`, -1 for a point mass.
            confidence: As in the field.
            failure: As in the field.
            matched: As in the field.
        """
        counts = list(map(len, tokens))
        if parents is not None and all(above == list(range(-1, len(above) - 1)) for above in parents):
            parents = None
        return cls(
            padded(tokens, device),
            counts,
            distributions if any(counts) else None,
            None if index is None or distributions is None or not any(counts) else padded(index, device, fill=-1),
            None if confidence is None or not any(counts) else padded(confidence, device, fill=1.0),
            None if parents is None else padded(parents, device, fill=-1),
            failure,
            matched,
        )

    def depths(self) -> torch.Tensor:
        """Number of draft tokens before each token on its path, [B, K] int64."""
        chain = torch.arange(self.width, device=self.token_ids.device).expand(self.token_ids.shape)
        return chain if self.parents is None else depths_of(self.parents)


def padded(
    lists: Sequence[Sequence[int]] | Sequence[Sequence[float]], device: torch.device, *, fill: float = 0
) -> torch.Tensor:
    """Return B lists as a tensor [B, K], filled on the right: int64, or float32 for a fill that is a float."""
    width = max(map(len, lists), default=0)
    rows = [[*one, *[fill] * (width - len(one))] for one in lists]
    dtype = torch.float32 if isinstance(fill, float) else torch.int64
    return to_device(rows, device, dtype).view(len(lists), width)


def ancestors_of(parents: torch.Tensor) -> torch.Tensor:
    """Return [B, T, T] bool: True at [:, t, s] if node s is on the path to node t of a forest, t included.

    parents: [B, T] int64, -1 for a root. A node without an earlier parent, as padding may have, begins a path of its own.
    """
    nodes = torch.arange(parents.shape[1], device=parents.device)
    above = ((parents[:, :, None] == nodes) | (nodes[:, None] == nodes)).float()
    for _ in range(max(1, parents.shape[1]).bit_length()):  # each time paths of twice the length
        above = (above @ above).clamp(max=1.0)
    return above > 0


def depths_of(parents: torch.Tensor) -> torch.Tensor:
    """Depth of each node of a forest, 0 for roots. parents: [B, T] int64, earlier nodes or -1 for a root -> [B, T]."""
    return ancestors_of(parents).sum(-1) - 1


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of verifying a proposal."""

    num_accepted: torch.Tensor
    """[B] int64, number of accepted draft tokens."""
    token_ids: torch.Tensor
    """[B] int64, the residual token after a rejection, else the bonus token."""
    num_tested: torch.Tensor
    """[B] int64, draft tokens that the rule tested."""
    path: torch.Tensor | None = None
    """[B, D] int64, the accepted nodes of a tree in order, padded with -1; None for a chain."""
    tried: torch.Tensor | None = None
    """[B, K] bool, the nodes of a tree that were tested; None for a chain, of which the first num_tested were."""
