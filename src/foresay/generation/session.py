"""Text requests over a living engine: submit, step, cancel.

Owns the way from a prompt to tokens and back to text, and that an error is a chunk of its own request and of no other.
`SessionThread` runs a session on a thread of its own, for callers that come from many. Knows nothing of HTTP.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from foresay.checks import check_int
from foresay.decoding.outcome import FinishReason, Step
from foresay.decoding.protocols import Begun
from foresay.decoding.rows import StopCondition
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Engine, Stats
from foresay.errors import ConfigError, QueueFullError, RequestError
from foresay.generation.result import Chunk, Generation
from foresay.models.sources.catalog import LoadedModel
from foresay.text.prompts import encode
from foresay.text.stream import Detokenizer, StopStrings, TextStream

logger = logging.getLogger(__name__)
_serials = itertools.count()


class _Request:
    """One request on its way through an engine."""

    def __init__(self, ids: Sequence[int], begun: Begun, tokenizer: Any, *, text: bool) -> None:
        if begun.params.stop and tokenizer is None:
            raise ConfigError(
                "stop strings need a tokenizer, and this model was loaded without one; use stop_token_ids"
            )
        params = begun.params
        self.ids, self.begun, self._tokenizer = list(ids), begun, tokenizer
        self.stop = StopStrings(tokenizer, params.stop, params.min_new_tokens) if params.stop else None
        self._stream = TextStream(tokenizer, params.stop) if text and tokenizer is not None else None
        self.steps: list[Step] = []
        self.seed: int | None = None

    def take(self, number: int, step: Step, exact: bool, draft_error: str | None) -> Chunk:
        """What a Step adds."""
        self.steps.append(step)
        pieces = self._stream.push(step.token_ids, step.origins) if self._stream is not None else []
        whole = None
        if step.finish_reason is not None:
            stopped = self.stop is not None and self.stop.cut_at is not None
            pieces += self._stream.finish(stopped=stopped) if self._stream is not None else []
            whole = self._whole(step, step.finish_reason, exact, draft_error)
        joined = "".join(piece.text for piece in pieces)
        return Chunk(number, joined, tuple(pieces), step, step.finish_reason, whole)

    def _whole(self, last: Step, reason: FinishReason, exact: bool, draft_error: str | None) -> Generation:
        ids = [token for step in self.steps for token in step.token_ids]
        return Generation(
            text=self._text(ids),
            token_ids=ids,
            prompt_token_ids=self.ids,
            finish_reason=reason,
            steps=self.steps,
            stats=Stats.of(self.steps),
            seed=self.seed,
            exact=exact,
            draft_error=draft_error,
            error=last.error,
        )

    def _text(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        if self.stop is not None and self.stop.cut_at is not None:
            return self.stop.text[: self.stop.cut_at]
        # as the stream decodes it: `decode` of the whole may turn complete characters before a cut one into U+FFFD
        return Detokenizer(self._tokenizer).all(ids)


class Session:
    """Requests of texts, messages or token ids over one engine. Not for several threads at once."""

    def __init__(self, target: LoadedModel, engine: Engine, *, max_waiting: int | None = None) -> None:
        """engine: over the target's model; nobody else submits to it. max_waiting: requests that may wait for a row."""
        self.target, self.engine = target, engine
        self.max_waiting = None if max_waiting is None else check_int("max_waiting", max_waiting, 0)
        self._open: dict[int, _Request] = {}
        self.serial = next(_serials)
        """No other session's."""

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.engine.has_work

    def submit(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        text: bool = True,
        stop: StopCondition | None = None,
        **changes: Any,
    ) -> int:
        """Queue a prompt (a text, chat messages or token ids) and return the request's id.

        changes: fields of SamplingParams over `params`. text: whether chunks carry the text as it comes; a Generation has it
        anyway. stop: a condition of the caller's own, in place of stop strings. Raises ConfigError, PromptError or
        ContextLengthError for what cannot be decoded, and QueueFullError.
        """
        free = max(0, self.engine.max_batch_size - self.engine.num_active)  # taken with the next step
        if self.max_waiting is not None and self.engine.num_waiting >= self.max_waiting + free:
            raise QueueFullError(f"{self.engine.num_waiting} requests are waiting, as many as may; try again later")
        ids = encode(prompt, self.target.tokenizer)
        begun = self.target.model.begin(ids, SamplingParams.of(params, **changes))
        request = _Request(ids, begun, self.target.tokenizer, text=text)
        number = self.engine.submit(
            begun.prompt,
            begun.params,
            eos=self.target.eos_token_ids,
            stop=stop if stop is not None else request.stop,
            source=begun.source,
        )
        request.seed = None if begun.params.greedy else self.engine.seed_of(number)
        self._open[number] = request
        return number

    def begun(self, number: int) -> Begun:
        """An unfinished request as its model began with it: prompt, parameters, source."""
        return self._open[number].begun

    def step(self) -> list[Chunk]:
        """One step of the engine: a chunk for each row that decoded or ended; none while only prompts are filled.

        What the target itself raises comes through; `fail` then ends what was under way.
        """
        return [self._chunk(step) for step in self.engine.step()]

    def _chunk(self, step: Step) -> Chunk:
        request = self._open[step.request_id]
        if step.finish_reason is not None:
            del self._open[step.request_id]
        return request.take(step.request_id, step, self.engine.rule.exact, self.draft_error)

    @property
    def draft_error(self) -> str | None:
        """Why the drafter last failed."""
        error = self.engine.drafter.last_error if self.engine.drafter is not None else None
        return None if error is None else f"{type(error).__name__}: {error}"

    def cancel(self, number: int) -> None:
        """End a request before its next step; unknown and finished ids are ignored."""
        self.engine.cancel(number)

    def fail(self, error: Exception) -> list[Chunk]:
        """End every unfinished request because of an error of the target; the session goes on with empty caches."""
        chunks = []
        for number in self.engine.abandon():
            why = RequestError(number, f"the target raised {type(error).__name__}: {error}")
            why.__cause__ = error
            chunks.append(self._chunk(Step(number, (), (), 0, 0, finish_reason=FinishReason.ERROR, error=why)))
        return chunks


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
    """The end of a request that nobody can say more of."""
    why = RequestError(number, f"the target raised {type(error).__name__}: {error}")
    why.__cause__ = error
    step = Step(number, (), (), 0, 0, finish_reason=FinishReason.ERROR, error=why)
    return Chunk(number, "", (), step, FinishReason.ERROR)


def _carry_out(action: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
