"""An event loop with a virtual clock: nothing waits, and what happens next depends on a seed alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from foresay.generation.session_thread import SessionThread


class StuckError(Exception):
    """Nothing is left that could happen, and the work has not ended."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs callbacks in order; if none is ready, the clock jumps to the next timer."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.dice, self._now = dice, 0.0
        self.turns_per_s = 50.0
        """Mean number of turns of a session thread."""
        self._selector = self
        self.failures: list[str] = []
        """Errors that no task handled."""
        self.set_exception_handler(self._note)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Called when no callback is ready, as a selector would be."""
        if timeout is None:
            raise StuckError
        self._now += timeout
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        """Other threads would wake the loop here; there are none."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Call a function after a random time, as a thread would."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except BaseException as error:
                future.set_exception(error)

        self.call_later(self.dice.expovariate(100), work)
        return future


class SimulatedThread(SessionThread):
    """A session thread whose turns are events of the loop, with random pauses between them."""

    def __init__(self, loop: SimulatedLoop, after_turn: Callable[[], None], *given: Any, **named: Any) -> None:
        """after_turn: called after each turn."""
        super().__init__(*given, **named)
        self._loop, self._after_turn = loop, after_turn

    def _start(self) -> None:
        self._loop.call_later(self._loop.dice.expovariate(self._loop.turns_per_s), self._tick)

    def _wait(self) -> bool:
        return False

    def _tick(self) -> None:
        if self._turn():
            self._after_turn()
            self._start()
