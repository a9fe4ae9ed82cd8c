"""What a benchmark runs, in one shape: methods of ours and other engines over one block of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN, Method
from foresay.lab.bench.peers.base import Peer, check_params
from foresay.lab.data.requests import PromptRequest
from foresay.lab.measure.live_run import Live, run_live
from foresay.records.results import Cell


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """What is run together: one data set in one setting."""

    dataset: str
    asks: Sequence[PromptRequest]
    batch_size: int
    params: SamplingParams

    def cell(self, method: str) -> Cell:
        """A method's cell here."""
        return Cell(method, self.dataset, self.batch_size, sampling_name(self.params))


def sampling_name(params: SamplingParams) -> str:
    """As a cell calls it: "greedy", or "t=0.8 top_p=0.9"."""
    if params.greedy:
        return "greedy"
    cut = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    default = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return " ".join([f"t={params.temperature:g}", *(f"{k}={v:g}" for k, v in cut.items() if v != default[k])])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run wrote, and how long it took."""

    seconds: float
    outputs: list[list[int]]
    live: Live | None = None
    """The Steps, where foresay ran it."""

    @property
    def tokens(self) -> int:
        """How many were written."""
        return sum(map(len, self.outputs))


class Runner(Protocol):
    """Something that decodes a block."""

    name: str
    exact: bool
    shares_noise: bool
    """Whether samples are plain decoding's too."""

    def prepare(self, block: PromptBlock) -> None:
        """Get ready for a block; what is loaded stays."""
        ...

    def run(self, block: PromptBlock, asks: Sequence[PromptRequest]) -> Outcome:
        """Decode some of the block's requests."""
        ...


class MethodRunner:
    """A method of ours over one target."""

    def __init__(self, target: Generator, method: Method) -> None:
        self.name, self.exact, self.shares_noise = method.name, True, False
        self._target, self._method = target, method
        self._ready: Generator | None = None

    def prepare(self, block: PromptBlock) -> None:
        """Load what drafts."""
        if self._ready is None and self._method.name == PLAIN:
            self._ready = self._target.plain()
        elif self._ready is None:
            self._ready = self._method.generator(self._target, block.batch_size)
            self.exact = self._ready.rule.exact
            self.shares_noise = all(one.rule.needs.shares_noise for one in (self._target, self._ready))
        self._ready = self.generator.with_settings(max_batch_size=block.batch_size)

    @property
    def generator(self) -> Generator:
        """What decodes, once prepared."""
        assert self._ready is not None
        return self._ready

    def run(self, block: PromptBlock, asks: Sequence[PromptRequest]) -> Outcome:
        """Decode through the engine."""
        live = run_live(self.generator, asks, block.params)
        return Outcome(live.seconds, live.outputs, live)


class PeerRunner:
    """Another engine."""

    def __init__(self, peer: Peer, eos: frozenset[int]) -> None:
        self.name, self.exact, self.shares_noise = peer.name, True, False
        self._peer, self._eos = peer, eos

    def prepare(self, block: PromptBlock) -> None:
        """Refuse what other engines are not told."""
        check_params(self.name, block.params)

    def run(self, block: PromptBlock, asks: Sequence[PromptRequest]) -> Outcome:
        """Decode the same token ids."""
        done = self._peer.run([ask.token_ids for ask in asks], block.params, block.batch_size)
        return Outcome(done.seconds, [self._cut(output) for output in done.outputs])

    def _cut(self, output: list[int]) -> list[int]:
        """Without pads behind the end token."""
        ends = [i for i, token in enumerate(output) if token in self._eos]
        return output[: ends[0] + 1] if ends else output
