"""Generation requests: chat completions and completions, whole or as a stream of events, and /predict.

Owns the numbering of a request's outputs, and cancellation when a client disconnects. Knows neither keys nor routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from anyio import CancelScope
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from foresay.decoding.outcome import TokenLogprob
from foresay.decoding.sampling_params import LogitsProcessor, SamplingParams
from foresay.errors import ConfigError
from foresay.generation.result import Chunk
from foresay.generation.session import seeded
from foresay.server.drafting_choice import DraftingChoice
from foresay.server.errors import CLIENT_CLOSED, ApiError, FieldError, as_api_error, as_api_errors
from foresay.server.events import Echo, Output, Reply
from foresay.server.formats import Format
from foresay.server.hints import ignore
from foresay.server.logprobs import Logprobs, of_prompt
from foresay.server.message_kind import MessageKind
from foresay.server.option_fields import StreamOptions, is_marked
from foresay.server.requests import OFF, ChatRequest, CompletionRequest, PredictRequest
from foresay.server.served import Served
from foresay.text.grammar import Source
from foresay.text.prompts import fill_in_marks
from foresay.text.reasoning import reasoning_of
from foresay.text.stream import Detokenizer
from foresay.text.thinking_budget import ThinkingBudget
from foresay.text.tool_calls.calls import Parser

MAX_ECHOED_SCORES = 1 << 20
"""Limit on the prompt log-probabilities of one response: about 300 MB while it is built."""
Chunks = AsyncGenerator[tuple[int, Chunk], None]
Processor = Callable[[list[int]], LogitsProcessor]
"""Returns a processor of one output, from its prompt."""
T = TypeVar("T")


def _no_parser() -> Parser | None:
    """Return no parser: all text is content."""
    return None


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A validated and tokenized request. Output i * n + j is the j-th output of prompt i."""

    prompts: list[list[int]]
    params: SamplingParams
    n: int = 1
    returned: int = 1
    """Outputs of each prompt that are returned, the most probable of its n."""
    drafting: DraftingChoice = field(default_factory=DraftingChoice)
    processors: tuple[Processor, ...] = ()
    """Processors of each output."""
    parser: Callable[[], Parser | None] = _no_parser
    """Returns a parser of one output."""

    def pairs(self) -> list[tuple[list[int], SamplingParams]]:
        """Return the prompt and parameters of every output."""
        ranked = self.returned < self.n and self.params.logprobs is None
        params = replace(self.params, logprobs=0) if ranked else self.params
        prompts = [prompt for prompt in self.prompts for _ in range(self.n)]
        made = [tuple(make(prompt) for make in self.processors) for prompt in prompts]
        return [(one, replace(seeded(params, i), processors=made[i])) for i, one in enumerate(prompts)]


async def generate(
    model: Served, request: ChatRequest | CompletionRequest, make: Callable[[Reply], Format], raw_request: Request
) -> Response:
    """Handle a request for completions. make: returns the format of a reply.

    Raises ApiError for a request that is rejected or fails.
    """
    with as_api_errors(*request.error_fields):
        prepared = await unless_disconnected(_prepare(model, request, raw_request.state), raw_request)
        outputs = await unless_disconnected(_outputs(model, request, prepared), raw_request)
        counts, is_predicted = [len(ids) for ids in prepared.prompts], bool(prepared.params.prediction)
        form = make(Reply(model.names[0], model.fingerprint, request, counts, outputs, is_predicted))
        chunks = _none() if request.only_prompt else model.chunks(prepared.pairs(), prepared.drafting)
        if not request.stream:
            await _collect(chunks, outputs, raw_request)

            def response() -> Response:
                return JSONResponse(form.whole())

            # a response that repeats its prompts may be long
            return await model.prepare(response) if request.echoes else response()
        # a rejection or an early failure is raised here, while the response can still have its status
        try:
            first = [] if request.only_prompt else [await unless_disconnected(anext(chunks), raw_request)]
        except BaseException:
            await chunks.aclose()
            raise
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return _Stream(_events(model, form, first, chunks), media_type=form.media_type, headers=headers)


