"""Consecutive blocks of one chat message: reasoning, text and tool calls, from its whole body or from the events of a stream.

Owns the order of blocks and their accumulated text. Knows no API but chat completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any
from uuid import uuid4


class Kind(StrEnum):
    """Kind of a block."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class Change(StrEnum):
    """A change of a block."""

    OPEN = "open"
    ADD = "add"
    CLOSE = "close"


@dataclass(slots=True)
class Block:
    """One block."""

    kind: Kind
    index: int
    """Index in the message."""
    name: str = ""
    """Name of the called function."""
    call_id: str = ""
    text: str = ""
    """Reasoning, text, or the arguments of a call."""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Log-probabilities of all tokens of the output, as chat completions report them; of the first text, at the end."""
    identity: str = field(default_factory=lambda: uuid4().hex[:24])

    def empty(self) -> Block:
        """Return the block before its first text."""
        return replace(self, text="", logprobs=[])


Changes = list[tuple[Change, Block, str]]
"""Changes in their order: (change, block, added text)."""


class BlockReader:
    """Reads the blocks of one growing message."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.usage: dict[str, Any] = {}
        """The latest usage."""
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        """Stop string that ended the message."""
        self.statistics: dict[str, Any] | None = None
        """Statistics of drafting, if they were requested."""
        self._logprobs: list[dict[str, Any]] = []
        self._open: Block | None = None
        self._blank = ""
        """White space that is part of the message only if text follows, or if the message has nothing else."""

    def take(self, body: Mapping[str, Any]) -> Changes:
        """Add the body of a response or of a stream's event."""
        self.usage = body.get("usage") or self.usage
        out: Changes = []
        for choice in body.get("choices", ()):
            piece = choice.get("delta") or choice.get("message") or {}
            self._add(Kind.REASONING, piece.get("reasoning_content") or "", out)
            self._add_content(piece.get("content") or "", out)
            for i, call in enumerate(piece.get("tool_calls") or ()):
                self._add_call(call, call.get("index", i), out)
            self._logprobs += (choice.get("logprobs") or {}).get("content") or ()
            self.statistics = choice.get("foresay") or self.statistics
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.stop_string = choice.get("stop_reason") or self.stop_string
        return out

    def finish(self) -> Changes:
        """Close the last block. A message without any has an empty text."""
        out: Changes = []
        if not any(one.kind is not Kind.REASONING for one in self.blocks):
            self._start(Kind.TEXT, out)
            self._add(Kind.TEXT, self._blank, out)
        text = next((one for one in self.blocks if one.kind is Kind.TEXT), None)
        if text is not None:
            text.logprobs = self._logprobs
        self._close(out)
        return out

    def _add_content(self, text: str, out: Changes) -> None:
        if self._open is not None and self._open.kind is Kind.TEXT:
            self._add(Kind.TEXT, text, out)
        elif text.strip():
            self._add(Kind.TEXT, self._blank + text, out)
            self._blank = ""
        else:
            self._blank += text

    def _add_call(self, call: Mapping[str, Any], index: int, out: Changes) -> None:
        calls = sum(one.kind is Kind.CALL for one in self.blocks)
        if index >= calls:
            self._blank = ""
            self._start(Kind.CALL, out, name=call["function"]["name"], call_id=call["id"])
        self._add(Kind.CALL, call["function"].get("arguments") or "", out)

    def _add(self, kind: Kind, text: str, out: Changes) -> None:
        if not text:
            return
        if self._open is None or self._open.kind is not kind:
            self._start(kind, out)
        assert self._open is not None
        self._open.text += text
        out.append((Change.ADD, self._open, text))

    def _start(self, kind: Kind, out: Changes, *, name: str = "", call_id: str = "") -> None:
        self._close(out)
        self._open = Block(kind, len(self.blocks), name, call_id)
        self.blocks.append(self._open)
        out.append((Change.OPEN, self._open, ""))

    def _close(self, out: Changes) -> None:
        if self._open is not None:
            out.append((Change.CLOSE, self._open, ""))
            self._open = None
