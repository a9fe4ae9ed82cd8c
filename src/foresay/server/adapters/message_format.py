"""Bodies, stream events and errors of Anthropic's Messages API, from those of chat completions.

Owns the formats. Knows no engine and no route.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from typing import Any
from uuid import uuid4

from foresay.server.adapters.blocks import Block, BlockReader, Change, Changes, Kind
from foresay.server.errors import messages_kind
from foresay.server.events import Bodies, encode_event

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.TEXT: ("text_delta", "text"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


class MessagesFormat:
    """One message."""

    def __init__(self, model: str) -> None:
        """model: the served name."""
        self._model, self._id = model, f"msg_{uuid4().hex[:24]}"
        self._reader = BlockReader()

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """See Format."""
        self._reader.take(body)
        self._reader.finish()
        return self._message([_block(one) for one in self._reader.blocks])

    async def events(self, bodies: Bodies) -> AsyncGenerator[bytes, None]:
        """See Format."""
        has_begun = False
        async with aclosing(bodies):
            async for body in bodies:
                if "error" in body:
                    yield _event("error", error={**body["error"], "type": messages_kind(body["status"])})
                    return
                changes = self._reader.take(body)
                if not has_begun:
                    begun = self._message([]) | {"stop_reason": None, "stop_sequence": None}
                    yield _event("message_start", message=begun)
                    has_begun = True
                for event in _changed(changes):
                    yield event
        for event in _changed(self._reader.finish()):
            yield event
        ended = self._message([])
        delta = {name: ended[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=delta, usage=ended["usage"])
        yield _event("message_stop")

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        stopped, usage = self._reader.stop_string, self._reader.usage
        reason = "stop_sequence" if stopped is not None else _REASONS.get(self._reader.finish_reason or "stop")
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stopped,
            **({} if self._reader.statistics is None else {"foresay": self._reader.statistics}),
            "usage": {
                "input_tokens": usage["prompt_tokens"] - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": usage["completion_tokens"],
            },
        }


def _event(kind: str, /, **values: Any) -> bytes:
    return encode_event({"type": kind, **values}, kind)


def _changed(changes: Changes) -> Iterator[bytes]:
    for change, block, added in changes:
        if change is Change.OPEN:
            yield _event("content_block_start", index=block.index, content_block=_block(block.empty()))
        elif change is Change.ADD:
            kind, field = _DELTAS[block.kind]
            yield _event("content_block_delta", index=block.index, delta={"type": kind, field: added})
        else:
            yield _event("content_block_stop", index=block.index)


def _block(block: Block) -> dict[str, Any]:
    if block.kind is Kind.TEXT:
        return {"type": "text", "text": block.text}
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    arguments: Any = {}
    with suppress(ValueError, RecursionError):
        found = json.loads(block.text or "{}")
        json.dumps(found, allow_nan=False)
        arguments = found
    identity = "toolu_" + block.call_id.removeprefix("call_")
    return {
        "type": "tool_use",
        "id": identity,
        "name": block.name,
        "input": arguments if isinstance(arguments, dict) else {},
    }
