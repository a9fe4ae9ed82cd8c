"""A proposal put together from several: tokens of different drafters behind each other, each with the law it came from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresay.decoding.proposal import Proposal


class ProposalBuilder:
    """B drafts that grow at their ends, row by row."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self._device = device
        self._index: list[list[int]] = [[] for _ in range(batch)]
        self._laws: list[torch.Tensor] = []
        self._num_laws = 0
        self._confidence: list[list[float]] = [[] for _ in range(batch)]

    def add(self, proposal: Proposal, counts: Sequence[int] | None = None) -> None:
        """Append the first counts[i] (all unless given) of another proposal's tokens to row i."""
        counts = proposal.num_tokens if counts is None else counts
        if not any(counts):
            return
        ids = proposal.token_ids.tolist()
        index = None if proposal.law_index is None else proposal.law_index.tolist()
        confidence = None if proposal.confidence is None else proposal.confidence.tolist()
        for i, n in enumerate(counts):
            self.tokens[i] += ids[i][:n]
            self._index[i] += (
                [-1] * n if index is None else [p + self._num_laws if p >= 0 else -1 for p in index[i][:n]]
            )
            # a token that no model guessed is held for certain
            self._confidence[i] += [1.0] * n if confidence is None else confidence[i][:n]
        if proposal.laws is not None:
            self._laws.append(proposal.laws)
            self._num_laws += len(proposal.laws)

    def proposal(self, *, confidence: bool = False) -> Proposal:
        """What has grown."""
        counts = [len(row) for row in self.tokens]
        width = max(counts)
        if width == 0:
            return Proposal.empty(len(counts), self._device)
        ids = torch.tensor([row + [0] * (width - len(row)) for row in self.tokens], device=self._device)
        sure = None
        if confidence:
            padded = [row + [1.0] * (width - len(row)) for row in self._confidence]
            sure = torch.tensor(padded, device=self._device)
        if not self._laws:
            return Proposal(ids, counts, confidence=sure)
        index = torch.tensor([row + [-1] * (width - len(row)) for row in self._index], device=self._device)
        laws = torch.cat([law.to(self._device) for law in self._laws])
        return Proposal(ids, counts, laws, index, sure)
