"""Server settings: address, access and limits.

Owns the values and their validation. Knows no HTTP.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from foresay.checks import check_choice, check_float, check_int
from foresay.errors import ConfigError
from foresay.text.tool_calls.families import FORMATS

KEYS_VARIABLE = "FORESAY_API_KEYS"
"""Accepted API keys, separated by commas."""
SHARE_PREFIXES = ("key", "all", "none")
POOLINGS = ("mean", "last")
"""Hidden states of the last layer that are an embedding: the mean of all tokens', or that of the last token."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of a server. Raises ConfigError for values out of range, and for a non-loopback address without keys."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: frozenset[str] = frozenset()
    """Accepted bearer keys; empty: no key is required."""
    open_to_all: bool = False
    """True to allow a non-loopback address without keys."""
    cors: tuple[str, ...] = ()
    """Origins whose pages may call the API."""
    hosts: tuple[str, ...] = ()
    """Further host names of a server without keys, such as the name of a reverse proxy."""
    tool_format: str = "auto"
    """Format of the model's tool calls, a name in FORMATS; "auto": by its chat template."""
    control_tokens: bool = False
    """True if a control token in a message is one, so that a message can open turns."""
    memory_shared: bool = False
    """True if requests of all keys draft from each other's texts."""
    share_prefixes: str = "key"
    """Requests that may reuse the keys and values of a common prefix: those of the same API "key", "all", or "none"."""
    pooling: str = "mean"
    """Hidden states that are the embedding of a request without `pooling`, a name in POOLINGS."""
    max_waiting: int = 128
    """Requests of one client that may wait for a row; further ones are answered with status 429."""
    max_body_bytes: int = 4 << 20
    max_prompts: int = 128
    """Limit on the outputs of one request: its prompts times its `n`."""
    max_n: int = 16
    max_stops: int = 32
    max_methods: int = 4
    """Sessions with different drafting methods that are kept open."""
    max_loaded: int = 1
    """Models of a server with several that are loaded at a time."""
    max_connections: int = 1024
    """Open connections; fewer if the process may open fewer files."""
    head_s: float = 15.0
    """Time limit for receiving a request's line and headers."""
    body_s: float = 60.0
    """Time limit for receiving a request's body."""
    unread_s: float = 120.0
    """Time after which a client that reads nothing of its response is disconnected (on Linux)."""
    timeout_s: float = 600.0
    """Time limit of one request."""
    prefill_wait_s: float = 0.3
    """Approximate time that running requests wait for the prefill of others between two tokens."""
    drain_s: float = 30.0
    """Time that open requests may take after a shutdown signal."""

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        for name in ("waiting", "body_bytes", "prompts", "n", "stops", "methods", "loaded", "connections"):
            check_int(f"max_{name}", getattr(self, f"max_{name}"), {"body_bytes": 1024, "stops": 0}.get(name, 1))
        check_choice("tool_format", self.tool_format, ("auto", *FORMATS))
        check_choice("share_prefixes", self.share_prefixes, SHARE_PREFIXES)
        check_choice("pooling", self.pooling, POOLINGS)
        if self.hosts and (self.keys or self.host not in LOOPBACK):
            raise ConfigError("host names are checked only on a loopback address without keys; drop --allow-host")
        for name in self.hosts:
            if not name or "/" in name or (":" in name and not name.startswith("[")):
                raise ConfigError(f"hosts: {name!r} is not a host name; omit scheme and port")
        check_float("drain_s", self.drain_s, 0.0, 1e6)
        for name in ("timeout_s", "prefill_wait_s", "head_s", "body_s", "unread_s"):
            check_float(name, getattr(self, name), 0.001, 1e6)
        if self.host not in LOOPBACK and not self.keys and not self.open_to_all:
            raise ConfigError(
                f"is reachable from other machines, and no API keys are set; "
                f"set {KEYS_VARIABLE} or --keys-file, or pass --open-to-all",
                param="host",
                value=self.host,
            )


def read_keys(path: Path | None) -> frozenset[str]:
    """Return the keys of the environment and of a file (one per line). Raises ConfigError for an unreadable or empty file."""
    found = {one.strip() for one in os.environ.get(KEYS_VARIABLE, "").split(",")}
    if path is not None:
        try:
            lines = {line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n")}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read keys from {str(path)!r}: {getattr(error, 'strerror', None) or error}"
            ) from None
        lines = {line for line in lines if not line.startswith("#")} - {""}
        if not lines:
            raise ConfigError(f"{str(path)!r} contains no keys")
        found |= lines
    return frozenset(found - {""})
