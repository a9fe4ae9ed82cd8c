"""Threads on which requests are prepared (parsed, tokenized, detokenized), shared fairly by the clients.

Owns two lanes, so that short texts never wait for long ones, and the turns of clients in each. Knows no HTTP and no text.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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


class Lane:
    """One thread, on which clients take turns."""

    def __init__(self, name: str, most: int, share: int) -> None:
        """most: requests in preparation, of all clients. share: those of one client."""
        self._worker = ThreadPoolExecutor(1, name)
        self._most, self._share = most, share
        self._open: Counter[str] = Counter()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def open(self) -> int:
        """Requests that are being prepared."""
        return self._open.total()

    @contextmanager
    def admitted(self, client: str) -> Iterator[None]:
        """Count a request that is being prepared. Raises ApiError if there are too many."""
        if self.open >= self._most or self._open[client] >= self._share:
            text = f"{self.open} requests are queued for preparation; try again later"
            raise ApiError(429, text, code="queue_full", retry_after=1)
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """Run work on the thread. A client has one piece of work in the queue at a time."""
        turn = self._turns.setdefault(client, asyncio.Lock())
        async with turn:
            run = copy_context().run
            return await asyncio.get_running_loop().run_in_executor(self._worker, lambda: run(work))


class Lanes:
    """The lane of short requests and that of long ones."""

    def __init__(self, most: int) -> None:
        """most: requests in preparation in each lane. Long ones of one client may be half of them."""
        self._short = Lane("foresay-texts", most, most)
        self._long = Lane("foresay-long-texts", most, max(1, most // 2))

    def of(self, sender: Sender) -> Lane:
        """Return the lane of a request."""
        return self._short if sender.size < LONG else self._long

    @property
    def open(self) -> int:
        """Requests that are being prepared."""
        return self._short.open + self._long.open
