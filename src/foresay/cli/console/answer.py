"""One answer: streamed, ended by Ctrl-C, returned as an Exchange."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from foresay.cli.console.screen import unechoed
from foresay.cli.console.session import INTERRUPTED, ChatSession, Exchange
from foresay.cli.tables import sum_up
from foresay.decoding.outcome import FinishReason, Step
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Stats
from foresay.generation.result import Chunk, Generation


@contextmanager
def interruptible(enabled: bool, started: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after Ctrl-C, so that an answer ends between two passes and no drafter state is damaged.

    started: returns True once the answer has its first word. A Ctrl-C before it, and a second one, raise KeyboardInterrupt.
    """
    pressed = False

    def on_signal(*_: object) -> None:
        nonlocal pressed
        if pressed or not started():
            raise KeyboardInterrupt
        pressed = True

    if not enabled or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, on_signal)
    try:
        with unechoed(True):
            yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


class _Answer:
    """Text and steps of an answer so far."""

    def __init__(self, session: ChatSession) -> None:
        self._session = session
        self.steps: list[Step] = []
        self.text = ""
        self.whole: Generation | None = None

    def show(self, chunk: Chunk) -> None:
        self.steps.append(chunk.step)
        self.text += chunk.text
        self.whole = chunk.generation or self.whole
        self._session.screen.stream(chunk.pieces, trace=self._session.trace)


def generate(session: ChatSession, user: str, before: Sequence[Exchange]) -> Exchange | None:
    """Generate the answer to a message after earlier exchanges. Return None after Ctrl-C before the first word.

    Raises the errors of `Generator.stream` for a message that cannot be answered.
    """
    prompt, left_out = session.fitted(before, user)
    params = session.seeded()
    answer = _Answer(session)
    stream: Any = session.generator.stream(prompt, params)
    if left_out:
        session.screen.note(_left_out(left_out))
    began = perf_counter()
    try:
        with interruptible(session.interactive, lambda: bool(answer.steps)) as interrupted:
            for chunk in stream:
                answer.show(chunk)
                if interrupted():
                    break
    except KeyboardInterrupt:
        if not session.interactive:
            session.screen.line()
            raise
    stream.close()
    seconds = perf_counter() - began
    session.screen.line()
    if not answer.text and answer.whole is None:
        session.screen.note("interrupted before the first word; the message is dropped")
        return None
    one = _exchange(session, user, params, answer, seconds, left_out)
    if session.screen.notes.is_terminal:
        session.screen.note(_sum_up(session, one))
    return one


def _exchange(
    session: ChatSession, user: str, params: SamplingParams, answer: _Answer, seconds: float, left_out: int
) -> Exchange:
    whole = answer.whole
    return Exchange(
        user=user,
        answer=answer.text if whole is None else whole.text,
        ended=INTERRUPTED if whole is None else whole.finish_reason.value,
        stats=Stats.of(answer.steps),
        seconds=seconds,
        seed=None if params.greedy else params.seed,
        exact=session.generator.rule.exact,
        method=session.method,
        params=params,
        left_out=left_out,
        draft_error=None if whole is None else whole.draft_error,
    )


def _left_out(count: int) -> str:
    exchanges = "the oldest exchange is" if count == 1 else f"the {count} oldest exchanges are"
    return f"({exchanges} left out: the model's context is full)"


def _sum_up(session: ChatSession, one: Exchange) -> str:
    ended = f", {INTERRUPTED}" if one.ended == INTERRUPTED else ""
    if one.ended == FinishReason.LENGTH:
        full = one.stats.num_tokens < session.params.max_new_tokens
        ended = ", ended by the context" if full else f", ended by /max-new-tokens {session.params.max_new_tokens}"
    return sum_up(one.stats, one.seconds, one.seed, exact=one.exact) + ended
