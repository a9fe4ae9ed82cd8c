"""Benchmarks: methods and other engines on the same prompts, interleaved with plain decoding, into a results file.

Owns the settings and the plan of a benchmark, the turns that its results file lacks and the lines written to it. An executor
runs turns on one target, in this process or in others; it writes nothing and does not know earlier results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from foresay.checks import check_int
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN, Method
from foresay.records.provenance import provenance
from foresay.records.results import Cell, Failure, Prediction, Results, Run, Trace, read_result, results_writer
from foresay_lab.bench.runners import MethodRunner, PromptBlock, Runner, sampling_name, take_turns
from foresay_lab.data.requests import PromptRequest, digest, recorded_params_of
from foresay_lab.measure.live_run import Outcome

_TRACES = 2
"""Number of outputs per run whose traces are reported."""

Turn = tuple[int, str]
"""(repeat, runner name)."""
TurnResult = tuple[Run | Failure, Sequence[Trace]]
"""A run or failure, and the traces of its first outputs."""
Missing = Mapping[int, Sequence[Turn]]
"""Block index -> turns that are not in the results file yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """The settings of a benchmark. Raises ConfigError for empty data sets, invalid numbers and duplicate sampling settings."""

    methods: Sequence[Method]
    datasets: Mapping[str, Sequence[PromptRequest]]
    params: Sequence[SamplingParams] = (SamplingParams(max_new_tokens=96),)
    batch_sizes: Sequence[int] = (1,)
    repeats: int = 3
    between: int = 3
    """Maximum number of runs between two runs of plain decoding."""
    warm_up: int = 1
    """Number of prompts that each method and engine decodes before it is timed."""

    def __post_init__(self) -> None:
        if not self.datasets or any(not requests for requests in self.datasets.values()):
            raise ConfigError("need at least one prompt each", param="datasets")
        check_int("repeats", self.repeats, 1)
        check_int("between", self.between, 1)
        for size in self.batch_sizes:
            check_int("batch_size", size, 1)
        if any(params.processors for params in self.params):
            raise ConfigError("cannot be stored in a results file; run without them", param="processors")
        names = [sampling_name(params) for params in self.params]
        for name in names:
            if names.count(name) > 1:
                text = "is in the results the name of two params; write each to a separate file"
                raise ConfigError(text, param="params", value=name)

    def blocks(self) -> Iterator[PromptBlock]:
        """Yield a block for every combination of sampling, data set and batch size."""
        for params, (name, requests), size in product(self.params, self.datasets.items(), self.batch_sizes):
            yield PromptBlock(name, requests, size, params)

    def header(self, target: Generator) -> dict[str, Any]:
        """Return the settings that must be equal to resume a file. Methods, engines and repeats may be added."""
        return {
            "model": target.target.name,
            "dtype": target.target.precision,
            "datasets": {name: {"prompts": len(some), "digest": digest(some)} for name, some in self.datasets.items()},
            "params": [recorded_params_of(params) for params in self.params],
        }


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The blocks, runners and repeats of a benchmark."""

    settings: Mapping[str, Any]
    """Settings that must be equal for a results file to be resumed."""
    provenance: Mapping[str, Any]
    blocks: Sequence[Cell]
    """The cell of plain decoding in each block."""
    runner_names: Sequence[str]
    """Methods and other engines, without plain decoding."""
    repeats: int
    between: int
    """Maximum number of turns between two runs of plain decoding."""

    def cell(self, block: int, runner_name: str) -> Cell:
        """Return the cell of a runner in a block."""
        return replace(self.blocks[block], method=runner_name)

    def turns(self) -> Iterator[tuple[int, Turn]]:
        """Return (block, turn) of all turns in the order of execution."""
        return product(range(len(self.blocks)), product(range(self.repeats), self.runner_names))


class BenchExecutor:
    """Runs methods and other engines on blocks of prompts, for one target."""

    def __init__(self, target: Generator, settings: BenchSettings, others: Sequence[Runner] = ()) -> None:
        self._settings, self._tokenizer = settings, target.tokenizer
        self._blocks = list(settings.blocks())
        self._plain = MethodRunner(target, Method("none"))
        runners: list[Runner] = [*(MethodRunner(target, method) for method in settings.methods), *others]
        self._runners = {runner.name: runner for runner in runners}
        self.plan = BenchPlan(
            settings.header(target),
            provenance(),
            [block.cell(PLAIN) for block in self._blocks],
            list(self._runners),
            settings.repeats,
            settings.between,
        )

    def run(self, block: int, turns: Sequence[Turn]) -> Iterator[TurnResult]:
        """Run the turns and plain decoding around them; yield each result once the next run of plain decoding is done."""
        chosen = self._blocks[block]
        pairs = [(repeat, self._runners[name]) for repeat, name in turns]
        warm = replace(chosen, asks=chosen.asks[: self._settings.warm_up])
        for result, outcome in take_turns(self._plain, pairs, chosen, warm=warm, between=self._settings.between):
            yield result, self._traces(chosen, result.cell, outcome)

    def _traces(self, block: PromptBlock, cell: Cell, outcome: Outcome | None) -> list[Trace]:
        if outcome is None or not outcome.generations or self._tokenizer is None or cell.method == PLAIN:
            return []
        out = []
        for request, one in list(zip(block.asks, outcome.generations, strict=True))[:_TRACES]:
            pieces = one.pieces(self._tokenizer)
            out.append(Trace(cell, request.id, tuple((piece.text, piece.origin.value) for piece in pieces)))
        return out


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
