"""One live run of a method over some requests, timed.

Owns what a run's seconds cover, the seeds of sampled requests, and that a failed drafter is an error rather than plain
decoding in disguise. Compares nothing and writes no file.
"""

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
    """The drafter failed while it was measured: decoding continued without it, so the time is not the method's."""


@dataclass(frozen=True, slots=True)
class Live:
    """The Steps of a run, and how long it took."""

    seconds: float
    """Wall-clock from the first request to the last token, prompt processing included."""
    steps: tuple[tuple[Step, ...], ...]
    """By request, in the order of the requests."""

    @property
    def outputs(self) -> list[list[int]]:
        """The output tokens of each request."""
        return [[token for step in steps for token in step.token_ids] for steps in self.steps]

    @property
    def tokens(self) -> int:
        """Number of output tokens."""
        return sum(len(step.token_ids) for steps in self.steps for step in steps)

    @property
    def stats(self) -> Stats:
        """All Steps added up."""
        return Stats.of(step for steps in self.steps for step in steps)

    def prompts(self, requests: Sequence[PromptRequest]) -> tuple[PromptResult, ...]:
        """The counts and times of each request. requests: those of the run, in the same order."""
        pairs = zip(requests, self.steps, strict=True)
        return tuple(PromptResult.of(one.id, one.category, steps) for one, steps in pairs)


def run_live(generator: Generator, requests: Sequence[PromptRequest], params: SamplingParams) -> Live:
    """Decode every request. Sampled ones get seeds of their own, the same in every run.

    What a drafter keeps between requests is cleared first. Raises DraftFailedError when the drafter failed, and a request's
    own error when that cannot be decoded.
    """
    generator.forget()
    session = generator.session()
    indices: dict[int, int] = {}
    for i, request in enumerate(requests):
        own = params if params.greedy else dataclasses.replace(params, seed=derive(params.seed or 0, i))
        try:
            indices[session.submit(list(request.token_ids), own, text=False)] = i
        except ForesayError as error:
            raise error.about(f"prompt {request.id!r}") from None
    steps: list[list[Step]] = [[] for _ in requests]
    began = perf_counter()
    while session.has_work:
        for chunk in session.step():
            if chunk.error is not None:
                raise chunk.error
            steps[indices[chunk.index]].append(chunk.step)
    seconds = perf_counter() - began
    if session.engine.draft_failures:
        raise DraftFailedError(f"the drafter failed: {session.draft_error}")
    return Live(seconds, tuple(map(tuple, steps)))
