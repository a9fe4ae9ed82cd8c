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
from foresay.lab.bench.executor import BenchExecutor, BenchPlan, Turn, TurnResult
from foresay.lab.bench.peers.base import Peer
from foresay.lab.bench.settings import BenchSettings
from foresay.records.lines import LineWriter
from foresay.records.results import Failure, Prediction, Results, Run, read_result, results_writer

Missing = Mapping[int, Sequence[Turn]]
"""Block index -> turns that are not in the results file yet."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a benchmark after a run."""

    last: Run | Failure
    done: int
    total: int
    """Number of runs of methods and other engines, without plain decoding."""


class Bench:
    """A benchmark of one target, in this process."""

    def __init__(
        self,
        target: Generator,
        settings: BenchSettings,
        peers: Sequence[Peer] = (),
        *,
        on_run: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self.settings, self._on_run = settings, on_run
        self._executor = BenchExecutor(target, settings, peers)

    @property
    def total(self) -> int:
        """Number of runs, without plain decoding."""
        return len(list(self._executor.plan.turns()))

    def run(self, path: str | os.PathLike[str], predictions: Sequence[Prediction] = ()) -> Results:
        """Run the turns that the file does not contain yet. predictions: written before the first run."""
        return write_results(path, self._executor.plan, self._perform, predictions=predictions, on_run=self._on_run)

    def _perform(self, missing: Missing) -> Iterator[TurnResult]:
        for block, turns in missing.items():
            yield from self._executor.run(block, turns)


def write_results(
    path: str | os.PathLike[str],
    plan: BenchPlan,
    perform: Callable[[Missing], Iterator[TurnResult]],
    *,
    predictions: Sequence[Prediction] = (),
    on_run: Callable[[Progress], None] = lambda progress: None,
) -> Results:
    """Perform the turns that a results file does not contain yet, append each result, and return all of them."""
    with results_writer(path, plan.settings, plan.provenance) as writer:
        so_far = Results.of(dict(plan.settings), {}, map(read_result, writer.lines))
        _predict(writer, so_far, predictions)
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
            if result.cell not in traced and traces:
                traced.add(result.cell)
                for trace in traces:
                    writer.append(trace.as_line())
            done += 1
            on_run(Progress(result, done, len(every)))
    return Results.load(path)


def _predict(writer: LineWriter, so_far: Results, predictions: Sequence[Prediction]) -> None:
    """Append the predictions that the file does not contain."""
    predicted = {one.cell for one in so_far.predictions}
    for one in predictions:
        if one.cell not in predicted:
            writer.append(one.as_line())
