"""A drafter cannot hurt: whatever it raises, the requests go on with plain decoding.

Wraps a drafter. A failure is counted, logged once, and ends drafting for the rows now in the batch; a batch that starts
afresh tries again, and after three failures drafting stays off. The law of the output never depends on any of this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from foresay.core import Drafter, LengthPolicy, Move, Proposal, Rows, Verdict
from foresay.models.base import ModelOutput

logger = logging.getLogger("foresay")
MAX_FAILURES = 3


class GuardedDrafter:
    """A Drafter that never raises."""

    def __init__(self, inner: Drafter, vocab_size: int, device: torch.device) -> None:
        self.inner, self._vocab, self._device = inner, vocab_size, device
        self.hidden_layers = inner.hidden_layers
        self.failures = 0
        self.last_error: Exception | None = None
        self._active = True
        self.reset()

    @property
    def active(self) -> bool:
        """Whether the present rows are drafted for."""
        return self._active

    def _try(self, action: Callable[[], Proposal | None]) -> Proposal | None:
        if not self._active:
            return None
        try:
            return action()
        except Exception as error:  # whatever a drafter raises, out of memory included, must not end a request
            self.failures += 1
            self.last_error = error
            self._active = False
            if self.failures == 1:
                logger.warning("the drafter failed (%s: %s); decoding goes on without it", type(error).__name__, error)
            logger.debug("drafter failure %d", self.failures, exc_info=error)
            return None

    def admit(self, rows: Rows, first: int) -> None:
        """Pass on, unless drafting is off."""
        self._try(lambda: self.inner.admit(rows, first))

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """The inner proposal once checked, or none."""
        proposal = self._try(lambda: self._checked(self.inner.propose(rows, budget, policy), rows, budget))
        return proposal if proposal is not None else Proposal.empty(len(rows), self._device)

    def _checked(self, proposal: Proposal, rows: Rows, budget: Sequence[int]) -> Proposal:
        counts = list(proposal.num_tokens)
        if proposal.token_ids.shape[0] != len(rows) or len(counts) != len(rows):
            raise ValueError(f"a proposal for {len(counts)} rows in a batch of {len(rows)}")
        if any(not 0 <= n <= min(b, proposal.width) for n, b in zip(counts, budget, strict=True)):
            raise ValueError(
                f"proposed {counts} tokens with a budget of {list(budget)} and a width of {proposal.width}"
            )
        if proposal.width > max(counts, default=0):
            width = max(counts)
            index = None if proposal.law_index is None else proposal.law_index[:, :width]
            proposal = Proposal(proposal.token_ids[:, :width], counts, proposal.laws, index)
        ids = proposal.token_ids
        if proposal.laws is None and ids.numel() and not bool(((ids >= 0) & (ids < self._vocab)).all()):
            raise ValueError(f"a proposed token id is not in [0, {self._vocab})")
        if ids.device != self._device:
            index = None if proposal.law_index is None else proposal.law_index.to(self._device)
            laws = None if proposal.laws is None else proposal.laws.to(self._device)
            proposal = Proposal(ids.to(self._device), counts, laws, index)
        return proposal

    def observe(self, rows: Rows, verdict: Verdict | None, target: ModelOutput | None) -> None:
        """Pass on, unless drafting is off."""
        self._try(lambda: self.inner.observe(rows, verdict, target))

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Pass on, unless drafting is off."""
        self._try(lambda: self.inner.rearrange(moves, count))

    def reset(self) -> None:
        """Forget every row, and try again unless it failed too often."""
        self._active = self.failures < MAX_FAILURES
        self._try(self.inner.reset)
