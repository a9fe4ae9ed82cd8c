"""Requests that write: chat completions and completions, whole or as a stream of events, and /predict.

Owns how outputs of one request are numbered, and what a client that leaves takes along. Knows neither keys nor how the
application is put together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from foresay.decoding.outcome import TokenLogprob
from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.generator import seeded
from foresay.generation.result import Chunk
from foresay.server.drafting_choice import DraftingChoice
from foresay.server.errors import GONE, ApiError, as_api_error, prompt_is
from foresay.server.logprobs import Logprobs, of_prompt
from foresay.server.requests import ChatRequest, CompletionRequest, Drafting, PredictRequest
from foresay.server.responses import CompletionShape, Echo, Names, Output, Shape, sent, usage
from foresay.server.service import Service
from foresay.text.grammar import JsonSchema
from foresay.text.stream import Detokenizer

MAX_ECHOED_SCORES = 1 << 20
"""Log-probabilities of prompt tokens in one answer: about 300 MB while it is made."""
Chunks = AsyncGenerator[tuple[int, Chunk], None]
T = TypeVar("T")
logger = logging.getLogger("foresay.server")


@dataclass(frozen=True, slots=True)
class Job:
    """A request, ready to be decoded. Output i * n + j is the j-th of prompt i."""

    prompts: list[list[int]]
    params: SamplingParams
    n: int = 1
    way: DraftingChoice = field(default_factory=DraftingChoice)
    schema: JsonSchema | None = None
    """What every output keeps to."""

    def pairs(self) -> list[tuple[list[int], SamplingParams]]:
        """Every output's prompt and parameters."""
        return [
            self._pair(self.prompts[i // self.n], seeded(self.params, i)) for i in range(len(self.prompts) * self.n)
        ]

    def _pair(self, prompt: list[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        if self.schema is None:
            return prompt, params
        return prompt, replace(params, processors=(self.schema.behind(len(prompt)),))


async def write(service: Service, asked: ChatRequest | CompletionRequest, shape: Shape, request: Request) -> Response:
    """POST /v1/chat/completions and /v1/completions. Raises ApiError for what cannot be answered."""
    with prompt_is(asked.prompt_field, logger):
        job = await _while_waited_for(_prepared(service, asked), request)
        outputs = await _while_waited_for(_outputs(service, asked, shape, job), request)
        chunks = _none() if asked.only_prompt else service.chunks(job.pairs(), job.way)
        answer = _Answer(service, asked, shape, job, outputs)
        if not asked.stream:
            await _collect(chunks, outputs, request)
            # with its prompts, an answer may be long
            return await service.prepare(answer.response) if asked.echoes else answer.response()
        first = None if asked.only_prompt else await _first(chunks, request)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(answer.events(first, chunks), media_type="text/event-stream", headers=headers)


async def _outputs(service: Service, asked: ChatRequest | CompletionRequest, shape: Shape, job: Job) -> list[Output]:
    """The outputs before their first token, each with its prompt where the answer repeats it."""
    top, tokenizer, echoes = job.params.logprobs, service.generator.tokenizer, list[Echo | None]()
    if asked.echoes and top is not None:
        _check_scores(sum(map(len, job.prompts)) * job.n, top)
    for prompt, ids in zip(asked.prompts(), job.prompts, strict=True):
        scored = await service.scored(ids, top) if asked.echoes and top is not None else None
        echoes.append(await service.prepare(partial(_echo, service, prompt, ids, scored)) if asked.echoes else None)
    return [
        Output(
            place,
            shape,
            asked.foresay or Drafting(),
            None if top is None else Logprobs(tokenizer),
            echoes[place // job.n],
        )
        for place in range(len(job.prompts) * job.n)
    ]


def _check_scores(tokens: int, top: int) -> None:
    if tokens * (top + 1) > MAX_ECHOED_SCORES:
        most = MAX_ECHOED_SCORES // (top + 1)
        text = f"echo with logprobs={top} of {tokens} prompt tokens, outputs counted apart; {most} are allowed"
        raise ApiError(400, text, param="prompt")


def _echo(service: Service, prompt: Any, ids: list[int], scored: Sequence[TokenLogprob | None] | None) -> Echo:
    text = prompt if isinstance(prompt, str) else Detokenizer(service.tokenizer).all(ids)
    return Echo(text, () if scored is None else of_prompt(service.tokenizer, ids, scored))


@dataclass(frozen=True, slots=True)
class _Answer:
    """A request's outputs as a body, or as the events of a stream."""

    service: Service
    asked: ChatRequest | CompletionRequest
    shape: Shape
    job: Job
    outputs: list[Output]
    names: Names = field(init=False)

    def __post_init__(self) -> None:
        names = Names.new(self.shape.prefix, self.service.names[0], self.service.fingerprint)
        object.__setattr__(self, "names", names)

    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        return usage([len(ids) for ids in self.job.prompts], self.outputs)

    def response(self) -> Response:
        """The answer in one piece, when all outputs are complete."""
        choices = [one.whole() for one in self.outputs]
        return JSONResponse(self.names.body(self.shape.whole, choices, usage=self.usage()))

    def _event(self, *choices: dict[str, Any]) -> bytes:
        extra: dict[str, Any] = {}
        if self.asked.with_usage:
            extra = {"usage": self.usage() if self.asked.with_running_usage or not choices else None}
        return sent(self.names.body(self.shape.event, choices, **extra))

    async def events(self, first: tuple[int, Chunk] | None, chunks: Chunks) -> AsyncIterator[bytes]:
        """The stream. An error is an event, since the status has been sent."""
        try:
            async with aclosing(chunks):
                for one in self.outputs if self.asked.echoes else ():
                    yield self._event(one.echoed(alone=self.asked.only_prompt))
                async for place, chunk in _behind(first, chunks):
                    yield self._event(self.outputs[place].take(chunk))
            if self.asked.with_usage:
                yield self._event()
            yield sent("[DONE]")
        except Exception as error:
            told = as_api_error(error, logger, prompt=self.asked.prompt_field)
            self.service.metrics.failed.labels(str(told.status)).inc()
            yield sent(told.body())


async def _none() -> Chunks:
    """No chunks."""
    return
    yield


async def predict(service: Service, asked: PredictRequest, request: Request) -> str:
    """POST /predict: the text that continues a prompt."""
    (ids,) = await service.encoded([asked.prompt])
    job = Job([ids], SamplingParams(max_new_tokens=asked.max_tokens))
    output = Output(0, CompletionShape(), Drafting(), None)
    await _collect(service.chunks(job.pairs(), job.way), [output], request)
    assert output.generation is not None
    return output.generation.text


async def _prepared(service: Service, asked: ChatRequest | CompletionRequest) -> Job:
    """Everything that can be wrong with a request, before it is queued."""
    prompts, n = asked.prompts(), 1 if asked.n is None else asked.n
    _check(service, asked, len(prompts), n)
    way, wanted = DraftingChoice.of(asked.foresay), asked.schema_wanted()
    ids = await service.encoded(prompts)
    params = asked.params(service.generator.target.model.max_length - max(len(one) for one in ids))
    schema = None if wanted is None else await service.json_schema(wanted)
    return Job(ids, params, n, way, schema)


def _check(service: Service, asked: ChatRequest | CompletionRequest, prompts: int, n: int) -> None:
    settings = service.settings
    service.check_model(asked.model)
    if not 1 <= n <= settings.max_n:
        raise ApiError(400, f"n={n} must be 1 to {settings.max_n}", param="n")
    if prompts * n > settings.max_prompts:
        text = f"{prompts * n} outputs are asked for, and one request may ask for {settings.max_prompts}"
        raise ApiError(400, text, param="n")
    if len(asked.stops) > settings.max_stops:
        raise ApiError(400, f"{len(asked.stops)} stop strings; {settings.max_stops} are taken", param="stop")
    options = asked.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        text = "continuous_usage_stats needs include_usage=true"
        raise ApiError(400, text, param="stream_options.continuous_usage_stats")
    if asked.with_usage and not asked.stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")


async def _collect(chunks: Chunks, outputs: Sequence[Output], request: Request) -> None:
    """Fill outputs. Raises the first error of one of them."""

    async def collect() -> None:
        async for place, chunk in chunks:
            outputs[place].take(_good(chunk))

    async with aclosing(chunks):
        await _while_waited_for(collect(), request)


async def _first(chunks: Chunks, request: Request) -> tuple[int, Chunk]:
    """What comes first, so that what is refused or fails before it has a status of its own."""

    async def first() -> tuple[int, Chunk]:
        place, chunk = await anext(chunks)
        return place, _good(chunk)

    try:
        return await _while_waited_for(first(), request)
    except BaseException:
        await chunks.aclose()
        raise


async def _behind(first: tuple[int, Chunk] | None, chunks: Chunks) -> AsyncIterator[tuple[int, Chunk]]:
    if first is not None:
        yield first
    async for place, chunk in chunks:
        yield place, _good(chunk)


def _good(chunk: Chunk) -> Chunk:
    if chunk.error is not None:
        raise chunk.error
    return chunk


async def _while_waited_for(work: Coroutine[Any, Any, T], request: Request) -> T:
    """What a coroutine comes to; it is cancelled, and ApiError raised, when the client has left before."""
    doing, gone = asyncio.create_task(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ApiError(GONE, "the client has left")
        return doing.result()
    finally:
        for task in (doing, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _left(request: Request) -> None:
    """Until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
