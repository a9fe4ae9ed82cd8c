"""Result of one step for one row: `Step`, with the origin of each token and the reason why a request ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from foresay.errors import RequestError


class Origin(StrEnum):
    """How a committed token was produced: an accepted draft token, the residual after a rejection, or the bonus token."""

    DRAFT = "draft"
    """An accepted draft token."""
    RESIDUAL = "residual"
    """The token after a rejection."""
    BONUS = "bonus"
    """The token after a draft that was accepted completely, or after no draft."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """A stop token, an end-of-sequence token or a stop string."""
    LENGTH = "length"
    """max_new_tokens or the context limit."""
    CANCELLED = "cancelled"
    """The caller cancelled the request."""
    ERROR = "error"
    """The request or its target failed; the cause is in `error`."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a generated token under the raw logits, and the likeliest tokens at its position."""

    logprob: float
    """Log-probability of the token."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the likeliest tokens, the likeliest first."""


@dataclass(slots=True, unsafe_hash=True)
class Step:
    """One target pass over one row: tokens drafted, accepted and committed. Not changed after it is returned.

    It is not frozen: a frozen one takes 4 us to make instead of 1, for each row of each step.
    """

    request_id: int
    """Id of the row's request."""
    token_ids: tuple[int, ...]
    """Committed tokens."""
    origins: tuple[Origin, ...]
    """Origin of each committed token."""
    num_drafted: int
    """Draft tokens proposed."""
    num_accepted: int
    """Draft tokens committed. Those after a stop are counted neither here nor as drafted."""
    tested: tuple[int, ...] = ()
    """Draft tokens that the rule tested, by depth: in a chain 1 per position up to the first rejection (all under `block`), in a
    tree the number of children that were tried."""
    finish_reason: FinishReason | None = None
    """Why the request ended in this step; None if it continues."""
    error: RequestError | None = None
    """Cause of FinishReason.ERROR."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One entry per committed token; None unless requested."""
    draft_error: str | None = None
    """Why the drafter failed in this step, or why drafting was paused; None if neither."""
    num_cached: int = 0
    """Prompt tokens copied from a cached common prefix instead of prefilled; in the first Step of a request only."""
    batch_size: int = 1
    """Number of rows that the pass decoded."""
    draft_s: float = 0.0
    """Seconds of the step spent drafting."""
    target_s: float = 0.0
    """Seconds of the step spent in the target."""
    total_s: float = 0.0
    """Seconds of the whole step. Times are equal for all rows of a batch."""

    @property
    def num_tested(self) -> int:
        """Draft tokens that the rule tested."""
        return sum(self.tested)
