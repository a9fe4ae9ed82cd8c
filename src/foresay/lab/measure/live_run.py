"""One live run of a method over some requests, on the clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from foresay.decoding.randomness import derive
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Stats
from foresay.engine.chunked_prefill import OFFLINE_WAIT_S
from foresay.errors import ForesayError
from foresay.generation.generator import Generator
from foresay.generation.result import Generation
from foresay.lab.data.requests import PromptRequest
from foresay.records.results import PromptResult


class DraftFailedError(ForesayError):
    """The drafter failed while it was measured: what went on was plain decoding."""


@dataclass(frozen=True, slots=True)
class Live:
    """What a run did."""

    seconds: float
    """Wall-clock from the first request to the last token, prompt processing included."""
    generations: tuple[Generation, ...]
    """By request."""

    @property
    def outputs(self) -> list[list[int]]:
        """The tokens written."""
        return [list(one.token_ids) for one in self.generations]

    @property
    def tokens(self) -> int:
        """How many were written."""
        return sum(len(one.token_ids) for one in self.generations)

    @property
    def stats(self) -> Stats:
        """All Steps added up."""
        return Stats.of(step for one in self.generations for step in one.steps)

    def prompts(self, asks: Sequence[PromptRequest]) -> tuple[PromptResult, ...]:
        """A record of each request."""
        pairs = zip(asks, self.generations, strict=True)
        return tuple(PromptResult.of(ask.id, ask.category, one.steps) for ask, one in pairs)


def run_live(generator: Generator, asks: Sequence[PromptRequest], params: SamplingParams) -> Live:
    """Decode every request. Sampled ones get seeds of their own, as in `generate`; the same in every run.

    What a drafter keeps between requests is cleared first. Raises DraftFailedError when the drafter failed.
    """
    generator.forget()
    session = generator.session(prefill_wait_s=OFFLINE_WAIT_S)
    places: dict[int, int] = {}
    for place, ask in enumerate(asks):
        seed = params.seed or 0
        one = params if params.greedy else dataclasses.replace(params, seed=derive(seed, place) if place else seed)
        try:
            places[session.submit(list(ask.token_ids), one, text=False)] = place
        except ForesayError as error:
            raise (error.about(f"prompt {ask.id!r}") if ask.id else error) from None
    done: dict[int, Generation] = {}
    began = perf_counter()
    while session.has_work:
        for chunk in session.step():
            if chunk.error is not None:
                raise chunk.error
            if chunk.generation is not None:
                done[places[chunk.index]] = chunk.generation
    seconds = perf_counter() - began
    if session.engine.draft_failures:
        raise DraftFailedError(f"the drafter failed: {session.draft_error}")
    return Live(seconds, tuple(done[place] for place in range(len(asks))))
