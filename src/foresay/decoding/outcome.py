"""What came of a pass: who wrote which token, why a request ended, and the Step that says both."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from foresay.errors import RequestError


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
    """Draft tokens committed. Those after a stop are counted neither here nor as drafted."""
    tested: tuple[int, ...] = ()
    """Draft tokens that the rule looked at, by depth: of a chain 1 at each place up to the first rejection (under `block`
    at every place), of a tree as many as were tried."""
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    """Why it ended with FinishReason.ERROR."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    draft_error: str | None = None
    """Why the drafter failed in this step, or why drafting was paused; None if neither."""
    num_cached: int = 0
    """Prompt tokens that were not filled but taken from a row that begins alike; said by the first Step of a request."""
    batch_size: int = 1
    draft_s: float = 0.0
    target_s: float = 0.0
    total_s: float = 0.0
    """Seconds of the whole step, and of the time in draft and target forwards, shared by the rows of its batch."""

    @property
    def num_tested(self) -> int:
        """Draft tokens that the rule looked at."""
        return sum(self.tested)
