"""Checks before every route: keys, host names, body sizes; request ids, and one log line per request.

Owns admission. Plain ASGI, so that responses are not buffered. Knows no route but those that need no key.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from hashlib import sha256
from time import perf_counter
from typing import Any
from uuid import uuid4

from fastapi.responses import JSONResponse

from foresay.server.chat_page import PAGE_FILES
from foresay.server.errors import CLIENT_CLOSED, ApiError
from foresay.server.hints import HEADER, IGNORED
from foresay.server.queues import SENDER, Sender
from foresay.server.settings import LOOPBACK, ServerSettings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger("foresay.server")
OPEN_ROUTES = frozenset({"/health", "/ping", "/ready", "/favicon.ico", *PAGE_FILES})
"""Routes that need no key: they expose no data and accept none."""


class Guards:
    """Middleware with the checks."""

    def __init__(self, app: App, settings: ServerSettings, failed: Callable[[int], None]) -> None:
        """failed: called with the status of each error response."""
        self._app, self._settings, self._failed = app, settings, failed
        self._keys = [sha256(key.encode()).digest() for key in sorted(settings.keys)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        request_id, start, status = f"req-{uuid4().hex[:16]}", perf_counter(), [0]
        scope.setdefault("state", {})["request_id"] = request_id
        ignored: dict[str, None] = {}
        IGNORED.set(ignored)
        method, head = scope["method"], scope["method"] == "HEAD"
        if head:  # the response of GET without its body
            scope = {**scope, "method": "GET"}

        async def send_response(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
                allows_head = {(b"allow", b"GET"): (b"allow", b"GET, HEAD")}
                headers = [allows_head.get((name, value), (name, value)) for name, value in message["headers"]]
                message["headers"] = [*headers, (b"x-request-id", request_id.encode())]
                if ignored:
                    message["headers"].append((HEADER, ", ".join(ignored).encode()))
            elif head:
                message = {**message, "body": b""}
            await send(message)

        try:
            scope["state"]["owner"] = self._check(scope, headers)
            body, size = await self._read_body(receive)
            SENDER.set(Sender(scope["state"]["owner"] or str((scope.get("client") or [""])[0]), size))
        except ApiError as error:
            response = JSONResponse(error.body_at(scope["path"]), error.status, headers=error.headers)
            await response(scope, receive, send_response)
        else:
            try:
                await self._app(scope, body, send_response)
            except Exception:  # the framework answers and logs one, then raises it again
                if not status[0]:
                    raise
        finally:
            if status[0] >= 400:
                self._failed(status[0])
            line = {"id": request_id, "method": method, "path": scope["path"], "status": status[0]}
            logger.info("%s", json.dumps({**line, "seconds": round(perf_counter() - start, 4)}))

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        """Return the owner of a request, which is its key; empty without keys.

        Raises ApiError for a request that is not permitted, or whose declared body is too large.
        """
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._settings.max_body_bytes:
            raise ApiError(413, f"the body exceeds {self._settings.max_body_bytes} bytes", code="body_too_large")
        if not self._keys and (b"host" in headers or scope.get("http_version") != "1.0"):  # pages send a host
            self._check_host(headers.get(b"host", b"").decode("latin-1"))
        if self._keys and scope["path"] not in OPEN_ROUTES:
            kind, _, key = headers.get(b"authorization", b"").partition(b" ")
            return self._checked_key(key if kind.lower() == b"bearer" else headers.get(b"x-api-key", b""))
        return ""

    def _checked_key(self, key: bytes) -> str:
        given = sha256(key.strip()).digest()
        # compare every key, so that the time taken reveals nothing about a near match
        matches = [hmac.compare_digest(given, item) for item in self._keys]
        if not any(matches):
            text = "the API key is not one of this server's" if key.strip() else "an API key is required"
            raise ApiError(401, f"{text}; send Authorization: Bearer KEY or X-Api-Key: KEY", code="invalid_api_key")
        return key.strip().decode("latin-1")

    def _check_host(self, header: str) -> None:
        """Raise ApiError for an unknown host name. A foreign page's name could resolve to this machine (DNS rebinding)."""
        name = header.rpartition(":")[0] if header.rpartition("]")[2].count(":") else header
        names = {*LOOPBACK, "[::1]", self._settings.host, *(item.lower() for item in self._settings.hosts)}
        if self._settings.host in LOOPBACK and name.lower() not in names:
            raise ApiError(421, f"unknown host {name!r}; allow it with --allow-host", code="unknown_host")

    async def _read_body(self, receive: Receive) -> tuple[Receive, int]:
        """Return a `receive` that replays the body in one piece before later messages, and the body's size in bytes.

        Raises ApiError for a body that is too large, too slow or incomplete.
        """
        remaining, parts, more = self._settings.max_body_bytes, list[bytes](), True
        try:
            async with asyncio.timeout(self._settings.body_s):
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ApiError(CLIENT_CLOSED, "the client disconnected")
                    parts.append(message.get("body", b""))
                    remaining, more = remaining - len(parts[-1]), message.get("more_body", False)
                    if remaining < 0:
                        text = f"the body exceeds {self._settings.max_body_bytes} bytes"
                        raise ApiError(413, text, code="body_too_large")
        except TimeoutError:
            raise ApiError(
                408, f"the body was not complete after {self._settings.body_s:g} s", code="timeout"
            ) from None
        body = b"".join(parts)
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> MutableMapping[str, Any]:
            return pending.pop() if pending else await receive()

        return replayed, len(body)
