"""Runners of a benchmark, with one interface: foresay's methods and other engines on one block of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN, Method
from foresay.records.results import Cell
from foresay_lab.data.requests import PromptRequest
from foresay_lab.measure.live_run import LiveRun, run_live


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """The requests of one data set with one batch size and sampling."""

    dataset: str
    asks: Sequence[PromptRequest]
    batch_size: int
    params: SamplingParams

    def cell(self, method: str) -> Cell:
        """Return the cell of a method in this block."""
        return Cell(method, self.dataset, self.batch_size, sampling_name(self.params))


def sampling_name(params: SamplingParams) -> str:
    """Return the name of a sampling setting in cells: "greedy", or "t=0.8 top_p=0.9"."""
    if params.greedy:
        return "greedy"
    cut = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    default = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return " ".join([f"t={params.temperature:g}", *(f"{k}={v:g}" for k, v in cut.items() if v != default[k])])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outputs of a run and its duration in seconds."""

    seconds: float
    outputs: list[list[int]]
    live: LiveRun | None = None
    """The run with its Steps; None for other engines."""

    @property
    def tokens(self) -> int:
        """Number of output tokens."""
        return sum(map(len, self.outputs))


class Runner(Protocol):
    """A method or engine that decodes a block."""

    name: str
    exact: bool
    shares_noise: bool
    """True if samples equal those of plain decoding, because both use the same noise."""

    def prepare(self, block: PromptBlock) -> None:
        """Prepare for a block; models stay loaded between blocks."""
        ...

    def run(self, block: PromptBlock, requests: Sequence[PromptRequest]) -> Outcome:
        """Decode some of the block's requests."""
        ...


class MethodRunner:
    """A foresay method on one target."""

    def __init__(self, target: Generator, method: Method) -> None:
        self.name, self.exact, self.shares_noise = method.name, True, False
        self._target, self.method = target, method
        self._generator: Generator | None = None

    def prepare(self, block: PromptBlock) -> None:
        """Load the drafter on first use and set the batch size."""
        if self._generator is None and self.method.name == PLAIN:
            self._generator = self._target.plain()
        elif self._generator is None:
            self._generator = self.method.generator(self._target, block.batch_size)
            self.exact = self._generator.rule.exact
            self.shares_noise = all(one.rule.needs.shares_noise for one in (self._target, self._generator))
        self._generator = self.generator.with_settings(max_batch_size=block.batch_size)

    @property
    def generator(self) -> Generator:
        """The generator, after `prepare`."""
        assert self._generator is not None
        return self._generator

    def run(self, block: PromptBlock, requests: Sequence[PromptRequest]) -> Outcome:
        """Decode with foresay's engine."""
        live = run_live(self.generator, requests, block.params)
        return Outcome(live.seconds, live.outputs, live)
