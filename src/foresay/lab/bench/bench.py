"""Benchmarks: methods and other engines on the same prompts, interleaved with plain decoding, into a results file.

Owns what is repeated after a stop, and what is written down; who runs it is the stage's to know, here or in other processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN
from foresay.lab.bench.peers.base import Peer
from foresay.lab.bench.settings import BenchSettings
from foresay.lab.bench.stage import Outline, Stage, Told, Turn
from foresay.records.lines import LineWriter
from foresay.records.results import Failure, Prediction, Results, Run, read_result, results_writer

Missing = Mapping[int, Sequence[Turn]]
"""By a block's number, the turns that are still to be run."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a benchmark is, after every run."""

    last: Run | Failure
    done: int
    total: int
    """Runs of methods and other engines; plain decoding is not counted."""


class Bench:
    """A benchmark of one target, in this process."""

    def __init__(
        self,
        target: Generator,
        settings: BenchSettings,
        peers: Sequence[Peer] = (),
        *,
        on_run: Callable[[Progress], None] = lambda told: None,
    ) -> None:
        self.settings, self._on_run = settings, on_run
        self._stage = Stage(target, settings, peers)

    @property
    def total(self) -> int:
        """Runs, plain decoding not counted."""
        return len(list(self._stage.outline.turns()))

    def run(self, path: str | os.PathLike[str], predictions: Sequence[Prediction] = ()) -> Results:
        """Run what the file does not hold yet. predictions: written before anything is run."""
        return keep(path, self._stage.outline, self._perform, predictions=predictions, on_run=self._on_run)

    def _perform(self, missing: Missing) -> Iterator[Told]:
        for block, turns in missing.items():
            yield from self._stage.run(block, turns)


def keep(
    path: str | os.PathLike[str],
    outline: Outline,
    perform: Callable[[Missing], Iterator[Told]],
    *,
    predictions: Sequence[Prediction] = (),
    on_run: Callable[[Progress], None] = lambda told: None,
) -> Results:
    """Have what a file does not hold yet performed, write each result as it comes, and return all of them."""
    with results_writer(path, outline.settings, outline.provenance) as writer:
        so_far = Results.of(dict(outline.settings), {}, map(read_result, writer.lines))
        _predict(writer, so_far, predictions)
        known = {(run.cell, run.repeat) for run in so_far.runs}
        missing: dict[int, list[Turn]] = {}
        every = list(outline.turns())
        for block, turn in every:
            if (outline.cell(block, turn[1]), turn[0]) not in known:
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
    """Write down the predictions that are not there."""
    predicted = {one.cell for one in so_far.predictions}
    for one in predictions:
        if one.cell not in predicted:
            writer.append(one.as_line())
