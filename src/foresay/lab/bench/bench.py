"""Benchmarks: methods and other engines on the same prompts, interleaved with plain decoding, into a results file.

Plain decoding runs before and after every few runs, so that a ratio compares neighbours in time: machines are shared and
drift. Owns the order of runs, what is repeated after a stop, and that a failing cell does not lose the others.
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
from foresay.lab.data.requests import PromptRequest, changed_params, digest
from foresay.records.lines import LineWriter
from foresay.records.provenance import provenance
from foresay.records.results import Cell, Failure, Prediction, Results, Run, Trace, results_writer
from foresay.text.stream import TextStream

_TRACES = 2
"""Outputs of each cell that are kept piece by piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What is compared, on what, and how often. Raises ConfigError for settings that cannot be run or recorded."""

    methods: Sequence[Method]
    datasets: Mapping[str, Sequence[PromptRequest]]
    params: Sequence[SamplingParams] = (SamplingParams(max_new_tokens=96),)
    batch_sizes: Sequence[int] = (1,)
    repeats: int = 3
    between: int = 3
    """Runs between two of plain decoding."""
    warm_up: int = 1
    """Prompts that every runner decodes before it is timed."""

    def __post_init__(self) -> None:
        if not self.datasets or any(not requests for requests in self.datasets.values()):
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
            for name, requests in self.datasets.items():
                for size in self.batch_sizes:
                    yield PromptBlock(name, requests, size, params)

    def header(self, target: Generator) -> dict[str, Any]:
        """What must be the same for a file to go on. Methods, other engines and repeats may grow."""
        return {
            "model": target.target.name,
            "dtype": target.target.dtype,
            "datasets": {
                name: {"prompts": len(requests), "digest": digest(requests)} for name, requests in self.datasets.items()
            },
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
        on_run: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """on_run: called with the progress after every run of a method or another engine."""
        self.settings, self._on_run, self._tokenizer = settings, on_run, target.tokenizer
        self._header = settings.header(target)
        self._provenance = provenance() | ({"peers": {peer.name: peer.describe() for peer in peers}} if peers else {})
        self._plain = MethodRunner(target, Method("none"))
        self._runners: list[Runner] = [MethodRunner(target, method) for method in settings.methods]
        self._runners += [PeerRunner(peer, target.target.eos_token_ids) for peer in peers]
        self._known: set[tuple[Cell, int]] = set()
        self._traced: set[Cell] = set()
        self._wanted: dict[Cell, list[list[int]]] = {}
        self._writer: LineWriter
        self._done = 0

    def run(self, path: str | os.PathLike[str], predictions: Sequence[Prediction] = ()) -> Results:
        """Run what the file does not hold yet. predictions: written before anything is run.

        Raises ConfigError when the file was begun with other settings, or another process writes it. A method that fails is
        recorded as a Failure and does not raise.
        """
        with results_writer(path, self._header, self._provenance) as self._writer:
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
        if not missing:
            return
        self._warm(self._plain, block)
        broken: dict[str, str] = {}
        for runner in {runner.name: runner for _, runner in missing}.values():
            if problem := self._guarded(lambda runner=runner: self._warm(runner, block)):  # type: ignore[misc]
                broken[runner.name] = problem
        before = self._run_plain(block, missing[0][0])
        for first in range(0, len(missing), self.settings.between):
            some = missing[first : first + self.settings.between]
            done = [(repeat, runner, self._attempt(runner, block, broken)) for repeat, runner in some]
            after = self._run_plain(block, some[-1][0])
            rate = (before.tokens + after.tokens) / (before.seconds + after.seconds)
            for repeat, runner, outcome in done:
                self._note(block, repeat, runner, outcome, rate)
            before = after

    def _warm(self, runner: Runner, block: PromptBlock) -> None:
        runner.prepare(block)
        if self.settings.warm_up:
            runner.run(block, block.asks[: self.settings.warm_up])

    def _guarded(self, work: Callable[[], Any]) -> str:
        """The error in one line, cut at 500 characters; empty when there was none."""
        try:
            work()
        except Exception as error:  # whatever it is, the other cells go on
            return " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return ""

    def _attempt(self, runner: Runner, block: PromptBlock, broken: Mapping[str, str]) -> Outcome | str:
        """A run, or why there is none."""
        if runner.name in broken:
            return broken[runner.name]
        out: list[Outcome] = []
        problem = self._guarded(lambda: out.append(runner.run(block, block.asks)))
        return problem or out[0]

    def _run_plain(self, block: PromptBlock, repeat: int) -> Outcome:
        outcome = self._plain.run(block, block.asks)
        known = self._wanted.setdefault(block.cell(PLAIN), outcome.outputs)
        assert not block.params.greedy or known == outcome.outputs, "plain decoding does not repeat itself"
        self._writer.append(self._as_run(block, repeat, self._plain, outcome).as_line())
        return outcome

    def _as_run(self, block: PromptBlock, repeat: int, runner: Runner, outcome: Outcome) -> Run:
        run = Run(block.cell(runner.name), repeat, outcome.seconds, outcome.tokens, exact=runner.exact)
        if outcome.live is None:
            return run
        return replace(run, stats=outcome.live.stats.as_dict(), prompts=outcome.live.prompts(block.asks))

    def _note(self, block: PromptBlock, repeat: int, runner: Runner, outcome: Outcome | str, rate: float) -> None:
        """Write a run or a failure. rate: tokens per second of plain decoding next to it in time."""
        self._done += 1
        if isinstance(outcome, str):
            failure = Failure(block.cell(runner.name), repeat, outcome)
            self._writer.append({"kind": "failed", **asdict(failure)})
            self._on_run(Progress(failure, self._done, self.total))
            return
        run = replace(self._as_run(block, repeat, runner, outcome), plain_seconds=outcome.tokens / rate)
        if block.params.greedy:
            wanted = self._wanted[block.cell(PLAIN)]
            same = sum(a == b for a, b in zip(outcome.outputs, wanted, strict=True))
            note = "" if same == len(wanted) else f"{same} of {len(wanted)} outputs as plain decoding writes them"
            run = replace(run, identical=same == len(wanted), note=note)
        self._writer.append(run.as_line())
        self._trace(block, run.cell, outcome)
        self._on_run(Progress(run, self._done, self.total))

    def _trace(self, block: PromptBlock, cell: Cell, outcome: Outcome) -> None:
        """Keep the first outputs with the origin of each piece: draft, residual or bonus."""
        if outcome.live is None or self._tokenizer is None or cell in self._traced:
            return
        self._traced.add(cell)
        for request, steps in list(zip(block.asks, outcome.live.steps, strict=True))[:_TRACES]:
            stream = TextStream(self._tokenizer)
            pieces = [p for step in steps for p in stream.push(step.token_ids, step.origins)]
            pieces += stream.finish(stopped=False)
            trace = Trace(cell, request.id, tuple((piece.text, piece.origin.value) for piece in pieces))
            self._writer.append({"kind": "trace", **asdict(trace)})
