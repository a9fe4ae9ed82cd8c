"""A proposal built token by token or part by part, which survives a failure of the drafter.

Owns the tokens of each row and the distributions they were drawn from. Every sampling drafter uses `Interruptible`: an exception
ends the draft after the tokens drawn so far. Losing drawn tokens because of their values would change the distribution of the
output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from foresay.decoding.proposal import INVALID, Proposal


class Interruptible:
    """An unfinished draft: `keeping` turns an exception into `failure` and keeps the tokens drawn before it."""

    failure: BaseException | None = None
    """The exception that ended the draft; None if there is none."""

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """End the draft at an exception, SystemExit included, instead of raising it; KeyboardInterrupt passes."""
        try:
            yield
        except (Exception, SystemExit) as error:
            self.failure = error


class ProposalBuilder(Interruptible):
    """Builder of a proposal for B rows, to which parts are appended."""

    def __init__(self, batch: int, device: torch.device) -> None:
        """Start with no token in any row.

        Args:
            batch: Number of rows, B.
            device: Device of the proposal.
        """
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self._device = device
        self._index: list[list[int]] = [[] for _ in range(batch)]
        self._distributions: list[torch.Tensor] = []
        self._num_distributions = 0
        self._confidence: list[list[float]] = [[] for _ in range(batch)]
        self._parents: list[list[int]] = [[] for _ in range(batch)]

    def add(self, proposal: Proposal, counts: Sequence[int] | None = None) -> None:
        """Append tokens of another proposal to each row, after the last token that it has, and take over its failure.

        Args:
            proposal: The part to append; parts of a row before another one must be chains.
            counts: [B] number of tokens to append, the first ones; None for all.
        """
        self.failure = self.failure or proposal.failure
        if self.failure is None and proposal.defects is not None and bool(proposal.defects.rows.any()):
            self.failure = ValueError(INVALID)
        counts = proposal.num_tokens if counts is None else counts
        if not any(counts):
            return
        ids = proposal.token_ids.tolist()
        index = None if proposal.distribution_index is None else proposal.distribution_index.tolist()
        confidence = None if proposal.confidence is None else proposal.confidence.tolist()
        parents = None if proposal.parents is None else proposal.parents.tolist()
        for i, n in enumerate(counts):
            before = len(self.tokens[i])
            self._parents[i] += [
                before + p if p >= 0 else before - 1 for p in (range(-1, n - 1) if parents is None else parents[i][:n])
            ]
            self.tokens[i] += ids[i][:n]
            self._index[i] += (
                [-1] * n if index is None else [p + self._num_distributions if p >= 0 else -1 for p in index[i][:n]]
            )
            # a token that no model proposed is considered certain
            self._confidence[i] += [1.0] * n if confidence is None else confidence[i][:n]
        if proposal.distributions is not None:
            self._distributions.append(proposal.distributions.to(self._device))
            self._num_distributions += len(proposal.distributions)

    def proposal(self, *, confidence: bool = False) -> Proposal:
        """Return all tokens so far, with the failure that ended the draft.

        Args:
            confidence: Include each token's confidence.
        """
        return Proposal.of_lists(
            self.tokens,
            self._device,
            parents=self._parents,
            distributions=torch.cat(self._distributions) if self._distributions else None,
            index=self._index,
            confidence=self._confidence if confidence else None,
            failure=self.failure,
        )
