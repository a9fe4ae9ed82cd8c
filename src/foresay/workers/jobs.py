"""The kinds of work that a worker can do, task by task, with its own model.

Owns the kinds and the contents of their setup, tasks and results, all plain data. Knows neither processes nor Ray.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from foresay.engine.chunked_prefill import OFFLINE_WAIT_S
from foresay.errors import ForesayError, UnknownNameError
from foresay.generation.generator import seeded
from foresay.generation.load import load
from foresay.generation.method import Method
from foresay.lab.data.items import PromptItem
from foresay.lab.data.requests import PromptRequest, RequestBuilder
from foresay.lab.replay.record import Recorder, header
from foresay.text.prompts import as_chat
from foresay.workers.messages import Plain, Result, read_params

AHEAD = 2
"""Capacity of a worker in batches, so that new tasks are available when rows end."""


class Job(Protocol):
    """The work of one worker."""

    capacity: int
    """Maximum number of unfinished tasks."""

    def describe(self) -> Plain:
        """Return the data that the coordinating process needs before the first task."""
        return {}

    def take(self, number: int, task: Plain) -> None:
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
    """Text generation: setup {load, params, raw}, task {prompt}, result: the record of a Generation."""

    def __init__(self, setup: Plain) -> None:
        self._generator = load(**setup["load"])
        self._params, self._raw = read_params(setup["params"]), bool(setup["raw"])
        self._session = self._generator.session(prefill_wait_s=OFFLINE_WAIT_S)
        self._numbers: dict[int, int] = {}
        self.capacity = AHEAD * self._generator.max_batch_size

    def take(self, number: int, task: Plain) -> None:
        """See Job. The seed is that of task 0; other seeds are derived from it and the task number."""
        prompt = as_chat(task["prompt"], self._generator.tokenizer, raw=self._raw)
        self._numbers[self._session.submit(prompt, seeded(self._params, number), text=False)] = number

    @property
    def has_work(self) -> bool:
        """See Job."""
        return self._session.has_work

    def step(self) -> Sequence[Result]:
        """See Job."""
        done = [chunk for chunk in self._session.step() if chunk.generation is not None]
        return [(self._numbers.pop(c.index), c.generation.as_record()) for c in done if c.generation is not None]


class RecordJob(Job):
    """Recording: setup {load, params, chat, items}, task {item, known}, result {lines}."""

    def __init__(self, setup: Plain) -> None:
        generator = load(**setup["load"])
        self._params, self._chat = read_params(setup["params"]), bool(setup["chat"])
        self._builder = RequestBuilder(generator, chat=self._chat)
        self._requests = self._builder.first(as_item(one) for one in setup["items"])
        self._recorder = Recorder(self._builder, self._requests, self._params, {}, self._write)
        self._open: dict[str, tuple[int, list[Plain]]] = {}
        self._ended: list[Result] = []
        self.capacity = AHEAD * generator.max_batch_size

    def describe(self) -> Plain:
        """Return the recording's header."""
        return dict(header(self._builder.generator, self._requests, self._params, self._chat))

    def take(self, number: int, task: Plain) -> None:
        """See Job. The task's `known` maps ids of the item's turns to existing outputs."""
        request = self._requests[task["item"]]
        self._recorder.done |= {name: {"output": output} for name, output in task["known"].items()}
        self._open[request.item.id] = (number, [])
        self._recorder.submit(request)

    @property
    def has_work(self) -> bool:
        """See Job."""
        return self._recorder.has_work

    def step(self) -> Sequence[Result]:
        """See Job."""
        try:
            self._recorder.step()
        except ForesayError as error:  # such as a later turn that is too long; it names its prompt
            return [(number, error) for number, _ in self._open.values()][:1]
        ended, self._ended = self._ended, []
        return ended

    def _write(self, request: PromptRequest, line: Mapping[str, Any]) -> None:
        number, lines = self._open[request.item.id]
        lines.append(dict(line))
        if request.turn >= len(request.item.followups):
            del self._open[request.item.id]
            self._ended.append((number, {"lines": lines}))


class CallsJob(Job):
    """Tasks of one function call each, such as a replay: `call` maps a task to its result."""

    capacity = 1

    def __init__(self, call: Callable[[Plain], Plain]) -> None:
        self._call, self._waiting = call, deque[tuple[int, Plain]]()

    def take(self, number: int, task: Plain) -> None:
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
            return [(number, error)]


class BenchJob(CallsJob):
    """Turns of a benchmark: setup from `benching.setup`, task {block, turns}, result {results: [[result, traces], ...]}."""

    def __init__(self, setup: Plain) -> None:
        from foresay.lab.bench.executor import BenchExecutor
        from foresay.lab.bench.settings import BenchSettings

        generator = load(**setup["load"])
        builder = RequestBuilder(generator, chat=bool(setup["chat"]))
        params = [read_params(one) for one in setup["params"]]
        sets = {name: builder.all(map(as_item, items), params[0]) for name, items in setup["sets"].items()}
        settings = BenchSettings(
            methods=[Method(**one) for one in setup["methods"]],
            datasets=sets,
            params=params,
            batch_sizes=setup["batch_sizes"],
            repeats=setup["repeats"],
        )
        self._executor = BenchExecutor(generator, settings)
        super().__init__(self._run_turns)

    def describe(self) -> Plain:
        """Return the BenchPlan as plain data."""
        return self._executor.plan.as_plain()

    def _run_turns(self, task: Plain) -> Plain:
        turns = [(int(repeat), str(name)) for repeat, name in task["turns"]]
        results = self._executor.run(task["block"], turns)
        return {"results": [[result.as_line(), [one.as_line() for one in traces]] for result, traces in results]}


def replays(setup: Plain) -> Job:
    """Replays: setup {recording, profile, costs, ...}, task {method, recording}; see `lab/replay/grid.py`."""
    from foresay.lab.replay.grid import Grid

    return CallsJob(Grid.of(setup))


KINDS: dict[str, Callable[[Plain], Job]] = {
    "generate": GenerateJob,
    "record": RecordJob,
    "replay": replays,
    "bench": BenchJob,
}


def open_job(setup: Plain) -> Job:
    """Create the job of a setup {kind, threads, ...}. Raises UnknownNameError for another kind, and the errors of `load`."""
    if setup["kind"] not in KINDS:
        raise UnknownNameError("kind of work", setup["kind"], KINDS)
    if setup.get("threads") is not None:
        torch.set_num_threads(setup["threads"])
    return KINDS[setup["kind"]](setup)


def as_item(plain: Plain) -> PromptItem:
    """Return a PromptItem from its JSON form."""
    prompt = plain["prompt"]
    prompt = prompt if isinstance(prompt, str) else tuple(prompt)
    return PromptItem(**{**plain, "prompt": prompt, "followups": tuple(plain["followups"])})
