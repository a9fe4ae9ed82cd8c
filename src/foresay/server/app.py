"""The application: routes, errors, and how it begins and ends.

Owns which path is which function's. Knows no engine but through the service.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from foresay.errors import ForesayError
from foresay.server import generating
from foresay.server.errors import ApiError, as_api_error, prompt_is
from foresay.server.fields import read
from foresay.server.guards import App, Guards
from foresay.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PredictRequest,
    TokenizeRequest,
)
from foresay.server.responses import ChatShape, CompletionShape
from foresay.server.service import Service

logger = logging.getLogger("foresay.server")
_SAFE = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_LARGE = 1 << 16
"""Bytes of a body from which on it is read on a thread."""


def make_app(service: Service, *, warm: bool = False) -> App:
    """An ASGI application over a service. warm: decode a little before the first request is taken."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        if warm:
            await service.warm()
        service.ready = True
        yield
        service.ready = False
        await service.drain()

    app = FastAPI(title="foresay", lifespan=life, docs_url=None, redoc_url=None)
    app.router.route_class = _json_route(service)
    _errors(app)
    _writing(app, service)
    _telling(app, service)
    _page(app)
    guarded = Guards(app, service.settings, lambda status: service.metrics.failed.labels(str(status)).inc())
    if not service.settings.cors:
        return guarded
    origins = list(service.settings.cors)  # around the guards, so that a page reads why it was refused
    return CORSMiddleware(guarded, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])


def _answer(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, headers=error.headers)


def _json_route(service: Service) -> type[APIRoute]:
    """Routes whose bodies are read by `fields.read`, large ones off the event loop."""

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()
            if self.body_field is None:
                return handler
            kind: Any = self.body_field.field_info.annotation

            async def handle(request: Request) -> Response:
                _check_type(request.headers.get("content-type"))
                body = await request.body()
                asked = read(kind, body) if len(body) < _LARGE else await service.prepare(lambda: read(kind, body))
                return await handler(_Read(request.scope, request.receive, body, asked))

            return handle

    return JsonRoute


class _Read(Request):
    """A request whose body has been read."""

    def __init__(self, scope: Any, receive: Any, body: bytes, asked: Any) -> None:
        super().__init__(scope, receive)
        self._body, self._asked = body, asked

    async def json(self) -> Any:
        return self._asked


def _check_type(content_type: str | None) -> None:
    """Raises ApiError for anything but JSON, which also keeps out what pages of other origins may send without permission."""
    if not re.fullmatch(r"application/(.+\+)?json", (content_type or "").partition(";")[0].strip().lower()):
        given = "no content type" if content_type is None else f"the content type {content_type!r}"
        text = f"the request has {given}; send the header Content-Type: application/json"
        raise ApiError(415, text, param="content-type", code="unsupported_media_type")


def _errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def missing(request: Request, error: HTTPException) -> Response:
        answer = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(answer.body(), answer.status, headers=error.headers)

    async def refused(request: Request, error: Exception) -> Response:
        return _answer(as_api_error(error, logger))

    for kind in (ApiError, ForesayError, Exception):
        app.add_exception_handler(kind, refused)


def _writing(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await generating.write(service, asked, ChatShape(), request)

    @app.post("/v1/completions")
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        return await generating.write(service, asked, CompletionShape(), request)

    @app.post("/predict")
    async def predict(asked: PredictRequest, request: Request) -> dict[str, Any]:
        return {"text": await generating.predict(service, asked, request)}


def _page(app: FastAPI) -> None:
    """The chat at /, three files that need nothing from elsewhere."""
    folder = files("foresay.server") / "page"
    kinds = {"index.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in kinds}

    def answer(name: str) -> Response:
        return Response(texts[name], media_type=f"{kinds[name]}; charset=utf-8", headers=_SAFE)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return answer("index.html")

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(status_code=204, headers={"Cache-Control": "max-age=86400"})

    @app.get("/page.css", include_in_schema=False)
    async def style() -> Response:
        return answer("page.css")

    @app.get("/page.js", include_in_schema=False)
    async def script() -> Response:
        return answer("page.js")


def _telling(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        length = service.generator.target.model.max_length
        return {"object": "list", "data": [_model(name, length) for name in service.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(name, service.generator.target.model.max_length)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def is_ready() -> Response:
        good = service.ready and not service.draining
        return JSONResponse({"status": "ready" if good else "not ready"}, 200 if good else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(await service.sessions()), media_type=CONTENT_TYPE_LATEST)

    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        service.check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        prompt: Any = asked.prompt if asked.messages is None else [one.plain() for one in asked.messages]
        with prompt_is("prompt" if asked.messages is None else "messages", logger):
            (ids,) = await service.encoded([prompt])
        return {"tokens": ids, "count": len(ids), "max_model_len": service.generator.target.model.max_length}

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> dict[str, str]:
        service.check_model(asked.model)
        tokenizer = service.tokenizer

        def decoded() -> str:
            most = len(tokenizer)
            if asked.tokens and max(asked.tokens) >= most:
                raise ApiError(
                    400, f"tokens: {max(asked.tokens)} is no token id, which are 0 to {most - 1}", param="tokens"
                )
            return str(tokenizer.decode(asked.tokens))

        return {"prompt": await service.prepare(decoded)}


def _model(name: str, length: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "foresay", "max_model_len": length}
