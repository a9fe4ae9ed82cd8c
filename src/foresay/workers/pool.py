"""Tasks shared out to workers, each done once: who dies is replaced, and what it held is given to others.

Owns who holds what. Knows neither what a task is nor where workers run.
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
"""Workers that a task may be given to, one after the other, when each dies over it."""


class WorkerDiedError(ForesayError):
    """A worker is gone; the message says how."""


class Worker(Protocol):
    """Someone who works."""

    name: str
    described: Plain
    """What it says of its job."""
    room: int
    """Tasks that it holds at a time."""

    def give(self, number: int, task: Plain) -> None:
        """Give it a task."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Place(Protocol):
    """Where workers run."""

    def start(self, index: int) -> Worker:
        """Worker number `index`, ready. Raises the error that its setup ended with."""
        ...

    def heard(self, workers: Sequence[Worker]) -> Iterator[tuple[Worker, int, Plain | ForesayError]]:
        """Wait until somebody has something to say: (who, which task, its result, or why it cannot be done).

        A task -1 with a WorkerDiedError: the worker is gone.
        """
        ...


class Pool:
    """So many workers in one place."""

    def __init__(self, place: Place, count: int, *, on_start: Callable[[int], None] = lambda ready: None) -> None:
        """Starts them all. on_start: called with how many are ready."""
        self._place = place
        self._suspects: set[int] = set()
        """Tasks that one more death would condemn: given out alone, so that it is no other's."""
        self._workers: list[Worker] = []
        self._settings: object = None
        """What all of them said that must be the same."""
        try:
            for index in range(count):
                self._workers.append(self._begun(index))
                on_start(index + 1)
        except BaseException:
            self.close()
            raise

    def _begun(self, index: int) -> Worker:
        """A worker that does what the others do: on other machines files and processors may differ."""
        worker = self._place.start(index)
        said = worker.described.get("settings")
        if self._settings is not None and said != self._settings:
            worker.close()
            raise ConfigError(
                f"{worker.name} would do something else than the first: {said} and not {self._settings}; "
                "name --dtype, and give all of them the same files"
            )
        self._settings = said
        return worker

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self._workers)

    @property
    def described(self) -> Plain:
        """What the first worker says of its job; all have the same."""
        return self._workers[0].described

    def run(self, tasks: Mapping[int, Plain]) -> Iterator[tuple[int, Plain]]:
        """(number, result) of each task, once, in the order in which they are done.

        Raises the error of a task that cannot be done, and ForesayError for one over which several workers died.
        """
        waiting, tries = deque(tasks), Counter[int]()
        held: dict[int, dict[int, None]] = {i: {} for i in range(len(self._workers))}
        while waiting or any(held.values()):
            self._share_out(waiting, held, tasks)
            for worker, number, said in self._place.heard(self._workers):
                if worker not in self._workers:
                    continue  # what one that is gone had still said: its tasks are somebody else's
                index = self._workers.index(worker)
                if isinstance(said, WorkerDiedError):
                    self._replace(index, said, held, waiting, tries)
                elif number in held[index]:  # else it was given away meanwhile
                    del held[index][number]
                    if isinstance(said, ForesayError):
                        raise said
                    yield number, said

    def _share_out(self, waiting: deque[int], held: dict[int, dict[int, None]], tasks: Mapping[int, Plain]) -> None:
        """Give to who holds least, so that all end at about the same time."""
        while waiting:
            index = min(held, key=lambda i: len(held[i]) / self._workers[i].room)
            fair = -(-(len(waiting) + sum(map(len, held.values()))) // len(held))
            room = 1 if self._suspects & {waiting[0], *held[index]} else min(self._workers[index].room, max(1, fair))
            if len(held[index]) >= room:
                return
            number = waiting.popleft()
            held[index][number] = None
            self._workers[index].give(number, tasks[number])

    def _replace(
        self,
        index: int,
        why: WorkerDiedError,
        held: dict[int, dict[int, None]],
        waiting: deque[int],
        tries: Counter[int],
    ) -> None:
        tries.update(list(held[index]))
        self._suspects |= {number for number in held[index] if tries[number] == TRIES - 1}
        for number in held[index]:
            if tries[number] >= TRIES:
                raise ForesayError(f"task {number} was given to {TRIES} workers, all of which died: {why}") from why
        logger.warning("%s; another takes its place, and its %d tasks are given out again", why, len(held[index]))
        waiting.extendleft(reversed(list(held[index])))
        held[index] = {}
        self._workers[index].close()
        self._workers[index] = self._begun(index)

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
    """Results by their numbers, each as soon as those before it are there."""
    early: dict[int, Plain] = {}
    for number, result in results:
        early[number] = result
        while first in early:
            yield early.pop(first)
            first += 1
