"""The kinds of work that a worker can do, task by task, with its own model.

Owns the kinds, the contents of their setup, tasks and results, and the two functions that run in a worker: `begin` and
`advance`. Knows neither processes nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from foresay.engine.chunked_prefill import OFFLINE_WAIT_S
from foresay.errors import ForesayError
from foresay.generation.generator import Generator, seeded
from foresay.generation.load import load
from foresay.text.prompts import as_chat
from foresay_lab.bench.executor import BenchExecutor
from foresay_lab.bench.settings import BenchSettings
from foresay_lab.data.requests import RequestBuilder
from foresay_lab.replay.grid import Grid
from foresay_lab.replay.record import Recorder, header
from foresay_lab.workers.messages import Failed, Plain, Result

AHEAD = 2
"""Capacity of a worker in batches, so that new tasks are available when rows end."""


class Job:
    """The work of one worker: tasks are taken, and steps return the results that they complete."""

    capacity = 1
    """Maximum number of unfinished tasks."""
    described: Plain
    """The data that the coordinating process needs before the first task."""
    work: Any
    """A session, or what else has `has_work` and `step`."""

    def load(self, setup: Plain) -> Generator:
        """Load the generator of a setup that decodes continuously."""
        generator = load(**setup["load"])
        self.capacity = AHEAD * generator.max_batch_size
        return generator

    def take(self, number: int, task: Any) -> None:
        """Accept a task. Raises ForesayError if it cannot be done."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """True if a task is unfinished."""
        return bool(self.work.has_work)

    def step(self) -> Sequence[Result]:
        """Advance the work by one step and return the results that it completes."""
        raise NotImplementedError


class GenerateJob(Job):
    """Text generation: setup {load, params, raw}, task: a prompt, result: the record of a Generation."""

    def __init__(self, setup: Plain) -> None:
        self._generator, self._params, self._raw = self.load(setup), setup["params"], setup["raw"]
        self.work = self._generator.session(prefill_wait_s=OFFLINE_WAIT_S)
        self._numbers, self.described = dict[int, int](), {}

    def take(self, number: int, task: str) -> None:
        """See Job. The seed is that of task 0; other seeds are derived from it and the task number."""
        prompt = as_chat(task, self._generator.tokenizer, raw=self._raw)
        self._numbers[self.work.submit(prompt, seeded(self._params, number), text=False)] = number

    def step(self) -> Sequence[Result]:
        """See Job."""
        done = [(chunk.index, chunk.generation) for chunk in self.work.step()]
        return [(self._numbers.pop(index), one.as_record()) for index, one in done if one is not None]


class RecordJob(Job):
    """Recording: setup {load, params, chat, items}, tasks by item index: known outputs by id, result: lines."""

    def __init__(self, setup: Plain) -> None:
        builder = RequestBuilder(self.load(setup), chat=setup["chat"])
        requests = builder.first(setup["items"])
        self.work, self._open = Recorder(builder, requests, setup["params"]), dict[int, list[Plain]]()
        self.described = dict(header(builder.generator, requests, setup["params"], setup["chat"]))

    def take(self, number: int, task: Mapping[str, Any]) -> None:
        """See Job."""
        self._open[number] = []
        self.work.submit(number, task)

    def step(self) -> Sequence[Result]:
        """See Job."""
        results: list[Result] = []
        try:
            for number, line, is_last in self.work.step():
                self._open[number].append(line)
                if is_last:
                    results.append((number, self._open.pop(number)))
        except ForesayError as error:  # such as a later turn that is too long; it names its prompt
            return [(number, Failed.of(error)) for number in self._open][:1]
        return results


class CallsJob(Job):
    """Tasks of one function call each: `call` maps a task to its result."""

    def __init__(self, call: Callable[[Any], Any], described: Plain | None = None) -> None:
        self._call, self.described, self._waiting = call, described or {}, list[tuple[int, Any]]()

    def take(self, number: int, task: Any) -> None:
        """See Job."""
        self._waiting.append((number, task))

    @property
    def has_work(self) -> bool:
        """See Job."""
        return bool(self._waiting)

    def step(self) -> Sequence[Result]:
        """See Job."""
        number, task = self._waiting.pop(0)
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
        return _job.described, _job.capacity
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
