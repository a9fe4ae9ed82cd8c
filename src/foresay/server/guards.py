"""What stands before every route: keys, the size of bodies, ids, and one line of log for each request.

Owns who is let in. Plain ASGI, so that nothing is buffered on its way. Knows no route but those that need no key.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from hashlib import sha256
from time import perf_counter
from typing import Any
from uuid import uuid4

from foresay.server.errors import GONE, ApiError
from foresay.server.settings import LOOPBACK, ServerSettings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger("foresay.server")
OPEN = frozenset({"/health", "/ready", "/", "/favicon.ico", "/page.css", "/page.js"})
"""Routes that need no key: they tell nothing, and take nothing."""


class Guards:
    """Wraps an application."""

    def __init__(self, app: App, settings: ServerSettings, failed: Callable[[int], None]) -> None:
        """failed: told the status of each answer that is an error."""
        self._app, self._settings, self._failed = app, settings, failed
        self._keys = [sha256(key.encode()).digest() for key in sorted(settings.keys)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        number, began, status = f"req-{uuid4().hex[:16]}", perf_counter(), [0]
        scope.setdefault("state", {})["request_id"] = number
        method, head = scope["method"], scope["method"] == "HEAD"
        if head:  # the same answer without its body
            scope = {**scope, "method": "GET"}

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
                message["headers"] = [*map(_with_head, message["headers"]), (b"x-request-id", number.encode())]
            elif head:
                message = {**message, "body": b""}
            await send(message)

        try:
            self._let_in(scope, headers)
            body = await self._read(receive)
        except ApiError as error:
            await _refuse(error, answer)
        else:
            with _answered(status):
                await self._app(scope, body, answer)
        finally:
            if status[0] >= 400:
                self._failed(status[0])
            line = {
                "id": number,
                "method": method,
                "path": scope["path"],
                "status": status[0],
                "seconds": round(perf_counter() - began, 4),
            }
            logger.info("%s", json.dumps(line))

    def _let_in(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raises ApiError for who is not let in, and for a body that says it is too large."""
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._settings.max_body_bytes:
            raise ApiError(413, f"the body may have {self._settings.max_body_bytes} bytes", code="body_too_large")
        if not self._keys:
            self._check_host(headers.get(b"host", b"").decode("latin-1"))
        elif scope["path"] not in OPEN:
            kind, _, key = headers.get(b"authorization", b"").partition(b" ")
            self._check_key(key if kind.lower() == b"bearer" else headers.get(b"x-api-key", b""))

    def _check_key(self, key: bytes) -> None:
        given = sha256(key.strip()).digest()
        # every key is compared, so that time tells nothing of which was nearly right
        known = [hmac.compare_digest(given, one) for one in self._keys]
        if not any(known):
            text = "a key of this server is needed, as Authorization: Bearer KEY or X-Api-Key: KEY"
            raise ApiError(401, text, code="invalid_api_key")

    def _check_host(self, header: str) -> None:
        """A page from elsewhere can have its own name point to this machine, and would then be read as if it came from here."""
        name = header.rpartition(":")[0] if header.rpartition("]")[2].count(":") else header
        known = {*LOOPBACK, "[::1]", self._settings.host, *(one.lower() for one in self._settings.hosts)}
        if self._settings.host in LOOPBACK and name.lower() not in known:
            raise ApiError(421, f"{name!r} is no name of this server; --allow-host makes it one", code="unknown_host")

    async def _read(self, receive: Receive) -> Receive:
        """What gives the body again, in one piece, and then whatever comes.

        Raises ApiError for one that is too large, too slow or never completed.
        """
        most, parts, more = self._settings.max_body_bytes, list[bytes](), True
        try:
            async with asyncio.timeout(self._settings.body_s):
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ApiError(GONE, "the client has left")
                    parts.append(message.get("body", b""))
                    most, more = most - len(parts[-1]), message.get("more_body", False)
                    if most < 0:
                        text = f"the body may have {self._settings.max_body_bytes} bytes"
                        raise ApiError(413, text, code="body_too_large")
        except TimeoutError:
            raise ApiError(408, f"the body took more than {self._settings.body_s:g} seconds", code="timeout") from None
        return _then({"type": "http.request", "body": b"".join(parts), "more_body": False}, receive)


def _then(first: MutableMapping[str, Any], receive: Receive) -> Receive:
    held = [first]

    async def again() -> MutableMapping[str, Any]:
        return held.pop() if held else await receive()

    return again


def _with_head(header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """What a route of GET allows, HEAD included."""
    name, value = header
    return (name, b"GET, HEAD") if name == b"allow" and value == b"GET" else header


@contextmanager
def _answered(status: list[int]) -> Iterator[None]:
    """Frameworks raise an error again that they have answered and logged; nobody else needs it."""
    try:
        yield
    except Exception:
        if not status[0]:
            raise


async def _refuse(error: ApiError, send: Send) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
