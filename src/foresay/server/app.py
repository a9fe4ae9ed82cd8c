"""The ASGI application: routes, error handlers, startup and shutdown.

Owns the table of routes. Reaches the engine only through the service.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ForesayError
from foresay.server import chat_page, generating
from foresay.server.adapters import message_fields, ollama_fields, response_fields
from foresay.server.adapters.message_fields import CountRequest, MessagesRequest
from foresay.server.adapters.message_format import MessagesFormat
from foresay.server.adapters.ollama_fields import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    ShowRequest,
)
from foresay.server.adapters.ollama_format import OllamaFormat, embedded, loaded
from foresay.server.adapters.ollama_models import OllamaModels
from foresay.server.adapters.response_fields import ResponsesRequest
from foresay.server.adapters.response_format import ResponsesFormat
from foresay.server.embedding import EmbeddingRequest, embed
from foresay.server.errors import ApiError, FieldError, as_api_error, as_api_errors, renamed
from foresay.server.fields import read
from foresay.server.formats import ChatFormat, CompletionFormat
from foresay.server.guards import App, Guards, Receive, Scope, Send
from foresay.server.message_kind import MessageKind
from foresay.server.queues import LONG
from foresay.server.requests import (
    DEFAULT_TEMPERATURE,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PredictRequest,
    TokenizeRequest,
)
from foresay.server.served import Served
from foresay.server.service import Entry, Service
from foresay.version import __version__


def make_app(service: Service, *, warm: bool = False) -> App:
    """Return the ASGI application of a service. warm: decode a few tokens before the first request is accepted."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if warm:
            await service.warm()
        service.ready = True
        watching = asyncio.create_task(service.watch())
        yield
        watching.cancel()
        service.ready = False
        await service.drain()

    app = FastAPI(title="foresay", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.route_class = _json_route(service)
    _add_error_handlers(app)
    _add_generation_routes(app, service)
    _add_ollama_routes(app, service)
    _add_other_routes(app, service)
    chat_page.add_routes(app)

    async def leased(scope: Scope, receive: Receive, send: Send) -> None:
        with service.request():
            await app(scope, receive, send)

    guarded = Guards(leased, service.settings, lambda status: service.metrics.failed.labels(str(status)).inc())
    if not service.settings.cors:
        return guarded
    origins = list(service.settings.cors)  # outermost, so that a page can read the reason of a refusal
    return CORSMiddleware(guarded, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])


async def used(service: Service, name: str | None, raw_request: Request) -> Served:
    """Return the model that a request names, which stays loaded until the request has ended. Raises as `Service.wait`."""
    found = service.take(name)
    return await generating.unless_disconnected(service.wait(name), raw_request) if found is None else found


def _json_route(service: Service) -> type[APIRoute]:
    """Return a route class whose bodies are parsed by `fields.read`, large ones off the event loop."""

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()
            if self.body_field is None:
                return handler
            kind: Any = self.body_field.field_info.annotation

            async def handle(raw_request: Request) -> Response:
                raw_request = _typed(raw_request)
                body = await raw_request.body()
                is_long = len(body) >= LONG
                raw_request._json = (
                    await service.shared.prepare(lambda: read(kind, body)) if is_long else read(kind, body)
                )
                return await handler(raw_request)

            return handle

    return JsonRoute


def _typed(raw_request: Request) -> Request:
    """Return a request with the type of JSON if a program has chosen none; curl then sends that of forms.

    Raises ApiError for another type. Pages of other origins cannot send JSON without a preflight request, so that a browser has
    to send the type.
    """
    headers = raw_request.headers
    given = headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if re.fullmatch(r"application/(.+\+)?json", kind):
        return raw_request
    if kind not in ("", "application/x-www-form-urlencoded") or "origin" in headers or "sec-fetch-site" in headers:
        text = f"the content type {given!r}" if given else "no content type"
        text = f"the request has {text}; send the header Content-Type: application/json"
        raise ApiError(415, text, param="content-type", code="unsupported_media_type")
    typed = [*(one for one in headers.raw if one[0] != b"content-type"), (b"content-type", b"application/json")]
    return Request({**raw_request.scope, "headers": typed}, raw_request.receive)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def on_http_exception(raw_request: Request, error: HTTPException) -> Response:
        api_error = ApiError(error.status_code, f"{raw_request.method} {raw_request.url.path}: {error.detail}")
        return JSONResponse(api_error.body_at(raw_request.url.path), api_error.status, headers=error.headers)

    async def on_exception(raw_request: Request, error: Exception) -> Response:
        api_error = as_api_error(error)
        return JSONResponse(api_error.body_at(raw_request.url.path), api_error.status, headers=api_error.headers)

    for kind in (ApiError, ForesayError, Exception):
        app.add_exception_handler(kind, on_exception)


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest, raw_request: Request) -> Response:
        model = await used(service, request.model, raw_request)
        return await generating.generate(model, request, ChatFormat, raw_request)

    @app.post("/v1/completions")
    async def complete(request: CompletionRequest, raw_request: Request) -> Response:
        model = await used(service, request.model, raw_request)
        return await generating.generate(model, request, CompletionFormat, raw_request)

    @app.post("/v1/embeddings")
    async def embeddings(request: EmbeddingRequest, raw_request: Request) -> Response:
        return await embed(await used(service, request.model, raw_request), request, raw_request)

    async def converted(request: ResponsesRequest | CountRequest, raw_request: Request) -> tuple[Served, ChatRequest]:
        chat = await service.shared.prepare(request.chat)  # validates the whole conversation
        return await used(service, request.model, raw_request), chat

    @app.post("/v1/responses")
    async def respond(request: ResponsesRequest, raw_request: Request) -> Response:
        with renamed(response_fields.CHAT_NAMES):
            model, chat = await converted(request, raw_request)
            default = model.generator.target.generation.sampled(SamplingParams(temperature=DEFAULT_TEMPERATURE))
            form = partial(ResponsesFormat, echoed=request.echoed(chat, default))
            return await generating.generate(model, chat, form, raw_request)

    @app.post("/v1/messages")
    async def message(request: MessagesRequest, raw_request: Request) -> Response:
        with renamed(message_fields.CHAT_NAMES):
            return await generating.generate(*await converted(request, raw_request), MessagesFormat, raw_request)

    @app.post("/v1/messages/count_tokens")
    async def count(request: CountRequest, raw_request: Request) -> dict[str, int]:
        with renamed(message_fields.CHAT_NAMES):
            return {"input_tokens": await generating.count_tokens(*await converted(request, raw_request))}

    @app.post("/predict")
    async def predict(request: PredictRequest, raw_request: Request) -> dict[str, Any]:
        return {"text": await generating.predict(await used(service, None, raw_request), request, raw_request)}


