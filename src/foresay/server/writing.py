"""Requests that write: chat completions, completions and /predict, whole or as a stream of events.

Owns how outputs of one request are numbered, what a client that leaves takes along, and the time a request may take. Knows
neither keys nor how the application is put together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from foresay.decoding.outcome import FinishReason, Step
from foresay.decoding.sampling_params import LogitsProcessor, SamplingParams
from foresay.generation.generator import seeded
from foresay.generation.result import Chunk
from foresay.server.answers import Logprobs, Names, Output, finish_reason, origins, sent, statistics, usage
from foresay.server.errors import ApiError, as_api_error
from foresay.server.requests import ChatRequest, CompletionRequest, Drafting
from foresay.server.service import Service
from foresay.server.ways import Way

GONE = 499
"""The status of an answer that nobody waits for."""


@dataclass(slots=True)
class Asked:
    """A request, ready to be decoded. Output i * n + j is the j-th of prompt i."""

    prompts: list[list[int]]
    params: SamplingParams
    n: int
    way: Way
    told: Drafting
    constrain: Callable[[int], LogitsProcessor] | None = None
    """Makes what keeps an output to a grammar behind a prompt of so many tokens; each output has its own."""

    def pairs(self) -> list[tuple[list[int], SamplingParams]]:
        """Every output's prompt and parameters."""
        return [
            self._pair(self.prompts[i // self.n], seeded(self.params, i)) for i in range(len(self.prompts) * self.n)
        ]

    def _pair(self, prompt: list[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        if self.constrain is None:
            return prompt, params
        return prompt, replace(params, processors=(self.constrain(len(prompt)),))

    @property
    def sizes(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(ids) for ids in self.prompts]


Shape = Callable[[int, str, Sequence[Step], FinishReason | None, bool], dict[str, Any]]
"""(output, text, steps, why it ended, whether it is the first piece) -> a choice of an event."""


def prepare(service: Service, asked: ChatRequest | CompletionRequest, prompts: Sequence[Any]) -> Asked:
    """Everything that can be wrong with a request, before it is queued. Raises ApiError or one of ours."""
    settings = service.settings
    service.check_model(asked.model)
    n = 1 if asked.n is None else asked.n
    if not 1 <= n <= settings.max_n:
        raise ApiError(400, f"n={n} must be 1 to {settings.max_n}", param="n")
    if len(prompts) * n > settings.max_prompts:
        raise ApiError(
            400,
            f"{len(prompts) * n} outputs are asked for, and one request may ask for {settings.max_prompts}",
            param="n",
        )
    if asked.num_stops > settings.max_stops:
        raise ApiError(400, f"{asked.num_stops} stop strings; {settings.max_stops} are taken", param="stop")
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")
    ids = [service.encoded(prompt) for prompt in prompts]
    room = service.generator.target.model.max_length - max(len(one) for one in ids)
    told = asked.foresay or Drafting()
    return Asked(ids, asked.params(room), n, Way.of(asked.foresay), told)


async def chat(service: Service, asked: ChatRequest, request: Request) -> Response:
    """POST /v1/chat/completions."""
    ready = prepare(service, asked, [[message.plain() for message in asked.messages]])
    logprobs = Logprobs(service.tokenizer)
    schema = None if asked.response_format is None else asked.response_format.schema_wanted()
    if schema is not None and asked.min_tokens:
        raise ApiError(
            400, "min_tokens and a schema contradict: its output ends where it is complete", param="min_tokens"
        )
    if schema is not None:
        ready.constrain = partial(service.json_schema, schema)
        ready.constrain(0)  # a schema that is not understood is refused now

    def piece(place: int, text: str, steps: Sequence[Step], ended: FinishReason | None, first: bool) -> dict[str, Any]:
        delta = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
        return {"index": place, "delta": delta, "logprobs": logprobs.chat(steps), "finish_reason": finish_reason(ended)}

    def whole(place: int, text: str, steps: Sequence[Step], ended: FinishReason | None, first: bool) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": place,
            "message": message,
            "logprobs": logprobs.chat(steps),
            "finish_reason": finish_reason(ended),
        }

    if asked.stream:
        usage_wanted = asked.stream_options is not None and asked.stream_options.include_usage
        return await streamed(
            service, ready, Names("chat.completion.chunk", "chatcmpl", service.names[0]), piece, usage_wanted, request
        )
    return await answered(service, ready, Names("chat.completion", "chatcmpl", service.names[0]), whole, request)


async def complete(service: Service, asked: CompletionRequest, request: Request) -> Response:
    """POST /v1/completions."""
    ready = prepare(service, asked, asked.prompts())
    logprobs = Logprobs(service.tokenizer) if asked.logprobs is not None else None
    names = Names("text_completion", "cmpl", service.names[0])
    written: dict[int, int] = {}

    def choice(place: int, text: str, steps: Sequence[Step], ended: FinishReason | None, first: bool) -> dict[str, Any]:
        found = None if logprobs is None else logprobs.completion(steps, written.get(place, 0))
        written[place] = written.get(place, 0) + len(text)
        return {"index": place, "text": text, "logprobs": found, "finish_reason": finish_reason(ended)}

    if asked.stream:
        usage_wanted = asked.stream_options is not None and asked.stream_options.include_usage
        return await streamed(service, ready, names, choice, usage_wanted, request)
    return await answered(service, ready, names, choice, request)


async def answered(service: Service, asked: Asked, names: Names, shape: Shape, request: Request) -> Response:
    """A whole answer; a client that leaves before ends it."""
    outputs = await collected(service, asked, request)
    choices, told = [], asked.told
    for place, output in enumerate(outputs):
        assert output.generation is not None
        one = shape(place, output.generation.text, output.steps, output.generation.finish_reason, True)
        choices.append(one | ({"foresay": statistics(output)} if told.stats else {}))
    return JSONResponse(names.event(choices, usage=usage(asked.sizes, outputs)))


async def collected(service: Service, asked: Asked, request: Request) -> list[Output]:
    """All outputs. Raises the first error of one of them, and ApiError for a client that left or a time that is over."""
    pairs = asked.pairs()
    outputs = [Output() for _ in pairs]

    async def collect() -> None:
        async with aclosing(service.chunks(pairs, asked.way)) as stream:
            async for place, chunk in stream:
                if chunk.error is not None:
                    raise chunk.error
                outputs[place].take(chunk)

    work = asyncio.create_task(collect())
    service.watch(work)
    gone = asyncio.create_task(_left(request))
    try:
        done, _ = await asyncio.wait(
            {work, gone}, timeout=service.settings.timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if work in done:
            await work
            return outputs
        if gone in done:
            raise ApiError(GONE, "the client has left")
        raise ApiError(504, f"the request took more than {service.settings.timeout_s:g} seconds", code="timeout")
    except asyncio.CancelledError:
        if work.cancelled() and service.draining:
            raise ApiError(503, "the server has ended", code="shutting_down") from None
        raise
    finally:
        for task in (work, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _left(request: Request) -> None:
    """Until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def streamed(
    service: Service, asked: Asked, names: Names, shape: Shape, with_usage: bool, request: Request
) -> Response:
    """Events as the outputs grow; what is refused before the first of them is refused as any other request is."""
    stream = service.chunks(asked.pairs(), asked.way)
    try:
        async with asyncio.timeout(service.settings.timeout_s):
            first = await _first(service, stream, request)
    except TimeoutError:
        await stream.aclose()
        raise ApiError(
            504, f"the request waited more than {service.settings.timeout_s:g} seconds", code="timeout"
        ) from None
    except BaseException:
        await stream.aclose()
        raise
    if first[1].error is not None:
        await stream.aclose()
        raise first[1].error
    events = _events(service, asked, names, shape, with_usage, first, stream)
    return StreamingResponse(
        events, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )


async def _first(
    service: Service, stream: AsyncGenerator[tuple[int, Chunk], None], request: Request
) -> tuple[int, Chunk]:
    """What comes first, while somebody waits for it."""
    work, gone = asyncio.ensure_future(anext(stream)), asyncio.create_task(_left(request))
    service.watch(work)
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ApiError(GONE, "the client has left")
        return work.result()
    finally:
        for task in (work, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _events(
    service: Service,
    asked: Asked,
    names: Names,
    shape: Shape,
    with_usage: bool,
    first: tuple[int, Chunk],
    stream: AsyncGenerator[tuple[int, Chunk], None],
) -> AsyncIterator[bytes]:
    outputs = [Output() for _ in range(len(asked.prompts) * asked.n)]
    extra: dict[str, Any] = {"usage": None} if with_usage else {}
    task = asyncio.current_task()
    if task is not None:
        service.watch(task)

    def said(place: int, chunk: Chunk) -> bytes:
        output = outputs[place]
        begins = not output.steps
        output.take(chunk)
        choice = shape(place, chunk.text, [chunk.step], chunk.finish_reason, begins)
        if asked.told.origins:
            choice["foresay"] = {"origins": origins(chunk), "tokens": len(chunk.step.token_ids)}
        if asked.told.stats and chunk.finish_reason is not None:
            choice["foresay"] = choice.get("foresay", {}) | statistics(output)
        return sent(names.event([choice], **extra))

    try:
        yield said(*first)
        async with asyncio.timeout(service.settings.timeout_s):
            async for place, chunk in stream:
                if chunk.error is not None:
                    raise chunk.error
                yield said(place, chunk)
        if with_usage:
            yield sent(names.event([], usage=usage(asked.sizes, outputs)))
        yield sent("[DONE]")
    except TimeoutError:
        yield sent(
            ApiError(504, f"the request took more than {service.settings.timeout_s:g} seconds", code="timeout").body()
        )
    except Exception as error:  # the status has been sent: what went wrong is an event
        yield sent(as_api_error(error).body())
    finally:
        await stream.aclose()
