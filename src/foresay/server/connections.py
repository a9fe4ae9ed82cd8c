"""Client connections: time limit and size limit of a request's head, and the number of open connections.

Owns the limits that uvicorn lacks before a request exists, and responses to HTTP/1.0. Knows no route.
"""

from __future__ import annotations

import asyncio
import json
import logging
from http import HTTPStatus
from typing import Any

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from foresay.server.errors import ApiError, FieldError

_logger = logging.getLogger("foresay.server.connections")
_logger.setLevel(logging.ERROR)  # uvicorn warns of each head that is malformed or wants an upgrade, without a key
MAX_HEAD_BYTES = 1 << 16
"""Largest size of the request line and headers."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits."""

    head_s: float = 15.0
    """Seconds in which a client must send a request's head."""
    max_connections: int = 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _logger
        self._timer: asyncio.TimerHandle | None = None
        self._unparsed = 0
        """Bytes since the parser last completed a head or a part of a body."""
        self.waiting_since = self.loop.time()

    @property
    def answering(self) -> bool:
        """True while a response is incomplete."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def awaits_client(self) -> bool:
        """True while the client has to send: its first request, the rest of one, or the next one."""
        return not self.transport.is_closing() and (not self.answering or self.cycle.more_body)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection. Above max_connections, disconnect the client that has been silent longest, or else refuse."""
        super().connection_made(transport)
        self._await_head()
        others: list[Any] = [one for one in self.connections if one is not self and not one.transport.is_closing()]
        if len(others) >= self.max_connections:
            idle = [one for one in others if one.awaits_client]
            if idle:
                min(idle, key=lambda one: float(one.waiting_since)).transport.abort()
            else:
                self.refuse(
                    ApiError(503, "too many connections are open; try again later", code="overloaded", retry_after=5)
                )

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer as well."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received data. Refuse a head larger than MAX_HEAD_BYTES."""
        if self._timer is None and not self.answering:
            self._await_head()
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_HEAD_BYTES:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        """Refuse a head that is too large although it came in one piece. Stop the timer, and select the class for HTTP/1.0."""
        self._stop_timer()
        self._unparsed = 0
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refuse_head()
            return
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and isinstance(self.cycle, RequestResponseCycle):
            self.cycle.__class__ = _Http10Cycle

    def on_body(self, body: bytes) -> None:
        """Reset the count of unparsed bytes."""
        self._unparsed = 0
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Reset the count of unparsed bytes."""
        self._unparsed = 0
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note that the client is next to send."""
        self.waiting_since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP, in the API's error shape."""
        self.refuse(FieldError("request", f": {msg}", code="invalid_http"))

    def refuse(self, error: ApiError) -> None:
        """Send an error without a request, unless a response is in progress, and disconnect."""
        if self.transport.is_closing():
            return
        if not self.answering or not self.cycle.response_started:
            if self.answering:  # a body that cannot be read: its request is answered here
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            body = json.dumps(error.body()).encode()
            lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", "content-type: application/json"]
            lines += [f"content-length: {len(body)}", "connection: close"]
            lines += [f"{name.lower()}: {value}" for name, value in error.headers.items()]
            self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()

    def _refuse_head(self) -> None:
        self.refuse(ApiError(431, f"the request's head exceeds {MAX_HEAD_BYTES} bytes", code="head_too_large"))

    def _await_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.head_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._unparsed:
            self.refuse(ApiError(408, f"the request's head was not complete after {self.head_s:g} s", code="timeout"))
        else:
            self.transport.close()


class _Http10Cycle(RequestResponseCycle):
    """A response to HTTP/1.0, which has no chunked encoding: without a Content-Length it ends with the connection."""

    _open_ended = False

    async def send(self, message: ASGISendEvent) -> None:
        """Send a message. RequestResponseCycle requires a length for responses that are not chunked."""
        if message["type"] == "http.response.start":
            self._open_ended = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            self.chunked_encoding = False if self._open_ended else None
        elif message["type"] == "http.response.body" and self._open_ended:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
