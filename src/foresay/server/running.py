"""The server process: sockets, startup, and graceful shutdown on a signal.

Owns the use of uvicorn. Knows no route.
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
"""Seconds for sending responses after decoding has ended."""
SPARE_FILES = 64
"""Upper bound on the files that a server opens besides its connections."""
_MAX_MS = (1 << 31) - 1


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        on_listening: Callable[[str], None] = lambda address: None,
        on_draining: Callable[[int], None] = lambda count: None,
    ) -> None:
        super().__init__(config)
        self._service, self._on_listening, self._on_draining = service, on_listening, on_draining

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for server in self.servers if self.started else ():
            for one in server.sockets:
                limit_unread(one, self._service.settings.unread_s)
                host, port = one.getsockname()[:2]
                self._on_listening(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain the server, then stop it. Until then it listens, and /ready answers 503. A second signal stops it at once."""
        if self._service.shared.draining:
            # as without a handler: tasks that are torn down one by one would report it
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
            return
        self._service.shared.draining = True  # load balancers send later requests elsewhere
        asyncio.run_coroutine_threadsafe(self._drain(sig, frame), self._loop)

    async def _drain(self, sig: int, frame: FrameType | None) -> None:
        self._on_draining(self._service.shared.num_open)
        await self._service.drain()
        super().handle_exit(sig, frame)


def bind(settings: ServerSettings) -> list[socket.socket]:
    """Return sockets bound to the address of the settings, which do not listen yet.

    Raises ConfigError for an unknown or foreign host, and for a port that is in use or not permitted.
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
    reason = f"cannot be listened at: {error.strerror or error}"
    if error.errno == errno.EADDRINUSE:
        hint = "stop the process that listens there, or choose another"
        return ConfigError(f"{reason}; {hint}", param="port", value=settings.port)
    return ConfigError(reason, param="host", value=settings.host)


def configuration(app: App, settings: ServerSettings) -> uvicorn.Config:
    """Return uvicorn's settings with our connection limits."""
    limit = min(settings.max_connections, _max_files() - SPARE_FILES)
    bounds = {"head_s": settings.head_s, "max_connections": max(1, limit)}
    return uvicorn.Config(
        app,
        http=type("Connection", (Connection,), bounds),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(settings.drain_s) + SPARE_S,
    )


def _max_files() -> int:
    """Return the number of files and connections that this process may open."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return 1 << 30
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit


def limit_unread(listening: socket.socket, seconds: float) -> None:
    """Close every later connection of a listening socket whose client reads nothing for `seconds`.

    The event loop cannot do so: unsent data waits in the kernel, and closing waits until the data is read.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None:
        return
    with suppress(OSError):  # not supported by this kernel or kind of socket
        listening.setsockopt(socket.IPPROTO_TCP, option, min(math.ceil(seconds * 1000), _MAX_MS))


def serve(
    service: Service,
    sockets: list[socket.socket],
    *,
    warm: bool = False,
    on_listening: Callable[[str], None] = lambda address: None,
    on_draining: Callable[[int], None] = lambda count: None,
) -> None:
    """Serve until a signal arrives. sockets: from `bind`.

    on_listening: called with each address that is listened on. on_draining: called with the number of open requests after the
    first signal. Raises ConfigError if another process has started to listen on the port since `bind`.
    """
    config = configuration(make_app(service, warm=warm), service.settings)
    try:
        for one in sockets:  # later clients wait until the application has started
            one.listen(config.backlog)
    except OSError as error:
        raise _cannot_listen(service.settings, error) from None
    _Server(config, service, on_listening, on_draining).run(sockets)
