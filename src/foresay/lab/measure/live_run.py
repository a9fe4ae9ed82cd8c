"""One live run of a method over some requests, on the clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from foresay.decoding.outcome import Step
from foresay.decoding.randomness import derive
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Stats
from foresay.errors import ForesayError
from foresay.generation.generator import Generator
from foresay.lab.data.requests import PromptRequest
from foresay.records.results import PromptResult


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
    session = generator.session()
    places: dict[int, int] = {}
    for place, ask in enumerate(asks):
        one = params if params.greedy else dataclasses.replace(params, seed=derive(params.seed or 0, place))
        try:
            places[session.submit(list(ask.token_ids), one, text=False)] = place
        except ForesayError as error:
            raise error.about(f"prompt {ask.id!r}") from None
    steps: list[list[Step]] = [[] for _ in asks]
    began = perf_counter()
    while session.has_work:
        for chunk in session.step():
            if chunk.error is not None:
                raise chunk.error
            steps[places[chunk.index]].append(chunk.step)
    seconds = perf_counter() - began
    if session.engine.draft_failures:
        raise DraftFailedError(f"the drafter failed: {session.draft_error}")
    return Live(seconds, tuple(map(tuple, steps)))
