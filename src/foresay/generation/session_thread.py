"""Sessions on a thread of their own, for callers that come from many, or from asyncio.

Owns the thread: what it is asked between two steps, whose listener hears what, and that it outlives a session that fails. Knows
nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from foresay.checks import check_int
from foresay.decoding.outcome import FinishReason
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import QueueFullError
from foresay.generation.result import Chunk
from foresay.generation.session import Session, failed_step

logger = logging.getLogger(__name__)

Listener = Callable[[Chunk], None]
"""Called with each chunk of a request, on the session's thread; when it raises, the request is cancelled."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request of one of a thread's sessions, whatever came after that session."""

    kind: Hashable
    session: int
    number: int


class SessionThread:
    """Sessions on a thread of their own, which lives while there is work. Its methods may be called from any thread.

    Requests of one kind share a session, and its batch; sessions with work take turns, a step each.
    """

    def __init__(
        self, make: Callable[[Any], Session], *, idle_s: float = 1.0, max_sessions: int = 1, main: Hashable = None
    ) -> None:
        """make: a session for a kind, called on the thread when the first such request comes. idle_s: how long the thread
        waits for more. max_sessions: kept at a time, beside that of the kind `main`, which stays; the one that was idle longest
        goes first, and those with work stay.
        """
        self._make, self._idle_s = make, idle_s
        self._max_sessions, self._main = check_int("max_sessions", max_sessions, 1), main
        self._condition = threading.Condition()
        self._orders: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._listeners: dict[Ticket, Listener] = {}
        self._sessions: dict[Hashable, Session] = {}
        """The one used last comes last."""
        self._running = False

    def submit(
        self,
        prompts: Sequence[tuple[Any, SamplingParams]],
        listener: Callable[[int, Chunk], None],
        *,
        kind: Hashable = None,
        text: bool = True,
    ) -> Future[list[Ticket]]:
        """Queue prompts together, all or none; the future gives their tickets or raises what `Session.submit` raises.

        listener: called with a prompt's place and each of its chunks (see Listener). kind: which session's.
        """

        def order() -> list[Ticket]:
            session = self._session(kind)
            numbers: list[int] = []
            try:
                for prompt, params in prompts:
                    numbers.append(session.submit(prompt, params, text=text))
            except BaseException:
                for number in numbers:
                    session.cancel(number)
                raise
            tickets = [Ticket(kind, session.serial, number) for number in numbers]
            for place, ticket in enumerate(tickets):
                self._listeners[ticket] = lambda chunk, place=place: listener(place, chunk)  # type: ignore[misc]
            return tickets

        return self.call(order)

    async def chunks(
        self, prompts: Sequence[tuple[Any, SamplingParams]], *, kind: Hashable = None
    ) -> AsyncGenerator[tuple[int, Chunk], None]:
        """(place, chunk) of prompts that are queued together, as they come; closing this frees their rows before the next step.

        Raises what `Session.submit` raises, before the first of them.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Chunk]]()

        def listen(place: int, chunk: Chunk) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, (place, chunk))

        submitted = self.submit(prompts, listen, kind=kind)
        waiting = set(range(len(prompts)))
        try:
            await asyncio.wrap_future(submitted)
            while waiting:
                place, chunk = await queue.get()
                if chunk.finish_reason is not None:
                    waiting.discard(place)
                yield place, chunk
        finally:
            if waiting:
                submitted.add_done_callback(self._abandon)

    def _abandon(self, submitted: Future[list[Ticket]]) -> None:
        """End what nobody reads any more."""
        if not submitted.cancelled() and submitted.exception() is None:
            self.cancel(submitted.result())

    def cancel(self, tickets: Sequence[Ticket]) -> Future[None]:
        """End requests before their next step; the future is done when the thread has heard of it."""

        def order() -> None:
            for ticket in tickets:
                session = self._sessions.get(ticket.kind)
                if session is not None and session.serial == ticket.session:
                    session.cancel(ticket.number)

        return self.call(order)

    def sessions(self) -> Future[list[Session]]:
        """Those there are, for who wants to look at them. They are the thread's: read numbers, change nothing."""
        return self.call(lambda: list(self._sessions.values()))

    def call(self, action: Callable[[], Any]) -> Future[Any]:
        """Have the thread call something between two steps."""
        future: Future[Any] = Future()
        with self._condition:
            self._orders.append((action, future))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="foresay-session", daemon=True).start()
            self._condition.notify()
        return future

    def _session(self, kind: Hashable) -> Session:
        found = self._sessions.pop(kind, None)
        if found is None:
            found = self._make(kind)  # first: one that cannot be made costs nobody a place
            if kind != self._main:
                self._make_room()
        self._sessions[kind] = found
        return found

    def _make_room(self) -> None:
        while len(others := [kind for kind in self._sessions if kind != self._main]) >= self._max_sessions:
            idle = next((kind for kind in others if not self._sessions[kind].has_work), None)
            if idle is None:
                raise QueueFullError(f"{len(others)} ways of drafting are at work, as many as may; try again later")
            del self._sessions[idle]

    def _run(self) -> None:
        while True:
            with self._condition:
                busy = any(one.has_work for one in self._sessions.values())
                if not self._orders and not busy and not self._condition.wait_for(lambda: self._orders, self._idle_s):
                    self._running = False
                    return
                orders = list(self._orders)
                self._orders.clear()
            for action, future in orders:
                _carry_out(action, future)
            for kind, session in list(self._sessions.items()):
                if session.has_work:
                    self._step(kind, session)

    def _step(self, kind: Hashable, session: Session) -> None:
        try:
            chunks = session.step()
        except BaseException as error:  # whatever the target raises ends the requests it was working on, and no more
            logger.exception("a pass failed")
            chunks = self._failed(kind, session, error)
        for chunk in chunks:
            ended, ticket = chunk.finish_reason is not None, Ticket(kind, session.serial, chunk.index)
            listener = self._listeners.pop(ticket, None) if ended else self._listeners.get(ticket)
            if listener is None:
                continue
            try:
                listener(replace(chunk))
            except Exception:
                self._listeners.pop(ticket, None)
                session.cancel(chunk.index)

    def _failed(self, kind: Hashable, session: Session, error: BaseException) -> list[Chunk]:
        """The last chunks of a session's requests; one that cannot go on is dropped, and another made when it is needed."""
        told = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        chunks: list[Chunk] = []
        try:
            chunks = session.fail(told)
        except BaseException:
            logger.exception("its session cannot go on")
            del self._sessions[kind]
        ended = {chunk.index for chunk in chunks if chunk.finish_reason is not None}
        mine = [one.number for one in self._listeners if one.kind == kind and one.session == session.serial]
        return chunks + [_lost(number, told) for number in mine if number not in ended]


def _lost(number: int, error: Exception) -> Chunk:
    """The end of a request of which nobody can say more."""
    return Chunk(number, "", (), failed_step(number, error), FinishReason.ERROR)


def _carry_out(action: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