async def _events(
    model: Served, form: Format, first: Sequence[tuple[int, Chunk]], chunks: Chunks
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. An error is one of them, since the status has been sent. first: chunks before the others."""

    def added(index: int, chunk: Chunk) -> Iterable[bytes]:
        return form.added(form.reply.outputs[index].take(chunk))

    try:
        async with aclosing(chunks):
            for event in (*form.begun(), *(event for one in first for event in added(*one))):
                yield event
            async for one in chunks:
                for event in added(*one):
                    yield event
        for event in form.ended():
            yield event
    except Exception as error:
        api_error = as_api_error(error, *form.reply.request.error_fields)
        model.metrics.failed.labels(str(api_error.status)).inc()
        yield form.failed(api_error)


class _Stream(StreamingResponse):
    """A stream that closes its events when it ends, however it ends: the rows of a client that has left are freed at once."""

    body_iterator: AsyncGenerator[bytes, None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            with CancelScope(shield=True):
                await self.body_iterator.aclose()


async def _outputs(model: Served, request: ChatRequest | CompletionRequest, prepared: PreparedRequest) -> list[Output]:
    """Return the outputs before their first token, each with its prompt if the response repeats it."""
    top, tokenizer, echoes = prepared.params.logprobs, model.generator.tokenizer, list[Echo | None]()
    tokens = sum(map(len, prepared.prompts)) * prepared.n
    if request.echoes and top is not None and tokens * (top + 1) > MAX_ECHOED_SCORES:
        limit = MAX_ECHOED_SCORES // (top + 1)
        text = f"has {tokens} tokens, once per output; echo with logprobs={top} is limited to {limit}"
        raise FieldError("prompt", text)
    for prompt, ids in zip(request.prompts(), prepared.prompts, strict=True):
        scored = await model.scored(ids, top) if request.echoes and top is not None else None
        echoes.append(await model.prepare(partial(_echo, model, prompt, ids, scored)) if request.echoes else None)
    # the output of an encoder-decoder does not continue its prompt
    before = [[] if model.generator.target.model.capabilities.reads_source else ids for ids in prepared.prompts]
    visible = prepared.params.visible_token_ids

    def output(index: int) -> Output:
        i = index // prepared.n
        logprobs = None if top is None else Logprobs(tokenizer, visible, context=before[i])
        return Output(index, logprobs, echoes[i], prepared.parser())

    return [output(index) for index in range(len(prepared.prompts) * prepared.n)]


def _echo(model: Served, prompt: Any, ids: list[int], scored: Sequence[TokenLogprob | None] | None) -> Echo:
    text = prompt if isinstance(prompt, str) else Detokenizer(model.tokenizer).all(ids)
    return Echo(text, () if scored is None else of_prompt(model.tokenizer, ids, scored))


async def _none() -> Chunks:
    """Yield nothing."""
    return
    yield


async def count_tokens(model: Served, request: ChatRequest) -> int:
    """Return the number of a chat's prompt tokens. Raises ApiError for a request that is rejected."""
    with as_api_errors(*request.error_fields):
        kind = await model.prepare(lambda: MessageKind.of(model, request))
        (ids,) = await model.encoded(request.prompts(), kind.options)
    return len(ids)


async def predict(model: Served, request: PredictRequest, raw_request: Request) -> str:
    """Handle POST /predict: return the continuation of a prompt."""
    (ids,) = await model.encoded([request.prompt])
    params = model.owned(SamplingParams(max_new_tokens=request.max_tokens, temperature=0.0), raw_request.state)
    prepared = PreparedRequest([ids], params)
    output = Output(0)
    await _collect(model.chunks(prepared.pairs(), prepared.drafting), [output], raw_request)
    assert output.generation is not None
    return output.generation.text


async def _prepare(model: Served, request: ChatRequest | CompletionRequest, state: Any) -> PreparedRequest:
    """Validate and tokenize a request before it is queued. state: of the request, with its API key."""
    prompts, chat = request.prompts(), request if isinstance(request, ChatRequest) else None
    _check(model, request, len(prompts))
    drafting, parser = DraftingChoice.of(request.foresay), _no_parser
    constraint = await model.read(request.constraint())
    before = None if chat is None else await model.prepare(lambda: MessageKind.of(model, chat, constraint))
    ids = await model.encoded(prompts, None if before is None else before.options)
    params = request.params(model.generator.target.model.max_length - max(len(one) for one in ids))
    params = model.owned(params, state, request.cache_salt)
    marked = chat is not None and is_marked([*chat.messages, *(chat.tools or ())])
    params = replace(params, keep_prompt=bool(request.prompt_cache_key) or marked)
    field, source = constraint or ("tools", None)
    if before is not None and chat is not None:
        # stop strings end content, which an output of required calls does not have
        params = replace(params, visible_token_ids=before.visible_ids, stop=() if chat.must_call else params.stop)
        if chat.prediction:
            predicted = await model.encoded_prediction(chat.prediction.text, params.max_new_tokens)
            params, drafting = replace(params, prediction=predicted), model.with_lookup(drafting)

        def after() -> tuple[Callable[[], Parser | None], Source | None]:
            message = before.after(ids[0])  # a response template reads the whole prompt
            return message.parser, message.grammar_source()

        field = "tools" if chat.must_call else field
        parser, source = await model.prepare(after)
    budget = _thinking_budget(model, request, params)
    processors: tuple[Processor, ...] = () if budget is None else (budget.after,)
    if source is not None:
        parts = {} if before is None else {one.name: one.parameters for one in before.callable}
        grammar = await model.grammar(source, param=field, owner=params.owner, parts=parts)
        if not params.given("min_new_tokens"):  # the model's own: the grammar decides where to end
            params = replace(params, min_new_tokens=0)
        processors = (*processors, lambda prompt: grammar.mask_after(len(prompt)))
    return PreparedRequest(ids, params, request.candidates, request.returned, drafting, processors, parser)


def _thinking_budget(
    model: Served, request: ChatRequest | CompletionRequest, params: SamplingParams
) -> ThinkingBudget | None:
    """Return the limit on reasoning. One for a model without marks of reasoning is a hint, which is ignored."""
    budget, target, tokenizer = request.thinking_budget, model.generator.target, model.generator.tokenizer
    if budget is None:
        return None
    field = "thinking_budget_tokens" if request.thinking_token_budget is None else "thinking_token_budget"
    reasoning = reasoning_of(tokenizer)
    if reasoning is None or target.model.capabilities.reads_source:
        ignore(field)
        return None
    try:
        return ThinkingBudget(budget, tokenizer, params.visible_token_ids, reasoning=reasoning)
    except ConfigError as error:
        raise FieldError(field, error) from None


def _check(model: Served, request: ChatRequest | CompletionRequest, prompts: int) -> None:
    """Raise ApiError for fields that contradict each other, the server's limits or the model."""
    settings, generation = model.settings, model.generator.target.generation
    n, candidates, stops = request.returned, request.candidates, len(request.stops)
    outputs, options = prompts * candidates, request.stream_options or StreamOptions()
    usage, off = "stream_options.continuous_usage_stats", {name: getattr(request, name) for name in OFF}
    fills_in = isinstance(request, CompletionRequest) and bool(request.suffix)
    # fmt: off
    checks: list[tuple[bool, str, str]] = [
        *((value not in (None, OFF[name]), name, f"is not supported; leave it out, or send {OFF[name]}")
          for name, value in off.items()),
        *((value is not None and generation.applies(name), name,
           "contradicts the model's generation config, which sets another value that a request cannot turn off")
          for name, value in off.items()),
        (not 1 <= n <= settings.max_n, "n", f"must be 1 to {settings.max_n}"),
        (not n <= candidates <= settings.max_n, "best_of", f"must be n={n} to {settings.max_n}"),
        (candidates > n and bool(request.stream), "best_of", "above n cannot be streamed: the best are known at the end"),
        (outputs > settings.max_prompts, "n", f"requests {outputs} outputs; at most {settings.max_prompts} are allowed"),
        (stops > settings.max_stops, "stop", f"has {stops} texts; at most {settings.max_stops} are allowed"),
        (options.continuous_usage_stats and not options.include_usage, usage, "needs include_usage=true"),
        (options.include_usage and not request.stream, "stream_options", "needs stream=true"),
        (fills_in and fill_in_marks(model.tokenizer) is None, "suffix",
         ": this model's tokenizer has no tokens for filling in text between two texts"),
    ]
    # fmt: on
    for is_wrong, param, text in checks:
        if is_wrong:
            raise FieldError(param, text, value=({"n": n, "best_of": candidates} | off).get(param, ...))


async def _collect(chunks: Chunks, outputs: Sequence[Output], raw_request: Request) -> None:
    """Fill the outputs. Raises the first error of any output."""

    async def collect() -> None:
        async for index, chunk in chunks:
            outputs[index].take(chunk)

    async with aclosing(chunks):
        await unless_disconnected(collect(), raw_request)


async def unless_disconnected(work: Awaitable[T], raw_request: Request) -> T:
    """Return the coroutine's result. If the client disconnects first, cancel the coroutine and raise ApiError."""
    task, disconnect = asyncio.ensure_future(work), asyncio.create_task(_disconnected(raw_request))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_CLOSED, "the client disconnected")
        return task.result()
    finally:
        for one in (task, disconnect):
            one.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await one


async def _disconnected(raw_request: Request) -> None:
    """Wait until the client disconnects."""
    while (await raw_request.receive())["type"] != "http.disconnect":
        pass
