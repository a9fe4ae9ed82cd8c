"""The kinds of work that a worker can do, task by task, with its own model.

Owns the kinds, the contents of their setup, tasks and results, and the two functions that run in a worker: `begin` and
`advance`. Knows neither processes nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foresay.engine.chunked_prefill import OFFLINE_WAIT_S
from foresay.errors import ForesayError
from foresay.generation.load import load
from foresay.generation.session import seeded
from foresay.text.prompts import as_chat
from foresay_lab.bench.bench import BenchExecutor, BenchSettings
from foresay_lab.data.requests import RequestBuilder
from foresay_lab.replay.grid import replayer
from foresay_lab.replay.record import Recorder, header
from foresay_lab.workers.pool import Begun, Plain, Result

AHEAD = 2
"""Capacity of a worker in batches, so that new tasks are available when rows end."""


@dataclass(frozen=True, slots=True)
class Job:
    """The work of one worker: it takes tasks, and each step returns the results that it completes."""

    take: Callable[[int, Any], None]
    """Accept a task with this number. Raises ForesayError if it cannot be done."""
    step: Callable[[], Sequence[Result]]
    has_work: Callable[[], bool]
    described: Plain = field(default_factory=dict)
    """The data that the coordinating process needs before the first task."""
    capacity: int = 1
    """Maximum number of unfinished tasks."""


def _generate(setup: Plain) -> Job:
    """Text generation: setup {load, params, raw}, task: a prompt, result: the record of a Generation.

    The seed is that of task 0; other seeds are derived from it and the task number.
    """
    generator = load(**setup["load"])
    session, numbers = generator.session(prefill_wait_s=OFFLINE_WAIT_S), dict[int, int]()

    def take(number: int, task: str) -> None:
        prompt = as_chat(task, generator.tokenizer, raw=setup["raw"])
        numbers[session.submit(prompt, seeded(setup["params"], number), text=False)] = number

    def step() -> Sequence[Result]:
        done = [(chunk.index, chunk.generation) for chunk in session.step()]
        return [(numbers.pop(index), one.as_record()) for index, one in done if one is not None]

    return Job(take, step, lambda: session.has_work, capacity=AHEAD * generator.max_batch_size)


def _record(setup: Plain) -> Job:
    """Recording: setup {load, params, chat, items}, tasks by item index: known outputs by id, result: lines."""
    generator = load(**setup["load"])
    builder = RequestBuilder(generator, chat=setup["chat"])
    requests = builder.first(setup["items"])
    recorder, lines = Recorder(builder, requests, setup["params"]), dict[int, list[Plain]]()

    def take(number: int, task: Mapping[str, Any]) -> None:
        lines[number] = []
        recorder.submit(number, task)

    def step() -> Sequence[Result]:
        done: list[Result] = []
        try:
            for number, line, is_last in recorder.step():
                lines[number].append(line)
                if is_last:
                    done.append((number, lines.pop(number)))
        except ForesayError as error:  # such as a later turn that is too long; it names its prompt
            return [(number, error) for number in lines][:1]
        return done

    described = dict(header(generator, requests, setup["params"], setup["chat"]))
    return Job(take, step, lambda: recorder.has_work, described, AHEAD * generator.max_batch_size)


def _calls(call: Callable[[Any], Any], described: Plain | None = None) -> Job:
    """Tasks of one function call each: `call` maps a task to its result."""
    done: list[Result] = []
    take = lambda number, task: done.append((number, call(task)))  # noqa: E731
    return Job(take, lambda: [done.pop()], lambda: bool(done), described or {})


def _bench(setup: Plain) -> Job:
    """Turns of a benchmark: setup from `work.bench_setup`, task (block, turns), result: TurnResults."""
    generator = load(**setup["load"])
    builder = RequestBuilder(generator, chat=setup["chat"])
    sets = {name: builder.all(items, setup["settings"]["params"][0]) for name, items in setup["sets"].items()}
    executor = BenchExecutor(generator, BenchSettings(datasets=sets, **setup["settings"]))
    described = {"settings": dict(executor.plan.settings), "plan": executor.plan}
    return _calls(lambda task: list(executor.run(*task)), described)


KINDS: dict[str, Callable[[Plain], Job]] = {
    "generate": _generate,
    "record": _record,
    "replay": lambda setup: _calls(replayer(setup)),
    "bench": _bench,
}
_job: Job
"""The job of this process, after `begin`."""


def begin(setup: Plain) -> Begun:
    """Open the job of a setup {kind, threads, ...} in this process."""
    global _job
    torch.set_num_threads(setup["threads"])
    try:
        _job = KINDS[setup["kind"]](setup)
        return _job.described, _job.capacity
    except ForesayError as error:
        return error


def advance(tasks: Sequence[tuple[int, Any]]) -> list[Result]:
    """Accept new tasks and work until results are available. Return them, in any order."""
    results: list[Result] = []
    for number, task in tasks:
        try:
            _job.take(number, task)
        except ForesayError as error:
            results.append((number, error))
    while _job.has_work() and not results:
        results += _job.step()
    return results
