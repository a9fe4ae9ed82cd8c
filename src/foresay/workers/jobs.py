"""The kinds of work that a worker can do, task by task, with its own model.

Owns the kinds, the contents of their setup, tasks and results, and the two functions that run in a worker: `begin` and
`advance`. Knows neither processes nor Ray.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from foresay.engine.chunked_prefill import OFFLINE_WAIT_S
from foresay.errors import ForesayError
from foresay.generation.generator import seeded
from foresay.generation.load import load
from foresay.lab.bench.executor import BenchExecutor
from foresay.lab.bench.settings import BenchSettings
from foresay.lab.data.requests import PromptRequest, RequestBuilder
from foresay.lab.replay.grid import Grid
from foresay.lab.replay.record import Recorder, header
from foresay.text.prompts import as_chat
from foresay.workers.messages import Failed, Plain, Result

AHEAD = 2
"""Capacity of a worker in batches, so that new tasks are available when rows end."""


class Job(Protocol):
    """The work of one worker."""

    capacity: int
    """Maximum number of unfinished tasks."""

    def describe(self) -> Plain:
        """Return the data that the coordinating process needs before the first task."""
        return {}

    def take(self, number: int, task: Any) -> None:
        """Accept a task. Raises ForesayError if it cannot be done."""
        ...

    @property
    def has_work(self) -> bool:
        """True if a task is unfinished."""
        ...

    def step(self) -> Sequence[Result]:
        """Advance the work by one step and return the results that it completes."""
        ...


class GenerateJob(Job):
    """Text generation: setup {load, params, raw}, task: a prompt, result: the record of a Generation."""

    def __init__(self, setup: Plain) -> None:
        self._generator, self._params, self._raw = load(**setup["load"]), setup["params"], setup["raw"]
        self._session = self._generator.session(prefill_wait_s=OFFLINE_WAIT_S)
        self._numbers: dict[int, int] = {}
        self.capacity = AHEAD * self._generator.max_batch_size

    def take(self, number: int, task: str) -> None:
        """See Job. The seed is that of task 0; other seeds are derived from it and the task number."""
        prompt = as_chat(task, self._generator.tokenizer, raw=self._raw)
        self._numbers[self._session.submit(prompt, seeded(self._params, number), text=False)] = number

    @property
    def has_work(self) -> bool:
        """See Job."""
        return self._session.has_work

    def step(self) -> Sequence[Result]:
        """See Job."""
        done = [(chunk.index, chunk.generation) for chunk in self._session.step()]
        return [(self._numbers.pop(index), one.as_record()) for index, one in done if one is not None]


class RecordJob(Job):
    """Recording: setup {load, params, chat, items}, task (item index, known outputs by id), result: lines."""

    def __init__(self, setup: Plain) -> None:
        generator = load(**setup["load"])
        self._builder = RequestBuilder(generator, chat=setup["chat"])
        self._requests = self._builder.first(setup["items"])
        self._recorder = Recorder(self._builder, self._requests, setup["params"], {}, self._write)
        self._open: dict[str, tuple[int, list[Plain]]] = {}
        self._ended: list[Result] = []
        self.capacity = AHEAD * generator.max_batch_size

    def describe(self) -> Plain:
        """Return the recording's header."""
        builder = self._builder
        return dict(header(builder.generator, self._requests, self._recorder.params, builder.chat))

    def take(self, number: int, task: tuple[int, Mapping[str, Any]]) -> None:
        """See Job."""
        index, known = task
        self._recorder.done |= {name: {"output": output} for name, output in known.items()}
        self._open[self._requests[index].item.id] = (number, [])
        self._recorder.submit(self._requests[index])

    @property
    def has_work(self) -> bool:
        """See Job."""
        return self._recorder.has_work

    def step(self) -> Sequence[Result]:
        """See Job."""
        try:
            self._recorder.step()
        except ForesayError as error:  # such as a later turn that is too long; it names its prompt
            return [(number, Failed.of(error)) for number, _ in self._open.values()][:1]
        ended, self._ended = self._ended, []
        return ended

    def _write(self, request: PromptRequest, line: Mapping[str, Any]) -> None:
        number, lines = self._open[request.item.id]
        lines.append(dict(line))
        if request.turn >= len(request.item.followups):
            del self._open[request.item.id]
            self._ended.append((number, lines))


class CallsJob(Job):
    """Tasks of one function call each: `call` maps a task to its result."""

    capacity = 1

    def __init__(self, call: Callable[[Any], Any], described: Plain | None = None) -> None:
        self._call, self._described, self._waiting = call, described or {}, deque[tuple[int, Any]]()

    def describe(self) -> Plain:
        """See Job."""
        return self._described

    def take(self, number: int, task: Any) -> None:
        """See Job."""
        self._waiting.append((number, task))

    @property
    def has_work(self) -> bool:
        """See Job."""
        return bool(self._waiting)

    def step(self) -> Sequence[Result]:
        """See Job."""
        number, task = self._waiting.popleft()
        try:
            return [(number, self._call(task))]
        except ForesayError as error:
            return [(number, Failed.of(error))]


def _bench(setup: Plain) -> Job:
    """Turns of a benchmark: setup from `benching.setup`, task (block, turns), result: TurnResults."""
    generator = load(**setup["load"])
    builder = RequestBuilder(generator, chat=setup["chat"])
    sets = {name: builder.all(items, setup["settings"]["params"][0]) for name, items in setup["sets"].items()}
    executor = BenchExecutor(generator, BenchSettings(datasets=sets, **setup["settings"]))
    return CallsJob(
        lambda task: list(executor.run(*task)), {"settings": dict(executor.plan.settings), "plan": executor.plan}
    )


KINDS: dict[str, Callable[[Plain], Job]] = {
    "generate": GenerateJob,
    "record": RecordJob,
    "replay": lambda setup: CallsJob(Grid.of(setup)),
    "bench": _bench,
}
_job: Job
"""The job of this process, after `begin`."""


def begin(setup: Plain) -> tuple[Plain, int] | Failed:
    """Open the job of a setup {kind, threads, ...} in this process. Return (its description, its capacity in tasks)."""
    global _job
    torch.set_num_threads(setup["threads"])
    try:
        _job = KINDS[setup["kind"]](setup)
        return _job.describe(), _job.capacity
    except ForesayError as error:
        return Failed.of(error)


def advance(tasks: Sequence[tuple[int, Any]]) -> list[Result]:
    """Accept new tasks and work until results are available. Return them, in any order."""
    results: list[Result] = []
    for number, task in tasks:
        try:
            _job.take(number, task)
        except ForesayError as error:
            results.append((number, Failed.of(error)))
    while _job.has_work and not results:
        results += _job.step()
    return results
