"""Draft until a trained acceptance head predicts a rejection (SpecDec++, Huang et al. 2024).

After each draft pass the head predicts c_i, the probability that the token consumed by that pass is accepted. Once the
probability of at least one rejection, 1 - c_1 ... c_i, exceeds a threshold, the token drawn by the pass is the last of the draft.
It is kept: dropping a token because of its own value would condition its distribution.
"""

from __future__ import annotations

import threading

import torch

from foresay.checks import check_float, check_int
from foresay.decoding.protocols import DraftStep, LengthPolicy
from foresay.decoding.rows import Rows
from foresay.errors import ConfigError
from foresay.lengths.acceptance_head import AcceptanceHead
from foresay.lengths.constant import MAX_DRAFT_TOKENS


class AcceptanceLength(LengthPolicy):
    """Draft until a rejection is likely, between low and high tokens. Drafters without a model draft `high` tokens."""

    needs_hidden, remembers = True, False

    def __init__(self, head: str | AcceptanceHead, threshold: float = 0.3, *, low: int = 2, high: int = 20) -> None:
        """head: an acceptance head, or its folder (written by `foresay distill --kind acceptance`). Raises what
        `AcceptanceHead.load` raises.

        threshold: largest allowed probability of a rejection, in [0, 1]. low, high: bounds of the draft length.
        """
        self.threshold = check_float("threshold", threshold, 0.0, 1.0)
        self.high = check_int("high", high, 1, MAX_DRAFT_TOKENS)
        self.low = check_int("low", low, 1, self.high)
        if not isinstance(head, str | AcceptanceHead):
            raise ConfigError(f"head={head!r} must be the folder of an acceptance head")
        self.head = head
        self._network = AcceptanceHead.load(head) if isinstance(head, str) else head
        self._steps = threading.local()
        """Per thread, since engines may share a policy. `accepted`: [B], c_1 ... c_i in this step; None before its first pass."""

    def budget(self, rows: Rows) -> list[int]:
        """Return the upper bound for each row."""
        self._steps.accepted = None
        return [self.high] * len(rows)

    @torch.inference_mode()
    def keep_drafting(self, step: DraftStep) -> torch.Tensor | None:
        """Return True for rows below the lower bound or without a likely rejection, [B] bool; None without hidden states.

        Raises ConfigError if the width of the draft's hidden states is not the acceptance head's.
        """
        if step.hidden is None:
            return None
        if step.hidden.shape[-1] != self._network.hidden_size:
            raise ConfigError(
                f"the acceptance head reads hidden states of width {self._network.hidden_size}, but the draft model's have "
                f"width {step.hidden.shape[-1]}; use a head trained for this draft model"
            )
        self._network.to(step.hidden.device)
        before: torch.Tensor | None = getattr(self._steps, "accepted", None)
        if before is None or len(before) != len(step.index):
            # the first pass of a draft consumed a committed token, which cannot be rejected
            now = torch.ones(len(step.index), device=step.hidden.device)
        else:
            now = before * self._network.accepted(step.hidden)
        self._steps.accepted = now
        return (1 - now <= self.threshold) | (step.index + 1 < self.low)
