"""Draft until a trained acceptance head predicts a rejection (SpecDec++, Huang et al. 2024).

After each draft pass the head predicts c_i, the probability that the token consumed by that pass is accepted. Once the
probability of at least one rejection, 1 - c_1 ... c_i, exceeds a threshold, the token drawn by the pass is the last of the draft.
It is kept: dropping a token because of its own value would condition its distribution.
"""

from __future__ import annotations

import torch

from foresay.checks import check_float, check_int
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Rows
from foresay.decoding.stopping import Reads, StoppingRule
from foresay.errors import ConfigError
from foresay.files import fingerprint
from foresay.lengths.acceptance_head import AcceptanceHead
from foresay.lengths.constant import MAX_DRAFT_TOKENS


class AcceptanceLength(LengthPolicy):
    """Draft until a rejection is likely, between low and high tokens."""

    remembers, needs_probabilities = False, True

    def __init__(self, head: str | AcceptanceHead, threshold: float = 0.3, *, low: int = 2, high: int = 20) -> None:
        """head: an acceptance head, or its folder (written by `foresay distill --kind acceptance`). Raises what
        `AcceptanceHead.load` raises.

        threshold: largest allowed probability of a rejection, in [0, 1]. low, high: bounds of the draft length.
        """
        self.threshold = check_float("threshold", threshold, 0.0, 1.0)
        self.high = check_int("high", high, 1, MAX_DRAFT_TOKENS)
        self.low = check_int("low", low, 1, self.high)
        if not isinstance(head, str | AcceptanceHead):
            raise ConfigError("must be the folder of an acceptance head", param="head", value=head)
        self.head = head
        self._network = AcceptanceHead.load(head) if isinstance(head, str) else head
        self.learned = fingerprint(head) if isinstance(head, str) else b""

    def budget(self, rows: Rows) -> list[int]:
        """Return the upper bound for each row."""
        return [self.high] * len(rows)

    def rule(self, rows: Rows) -> StoppingRule:
        """See LengthPolicy."""
        return StoppingRule(Reads.HIDDEN, self.threshold, self.low, network=self._chance)

    def _chance(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return c, [B]. Raises ConfigError if the width of the draft's hidden states [B, H] is not the acceptance head's."""
        if hidden.shape[-1] != self._network.hidden_size:
            text = f"reads hidden states of width {self._network.hidden_size}, and this draft model's have {hidden.shape[-1]}"
            raise ConfigError(text, param="head")
        return self._network.to(hidden.device).accepted(hidden)
