"""Runners of a benchmark with one interface, foresay's methods and other engines, and their turns on one block of requests.

Plain decoding runs before and after every few runs, so that a ratio compares runs next to each other in time: the speed of a
machine drifts. Owns the order of runs and isolates failures, so that a failed run does not stop the others. Stores nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ForesayError
from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN, Method
from foresay.records.results import Cell, Failure, Run
from foresay_lab.data.requests import PromptRequest
from foresay_lab.measure.live_run import Outcome, run_live


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
        return run_live(self.generator, requests, block.params)


def take_turns(
    plain: Runner,
    turns: Sequence[tuple[int, Runner]],
    block: PromptBlock,
    *,
    warm: PromptBlock,
    between: int,
    starting: Callable[[Runner, int | None], None] = lambda runner, repeat: None,
) -> Iterator[tuple[Run | Failure, Outcome | None]]:
    """Run each (repeat, runner) after all runners decoded `warm`; yield their results and those of plain decoding.

    between: runs between two runs of plain decoding; their results are yielded after the second one. starting: called before
    each run with the runner and the repeat, or with None before a warm-up. Errors of plain decoding are raised.
    """

    def prepare(runner: Runner) -> None:
        starting(runner, None)
        runner.prepare(block)
        if warm.asks:
            runner.run(warm, warm.asks)

    def run(runner: Runner, repeat: int) -> Outcome:
        starting(runner, repeat)
        return runner.run(block, block.asks)

    if not turns:
        return
    prepare(plain)
    errors = {name: _guarded(partial(prepare, runner)) for name, runner in {r.name: r for _, r in turns}.items()}
    before = run(plain, turns[0][0])
    expected = before.outputs
    yield _as_run(block, turns[0][0], plain, before), before
    for first in range(0, len(turns), between):
        some = turns[first : first + between]
        done = [errors[runner.name] or _guarded(partial(run, runner, repeat)) for repeat, runner in some]
        after = run(plain, some[-1][0])
        assert not block.params.greedy or after.outputs == expected, "plain decoding is not deterministic"
        yield _as_run(block, some[-1][0], plain, after), after
        rate = (before.tokens + after.tokens) / (before.seconds + after.seconds)
        for (repeat, runner), outcome in zip(some, done, strict=True):
            if isinstance(outcome, Outcome):
                same = _compared(outcome.outputs, expected) if block.params.greedy or runner.shares_noise else {}
                result = _as_run(block, repeat, runner, outcome, plain_seconds=outcome.tokens / rate, **same)
                yield result, outcome
            else:
                yield Failure(block.cell(runner.name), repeat, str(outcome)), None
        before = after


def _guarded(work: Callable[[], Outcome | None]) -> Outcome | str | None:
    """Return the result of `work`, or its error on one line."""
    try:
        return work()
    except Exception as error:  # any error: the other runs continue
        kind = "" if isinstance(error, ForesayError) else f"{type(error).__name__}: "
        return " ".join(f"{kind}{error}".split())[:500]


def _as_run(block: PromptBlock, repeat: int, runner: Runner, outcome: Outcome, **more: Any) -> Run:
    if outcome.generations:
        more |= {"stats": outcome.stats.as_dict(), "prompts": outcome.prompts(block.asks)}
    return Run(block.cell(runner.name), repeat, outcome.seconds, outcome.tokens, exact=runner.exact, **more)


def _compared(outputs: Sequence[list[int]], expected: Sequence[list[int]]) -> dict[str, Any]:
    """Compare outputs with the expected ones and return the fields of a Run."""
    same = sum(a == b for a, b in zip(outputs, expected, strict=True))
    note = "" if same == len(expected) else f"{same} of {len(expected)} outputs equal those of plain decoding"
    return {"identical": same == len(expected), "note": note}
