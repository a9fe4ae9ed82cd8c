"""Lengths that end where a trained head expects that one of the drafted tokens will be rejected (SpecDec++, Huang et al. 2024).

After each pass of the draft the head says c_i, the chance that the token which that pass consumed is accepted. Once the chance
that some token was rejected, 1 - c_1 ... c_i, is above a threshold, the token that the pass drew is the last one: it stays,
since dropping a token for its own value would condition its law.
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
    """Draft until a rejection is likely, within [low, high]. Drafters without a model draft `high` tokens."""

    needs_hidden, remembers = True, False

    def __init__(self, head: str | AcceptanceHead, threshold: float = 0.3, *, low: int = 2, high: int = 20) -> None:
        """head: a folder that `foresay acceptance-head train` wrote, or the head itself. Raises as `AcceptanceHead.load` does."""
        self.threshold = check_float("threshold", threshold, 0.0, 1.0)
        self.high = check_int("high", high, 1, MAX_DRAFT_TOKENS)
        self.low = check_int("low", low, 1, self.high)
        if not isinstance(head, str | AcceptanceHead):
            raise ConfigError(f"head={head!r} must be the folder of an acceptance head")
        self.head = head
        self._network = AcceptanceHead.load(head) if isinstance(head, str) else head
        self._steps = threading.local()
        """`accepted`, [B]: the product of c in this step so far; None before its first pass. Engines may share a policy."""

    def budget(self, rows: Rows) -> list[int]:
        """The upper bound."""
        self._steps.accepted = None
        return [self.high] * len(rows)

    @torch.inference_mode()
    def keep_drafting(self, step: DraftStep) -> torch.Tensor | None:
        """Rows in which a rejection is not yet likely, and all of them up to the lower bound."""
        if step.hidden is None:
            return None
        if step.hidden.shape[-1] != self._network.hidden_size:
            raise ConfigError(
                f"the acceptance head reads hidden states of {self._network.hidden_size}, and the draft's are of "
                f"{step.hidden.shape[-1]}"
            )
        self._network.to(step.hidden.device)
        before: torch.Tensor | None = getattr(self._steps, "accepted", None)
        if before is None or len(before) != len(
            step.index
        ):  # a chain begins: its first pass consumed what was committed
            now = torch.ones(len(step.index), device=step.hidden.device)
        else:
            now = before * self._network.accepted(step.hidden)
        self._steps.accepted = now
        return (1 - now <= self.threshold) | (step.index + 1 < self.low)
