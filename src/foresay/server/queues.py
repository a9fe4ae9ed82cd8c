"""Queues in which requests wait: for the threads of texts and of trials, for passes, rows and models. Clients share each fairly.

Owns the slots of clients in a queue, their turns, and two queues for texts, so that short ones never wait for long ones. Knows no
HTTP and no text.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from foresay.errors import QueueFullError

T = TypeVar("T")
LONG = 1 << 16
"""Size in bytes from which a body is long: it takes a millisecond or more to parse or tokenize."""
STUCK_S = 30.0
"""Time after which a piece of work is reported: no text takes as long."""
GRACE_S = 1.0
"""Time for which work whose request has left goes on: most of it ends by itself."""


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


class _EndedError(BaseException):
    """A request's work was ended. No `except Exception` of a library or template keeps it from that."""


class _Work(Generic[T]):
    """A piece of work on a thread, which can be ended between two instructions of Python."""

    def __init__(self, work: Callable[[], T], running: set[_Work[T]]) -> None:
        """running: contains the work while it runs."""
        self._work, self._run, self._running = work, copy_context().run, running
        self._lock, self._thread, self._is_ended = threading.Lock(), 0, False
        self.began = 0.0

    def __call__(self) -> T:
        with self._lock:
            if self._is_ended:
                raise _EndedError
            self._thread, self.began = threading.get_ident(), monotonic()
            self._running.add(self)
        try:
            return self._run(self._work)
        finally:
            with self._lock:
                self._thread = 0
                self._running.discard(self)
            for _ in range(8):  # an end that was set before is raised here, and not in the thread's own code
                pass

    def cancel(self) -> bool:
        """Let work that has not begun never begin. Return True if it is running."""
        with self._lock:
            self._is_ended = True
            return self._thread != 0

    def end(self) -> None:
        """End the work, if it is still running. A call of compiled code ends when it returns."""
        with self._lock:
            if self._thread:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(_EndedError))


class Queue:
    """Requests that wait for something, or use it; threads do the work of a queue with a name."""

    def __init__(
        self, slots: int, what: str = "are queued", *, name: str = "", workers: int = 1, ends_itself: bool = False
    ) -> None:
        """slots: a client may have as many as are free. what: what the requests do. workers: turns at a time.

        name: of the threads on which `run` runs work. ends_itself: True for work that ends soon after its request has left.
        """
        self._slots, self._what, self.name, self._ends_itself = slots, what, name, ends_itself
        self._taken: Counter[str] = Counter()
        self._workers = asyncio.Semaphore(workers)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._threads = ThreadPoolExecutor(workers, name) if name else None
        self._running: set[_Work[Any]] = set()

    @property
    def open(self) -> int:
        """Slots that are taken."""
        return self._taken.total()

    @contextmanager
    def slot(self, count: int = 1) -> Iterator[None]:
        """Take slots for the current request. Raises QueueFullError if its client would have more than are free."""
        client = SENDER.get().client
        if self._taken[client] + count > self._slots - self.open:
            raise QueueFullError(f"{self.open} requests {self._what}; try again later")
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

    async def run(self, work: Callable[[], T]) -> T:
        """Run work on a thread; it ends soon after the coroutine was cancelled. Raises QueueFullError as `slot`."""
        loop, begun = asyncio.get_running_loop(), _Work(work, self._running)
        with self.slot():
            async with self.turn():
                try:
                    return await loop.run_in_executor(self._threads, begun)
                finally:
                    if begun.cancel() and not self._ends_itself:
                        loop.call_later(GRACE_S, begun.end)

    @property
    def problem(self) -> str:
        """Why requests wait that should not: a piece of work that does not end. Empty if there is none."""
        since = min((one.began for one in list(self._running)), default=None)
        if since is None or monotonic() - since < STUCK_S:
            return ""
        return f"a piece of work on the thread {self.name} has not ended for {STUCK_S:g} s"


class Queues:
    """The queues of a server."""

    def __init__(self, most: int, max_waiting: int, trials: int) -> None:
        """most: requests of one client that have a row or wait for one, and those in each other queue but two.

        Half as many long texts of one client are read. max_waiting: requests of one client that wait for a model. trials: of
        constraints at a time.
        """
        self.short, self.long = Queue(2 * most, name="foresay-texts"), Queue(most, name="foresay-long-texts")
        self.trials = Queue(2 * most, name="foresay-schemas", workers=trials, ends_itself=True)
        self.passes, self.rows = Queue(2 * most), Queue(2 * most)
        self.models = Queue(2 * max_waiting, "wait for a model to be loaded")

    @property
    def texts(self) -> Queue:
        """The queue of the current request."""
        return self.short if SENDER.get().size < LONG else self.long

    @property
    def problem(self) -> str:
        """See Queue."""
        return next((one.problem for one in (self.short, self.long, self.trials) if one.problem), "")

    @property
    def before_rows(self) -> int:
        """Requests that are not in the engine's queue yet, or never will be."""
        return sum(one.open for one in (self.short, self.long, self.trials, self.passes, self.models))
