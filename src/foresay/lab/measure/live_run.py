"""One live run of a method over some requests, on the clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from foresay.decoding.outcome import FinishReason, Step
from foresay.decoding.randomness import derive
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Engine, Stats
from foresay.errors import ForesayError
from foresay.generation.generator import Generator
from foresay.lab.data.requests import PromptRequest, source_and_start
from foresay.records.results import PromptResult
from foresay.text.stream import StopStrings


class DraftFailedError(ForesayError):
    """The drafter failed while it was measured: what went on was plain decoding."""


@dataclass(frozen=True, slots=True)
class Live:
    """What a run did."""

    seconds: float
    """Wall-clock from the first request to the last token, prompt processing included."""
    steps: tuple[tuple[Step, ...], ...]
    """By request."""

    @property
    def outputs(self) -> list[list[int]]:
        """The tokens written."""
        return [[token for step in steps for token in step.token_ids] for steps in self.steps]

    @property
    def tokens(self) -> int:
        """How many were written."""
        return sum(len(step.token_ids) for steps in self.steps for step in steps)

    @property
    def stats(self) -> Stats:
        """All Steps added up."""
        return Stats.of(step for steps in self.steps for step in steps)

    def prompts(self, asks: Sequence[PromptRequest]) -> tuple[PromptResult, ...]:
        """A record of each request."""
        pairs = zip(asks, self.steps, strict=True)
        return tuple(PromptResult.of(ask.id, ask.category, steps) for ask, steps in pairs)


def run_live(generator: Generator, asks: Sequence[PromptRequest], params: SamplingParams) -> Live:
    """Decode every request. Sampled ones get seeds of their own, the same in every run.

    What a drafter keeps between requests is cleared first. Raises DraftFailedError when the drafter failed.
    """
    generator.forget()
    engine = generator.engine()
    for place, ask in enumerate(asks):
        one = params if params.greedy else dataclasses.replace(params, seed=derive(params.seed or 0, place))
        try:
            prompt, one, source = source_and_start(generator, ask.token_ids, one)
            stop = StopStrings(generator.tokenizer, one.stop, one.min_new_tokens) if one.stop else None
            engine.submit(prompt, one, eos=generator.target.eos_token_ids, stop=stop, source=source)
        except ForesayError as error:
            raise type(error)(f"prompt {ask.id!r}: {error}") from None
    steps: list[list[Step]] = [[] for _ in asks]
    began = perf_counter()
    while engine.has_work:
        for step in engine.step():
            if step.finish_reason is FinishReason.ERROR:
                raise engine.errors[step.request_id]
            steps[step.request_id].append(step)
    seconds = perf_counter() - began
    _check(engine)
    return Live(seconds, tuple(map(tuple, steps)))


def _check(engine: Engine) -> None:
    if engine.draft_failures and engine.drafter is not None:
        error = engine.drafter.last_error
        raise DraftFailedError(f"the drafter failed: {type(error).__name__}: {error}")
