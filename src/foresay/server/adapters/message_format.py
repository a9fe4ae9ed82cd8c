"""Bodies, stream events and errors of Anthropic's Messages API.

Owns the formats. Knows no engine and no route.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from foresay.server.adapters.blocks import Block, BlockFormat, Kind
from foresay.server.errors import MESSAGES_ROUTE, ApiError
from foresay.server.events import Added, Reply
from foresay.server.formats import encode_event

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.TEXT: ("text_delta", "text"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


class MessagesFormat(BlockFormat):
    """One message."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._id = f"msg_{uuid4().hex[:24]}"

    def whole(self) -> dict[str, Any]:
        """See Format."""
        self.read_whole()
        return self._message([_block(one) for one in self.blocks], **self.statistics)

    def added(self, event: Added) -> Iterator[bytes]:
        """See Format."""
        if len(self.output.steps) == 1:
            message = self._message([]) | {"stop_reason": None, "stop_sequence": None}
            yield _event("message_start", message=message)
        yield from super().added(event)

    def ended(self) -> Iterator[bytes]:
        """See Format."""
        yield from self.last_block_ended()
        ended = self._message([])
        delta = {name: ended[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=delta, usage=ended["usage"])
        yield _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        """See Format."""
        return _event("error", error=error.body_at(MESSAGES_ROUTE)["error"])

    def block_begun(self, block: Block) -> Iterator[bytes]:
        """See BlockFormat."""
        yield _event("content_block_start", index=block.index, content_block=_block(block))

    def block_added(self, block: Block, text: str) -> Iterator[bytes]:
        """See BlockFormat."""
        kind, field = _DELTAS[block.kind]
        yield _event("content_block_delta", index=block.index, delta={"type": kind, field: text})

    def block_ended(self, block: Block) -> Iterator[bytes]:
        """See BlockFormat."""
        yield _event("content_block_stop", index=block.index)

    def _message(self, content: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        usage, stopped = self.reply.usage(), self.output.stop_string
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.reply.model,
            "content": content,
            "stop_reason": _REASONS[self.output.finish_reason] if stopped is None else "stop_sequence",
            "stop_sequence": stopped,
            **extra,
            "usage": {
                "input_tokens": usage.prompt - usage.cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.cached,
                "output_tokens": usage.generated,
            },
        }


def _event(kind: str, /, **values: Any) -> bytes:
    return encode_event({"type": kind, **values}, kind)


def _block(block: Block) -> dict[str, Any]:
    if block.kind is Kind.TEXT:
        return {"type": "text", "text": block.text}
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    identity = "toolu_" + block.call_id.removeprefix("call_")
    return {"type": "tool_use", "id": identity, "name": block.name, "input": block.arguments}
