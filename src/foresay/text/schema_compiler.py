"""Compilation of untrusted schemas after a trial in another process, which limits time and memory and can be killed.

The library's own limits do not cover the cost of a short schema: `multipleOf` makes an automaton with one state per remainder. A
schema that passes its trial is compiled here, because the cost is then known to be small. Owns the processes of the trials.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from time import monotonic
from typing import Any

from foresay.errors import ConfigError, ForesayError
from foresay.text.child_process import ChildProcess
from foresay.text.grammar import Grammar, Source, checked, tokenizer_json

PROCESSES = 2
"""Concurrent trials: one slow schema delays no other, two slow ones delay others until their time limit."""
_COMMAND = [sys.executable, "-m", "foresay.text.grammar_process"]
_START_S = 60.0
_GRACE_S = 5.0
_POLL_S = 0.05
_CACHE_SIZE = 4096


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """Limits for compiling a schema and computing its first mask."""

    cpu_s: float = 2.0
    """Processor time, rounded up to whole seconds."""
    wall_s: float = 10.0
    memory_bytes: int = 64 << 20
    """Memory in addition to that of a process with the tokenizer loaded."""


class SchemaCompiler:
    """Compiler of schemas for one model's outputs. At most PROCESSES threads may call `compile` at a time."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Sequence[int], limits: TrialLimits | None = None) -> None:
        """See Grammar for the arguments. Processes start with the first schema."""
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos)
        self._limits = TrialLimits() if limits is None else limits
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._idle: list[ChildProcess] = []
        self._known_good: OrderedDict[bytes, None] = OrderedDict()
        """Digests of schemas that passed, in order of last use."""

    def compile(self, source: Source, cancelled: threading.Event | None = None) -> Grammar:
        """Compile a schema or grammar in this process once it has passed its trial. cancelled: ends the trial when set.

        Raises ConfigError for a schema that is refused (see Grammar) or reaches a limit, ForesayError when cancelled.
        """
        text = checked(source)
        key = sha256(text.encode()).digest()
        if not self._passed(key):
            self._try(text, isinstance(source, str), cancelled or threading.Event())
            self._remember(key)
        return Grammar(source, self._tokenizer, self._vocab_size, self._eos)

    def close(self) -> None:
        """Cancel running trials and end the processes; later schemas are refused."""
        self._closed.set()
        with self._lock:
            ended, self._idle = self._idle, []
        for child in ended:
            child.end("it was closed")

    def _passed(self, key: bytes) -> bool:
        with self._lock:
            if key in self._known_good:
                self._known_good.move_to_end(key)
            return key in self._known_good

    def _remember(self, key: bytes) -> None:
        with self._lock:
            self._known_good[key] = None
            if len(self._known_good) > _CACHE_SIZE:
                self._known_good.popitem(last=False)

    def _try(self, text: str, is_lark: bool, cancelled: threading.Event) -> None:
        if self._closed.is_set():
            raise ForesayError("the schema was not compiled: the compiler is closed")
        with self._lock:
            child = self._idle.pop() if self._idle else None
        child = child or self._start_process(cancelled)
        limits = self._limits
        job = {
            "schema": text,
            "is_lark": is_lark,
            "cpu_s": limits.cpu_s,
            "wall_s": limits.wall_s,
            "memory_bytes": limits.memory_bytes,
        }
        reply = self._request(child, job, limits.wall_s + _GRACE_S, cancelled)
        with self._lock:
            if not self._closed.is_set():
                self._idle.append(child)
        if self._closed.is_set():
            child.end("it was closed")
        if "refused" in reply:
            raise ConfigError(str(reply["refused"]))

    def _start_process(self, cancelled: threading.Event) -> ChildProcess:
        """Start a process and load the tokenizer in it."""
        setup = {"tokenizer": tokenizer_json(self._tokenizer), "vocab_size": self._vocab_size, "eos": self._eos}
        child = ChildProcess("schemas", _COMMAND, os.environ)
        reply = self._request(child, setup, _START_S, cancelled)
        if not reply.get("ok"):
            child.end("it refused the tokenizer")
            raise ConfigError(str(reply.get("error")))
        return child

    def _request(
        self, child: ChildProcess, message: Mapping[str, Any], limit_s: float, cancelled: threading.Event
    ) -> dict[str, Any]:
        """Send a message and wait for the reply. End the child if no reply comes in time or the request is cancelled."""
        deadline = monotonic() + limit_s
        child.send(message)
        while not (replies := child.read()):
            if cancelled.is_set() or self._closed.is_set():
                child.end("its request was cancelled")
                raise ForesayError("the schema was not compiled: its request was cancelled")
            if monotonic() > deadline:
                child.end("it did not reply in time")
                raise ForesayError(f"the schema was not compiled: no reply within {limit_s:g} s")
            child.wait_ready(_POLL_S)
        return dict(replies[0])
