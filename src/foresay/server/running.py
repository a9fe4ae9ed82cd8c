"""A server from its first line to its last: where it listens is said, and a signal ends it in order.

Owns uvicorn's part. Knows no route.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn

from foresay.errors import ConfigError
from foresay.server.app import make_app
from foresay.server.connections import Connection
from foresay.server.guards import App
from foresay.server.service import Service
from foresay.server.settings import ServerSettings

SPARE_S = 5
"""Seconds for answers to be sent once nothing is decoded any more."""
SPARE_FILES = 64
"""Files that a server has open besides its connections, at most."""
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
        """Drain the server, then end it; until then it listens, and /ready answers 503. A second signal does not wait."""
        if self._service.draining:
            super().handle_exit(sig, frame)
            self.force_exit = sig == signal.SIGINT
            return
        self._service.draining = True  # what comes from now on is sent elsewhere
        asyncio.run_coroutine_threadsafe(self._drain(sig, frame), self._loop)

    async def _drain(self, sig: int, frame: FrameType | None) -> None:
        await self._service.drain()
        super().handle_exit(sig, frame)


def bind(settings: ServerSettings) -> list[socket.socket]:
    """Sockets bound to the address of the settings, which do not listen yet.

    Raises ConfigError for a host that is unknown or not this machine's, and for a port that is in use or not permitted.
    """
    bound: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            bound.append(one)
            if os.name == "posix":
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
    except OSError as error:
        for one in bound:
            one.close()
        raise _cannot_listen(settings, error) from None
    return bound


def _cannot_listen(settings: ServerSettings, error: OSError) -> ConfigError:
    hint = "; stop what listens there, or give another --port" if error.errno == errno.EADDRINUSE else ""
    reason = error.strerror or str(error)
    return ConfigError(f"cannot listen at host={settings.host!r}, port={settings.port}: {reason}{hint}")


def configuration(app: App, settings: ServerSettings) -> uvicorn.Config:
    """uvicorn's settings, with our bounds of connections."""
    most = min(settings.max_connections, _most_files() - SPARE_FILES)
    bounds = {"head_s": settings.head_s, "max_connections": max(1, most)}
    return uvicorn.Config(
        app,
        http=type("Connection", (Connection,), bounds),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(settings.drain_s) + SPARE_S,
    )


def _most_files() -> int:
    """Files and connections that this process may have open."""
    try:
        import resource
    except ImportError:  # Windows, which has no such bound
        return 1 << 30
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if most == resource.RLIM_INFINITY else most


def limit_unread(listening: socket.socket, seconds: float) -> None:
    """End every later connection of a listening socket whose client takes nothing for so long of what is sent.

    The event loop cannot: what is to be sent waits in the kernel, and closing waits for it to be taken.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None:
        return
    with suppress(OSError):  # a kernel, or a kind of socket, that does not have it
        listening.setsockopt(socket.IPPROTO_TCP, option, min(math.ceil(seconds * 1000), _MOST_MS))


def serve(
    service: Service,
    sockets: list[socket.socket],
    *,
    warm: bool = False,
    say: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve until a signal. sockets: from `bind`. say: called with each address that it listens at.

    Raises ConfigError where another process has come to listen at the port since.
    """
    config = configuration(make_app(service, warm=warm), service.settings)
    try:
        for one in sockets:  # clients that connect from here on wait until the application has started
            one.listen(config.backlog)
    except OSError as error:
        raise _cannot_listen(service.settings, error) from None
    _Server(config, service, say).run(sockets)
