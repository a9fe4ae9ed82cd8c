"""What came of a pass: who wrote which token, why a request ended, and the Step that says both."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Origin(StrEnum):
    """Who produced a token."""

    DRAFT = "draft"
    RESIDUAL = "residual"
    BONUS = "bonus"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one written token under the raw logits, and the likeliest tokens at its place."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One target pass over one row: what was guessed, accepted and committed."""

    request_id: int
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    num_drafted: int
    num_accepted: int
    """Draft tokens committed. Those behind a stop are counted neither here nor as drafted."""
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    batch_size: int = 1
    draft_s: float = 0.0
    target_s: float = 0.0
    total_s: float = 0.0
    """Seconds of the whole step, and of the time in draft and target forwards, shared by the rows of its batch."""

    @property
    def num_tested(self) -> int:
        """Draft tokens the rule looked at: those behind the first rejection were not."""
        return min(self.num_accepted + 1, self.num_drafted)
