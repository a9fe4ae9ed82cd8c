"""A client of the application, without sockets: it reads, stops reading, disconnects, or its request's task is cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from foresay.server.guards import App


class Manner(StrEnum):
    """A client's behaviour."""

    READS = "reads"
    DISCONNECTS = "disconnects"
    STALLS = "stops reading, then disconnects"
    CANCELLED = "has its task cancelled"


@dataclass
class Call:
    """One request and its response."""

    path: str
    body: dict[str, Any]
    manner: Manner = Manner.READS
    starts_at: float = 0.0
    leaves_after: float = 0.0
    """Seconds after the start at which a client that does not read leaves."""
    status: int = 0
    data: bytes = b""
    starts: int = 0
    ends: int = 0
    """Response starts and complete bodies."""
    began: float | None = None
    ended: float | None = None
    failure: BaseException | None = None
    _gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_complete(self) -> bool:
        """True if the response was read to its end."""
        return self.ends == 1

    async def run(self, app: App) -> None:
        """Send the request and read its response."""
        await asyncio.sleep(self.starts_at)
        loop = asyncio.get_running_loop()
        self.began = loop.time()
        raw = json.dumps(self.body).encode()
        headers = [
            (b"host", b"127.0.0.1"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(raw)).encode()),
        ]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": self.path, "raw_path": self.path.encode(), "query_string": b"", "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "root_path": "", "state": {},
        }  # fmt: skip
        messages = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> MutableMapping[str, Any]:
            if messages:
                return messages.pop()
            await self._gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(app(scope, receive, self._send))
        leaving = loop.call_later(self.leaves_after, self._leave, task) if self.manner is not Manner.READS else None
        try:
            await task
        except asyncio.CancelledError:
            if self.manner is not Manner.CANCELLED:
                raise
        except Exception as error:
            self.failure = error
        finally:
            if leaving is not None:
                leaving.cancel()
            self.ended = loop.time()

    def _leave(self, task: asyncio.Future[Any]) -> None:
        if self.manner is Manner.CANCELLED:
            task.cancel()
        self._gone.set()

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await asyncio.sleep(0)
        if self.manner is Manner.STALLS and self.starts:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), 1e6)
        if self._gone.is_set() and self.manner is not Manner.CANCELLED:
            return  # as servers do after a disconnection
        if message["type"] == "http.response.start":
            self.starts += 1
            self.status = message["status"]
            return
        assert message["type"] == "http.response.body" and self.starts == 1, "a body before its start"
        assert not self.ends, "a body after its end"
        self.data += message.get("body", b"")
        self.ends += not message.get("more_body", False)

    def events(self) -> list[Any]:
        """The events of a stream; "[DONE]" as text."""
        out: list[Any] = []
        for line in self.data.decode().splitlines():
            kind, _, rest = line.partition(": ")
            if kind == "data":
                out.append(rest if rest == "[DONE]" else json.loads(rest))
        return out
