"""Distribution of tasks over workers, with one result for each task even if workers die.

Owns the assignment of tasks to workers. Does not know the tasks or where workers run.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from foresay.errors import ConfigError, ForesayError

logger = logging.getLogger("foresay")

TRIES = 3
"""Maximum number of workers that a task may be assigned to, if each of them dies."""
Plain = dict[str, Any]
Begun = tuple[Plain, int] | ForesayError
"""The description of a worker's job and the number of tasks that it takes at a time, or why it has none."""
Result = tuple[int, Any]
"""A task's number, and its result or the ForesayError that prevented it."""


class Backend(Protocol):
    """Starts workers and calls `jobs.begin` and `jobs.advance` in them. The future of a worker that died raises an error."""

    def start(self, index: int) -> tuple[Any, Future[Begun]]:
        """Start worker `index`. Return it with the future of its `begin`."""
        ...

    def advance(self, worker: Any, tasks: Sequence[tuple[int, Any]]) -> Future[list[Result]]:
        """Return the future of the worker's `advance`. The worker has no other call."""
        ...

    def close(self, worker: Any) -> None:
        """End the worker, also during a call."""
        ...


@dataclass(eq=False, slots=True)
class _Worker:
    name: str
    handle: Any
    capacity: int = 0
    assigned: list[int] = field(default_factory=list)
    call: Future[list[Result]] | None = None


class Pool:
    """A fixed number of workers on one backend."""

    def __init__(self, backend: Backend, count: int, *, on_start: Callable[[int], None] = lambda ready: None) -> None:
        """Start `count` workers. on_start: called with the number of workers that are ready."""
        self._backend, self._workers, self.size = backend, list[_Worker](), count
        self.described: Plain = {}
        """The first worker's description of the job; it is the same for all workers."""
        try:
            for index in range(count):
                self._start(index)
                on_start(index + 1)
        except BaseException:
            self.close()
            raise

    def _start(self, index: int) -> None:
        """Start a worker. Raises ConfigError if its settings differ, because files and processors may differ by machine."""
        handle, call = self._backend.start(index)
        worker = _Worker(f"worker {index + 1}", handle)
        self._workers[index : index + 1] = [worker]
        try:
            begun = call.result()
        except Exception as error:
            raise ForesayError(f"{worker.name} died: {error}") from error
        if isinstance(begun, ForesayError):
            raise begun
        described, worker.capacity = begun
        self.described = self.described or described
        settings, expected = described.get("settings"), self.described.get("settings")
        if settings != expected:
            text = (
                f"of {worker.name} differ from the first worker's {expected}; set --dtype, and give all the same files"
            )
            raise ConfigError(text, param="settings", value=settings)

    def run(self, tasks: Mapping[int, Any]) -> Iterator[tuple[int, Any]]:
        """Yield (number, result) of each task once, in order of completion.

        Raises the error of a task that fails, and ForesayError for tasks during which TRIES workers died.
        """
        waiting, tries, results = deque(tasks), Counter[int](), list[Result]()
        while results or waiting or any(worker.assigned for worker in self._workers):
            self._assign(waiting, tasks)
            for number, result in results:  # while the workers work
                if isinstance(result, ForesayError):
                    raise result
                yield number, result
            results = self._collect(waiting, tries)

    def _assign(self, waiting: deque[int], tasks: Mapping[int, Any]) -> None:
        """Give idle workers a fair share of the tasks, so that all workers end at about the same time, and let them work."""
        for worker in (one for one in self._workers if one.call is None):
            unfinished = len(waiting) + sum(len(one.assigned) for one in self._workers)
            free = min(worker.capacity, -(-unfinished // len(self._workers))) - len(worker.assigned)
            new = [waiting.popleft() for _ in range(min(free, len(waiting)))]
            worker.assigned += new
            if worker.assigned:
                worker.call = self._backend.advance(worker.handle, [(number, tasks[number]) for number in new])

    def _collect(self, waiting: deque[int], tries: Counter[int]) -> list[Result]:
        """Wait for a worker's results and return those of assigned tasks. Replace workers that died."""
        calls = {worker.call: index for index, worker in enumerate(self._workers) if worker.call is not None}
        results: list[Result] = []
        for call in wait(calls, return_when=FIRST_COMPLETED).done:
            worker, error = self._workers[calls[call]], call.exception()
            worker.call = None
            if error is not None:
                self._replace(calls[call], error, waiting, tries)
                continue
            found = [(number, result) for number, result in call.result() if number in worker.assigned]
            for number, _ in found:
                worker.assigned.remove(number)
            results += found
        return results

    def _replace(self, index: int, error: BaseException, waiting: deque[int], tries: Counter[int]) -> None:
        worker = self._workers[index]
        cause = f"{worker.name} died: {error}"
        tries.update(worker.assigned)
        if lost := [number for number in worker.assigned if tries[number] >= TRIES]:
            raise ForesayError(f"tasks {lost} were assigned to {TRIES} workers, and all of them died: {cause}")
        logger.warning("%s; the worker is replaced and its %d tasks are reassigned", cause, len(worker.assigned))
        waiting.extendleft(reversed(worker.assigned))
        self._backend.close(worker.handle)
        self._start(index)

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            self._backend.close(worker.handle)
        self._workers.clear()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def in_order(results: Iterator[tuple[int, Any]]) -> Iterator[Any]:
    """Yield results in order of their numbers from 0, each as soon as all earlier results have arrived."""
    early: dict[int, Any] = {}
    first = 0
    for number, result in results:
        early[number] = result
        while first in early:
            yield early.pop(first)
            first += 1
