"""Benchmarks: methods and other engines on the same prompts, interleaved with plain decoding, into a results file.

Owns what is run, what is repeated after a stop, and what is written down; `turns` owns the order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN, Method
from foresay.lab.bench.contenders import MethodRunner, Outcome, PeerRunner, PromptBlock, Runner, sampling_name
from foresay.lab.bench.peers.base import Peer
from foresay.lab.bench.turns import take_turns
from foresay.lab.data.requests import PromptRequest, changed_params, digest
from foresay.records.lines import LineWriter
from foresay.records.provenance import provenance
from foresay.records.results import Cell, Failure, Prediction, Results, Run, Trace, results_writer

_TRACES = 2
"""Outputs of each cell that are kept piece by piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What is compared, on what, and how often."""

    methods: Sequence[Method]
    datasets: Mapping[str, Sequence[PromptRequest]]
    params: Sequence[SamplingParams] = (SamplingParams(max_new_tokens=96),)
    batch_sizes: Sequence[int] = (1,)
    repeats: int = 3
    between: int = 3
    """Runs between two of plain decoding."""
    warm_up: int = 1
    """Prompts that everyone decodes before being timed."""

    def __post_init__(self) -> None:
        if not self.datasets or any(not asks for asks in self.datasets.values()):
            raise ConfigError("no prompts to run")
        for name, value in (
            ("repeats", self.repeats),
            ("between", self.between),
            *(("batch_size", b) for b in self.batch_sizes),
        ):
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if any(params.processors for params in self.params):
            raise ConfigError("processors cannot be written into a results file; run without them")
        names = [sampling_name(params) for params in self.params]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two of the params are {name!r} in the results; run them into files of their own")

    def blocks(self) -> Iterator[PromptBlock]:
        """Every data set in every setting."""
        for params in self.params:
            for name, asks in self.datasets.items():
                for size in self.batch_sizes:
                    yield PromptBlock(name, asks, size, params)

    def header(self, target: Generator) -> dict[str, Any]:
        """What must be the same for a file to go on. Methods, other engines and repeats may grow."""
        return {
            "model": target.target.name,
            "dtype": target.target.precision,
            "datasets": {name: {"prompts": len(asks), "digest": digest(asks)} for name, asks in self.datasets.items()},
            "params": [{**changed_params(p), "max_new_tokens": p.max_new_tokens} for p in self.params],
        }


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a benchmark is, after every run."""

    last: Run | Failure
    done: int
    total: int
    """Runs of methods and other engines; plain decoding is not counted."""


class Bench:
    """A benchmark of one target."""

    def __init__(
        self,
        target: Generator,
        settings: BenchSettings,
        peers: Sequence[Peer] = (),
        *,
        on_run: Callable[[Progress], None] = lambda told: None,
    ) -> None:
        self.settings, self._on_run, self._tokenizer = settings, on_run, target.tokenizer
        self._header = settings.header(target)
        self._came = provenance() | ({"peers": {peer.name: peer.describe() for peer in peers}} if peers else {})
        self._plain = MethodRunner(target, Method("none"))
        self._runners: list[Runner] = [MethodRunner(target, method) for method in settings.methods]
        self._runners += [PeerRunner(peer, target.target.eos_token_ids) for peer in peers]
        self._known: set[tuple[Cell, int]] = set()
        self._traced: set[Cell] = set()
        self._writer: LineWriter
        self._done = 0

    def run(self, path: str | os.PathLike[str], predictions: Sequence[Prediction] = ()) -> Results:
        """Run what the file does not hold yet. predictions: written before anything is run."""
        with results_writer(path, self._header, self._came) as self._writer:
            so_far = Results(self._header, {})
            for line in self._writer.lines:
                so_far.add(line)
            self._known = {(run.cell, run.repeat) for run in so_far.runs}
            self._traced = {trace.cell for trace in so_far.traces}
            predicted = {one.cell for one in so_far.predictions}
            for one in predictions:
                if one.cell not in predicted:
                    self._writer.append({"kind": "prediction", **asdict(one)})
            for block in self.settings.blocks():
                self._run_block(block)
        return Results.load(path)

    @property
    def total(self) -> int:
        """Runs, plain decoding not counted."""
        return len(list(self.settings.blocks())) * self.settings.repeats * len(self._runners)

    def _run_block(self, block: PromptBlock) -> None:
        repeats = range(self.settings.repeats)
        everything = [(repeat, runner) for repeat in repeats for runner in self._runners]
        missing = [(r, runner) for r, runner in everything if (block.cell(runner.name), r) not in self._known]
        self._done += len(everything) - len(missing)
        warm = replace(block, asks=block.asks[: self.settings.warm_up])
        for result, outcome in take_turns(self._plain, missing, block, warm=warm, between=self.settings.between):
            self._writer.append({"kind": "run" if isinstance(result, Run) else "failed", **asdict(result)})
            if result.cell.method != PLAIN:
                self._done += 1
                self._trace(block, result.cell, outcome)
                self._on_run(Progress(result, self._done, self.total))

    def _trace(self, block: PromptBlock, cell: Cell, outcome: Outcome | None) -> None:
        """Keep the first outputs with who wrote what."""
        if outcome is None or outcome.live is None or self._tokenizer is None or cell in self._traced:
            return
        self._traced.add(cell)
        for ask, one in list(zip(block.asks, outcome.live.generations, strict=True))[:_TRACES]:
            pieces = one.pieces(self._tokenizer)
            trace = Trace(cell, ask.id, tuple((piece.text, piece.origin.value) for piece in pieces))
            self._writer.append({"kind": "trace", **asdict(trace)})
