"""One timed live run of a method on some requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Stats
from foresay.engine.chunked_prefill import OFFLINE_WAIT_S
from foresay.errors import ForesayError
from foresay.generation.generator import Generator
from foresay.generation.result import Generation
from foresay.generation.session import seeded
from foresay.records.results import PromptResult
from foresay_lab.data.requests import PromptRequest


class DraftFailedError(ForesayError):
    """The drafter failed during a measurement, which continued with plain decoding."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outputs and the time of a run."""

    seconds: float
    """Wall-clock time from the first request to the last token, including prompt processing."""
    outputs: list[list[int]]
    """Token ids of each request, in order."""
    generations: tuple[Generation, ...] = ()
    """One per request, with its Steps; none from other engines."""

    @property
    def tokens(self) -> int:
        """Number of output tokens."""
        return sum(map(len, self.outputs))

    @property
    def stats(self) -> Stats:
        """The sum of all Steps."""
        return Stats.of(step for one in self.generations for step in one.steps)

    def prompts(self, requests: Sequence[PromptRequest]) -> tuple[PromptResult, ...]:
        """Return the results of each request."""
        pairs = zip(requests, self.generations, strict=True)
        return tuple(PromptResult.of(request.id, request.category, one.steps) for request, one in pairs)


def run_live(generator: Generator, requests: Sequence[PromptRequest], params: SamplingParams) -> Outcome:
    """Decode every request and time the run. Each sampled request has its own seed as in `generate`, equal in every run."""
    params = params if params.greedy else dataclasses.replace(params, seed=params.seed or 0)
    return decode(generator, [(one.id, one.token_ids, seeded(params, index)) for index, one in enumerate(requests)])


def decode(
    generator: Generator,
    prompts: Sequence[tuple[str, Sequence[int], SamplingParams]],
    on_progress: Callable[[int, int], None] = lambda done, tokens: None,
) -> Outcome:
    """Decode prompts in batches and time the run. prompts: (id, token ids, parameters) of each.

    The state that a drafter keeps between requests is cleared first. on_progress: called after every step with the number of
    complete outputs and of tokens. Raises DraftFailedError if the drafter fails, because the counts then do not describe it.
    """
    generator.forget()
    session = generator.session(prefill_wait_s=OFFLINE_WAIT_S)
    indices: dict[int, int] = {}
    for index, (name, token_ids, params) in enumerate(prompts):
        try:
            indices[session.submit(list(token_ids), params, text=False)] = index
        except ForesayError as error:
            raise (error.about(f"prompt {name!r}") if name else error) from None
    done: dict[int, Generation] = {}
    tokens, start = 0, perf_counter()
    while session.has_work:
        for chunk in session.step():
            if chunk.error is not None:
                raise chunk.error
            tokens += len(chunk.step.token_ids)
            if chunk.generation is not None:
                done[indices[chunk.index]] = chunk.generation
        on_progress(len(done), tokens)
    seconds = perf_counter() - start
    if session.engine.draft_failures:
        raise DraftFailedError(f"the drafter failed: {session.draft_error}")
    generations = tuple(done[index] for index in range(len(prompts)))
    return Outcome(seconds, [list(one.token_ids) for one in generations], generations)
