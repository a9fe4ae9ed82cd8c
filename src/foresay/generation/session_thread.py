"""Sessions on a separate thread, for callers on many threads or in asyncio.

Owns the thread, the calls that it carries out between steps, and the listeners of requests; it survives sessions that fail. Knows
no HTTP.
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
"""Called with each chunk of a request, on the session's thread; if it raises, the request is cancelled."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Identifies a request of one of a thread's sessions, also after that session was replaced."""

    kind: Hashable
    session: int
    number: int


class SessionThread:
    """Sessions on a separate thread, which runs while there is work. All methods are thread-safe.

    Requests of one kind share a session and its batch; sessions with work take turns, one step each.
    """

    def __init__(
        self,
        make: Callable[[Any], Session],
        *,
        idle_s: float = 1.0,
        max_sessions: int = 1,
        is_main: Callable[[Any], bool] = lambda kind: kind is None,
    ) -> None:
        """Prepare a thread, which starts at the first call.

        Args:
            make: Creates the session of a kind, on the thread, at the first request of that kind.
            idle_s: Time that the thread waits for further work before it ends, in seconds.
            max_sessions: Maximum number in addition to those of main kinds; the least recently used idle session is dropped
                first, sessions with work are kept.
            is_main: Returns True for a kind whose sessions are never dropped for others.
        """
        self._make, self._idle_s = make, idle_s
        self._max_sessions, self._is_main = check_int("max_sessions", max_sessions, 1), is_main
        self._condition = threading.Condition()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._listeners: dict[Ticket, Listener] = {}
        self._sessions: dict[Hashable, Session] = {}
        """In order of use, the most recent last."""
        self._running = False

    def submit(
        self,
        prompts: Sequence[tuple[Any, SamplingParams]],
        listener: Callable[[int, Chunk], None],
        *,
        kind: Hashable = None,
        text: bool = True,
    ) -> Future[list[Ticket]]:
        """Queue prompts together, all or none.

        Args:
            prompts: Each prompt with its parameters.
            listener: Called with a prompt's index and each of its chunks, on the session's thread; if it raises, the request is
                cancelled.
            kind: Selects the session.
            text: False leaves the text of chunks empty.

        Returns:
            A future, which returns the requests' tickets or raises as `Session.submit` does.
        """

        def submit_all() -> list[Ticket]:
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
            for index, ticket in enumerate(tickets):
                self._listeners[ticket] = lambda chunk, index=index: listener(index, chunk)  # type: ignore[misc]
            return tickets

        return self.call(submit_all)

    async def chunks(
        self, prompts: Sequence[tuple[Any, SamplingParams]], *, kind: Hashable = None
    ) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Queue prompts together and yield (index, chunk); closing the generator frees their rows before the next step.

        Args:
            prompts: Each prompt with its parameters.
            kind: Selects the session.

        Raises:
            ForesayError: As in `Session.submit`, before the first chunk.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Chunk]]()

        def listen(index: int, chunk: Chunk) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, (index, chunk))

        submitted = self.submit(prompts, listen, kind=kind)
        waiting = set(range(len(prompts)))
        try:
            await asyncio.wrap_future(submitted)
            while waiting:
                index, chunk = await queue.get()
                if chunk.finish_reason is not None:
                    waiting.discard(index)
                yield index, chunk
        finally:
            if waiting:
                submitted.add_done_callback(self._abandon)

    def _abandon(self, submitted: Future[list[Ticket]]) -> None:
        """Cancel the requests of a closed generator."""
        if not submitted.cancelled() and submitted.exception() is None:
            self.cancel(submitted.result())

    def cancel(self, tickets: Sequence[Ticket]) -> Future[None]:
        """End requests before their next step.

        Args:
            tickets: The requests; finished ones are ignored.

        Returns:
            A future, which is done when the thread has processed the call.
        """

        def cancel_all() -> None:
            for ticket in tickets:
                session = self._sessions.get(ticket.kind)
                if session is not None and session.serial == ticket.session:
                    session.cancel(ticket.number)

        return self.call(cancel_all)

    def sessions(self) -> Future[list[Session]]:
        """Return the present sessions, for reading statistics only: they belong to the thread."""
        return self.call(lambda: list(self._sessions.values()))

    def present(self) -> list[Session]:
        """Return the present sessions without waiting for the thread, which may carry out a long call."""
        return list(self._sessions.values())

    def drop(self, belongs: Callable[[Hashable], bool]) -> None:
        """Drop sessions whose requests have ended. Called on the thread.

        Args:
            belongs: Returns True for the kinds of these sessions.
        """
        self._sessions = {kind: one for kind, one in self._sessions.items() if not belongs(kind)}
        self._listeners = {ticket: one for ticket, one in self._listeners.items() if not belongs(ticket.kind)}

    def close(self) -> None:
        """Cancel every request, and drop the sessions when all have ended."""
        self.cancel(self.call(lambda: list(self._listeners)).result()).result()
        while self.call(lambda: any(one.has_work for one in self._sessions.values())).result():
            pass
        self.call(lambda: self.drop(lambda kind: True)).result()

    def call(self, action: Callable[[], Any]) -> Future[Any]:
        """Call a function on the thread, between two steps.

        Args:
            action: The function, called without arguments.

        Returns:
            A future of its result.
        """
        future: Future[Any] = Future()
        with self._condition:
            self._calls.append((action, future))
            if not self._running:
                self._running = True
                self._start()
            self._condition.notify()
        return future

    def _start(self) -> None:
        """Start to take turns, on another thread."""
        threading.Thread(target=self._run, name="foresay-session", daemon=True).start()

    def _wait(self) -> bool:
        """Wait for a call; return False if none comes in time. Called with the condition held."""
        return self._condition.wait_for(lambda: bool(self._calls), self._idle_s)

    def _session(self, kind: Hashable) -> Session:
        found = self._sessions.pop(kind, None)
        if found is None:
            found = self._make(kind)  # first: if this fails, no other session is dropped
            if not self._is_main(kind):
                self._make_room()
        self._sessions[kind] = found
        return found

    def _make_room(self) -> None:
        while len(others := [kind for kind in self._sessions if not self._is_main(kind)]) >= self._max_sessions:
            idle = next((kind for kind in others if not self._sessions[kind].has_work), None)
            if idle is None:
                raise QueueFullError(
                    f"{len(others)} drafting methods are in use, which is the maximum; try again later"
                )
            del self._sessions[idle]

    def _run(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Carry out the calls, then one step of each session with work. Return False if there was nothing to do."""
        with self._condition:
            busy = any(one.has_work for one in self._sessions.values())
            if not self._calls and not busy and not self._wait():
                self._running = False
                return False
            calls = list(self._calls)
            self._calls.clear()
        for action, future in calls:
            _carry_out(action, future)
        for kind, session in list(self._sessions.items()):
            if session.has_work:
                self._step(kind, session)
        return True

    def _step(self, kind: Hashable, session: Session) -> None:
        try:
            chunks = session.step()
        except BaseException as error:  # an exception of the target ends the requests of this session only
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
        """Return the last chunks of a failed session's requests; a session that cannot continue is dropped."""
        cause = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        chunks: list[Chunk] = []
        try:
            chunks = session.fail(cause)
        except BaseException:
            logger.exception("its session cannot continue")
            del self._sessions[kind]
        ended = {chunk.index for chunk in chunks if chunk.finish_reason is not None}
        open_ = [one.number for one in self._listeners if one.kind == kind and one.session == session.serial]
        return chunks + [_lost(number, cause) for number in open_ if number not in ended]


def _lost(number: int, error: Exception) -> Chunk:
    """Last chunk of a request whose session was dropped."""
    return Chunk(number, "", (), failed_step(number, error), FinishReason.ERROR)


def _carry_out(action: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
