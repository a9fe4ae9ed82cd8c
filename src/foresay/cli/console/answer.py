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
from foresay.decoding.outcome import FinishReason
from foresay.engine import Stats
from foresay.generation.result import Chunk


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


def generate(session: ChatSession, user: str, before: Sequence[Exchange]) -> Exchange | None:
    """Generate the answer to a message after earlier exchanges. Return None after Ctrl-C before the first word.

    Raises the errors of `Generator.stream` for a message that cannot be answered.
    """
    prompt, left_out = session.fitted(before, user)
    params, chunks, began = session.seeded(), list[Chunk](), perf_counter()
    stream: Any = session.generator.stream(prompt, params)
    if left_out:
        session.screen.note(_left_out(left_out))
    try:
        with interruptible(session.interactive, lambda: bool(chunks)) as interrupted:
            for chunk in stream:
                chunks.append(chunk)
                session.screen.stream(chunk.pieces, trace=session.trace)
                if interrupted():
                    break
    except KeyboardInterrupt:
        if not session.interactive:
            session.screen.line()
            raise
    stream.close()
    seconds = perf_counter() - began
    session.screen.line()
    whole = next((chunk.generation for chunk in reversed(chunks) if chunk.generation), None)
    text = "".join(chunk.text for chunk in chunks)
    if not text and whole is None:
        session.screen.note("interrupted before the first word; the message is dropped")
        return None
    one = Exchange(
        user=user,
        answer=text if whole is None else whole.text,
        ended=INTERRUPTED if whole is None else whole.finish_reason.value,
        stats=Stats.of([chunk.step for chunk in chunks]),
        seconds=seconds,
        seed=None if params.greedy else params.seed,
        exact=session.generator.rule.exact,
        method=session.method,
        params=params,
        left_out=left_out,
        draft_error=None if whole is None else whole.draft_error,
    )
    if session.screen.notes.is_terminal:
        session.screen.note(_sum_up(session, one))
    return one


def _left_out(count: int) -> str:
    exchanges = "the oldest exchange is" if count == 1 else f"the {count} oldest exchanges are"
    return f"({exchanges} left out: the model's context is full)"


def _sum_up(session: ChatSession, one: Exchange) -> str:
    ended = f", {INTERRUPTED}" if one.ended == INTERRUPTED else ""
    if one.ended == FinishReason.LENGTH:
        full = one.stats.num_tokens < session.params.max_new_tokens
        ended = ", ended by the context" if full else f", ended by /max-new-tokens {session.params.max_new_tokens}"
    return sum_up(one.stats, one.seconds, one.seed, exact=one.exact) + ended
