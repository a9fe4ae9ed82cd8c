"""Schemas from strangers, compiled after a trial in another process, which limits time and memory and can be killed.

The library's own limits leave out what a few bytes can cost: `multipleOf` makes an automaton with a state for each remainder. A
schema that passes its trial is compiled here, where the same work is then known to be small. Owns the processes of the trials.
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

from foresay.child_process import ChildProcess
from foresay.errors import ConfigError, ForesayError
from foresay.text.grammar import JsonSchema, checked, tokenizer_json

PROCESSES = 2
"""Trials at a time: one schema that takes long keeps nobody waiting, two do so until their time is over."""
_COMMAND = [sys.executable, "-m", "foresay.text.grammar_process"]
_START_S = 60.0
_SPARE_S = 5.0
_POLL_S = 0.05
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """What compiling a schema and computing its first mask may take."""

    cpu_s: float = 2.0
    """Seconds of processor time, rounded up to whole ones."""
    wall_s: float = 10.0
    memory_bytes: int = 64 << 20
    """Beyond what a process with the tokenizer has."""


class SchemaCompiler:
    """Compiles schemas for one model's outputs. `compile` may be called on PROCESSES threads at a time."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Sequence[int], limits: TrialLimits | None = None) -> None:
        """See JsonSchema. Nothing is started before the first schema."""
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos)
        self._limits = TrialLimits() if limits is None else limits
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._idle: list[ChildProcess] = []
        self._good: OrderedDict[bytes, None] = OrderedDict()
        """Digests of schemas that passed, the one used last at the end."""

    def compile(self, schema: Mapping[str, Any], cancelled: threading.Event | None = None) -> JsonSchema:
        """A schema, compiled here once it has passed its trial. cancelled: ends the trial when set.

        Raises ConfigError for a schema that is refused (see JsonSchema) or meets a limit, ForesayError when it was cancelled.
        """
        text = checked(schema)
        key = sha256(text.encode()).digest()
        if not self._passed(key):
            self._try(text, cancelled or threading.Event())
            self._remember(key)
        return JsonSchema(schema, self._tokenizer, self._vocab_size, self._eos)

    def close(self) -> None:
        """Cancel the trials under way and end the processes; no schema is tried any more."""
        self._closed.set()
        with self._lock:
            ended, self._idle = self._idle, []
        for child in ended:
            child.end("it was closed")

    def _passed(self, key: bytes) -> bool:
        with self._lock:
            if key in self._good:
                self._good.move_to_end(key)
            return key in self._good

    def _remember(self, key: bytes) -> None:
        with self._lock:
            self._good[key] = None
            if len(self._good) > _REMEMBERED:
                self._good.popitem(last=False)

    def _try(self, text: str, cancelled: threading.Event) -> None:
        if self._closed.is_set():
            raise ForesayError("the schema was not compiled: the compiler is closed")
        with self._lock:
            child = self._idle.pop() if self._idle else None
        child = child or self._started(cancelled)
        limits = self._limits
        job = {"schema": text, "cpu_s": limits.cpu_s, "wall_s": limits.wall_s, "memory_bytes": limits.memory_bytes}
        answer = self._answer(child, job, limits.wall_s + _SPARE_S, cancelled)
        with self._lock:
            if not self._closed.is_set():
                self._idle.append(child)
        if self._closed.is_set():
            child.end("it was closed")
        if "refused" in answer:
            raise ConfigError(str(answer["refused"]))

    def _started(self, cancelled: threading.Event) -> ChildProcess:
        """A process with the tokenizer ready."""
        setup = {"tokenizer": tokenizer_json(self._tokenizer), "vocab_size": self._vocab_size, "eos": self._eos}
        child = ChildProcess("schemas", _COMMAND, os.environ)
        answer = self._answer(child, setup, _START_S, cancelled)
        if not answer.get("ok"):
            child.end("it refused the tokenizer")
            raise ConfigError(str(answer.get("error")))
        return child

    def _answer(
        self, child: ChildProcess, message: Mapping[str, Any], limit_s: float, cancelled: threading.Event
    ) -> dict[str, Any]:
        """Send a message and wait for its answer. The child is ended when there is none in time, or nobody waits for it."""
        until = monotonic() + limit_s
        child.send(message)
        while not (answers := child.read()):
            if cancelled.is_set() or self._closed.is_set():
                child.end("nobody waits for its answer")
                raise ForesayError("the schema was not compiled: its request was cancelled")
            if monotonic() > until:
                child.end("it did not answer in time")
                raise ForesayError(f"the schema was not compiled: no answer within {limit_s:g} s")
            child.wait_ready(_POLL_S)
        return dict(answers[0])
