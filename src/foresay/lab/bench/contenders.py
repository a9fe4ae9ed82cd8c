"""What a benchmark runs: methods of foresay and other engines, behind one protocol.

Owns the protocol (`Runner`), and how a method or a peer decodes one block of requests. Does not know in which order runs
happen, how they are compared, or what is written to the results file.
"""

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
    """Requests that are run together: one data set at one batch size with one set of sampling parameters."""

    dataset: str
    asks: Sequence[PromptRequest]
    batch_size: int
    params: SamplingParams

    def cell(self, method: str) -> Cell:
        """The results cell of a method on this block."""
        return Cell(method, self.dataset, self.batch_size, sampling_name(self.params))


def sampling_name(params: SamplingParams) -> str:
    """The sampling parameters as a results cell names them: "greedy", or "t=0.8 top_p=0.9"."""
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
    """The engine's Steps; None for another engine."""

    @property
    def tokens(self) -> int:
        """Number of output tokens."""
        return sum(map(len, self.outputs))


class Runner(Protocol):
    """Something that decodes a block."""

    name: str
    exact: bool

    def prepare(self, block: PromptBlock) -> None:
        """Load what a block needs; models that are loaded stay loaded for later blocks."""
        ...

    def run(self, block: PromptBlock, requests: Sequence[PromptRequest]) -> Outcome:
        """Decode some of the block's requests."""
        ...


class MethodRunner:
    """One of foresay's methods over one target."""

    def __init__(self, target: Generator, method: Method) -> None:
        self.name, self.exact = method.name, True
        self._target, self._method = target, method
        self._ready: Generator | None = None

    def prepare(self, block: PromptBlock) -> None:
        """Load the drafter."""
        if self.name == PLAIN:
            self._ready = self._target.plain().with_settings(max_batch_size=block.batch_size)
            return
        if self._ready is None:
            self._ready = self._method.generator(self._target, block.batch_size)
            self.exact = self._ready.rule.exact
        self._ready = self._ready.with_settings(max_batch_size=block.batch_size)

    def run(self, block: PromptBlock, requests: Sequence[PromptRequest]) -> Outcome:
        """Decode through the engine. Raises DraftFailedError when the drafter failed."""
        assert self._ready is not None
        live = run_live(self._ready, requests, block.params)
        return Outcome(live.seconds, live.outputs, live)


class PeerRunner:
    """Another engine."""

    def __init__(self, peer: Peer, eos: frozenset[int]) -> None:
        self.name, self.exact = peer.name, True
        self._peer, self._eos = peer, eos

    def prepare(self, block: PromptBlock) -> None:
        """Raises ConfigError for sampling parameters that are not passed on to other engines."""
        check_params(self.name, block.params)

    def run(self, block: PromptBlock, requests: Sequence[PromptRequest]) -> Outcome:
        """Decode the same token ids."""
        done = self._peer.run([one.token_ids for one in requests], block.params, block.batch_size)
        return Outcome(done.seconds, [self._cut(output) for output in done.outputs])

    def _cut(self, output: list[int]) -> list[int]:
        """The output up to and including its first end token, without the padding after it."""
        ends = [i for i, token in enumerate(output) if token in self._eos]
        return output[: ends[0] + 1] if ends else output
