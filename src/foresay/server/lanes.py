"""Queues in which requests wait: for the threads of texts and of trials, for passes, rows and models. Clients share each fairly.

Owns the slots of clients in a queue, their turns, and two lanes for texts, so that short ones never wait for long ones. Knows no
HTTP and no text.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakValueDictionary

from foresay.server.errors import ApiError

T = TypeVar("T")
LONG = 1 << 16
"""Size in bytes from which a body is long: it takes a millisecond or more to parse or tokenize."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Client and size of a request."""

    client: str = ""
    """The key, or the address without keys."""
    size: int = 0
    """Bytes of the body."""


_NONE = Sender()
SENDER: ContextVar[Sender] = ContextVar("sender", default=_NONE)
"""Sender of the request that the current task handles."""


class Queue:
    """Requests that wait for something, or use it."""

    def __init__(self, slots: int, what: str = "are queued", workers: int = 1) -> None:
        """slots: a client may have as many as are free. what: what the requests do. workers: turns at a time."""
        self._slots, self._what = slots, what
        self._taken: Counter[str] = Counter()
        self._workers = asyncio.Semaphore(workers)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def open(self) -> int:
        """Slots that are taken."""
        return self._taken.total()

    @contextmanager
    def slot(self, count: int = 1) -> Iterator[None]:
        """Take slots for the current request. Raises ApiError if its client would have more than are free."""
        client = SENDER.get().client
        if self._taken[client] + count > self._slots - self.open:
            text = f"{self.open} requests {self._what}; try again later"
            raise ApiError(429, text, code="queue_full", retry_after=1)
        self._taken[client] += count
        try:
            yield
        finally:
            self._taken[client] -= count
            if not self._taken[client]:
                del self._taken[client]

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn of the current request. A client has one at a time, and waits for one at a time."""
        async with self._turns.setdefault(SENDER.get().client, asyncio.Lock()), self._workers:
            yield


class Lane(Queue):
    """Threads on which clients take turns."""

    def __init__(self, name: str, slots: int, threads: int = 1) -> None:
        super().__init__(slots, workers=threads)
        self._threads = ThreadPoolExecutor(threads, name)

    async def run(self, work: Callable[[], T]) -> T:
        """Run work on a thread. Raises ApiError as `slot`."""
        with self.slot():
            async with self.turn():
                run = copy_context().run
                return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: run(work))


class Queues:
    """The queues of a server."""

    def __init__(self, most: int, max_waiting: int, trials: int) -> None:
        """most: requests of one client that have a row or wait for one, and those in each other queue but two.

        Half as many long texts of one client are read. max_waiting: requests of one client that wait for a model. trials: of
        constraints at a time.
        """
        self.short, self.long = Lane("foresay-texts", 2 * most), Lane("foresay-long-texts", most)
        self.trials, self.passes, self.rows = (
            Lane("foresay-schemas", 2 * most, trials),
            Queue(2 * most),
            Queue(2 * most),
        )
        self.models = Queue(2 * max_waiting, "wait for a model to be loaded")

    @property
    def texts(self) -> Lane:
        """The lane of the current request."""
        return self.short if SENDER.get().size < LONG else self.long

    @property
    def before_rows(self) -> int:
        """Requests that are not in the engine's queue yet, or never will be."""
        return sum(one.open for one in (self.short, self.long, self.trials, self.passes, self.models))
