"""Assignment of tasks to workers: each task yields one result; a dead worker is replaced and its tasks are reassigned.

Owns the assignment. Knows neither the contents of a task nor where workers run.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from foresay.errors import ConfigError, ForesayError
from foresay.workers.messages import Plain

logger = logging.getLogger("foresay")

TRIES = 3
"""Maximum number of workers that a task may be assigned to, if each of them dies."""


class WorkerDiedError(ForesayError):
    """A worker died; the message contains the reason."""


class Worker(Protocol):
    """A worker that performs tasks."""

    name: str
    described: Plain
    """The description of its job."""
    capacity: int
    """Maximum number of unfinished tasks."""

    def give(self, number: int, task: Plain) -> None:
        """Assign a task to the worker."""
        ...

    def close(self) -> None:
        """End the worker."""
        ...


class WorkerBackend(Protocol):
    """The backend that starts workers and receives their replies."""

    def start(self, index: int) -> Worker:
        """Start worker `index` and wait until it is ready. Raises the error of its setup."""
        ...

    def poll(self, workers: Sequence[Worker]) -> Iterator[tuple[Worker, int, Plain | ForesayError]]:
        """Wait for replies for a limited time and yield (worker, task number, result or error) of each.

        Task number -1 with a WorkerDiedError means that the worker died.
        """
        ...


class Pool:
    """A fixed number of workers on one backend."""

    def __init__(
        self, backend: WorkerBackend, count: int, *, on_start: Callable[[int], None] = lambda ready: None
    ) -> None:
        """Start `count` workers. on_start: called with the number of workers that are ready."""
        self._backend = backend
        self._suspects: set[int] = set()
        """Tasks that one more dead worker makes fail. Each is assigned alone, so that no other task can cause that death."""
        self._workers: list[Worker] = []
        self._settings: object = None
        """The settings in the workers' descriptions, which must be equal."""
        try:
            for index in range(count):
                self._workers.append(self._start_worker(index))
                on_start(index + 1)
        except BaseException:
            self.close()
            raise

    def _start_worker(self, index: int) -> Worker:
        """Start a worker. Raises ConfigError if its settings differ, because files and processors may differ by machine."""
        worker = self._backend.start(index)
        found = worker.described.get("settings")
        if self._settings is not None and found != self._settings:
            worker.close()
            raise ConfigError(
                f"the settings of {worker.name} differ from those of the first worker: {found} instead of {self._settings}; "
                "set --dtype, and give all workers the same files"
            )
        self._settings = found
        return worker

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self._workers)

    @property
    def described(self) -> Plain:
        """The first worker's description of the job; it is the same for all workers."""
        return self._workers[0].described

    def run(self, tasks: Mapping[int, Plain]) -> Iterator[tuple[int, Plain]]:
        """Yield (number, result) of each task once, in order of completion.

        Raises the error of a task that fails, and ForesayError for a task during which TRIES workers died.
        """
        waiting, tries = deque(tasks), Counter[int]()
        assigned: dict[int, dict[int, None]] = {i: {} for i in range(len(self._workers))}
        while waiting or any(assigned.values()):
            self._assign(waiting, assigned, tasks)
            for worker, number, reply in self._backend.poll(self._workers):
                if worker not in self._workers:
                    continue  # a late reply of a dead worker, whose tasks were reassigned
                index = self._workers.index(worker)
                if isinstance(reply, WorkerDiedError):
                    self._replace(index, reply, assigned, waiting, tries)
                elif number in assigned[index]:  # otherwise it was reassigned
                    del assigned[index][number]
                    if isinstance(reply, ForesayError):
                        raise reply
                    yield number, reply

    def _assign(self, waiting: deque[int], assigned: dict[int, dict[int, None]], tasks: Mapping[int, Plain]) -> None:
        """Assign tasks to the least loaded worker, so that all workers end at about the same time."""
        while waiting:
            index = min(assigned, key=lambda i: len(assigned[i]) / self._workers[i].capacity)
            fair = -(-(len(waiting) + sum(map(len, assigned.values()))) // len(assigned))
            limit = (
                1
                if self._suspects & {waiting[0], *assigned[index]}
                else min(self._workers[index].capacity, max(1, fair))
            )
            if len(assigned[index]) >= limit:
                return
            number = waiting.popleft()
            assigned[index][number] = None
            self._workers[index].give(number, tasks[number])

    def _replace(
        self,
        index: int,
        cause: WorkerDiedError,
        assigned: dict[int, dict[int, None]],
        waiting: deque[int],
        tries: Counter[int],
    ) -> None:
        tries.update(list(assigned[index]))
        self._suspects |= {number for number in assigned[index] if tries[number] == TRIES - 1}
        for number in assigned[index]:
            if tries[number] >= TRIES:
                raise ForesayError(
                    f"task {number} was assigned to {TRIES} workers, and all of them died: {cause}"
                ) from cause
        logger.warning("%s; the worker is replaced and its %d tasks are reassigned", cause, len(assigned[index]))
        waiting.extendleft(reversed(list(assigned[index])))
        assigned[index] = {}
        self._workers[index].close()
        self._workers[index] = self._start_worker(index)

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_workers(count: int) -> int:
    """Raise ConfigError for a number of workers out of range."""
    if not 1 <= count <= 1024:
        raise ConfigError(f"--workers {count} must be between 1 and 1024")
    return count


def in_order(results: Iterator[tuple[int, Plain]], first: int = 0) -> Iterator[Plain]:
    """Yield results in order of their numbers, each as soon as all earlier results have arrived."""
    early: dict[int, Plain] = {}
    for number, result in results:
        early[number] = result
        while first in early:
            yield early.pop(first)
            first += 1