def _add_ollama_routes(app: FastAPI, service: Service) -> None:
    models = OllamaModels(service)

    @app.post("/api/chat")
    async def chat(request: OllamaChatRequest, raw_request: Request) -> Response:
        return await respond(request, raw_request, ollama_fields.CHAT_NAMES, is_chat=True)

    @app.post("/api/generate")
    async def generate(request: OllamaGenerateRequest, raw_request: Request) -> Response:
        return await respond(request, raw_request, ollama_fields.GENERATE_NAMES, is_chat=False)

    async def respond(
        request: OllamaRequest, raw_request: Request, names: Mapping[str, str], *, is_chat: bool
    ) -> Response:
        began, name = perf_counter(), request.model or models.first
        request = request.model_copy(update={"model": models.served(name)})
        with renamed(names):
            only_loads = request.only_loads()
            chat = None if only_loads else await service.shared.prepare(request.chat)
            model = await used(service, request.model, raw_request)
            if chat is None:
                return JSONResponse(loaded(name, is_chat=is_chat))
            form = partial(OllamaFormat, model=name, began=began, is_chat=is_chat)
            return await generating.generate(model, chat, form, raw_request)

    @app.post("/api/embed")
    async def embeddings(request: OllamaEmbedRequest, raw_request: Request) -> Response:
        name, began = request.model or models.first, perf_counter()
        own = await service.shared.prepare(lambda: request.embedding(models.served(name)))
        model = await used(service, own.model, raw_request)
        return await embed(model, own, raw_request, partial(embedded, name, began))

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        return models.tags()

    @app.post("/api/show")
    async def show(request: ShowRequest, raw_request: Request) -> dict[str, Any]:
        name = models.served(request.model or request.name or models.first)
        if known := models.known(name):
            return known
        model = await used(service, name, raw_request)
        return await model.prepare(lambda: models.shown(model))

    @app.post("/api/embeddings")
    async def older_embeddings(request: OllamaEmbeddingsRequest, raw_request: Request) -> Response:
        with renamed({"input": "prompt"}):
            own = request.embedding(models.served(request.model or models.first))
            model = await used(service, own.model, raw_request)
            return await embed(model, own, raw_request, lambda vectors, _: {"embedding": vectors[0].tolist()})

    @app.get("/api/ps")
    async def running() -> dict[str, Any]:
        return models.running()

    @app.get("/version")
    @app.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}


def _add_other_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        data = [_model(name, one, service.created) for one in service.entries for name in one.names]
        return {"object": "list", "data": data}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _model(name, service.entry(name), service.created)

    @app.get("/ping")
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def is_ready() -> Response:
        if reason := service.not_ready:
            return JSONResponse({"status": "not ready", "reason": reason}, 503)
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await service.metrics_text(), media_type=CONTENT_TYPE_LATEST)

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest, raw_request: Request) -> dict[str, Any]:
        model = await used(service, request.model, raw_request)
        if (request.prompt is None) == (request.messages is None):
            raise FieldError("prompt", "and messages: give exactly one of them")
        prompt: Any = request.prompt
        options = None
        if request.messages is not None:
            prompt = [one.plain() for one in request.messages]
            options = (await model.prepare(lambda: MessageKind.of(model, request))).options
        elif fields := request.model_fields_set & {"tools", "add_generation_prompt", "continue_final_message"}:
            raise FieldError(min(fields), "needs messages")
        with as_api_errors("prompt" if request.messages is None else "messages"):
            (ids,) = await model.encoded([prompt], options)
        return {"tokens": ids, "count": len(ids), "max_model_len": model.generator.target.model.max_length}

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest, raw_request: Request) -> dict[str, str]:
        model = await used(service, request.model, raw_request)
        tokenizer = model.tokenizer

        def decoded() -> str:
            vocab_size = len(tokenizer)
            if request.tokens and max(request.tokens) >= vocab_size:
                text = f"contain {max(request.tokens)}, which is not a token id; allowed are 0 to {vocab_size - 1}"
                raise FieldError("tokens", text)
            return str(tokenizer.decode(request.tokens))

        return {"prompt": await model.prepare(decoded)}


def _model(name: str, entry: Entry, created: int) -> dict[str, Any]:
    known: dict[str, Any] = {} if entry.length is None else {"max_model_len": entry.length}
    if entry.served is not None:
        known["foresay"] = entry.served.facts()
    return {"id": name, "object": "model", "created": created, "owned_by": "foresay", "root": entry.name, **known}
