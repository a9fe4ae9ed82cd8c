"""Benchmarks: methods and other engines on the same prompts, interleaved with plain decoding, into a results file.

Owns the results file: the turns that are missing from it and the lines written to it. An executor runs the turns, in this
process or in others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN
from foresay.records.results import Failure, Prediction, Results, Run, read_result, results_writer
from foresay_lab.bench.executor import BenchExecutor, BenchPlan, Turn, TurnResult
from foresay_lab.bench.runners import Runner
from foresay_lab.bench.settings import BenchSettings

Missing = Mapping[int, Sequence[Turn]]
"""Block index -> turns that are not in the results file yet."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a benchmark after a run."""

    last: Run | Failure
    done: int
    total: int
    """Number of runs of methods and other engines, without plain decoding."""


OnRun = Callable[[Progress], None]


def bench(
    target: Generator,
    settings: BenchSettings,
    path: str | os.PathLike[str],
    others: Sequence[Runner] = (),
    *,
    predictions: Sequence[Prediction] = (),
    on_run: OnRun = lambda progress: None,
) -> Results:
    """Run the turns that the file does not contain yet, in this process. predictions: written before the first run."""
    executor = BenchExecutor(target, settings, others)

    def perform(missing: Missing) -> Iterator[TurnResult]:
        for block, turns in missing.items():
            yield from executor.run(block, turns)

    return write_results(path, executor.plan, perform, predictions=predictions, on_run=on_run)


def write_results(
    path: str | os.PathLike[str],
    plan: BenchPlan,
    perform: Callable[[Missing], Iterator[TurnResult]],
    *,
    predictions: Sequence[Prediction] = (),
    on_run: OnRun = lambda progress: None,
) -> Results:
    """Perform the turns that a results file does not contain yet, append each result, and return all of them."""
    with results_writer(path, plan.settings, plan.provenance) as writer:
        so_far = Results.of(dict(plan.settings), {}, map(read_result, writer.lines))
        predicted = {one.cell for one in so_far.predictions}
        for prediction in predictions:
            if prediction.cell not in predicted:
                writer.append(prediction.as_line())
        known = {(run.cell, run.repeat) for run in so_far.runs}
        missing: dict[int, list[Turn]] = {}
        every = list(plan.turns())
        for block, turn in every:
            if (plan.cell(block, turn[1]), turn[0]) not in known:
                missing.setdefault(block, []).append(turn)
        done = len(every) - sum(map(len, missing.values()))
        traced = {trace.cell for trace in so_far.traces}
        for result, traces in perform(missing):
            writer.append(result.as_line())
            if result.cell.method == PLAIN:
                continue
            for trace in traces if result.cell not in traced else ():
                writer.append(trace.as_line())
            traced.add(result.cell)
            done += 1
            on_run(Progress(result, done, len(every)))
    return Results.load(path)
