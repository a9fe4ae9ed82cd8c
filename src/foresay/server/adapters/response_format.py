"""Bodies and stream events of OpenAI's Responses API, from those of chat completions.

Owns the formats. Knows no engine and no route.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from time import time
from typing import Any
from uuid import uuid4

from foresay.server.adapters.blocks import Block, BlockReader, Change, Changes, Kind
from foresay.server.events import Bodies, encode_event

_PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}
_TEXTS = {
    Kind.REASONING: ("response.reasoning_text", "text"),
    Kind.TEXT: ("response.output_text", "text"),
    Kind.CALL: ("response.function_call_arguments", "arguments"),
}
"""Prefix of the events of a block's text, and the field of the whole text in the last of them."""


class ResponsesFormat:
    """One response."""

    def __init__(self, echoed: Mapping[str, Any], model: str) -> None:
        """echoed: fields of the request that the response repeats. model: the served name."""
        self._echoed, self._model = echoed, model
        self._id, self._created = f"resp_{uuid4().hex[:24]}", int(time())
        self._reader = BlockReader()
        self._count = 0
        self._is_cut = False

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """See Format."""
        self._reader.take(body)
        self._reader.finish()
        return self._ended()

    async def events(self, bodies: Bodies) -> AsyncGenerator[bytes, None]:
        """See Format."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response("in_progress"))
        async with aclosing(bodies):
            async for body in bodies:
                if "error" in body:
                    failed = {"code": body["error"]["code"] or "server_error", "message": body["error"]["message"]}
                    self._is_cut = True
                    yield self._event("response.failed", response=self._response("failed", error=failed))
                    return
                for event in self._changed(self._reader.take(body)):
                    yield event
        for event in self._changed(self._reader.finish()):
            yield event
        ended = self._ended()
        yield self._event(f"response.{ended['status']}", response=ended)

    def _event(self, kind: str, /, **values: Any) -> bytes:
        self._count += 1
        return encode_event({"type": kind, "sequence_number": self._count - 1, **values}, kind)

    def _changed(self, changes: Changes) -> Iterator[bytes]:
        for change, block, added in changes:
            where = {"item_id": _identity(block), "output_index": block.index}
            inner = where if block.kind is Kind.CALL else {**where, "content_index": 0}
            name, field = _TEXTS[block.kind]
            if change is Change.OPEN:
                yield self._event("response.output_item.added", output_index=block.index, item=_opened(block))
                if block.kind is not Kind.CALL:
                    yield self._event("response.content_part.added", **inner, part=_part(block.empty()))
            elif change is Change.ADD:
                more: dict[str, Any] = {"logprobs": []} if block.kind is Kind.TEXT else {}
                yield self._event(f"{name}.delta", **inner, delta=added, **more)
            else:
                more = {"name": block.name} if block.kind is Kind.CALL else {}
                more |= {"logprobs": block.logprobs} if block.kind is Kind.TEXT else {}
                yield self._event(f"{name}.done", **inner, **{field: block.text}, **more)
                if block.kind is not Kind.CALL:
                    yield self._event("response.content_part.done", **inner, part=_part(block))
                yield self._event("response.output_item.done", output_index=block.index, item=self._item(block))

    def _item(self, block: Block) -> dict[str, Any]:
        """Return a complete block, or the last one of an output that was cut."""
        is_cut = self._is_cut or self._reader.finish_reason == "length"
        return _item(block, "incomplete" if is_cut and block is self._reader.blocks[-1] else "completed")

    def _ended(self) -> dict[str, Any]:
        """Return the response after its end."""
        cut = self._reader.finish_reason == "length"
        details = {"reason": "max_output_tokens"} if cut else None
        return self._response("incomplete" if cut else "completed", incomplete_details=details, usage=self._usage())

    def _response(self, status: str, **values: Any) -> dict[str, Any]:
        output = [self._item(block) for block in self._reader.blocks] if status != "in_progress" else []
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": output,
            "usage": None,
            **self._echoed,
            **({} if self._reader.statistics is None else {"foresay": self._reader.statistics}),
            **values,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._reader.usage
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
            },
            "total_tokens": usage["total_tokens"],
        }


def _identity(block: Block) -> str:
    return f"{_PREFIXES[block.kind]}_{block.identity}"


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


def _opened(block: Block) -> dict[str, Any]:
    return _item(block.empty(), "in_progress")
