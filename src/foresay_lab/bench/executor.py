"""Execution of a benchmark's turns on one target, which yields runs and traces.

Owns the runners and the plan of a benchmark. Writes nothing and does not know earlier results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN, Method
from foresay.records.provenance import provenance
from foresay.records.results import Cell, Failure, Run, Trace
from foresay_lab.bench.runners import MethodRunner, Outcome, PromptBlock, Runner
from foresay_lab.bench.settings import BenchSettings
from foresay_lab.bench.turns import take_turns

_TRACES = 2
"""Number of outputs per run whose traces are reported."""

Turn = tuple[int, str]
"""(repeat, runner name)."""
TurnResult = tuple[Run | Failure, Sequence[Trace]]
"""A run or failure, and the traces of its first outputs."""


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
        if outcome is None or outcome.live is None or self._tokenizer is None or cell.method == PLAIN:
            return []
        out = []
        for request, one in list(zip(block.asks, outcome.live.generations, strict=True))[:_TRACES]:
            pieces = one.pieces(self._tokenizer)
            out.append(Trace(cell, request.id, tuple((piece.text, piece.origin.value) for piece in pieces)))
        return out
