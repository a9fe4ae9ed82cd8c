"""Consecutive blocks of one chat message: reasoning, text and tool calls, from the events of its output.

Owns the order of blocks and their accumulated text. Knows no API.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from uuid import uuid4

from foresay.server.events import Added, Reply
from foresay.server.formats import Format, statistics


class Kind(StrEnum):
    """Kind of a block."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


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
    """Log-probabilities of all tokens of the output; of the first text, at the end."""
    identity: str = field(default_factory=lambda: uuid4().hex[:24])

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of a call; those that are no JSON object, because they were cut off, are an empty one."""
        with suppress(ValueError, RecursionError):
            found = json.loads(self.text or "{}")
            json.dumps(found, allow_nan=False)
            return found if isinstance(found, dict) else {}
        return {}


class BlockFormat(Format):
    """Format of a reply with one output, whose message is a list of blocks."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        (self.output,) = reply.outputs
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._blank = ""
        """White space that is part of the message only if text follows, or if the message has nothing else."""

    def block_begun(self, block: Block) -> Iterator[bytes]:
        """Yield the events of a new block, which is empty."""
        raise NotImplementedError

    def block_added(self, block: Block, text: str) -> Iterator[bytes]:
        """Yield the events of a text that was added."""
        raise NotImplementedError

    def block_ended(self, block: Block) -> Iterator[bytes]:
        """Yield the events of a complete block."""
        raise NotImplementedError

    @property
    def statistics(self) -> dict[str, Any]:
        """Statistics of drafting as a field, if they were requested."""
        generation = self.output.generation if self.reply.drafting.stats else None
        return {} if generation is None else {"foresay": statistics(generation)}

    def read_whole(self) -> None:
        """Read the blocks of a whole message."""
        for events in (self.added(self.output.whole()), self.last_block_ended()):
            list(events)

    def added(self, event: Added) -> Iterator[bytes]:
        """See Format."""
        yield from self._add(Kind.REASONING, event.message.reasoning)
        yield from self._add_content(event.message.content)
        for call in event.message.calls:
            if call.name is not None:
                self._blank = ""
                yield from self._begin(Kind.CALL, call.name, call.identity)
            yield from self._add(Kind.CALL, call.arguments)

    def last_block_ended(self) -> Iterator[bytes]:
        """End the last block. A message without any has an empty text."""
        if all(one.kind is Kind.REASONING for one in self.blocks):
            yield from self._begin(Kind.TEXT)
            yield from self._add(Kind.TEXT, self._blank)
        for text in [one for one in self.blocks if one.kind is Kind.TEXT][:1]:
            text.logprobs = [one.plain() for one in self.output.entries]
        yield from self._end()

    def _add_content(self, text: str) -> Iterator[bytes]:
        if self._open is not None and self._open.kind is Kind.TEXT:
            yield from self._add(Kind.TEXT, text)
        elif text.strip():
            yield from self._add(Kind.TEXT, self._blank + text)
            self._blank = ""
        else:
            self._blank += text

    def _add(self, kind: Kind, text: str) -> Iterator[bytes]:
        if not text:
            return
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind)
        assert self._open is not None
        self._open.text += text
        yield from self.block_added(self._open, text)

    def _begin(self, kind: Kind, name: str = "", call_id: str = "") -> Iterator[bytes]:
        new = Block(kind, len(self.blocks), name, call_id)
        self.blocks.append(new)
        yield from self._end()
        self._open = new
        yield from self.block_begun(new)

    def _end(self) -> Iterator[bytes]:
        if self._open is not None:
            yield from self.block_ended(self._open)
            self._open = None
