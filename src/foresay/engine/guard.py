"""Isolation of drafter failures: if a drafter raises, its requests continue with plain decoding.

A failure is counted, logged once, and pauses drafting for the rows of the batch. The drafter is tried again when rows join or a
new batch begins; after repeated failures the pauses grow, but it is never disabled for good. The output distribution does not
depend on failures: tokens drawn before one are verified as usual.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from foresay.decoding.proposal import INVALID, Defects, Proposal, Verification
from foresay.decoding.proposal_checks import checked
from foresay.decoding.protocols import Drafter, KVCache, LengthPolicy, ModelOutput, Move, UsesTargetCache
from foresay.decoding.rows import Rows
from foresay.threads import all_threads

logger = logging.getLogger("foresay")
MAX_FAILURES = 3
"""Number of failures from which on joining rows no longer end a pause."""
PAUSE = 32
"""Steps of the pause after the first failure; each further one doubles it."""
_DOUBLINGS = 7
_FORGIVEN = 256
"""Number of drafts without failure that cancel one failure."""
_OURS = "foresay."
T = TypeVar("T")


class _Pauses:
    """Length of the pauses after failures, in steps that would have drafted."""

    def __init__(self) -> None:
        self.failures = self._sound = 0
        """Failures that are not cancelled yet, and successful drafts since that number last changed."""
        self._left = 0

    @property
    def over(self) -> bool:
        """True if the drafter may be tried again even if no rows join."""
        return self._left == 0

    def failed(self) -> None:
        """Start a pause."""
        self._left = PAUSE << min(self.failures, _DOUBLINGS)
        self.failures, self._sound = self.failures + 1, 0

    def waited(self) -> None:
        """Count a step without a draft."""
        self._left = max(0, self._left - 1)

    def drafted(self) -> None:
        """Count a draft without a failure."""
        self._sound, self._left = self._sound + 1, 0
        if self._sound >= _FORGIVEN:
            self.failures, self._sound = max(0, self.failures - 1), 0


class GuardedDrafter:
    """A Drafter that never raises."""

    def __init__(self, inner: Drafter, vocab_size: int, device: torch.device, *, trees: bool) -> None:
        """trees: True if the rule and the target support trees."""
        self.inner, self._vocab, self._device, self._trees = inner, vocab_size, device, trees
        self.hidden_layers, self.samples = inner.hidden_layers, inner.samples
        self.failures = 0
        self._ours = _is_ours(inner)
        self.last_error: BaseException | None = None
        self._pauses, self._active = _Pauses(), True
        self._step_error: str | None = None
        self._defects: Defects | None = None
        self.reset()

    @property
    def active(self) -> bool:
        """True unless drafting is paused."""
        return self._active

    def step_error(self) -> str | None:
        """Return and clear the error that stopped drafting in the last step, or the reason of a pause; None if there is none."""
        error, self._step_error = self._step_error, None
        return error

    def _threads(self) -> AbstractContextManager[None]:
        """Thread setting of the drafter. A third-party drafter may run a PyTorch model, so it may use every core."""
        return nullcontext() if self._ours else all_threads()

    def _try(self, action: Callable[[], T]) -> T | None:
        if not self._active:
            return None
        try:
            with self._threads():
                return action()
        except (Exception, SystemExit) as error:  # no exception of a drafter may end a request
            self._failed(error)
            return None

    def _failed(self, error: BaseException) -> None:
        self.failures += 1
        self.last_error, self._active = error, False
        self._step_error = self._step_error or f"{type(error).__name__}: {error}"
        self._pauses.failed()
        if self.failures == 1:
            logger.warning("the drafter failed (%s: %s); decoding continues without it", type(error).__name__, error)
        logger.debug("drafter failure %d", self.failures, exc_info=error)
        with contextlib.suppress(Exception, SystemExit):
            self.inner.reset()  # its caches are no longer valid

    def use_cache_of_target(self, cache: KVCache) -> None:
        """Pass the target's cache to a drafter that uses it."""
        if isinstance(self.inner, UsesTargetCache):
            self.inner.use_cache_of_target(cache)

    def admit(self, rows: Rows, first: int) -> None:
        """Admit new rows; a paused drafter is tried again with all rows."""
        if not self._active:
            self.reset()
            first = 0
        self._try(lambda: self.inner.admit(rows, first))

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Return the well-formed part of the drafter's proposal; empty while drafting is paused."""
        if not self._active:
            self._wait(rows)
        proposal: Any = self._try(lambda: self.inner.propose(rows, budget, policy))
        if not self._active:
            return Proposal.empty(len(rows), self._device)
        out = checked(proposal, budget, self._vocab, self._device, trees=self._trees)
        self._defects = out.defects
        if out.failure is not None:
            self._failed(out.failure)
        else:
            self._pauses.drafted()
        return out

    def _wait(self, rows: Rows) -> None:
        """Count a step of the pause; after the last one, try again with all rows."""
        self._pauses.waited()
        if self._pauses.over:
            self.admit(rows, 0)
        if not self._active and self.last_error is not None:
            name = type(self.last_error).__name__
            self._step_error = (
                self._step_error
                or f"drafting is paused after failures of the drafter, the last {name}: {self.last_error}"
            )

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Call the drafter's `observe`, unless drafting is paused."""
        if self._defects is not None and self._defects.found:
            self._failed(ValueError(INVALID))
        self._defects = None
        self._try(lambda: self.inner.observe(rows, verification, target))

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Call the drafter's `rearrange`, unless drafting is paused."""
        self._try(lambda: self.inner.rearrange(moves, count))

    def reset(self) -> None:
        """Drop every row and try again, unless the drafter has failed too often."""
        self._active = self._pauses.over or self._pauses.failures < MAX_FAILURES
        self._try(self.inner.reset)


def _is_ours(drafter: object) -> bool:
    """True if a drafter and all drafters it consists of are part of foresay."""
    if not type(drafter).__module__.startswith(_OURS):
        return False
    parts = [
        part
        for value in getattr(drafter, "__dict__", {}).values()
        for part in (value if isinstance(value, list | tuple) else [value])
    ]
    return all(_is_ours(part) for part in parts if hasattr(part, "propose") and hasattr(part, "observe"))
