"""Clients' constraints, read and compiled after a trial in another process, which limits time and memory and can be killed.

The library's own limits do not cover the cost of a short schema: `multipleOf` makes an automaton with one state per remainder. A
schema that passes its trial is compiled here, because the cost is then known to be small. Owns the processes of the trials.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from time import monotonic
from typing import Any

from foresay.errors import ConfigError, ForesayError
from foresay.text.client_grammars import Written
from foresay.text.grammar import Grammar, Source, checked, tokenizer_json

PROCESSES = 2
"""Concurrent trials: one slow schema delays no other, two slow ones delay others until their time limit."""
_COMMAND = [sys.executable, "-m", "foresay.text.grammar_process"]
_GRACE_S = 5.0
_POLL_S = 0.05
START_S, CACHE_SIZE = 60.0, 4096
"""Seconds in which a process must have loaded the tokenizer; schemas whose trials are remembered."""


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """Limits for reading a constraint, and for compiling a schema and computing its first mask."""

    cpu_s: float = 2.0
    """Processor time, rounded up to whole seconds."""
    wall_s: float = 10.0
    memory_bytes: int = 64 << 20
    """Memory in addition to that of a process with the tokenizer loaded."""


class SchemaCompiler:
    """Compiler of schemas for one model's outputs. At most PROCESSES threads may call it at a time."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Sequence[int], limits: TrialLimits | None = None) -> None:
        """See Grammar for the arguments. Processes start with the first schema."""
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos)
        self._limits = TrialLimits() if limits is None else limits
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._known_good: dict[bytes, None] = {}
        """Digests of schemas that passed, of each owner, who would else see which ones others use; in order of last use."""

    def compile(
        self,
        source: Source,
        cancelled: threading.Event | None = None,
        owner: str = "",
        parts: Mapping[str, Any] | None = None,
    ) -> Grammar:
        """Compile a schema or grammar in this process once it has passed its trial. cancelled: ends the trial when set.

        parts: schemas of functions by name, of which the grammar is made; a refusal names the one that is refused alone.
        Raises ConfigError for a schema that is refused (see Grammar) or reaches a limit, ForesayError when cancelled.
        """
        text = checked(source)
        key = sha256(f"{len(owner)} {owner}{text}".encode()).digest()
        if key not in self._known_good:
            self._try({"schema": text, "is_lark": isinstance(source, str), "parts": parts or {}}, cancelled)
        with self._lock:
            self._known_good.pop(key, None)
            self._known_good[key] = None
            if len(self._known_good) > CACHE_SIZE:
                del self._known_good[next(iter(self._known_good))]
        return Grammar(source, self._tokenizer, self._vocab_size, self._eos)

    def read(self, written: Written, cancelled: threading.Event | None = None) -> Source:
        """Return the schema or grammar of a constraint, which is read in the other process alone. Raises as `compile`."""
        source: Source = self._try({"written": written}, cancelled)["source"]
        return source

    def close(self) -> None:
        """Cancel running trials and end the processes; later schemas are refused."""
        self._closed.set()
        with self._lock:
            while self._idle:
                _end(self._idle.pop())

    def _try(self, job: Mapping[str, Any], cancelled: threading.Event | None) -> dict[str, Any]:
        """Return the reply to a job of `grammar_process`. Raises ConfigError for one that is refused."""
        cancelled = cancelled or threading.Event()
        if self._closed.is_set():
            raise ForesayError("the schema was not compiled: the compiler is closed")
        with self._lock:
            child = self._idle.pop() if self._idle else None
        child = child or self._start_process(cancelled)
        limits = self._limits
        reply = self._request(child, {**job, **asdict(limits)}, limits.wall_s + _GRACE_S, cancelled)
        with self._lock:
            if self._closed.is_set():
                _end(child)
            else:
                self._idle.append(child)
        _raise(reply.get("refused"))
        return reply

    def _start_process(self, cancelled: threading.Event) -> subprocess.Popen[bytes]:
        """Start a process and load the tokenizer in it."""
        setup = {"tokenizer": tokenizer_json(self._tokenizer), "vocab_size": self._vocab_size, "eos": self._eos}
        # a session of its own: it is ended with its forks, and Ctrl-C reaches only this process
        child = subprocess.Popen(
            _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)  # a process that reads nothing blocks no request
        reply = self._request(child, setup, START_S, cancelled)
        if "error" in reply:
            _end(child)
            _raise(reply["error"])
        return child

    def _request(
        self, child: subprocess.Popen[bytes], message: Mapping[str, Any], limit_s: float, cancelled: threading.Event
    ) -> dict[str, Any]:
        """Send a message and wait for the reply. Ends the child if none comes in time or the request is cancelled."""
        assert child.stdin is not None and child.stdout is not None
        deadline, reason, reply = monotonic() + limit_s, "", b""
        unsent = memoryview(json.dumps(message).encode() + b"\n")
        with selectors.DefaultSelector() as pipes:
            pipes.register(child.stdout, selectors.EVENT_READ)
            pipes.register(child.stdin, selectors.EVENT_WRITE)
            while not reason and not reply.endswith(b"\n"):
                ready = [key.fileobj for key, _ in pipes.select(_POLL_S)]
                if child.stdout in ready:
                    if not (part := os.read(child.stdout.fileno(), 1 << 16)):
                        break
                    reply += part
                if child.stdin in ready:
                    with suppress(OSError):  # it has ended, which the reply shows
                        unsent = unsent[child.stdin.write(unsent) or 0 :]
                    if not unsent:
                        pipes.unregister(child.stdin)
                if cancelled.is_set() or self._closed.is_set():
                    reason = "its request was cancelled"
                elif monotonic() > deadline:
                    reason = f"no reply within {limit_s:g} s"
        if reply.endswith(b"\n"):
            return dict(json.loads(reply))
        code = _end(child)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise ForesayError(f"the schema was not compiled: {reason or f'the process that tries schemas {how}'}")


def _raise(message: str | None) -> None:
    """Raise the ConfigError of a process, whose message begins with its parameter."""
    if message is not None:
        param, _, problem = message.partition(" ")
        raise ConfigError(problem, param=param)


def _end(child: subprocess.Popen[bytes]) -> int:
    """End a process with its forks; return its exit code. It is reaped last, so that its group's id is not reused."""
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses for a group of zombies
        os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    return child.wait()
