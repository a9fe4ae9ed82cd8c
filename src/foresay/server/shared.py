"""Resources of all models of a server: settings, metrics, the threads, and the limits of requests in number and time.

Owns the shutdown of open requests. Knows no model and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from foresay.generation.session import Session
from foresay.generation.session_thread import SessionThread
from foresay.models.cache.memory import check_limit
from foresay.server.drafting_choice import DraftingChoice
from foresay.server.errors import ApiError
from foresay.server.metrics import Metrics
from foresay.server.queues import LONG, SENDER, Queues
from foresay.server.settings import ServerSettings
from foresay.text.schema_compiler import PROCESSES

T = TypeVar("T")
READING_BYTES = 32
"""Memory that reading a long body takes, for each of its bytes, before its texts are tokenized."""
Kind = tuple[str, DraftingChoice]
"""Kind of a session: the name of its model, and its drafting method."""


class Shared:
    """Threads and limits of one server."""

    def __init__(self, settings: ServerSettings, max_batch_size: int) -> None:
        """max_batch_size: the largest of the models."""
        self.settings, self.metrics, self.draining = settings, Metrics(), False
        self.sessions: dict[str, Callable[[DraftingChoice], Session]] = {}
        """Loaded models, and the functions that make their sessions."""
        self.thread = SessionThread(self._new_session, idle_s=5.0, max_sessions=settings.max_methods, is_main=is_main)
        self.queues = Queues(settings.max_waiting + max_batch_size, settings.max_waiting, PROCESSES)
        self._open_limits: set[TimeLimit] = set()

    def _new_session(self, kind: Kind) -> Session:
        name, drafting = kind
        return self.sessions[name](drafting)

    @property
    def num_open(self) -> int:
        """Number of open requests."""
        return len(self._open_limits) + self.queues.short.open + self.queues.long.open + self.queues.trials.open

    async def prepare(self, work: Callable[[], T]) -> T:
        """Run work that is slow for a long text (parsing, tokenization) on a thread, so that the event loop continues.

        Raises QueueFullError if too many requests wait, ApiError after the request's time limit, and OutOfMemoryError for a long
        text that would pass the memory limit.
        """
        size = SENDER.get().size
        if size >= LONG:
            check_limit(READING_BYTES * size)
        return await self.in_time(self.queues.texts.run(work))

    async def in_time(self, result: Awaitable[T]) -> T:
        """Wait for a result. Raises ApiError after the request's time limit."""
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                return await result
        except TimeoutError:
            raise self._timeout_error() from None

    @contextmanager
    def time_limit(self, why: str = "") -> Iterator[TimeLimit]:
        """Apply the time limit of a request in the engine. Server shutdown ends the request earlier.

        why: a reason that the error of a request which took too long reports.
        """
        if self.draining:
            raise shutdown_error()
        limit = TimeLimit(self.settings.timeout_s)
        self._open_limits.add(limit)
        try:
            yield limit
        except TimeoutError:
            if limit.ended:
                raise ApiError(503, "the server has shut down", code="shutting_down", retry_after=5) from None
            raise self._timeout_error(why) from None
        finally:
            self._open_limits.discard(limit)

    def _timeout_error(self, why: str = "") -> ApiError:
        return ApiError(504, f"the request took more than {self.settings.timeout_s:g} seconds{why}", code="timeout")

    async def end_requests(self) -> None:
        """Wait for the open requests up to the drain limit, then end them."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.drain_s
        while self._open_limits and loop.time() < deadline:
            await asyncio.sleep(0.02)
        for limit in self._open_limits:
            limit.end()


def is_main(kind: Hashable) -> bool:
    """Return True for the kind of sessions with a model's own drafting method."""
    return isinstance(kind, tuple) and kind[1] == DraftingChoice()


def shutdown_error() -> ApiError:
    """Return the error of a request that arrives during the shutdown."""
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)


class TimeLimit:
    """Time limit of one request, over all its waits."""

    def __init__(self, seconds: float) -> None:
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._timeout: asyncio.Timeout | None = None
        self.ended = False
        """True if the request was ended before its limit."""

    async def wait(self, chunk: Awaitable[T]) -> T:
        """Wait for a chunk. Raises TimeoutError after the limit."""
        async with asyncio.timeout_at(self._deadline) as self._timeout:
            return await chunk

    def end(self) -> None:
        """End the request now."""
        self.ended, self._deadline = True, 0.0
        if self._timeout is not None and not self._timeout.expired():
            with suppress(RuntimeError):  # no task waits
                self._timeout.reschedule(0.0)
