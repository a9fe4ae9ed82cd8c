"""Result of one step for one row: `Step`, with the origin of each token and the reason why a request ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from foresay.errors import RequestError


class Origin(StrEnum):
    """How a committed token was produced: an accepted draft token, the residual after a rejection, or the bonus token."""

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
    """Log-probability of a generated token under the raw logits, and the likeliest tokens at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One target pass over one row: tokens drafted, accepted and committed."""

    request_id: int
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    num_drafted: int
    num_accepted: int
    """Draft tokens committed. Those after a stop are counted neither here nor as drafted."""
    tested: tuple[int, ...] = ()
    """Draft tokens that the rule tested, by depth: in a chain 1 per position up to the first rejection (all under `block`), in a
    tree the number of children that were tried."""
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    """Cause of FinishReason.ERROR."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    draft_error: str | None = None
    """Why the drafter failed in this step, or why drafting was paused; None if neither."""
    num_cached: int = 0
    """Prompt tokens copied from a cached common prefix instead of prefilled; in the first Step of a request only."""
    batch_size: int = 1
    draft_s: float = 0.0
    target_s: float = 0.0
    total_s: float = 0.0
    """Seconds of the whole step; draft_s and target_s are the parts spent drafting and in the target. Equal for all rows of a
    batch."""

    @property
    def num_tested(self) -> int:
        """Draft tokens that the rule tested."""
        return sum(self.tested)
