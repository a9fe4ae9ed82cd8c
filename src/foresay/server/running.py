"""A server from its first line to its last: where it listens is said, and a signal ends it in order.

Owns uvicorn's part. Knows no route.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn

from foresay.server.app import make_app
from foresay.server.service import Service

SPARE_S = 5
"""Seconds for answers to be sent once nothing is decoded any more."""


_MOST_MS = (1 << 31) - 1


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service, say: Callable[[str], None]) -> None:
        super().__init__(config)
        self._service, self._say = service, say

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for server in self.servers if self.started else ():
            for one in server.sockets:
                limit_unread(one, self._service.settings.unread_s)
                host, port = one.getsockname()[:2]
                self._say(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self._service.draining:
            self._service.draining = True  # what comes from now on is sent elsewhere
            asyncio.run_coroutine_threadsafe(self._service.drain(), self._loop)
        super().handle_exit(sig, frame)


def limit_unread(listening: socket.socket, seconds: float) -> None:
    """End every later connection of a listening socket whose client takes nothing for so long of what is sent.

    The event loop cannot: what is to be sent waits in the kernel, and closing waits for it to be taken.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None:
        return
    with suppress(OSError):  # a kernel, or a kind of socket, that does not have it
        listening.setsockopt(socket.IPPROTO_TCP, option, min(math.ceil(seconds * 1000), _MOST_MS))


def serve(service: Service, *, warm: bool = False, say: Callable[[str], None] = lambda address: None) -> None:
    """Serve until a signal. say: told each address that it listens at."""
    settings = service.settings
    config = uvicorn.Config(
        make_app(service, warm=warm),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(settings.drain_s) + SPARE_S,
    )
    _Server(config, service, say).run()
