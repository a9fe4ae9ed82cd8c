"""One target and who decodes with it: the turns of a block to runs and traces.

Owns the runners, and what a benchmark consists of. Keeps nothing, and does not know what has been run before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN, Method
from foresay.lab.bench.peers.base import Peer
from foresay.lab.bench.runners import MethodRunner, Outcome, PeerRunner, PromptBlock, Runner
from foresay.lab.bench.settings import BenchSettings
from foresay.lab.bench.turns import take_turns
from foresay.records.provenance import provenance
from foresay.records.results import Cell, Failure, Run, Trace

_TRACES = 2
"""Outputs of each run that are told piece by piece."""

Turn = tuple[int, str]
"""A repeat, and who decodes."""
Told = tuple[Run | Failure, Sequence[Trace]]
"""What came of a turn, and its first outputs with who wrote what."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What a benchmark consists of; plain data, but for the cells."""

    settings: Mapping[str, Any]
    """What must be the same for a file to go on."""
    provenance: Mapping[str, Any]
    blocks: Sequence[Cell]
    """Plain decoding's cell in each."""
    contenders: Sequence[str]
    repeats: int
    between: int
    """Turns between two of plain decoding."""

    def cell(self, block: int, contender: str) -> Cell:
        """A contender's cell in a block."""
        return replace(self.blocks[block], method=contender)

    def turns(self) -> Iterator[tuple[int, Turn]]:
        """(block, turn), in the order in which they are run."""
        for block in range(len(self.blocks)):
            for repeat in range(self.repeats):
                for name in self.contenders:
                    yield block, (repeat, name)

    def as_plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Outline:
        """From `as_plain`, after JSON."""
        return cls(**{**plain, "blocks": [Cell(**one) for one in plain["blocks"]]})


class Stage:
    """A target, methods and other engines over blocks of prompts."""

    def __init__(self, target: Generator, settings: BenchSettings, peers: Sequence[Peer] = ()) -> None:
        self._settings, self._tokenizer = settings, target.tokenizer
        self._blocks = list(settings.blocks())
        self._plain = MethodRunner(target, Method("none"))
        runners: list[Runner] = [MethodRunner(target, method) for method in settings.methods]
        runners += [PeerRunner(peer, target.target.eos_token_ids) for peer in peers]
        self._runners = {runner.name: runner for runner in runners}
        came = provenance() | ({"peers": {peer.name: peer.describe() for peer in peers}} if peers else {})
        self.outline = Outline(
            settings.header(target),
            came,
            [block.cell(PLAIN) for block in self._blocks],
            list(self._runners),
            settings.repeats,
            settings.between,
        )

    def run(self, block: int, turns: Sequence[Turn]) -> Iterator[Told]:
        """The runs of these turns, and plain decoding's around them, each as soon as its neighbours are there."""
        chosen = self._blocks[block]
        given = [(repeat, self._runners[name]) for repeat, name in turns]
        warm = replace(chosen, asks=chosen.asks[: self._settings.warm_up])
        for result, outcome in take_turns(self._plain, given, chosen, warm=warm, between=self._settings.between):
            yield result, self._traces(chosen, result.cell, outcome)

    def _traces(self, block: PromptBlock, cell: Cell, outcome: Outcome | None) -> list[Trace]:
        if outcome is None or outcome.live is None or self._tokenizer is None or cell.method == PLAIN:
            return []
        out = []
        for ask, one in list(zip(block.asks, outcome.live.generations, strict=True))[:_TRACES]:
            pieces = one.pieces(self._tokenizer)
            out.append(Trace(cell, ask.id, tuple((piece.text, piece.origin.value) for piece in pieces)))
        return out
