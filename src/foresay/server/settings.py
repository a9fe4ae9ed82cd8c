"""What a server is told: where it listens, whom it lets in, and how much of anything it takes.

Owns the values and their checks. Knows no HTTP.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from foresay.checks import check_float, check_int
from foresay.errors import ConfigError

KEYS_VARIABLE = "FORESAY_API_KEYS"
"""Keys that are let in, separated by commas."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Raises ConfigError for values out of range, and for an address beyond this machine without keys."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: frozenset[str] = frozenset()
    """Bearer keys; none lets everyone in."""
    open_to_all: bool = False
    """Whether an address beyond this machine is wanted without keys."""
    cors: tuple[str, ...] = ()
    """Origins whose pages may call the API."""
    hosts: tuple[str, ...] = ()
    """Further names that this server is reached by, where there are no keys: of a proxy before it."""
    max_waiting: int = 128
    """Requests that may wait for a row; more are told to come back."""
    max_body_bytes: int = 4 << 20
    max_prompts: int = 128
    """Of one request, times its `n`."""
    max_n: int = 16
    max_stops: int = 16
    max_methods: int = 4
    """Ways of drafting that are kept ready at a time."""
    max_connections: int = 1024
    """Open at a time; fewer where the process may open fewer files."""
    head_s: float = 15.0
    """How long a client may take to send a request's line and headers."""
    body_s: float = 60.0
    """How long a client may take to send its request."""
    unread_s: float = 120.0
    """How long a client may take nothing of what waits for it; its connection is then closed (on Linux)."""
    timeout_s: float = 600.0
    """Of one request."""
    prefill_wait_s: float = 0.3
    """About how long running requests wait for the prompts of others between two tokens."""
    drain_s: float = 30.0
    """How long requests may go on when the server is told to end."""

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        for name, low in (
            ("max_waiting", 1),
            ("max_body_bytes", 1024),
            ("max_prompts", 1),
            ("max_n", 1),
            ("max_methods", 1),
            ("max_connections", 1),
        ):
            check_int(name, getattr(self, name), low)
        check_int("max_stops", self.max_stops, 0)
        if self.hosts and (self.keys or self.host not in LOOPBACK):
            raise ConfigError(
                "names of hosts are looked at on this machine's own address without keys; drop --allow-host"
            )
        for name in self.hosts:
            if not name or "/" in name or (":" in name and not name.startswith("[")):
                raise ConfigError(f"hosts: {name!r} is no name of a host; leave scheme and port out")
        check_float("drain_s", self.drain_s, 0.0, 1e6)
        for name in ("timeout_s", "prefill_wait_s", "head_s", "body_s", "unread_s"):
            check_float(name, getattr(self, name), 0.001, 1e6)
        if self.host not in LOOPBACK and not self.keys and not self.open_to_all:
            raise ConfigError(
                f"host={self.host!r} is reached from other machines, and no keys are asked for; set {KEYS_VARIABLE} or "
                "--keys-file, or say --open-to-all"
            )


def read_keys(path: Path | None) -> frozenset[str]:
    """The keys of the environment and of a file, one to a line. Raises ConfigError for a file that cannot be read or has none."""
    found = {one.strip() for one in os.environ.get(KEYS_VARIABLE, "").split(",")}
    if path is not None:
        try:
            lines = {line.strip() for line in path.read_text(encoding="utf-8").splitlines()}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read keys from {str(path)!r}: {getattr(error, 'strerror', None) or error}"
            ) from None
        lines = {line for line in lines if not line.startswith("#")} - {""}
        if not lines:
            raise ConfigError(f"{str(path)!r} has no keys")
        found |= lines
    return frozenset(found - {""})
