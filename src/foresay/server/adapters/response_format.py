"""Bodies and stream events of OpenAI's Responses API.

Owns the formats. Knows no engine and no route.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

from foresay.server.adapters.blocks import Block, BlockFormat, Kind
from foresay.server.errors import ApiError
from foresay.server.events import Reply
from foresay.server.formats import encode_event

_PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}
_TEXTS = {
    Kind.REASONING: ("response.reasoning_text", "text"),
    Kind.TEXT: ("response.output_text", "text"),
    Kind.CALL: ("response.function_call_arguments", "arguments"),
}
"""Prefix of the events of a block's text, and the field of the whole text in the last of them."""


class ResponsesFormat(BlockFormat):
    """One response."""

    def __init__(self, reply: Reply, echoed: Mapping[str, Any]) -> None:
        """echoed: fields of the request that the response repeats."""
        super().__init__(reply)
        self._echoed, self._id = echoed, f"resp_{uuid4().hex[:24]}"
        self._count = 0
        self._is_cut = False

    def whole(self) -> dict[str, Any]:
        """See Format."""
        self.read_whole()
        return self._ended()

    def begun(self) -> Iterator[bytes]:
        """See Format."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def ended(self) -> Iterator[bytes]:
        """See Format."""
        self._is_cut = self.output.finish_reason == "length"
        yield from self.last_block_ended()
        ended = self._ended()
        yield self._event(f"response.{ended['status']}", response=ended)

    def failed(self, error: ApiError) -> bytes:
        """See Format."""
        body, self._is_cut = error.body()["error"], True
        cause = {"code": body["code"] or "server_error", "message": body["message"]}
        return self._event("response.failed", response=self._response("failed", error=cause))

    def block_begun(self, block: Block) -> Iterator[bytes]:
        """See BlockFormat."""
        item = _item(block, "in_progress")
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind is not Kind.CALL:
            yield self._event("response.content_part.added", **_where(block), part=_part(block))

    def block_added(self, block: Block, text: str) -> Iterator[bytes]:
        """See BlockFormat."""
        more = {"logprobs": list[Any]()} if block.kind is Kind.TEXT else {}
        yield self._event(f"{_TEXTS[block.kind][0]}.delta", **_where(block), delta=text, **more)

    def block_ended(self, block: Block) -> Iterator[bytes]:
        """See BlockFormat."""
        name, field = _TEXTS[block.kind]
        more: dict[str, Any] = {"name": block.name} if block.kind is Kind.CALL else {}
        more |= {"logprobs": block.logprobs} if block.kind is Kind.TEXT else {}
        yield self._event(f"{name}.done", **_where(block), **{field: block.text}, **more)
        if block.kind is not Kind.CALL:
            yield self._event("response.content_part.done", **_where(block), part=_part(block))
        yield self._event("response.output_item.done", output_index=block.index, item=self._item(block))

    def _event(self, kind: str, /, **values: Any) -> bytes:
        self._count += 1
        return encode_event({"type": kind, "sequence_number": self._count - 1, **values}, kind)

    def _item(self, block: Block) -> dict[str, Any]:
        """Return a complete block, or the last one of an output that was cut."""
        return _item(block, "incomplete" if self._is_cut and block is self.blocks[-1] else "completed")

    def _ended(self) -> dict[str, Any]:
        """Return the response after its end."""
        self._is_cut = self.output.finish_reason == "length"
        details = {"reason": "max_output_tokens"} if self._is_cut else None
        status, usage = "incomplete" if self._is_cut else "completed", self.reply.usage()
        counts = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.generated,
        }
        return self._response(status, incomplete_details=details, usage=counts, **self.statistics)

    def _response(self, status: str, **values: Any) -> dict[str, Any]:
        output = [self._item(block) for block in self.blocks] if status != "in_progress" else []
        return {
            "id": self._id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.reply.model,
            "output": output,
            "usage": None,
            **self._echoed,
            **values,
        }


def _identity(block: Block) -> str:
    return f"{_PREFIXES[block.kind]}_{block.identity}"


def _where(block: Block) -> dict[str, Any]:
    where = {"item_id": _identity(block), "output_index": block.index}
    return where if block.kind is Kind.CALL else {**where, "content_index": 0}


def _part(block: Block) -> dict[str, Any]:
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}


def _item(block: Block, status: str = "completed") -> dict[str, Any]:
    if block.kind is Kind.CALL:
        called = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return {"id": _identity(block), "type": "function_call", "status": status, **called}
    parts = [] if status == "in_progress" else [_part(block)]
    if block.kind is Kind.REASONING:
        return {"id": _identity(block), "type": "reasoning", "status": status, "summary": [], "content": parts}
    return {"id": _identity(block), "type": "message", "status": status, "role": "assistant", "content": parts}
