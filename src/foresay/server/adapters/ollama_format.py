"""Bodies and stream lines of Ollama's API.

Owns the formats. Knows no engine and no route.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from time import perf_counter
from typing import Any, ClassVar

import torch

from foresay.server.adapters.blocks import Block, BlockFormat, Kind
from foresay.server.errors import OLLAMA_ROUTES, ApiError
from foresay.server.events import Added, Reply

_NAMES = {Kind.REASONING: "thinking", Kind.TEXT: "content"}


def now() -> str:
    """Return the time as RFC 3339 has it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def loaded(model: str, *, is_chat: bool) -> dict[str, Any]:
    """Return the body of a request to load the model. is_chat: True for that of /api/chat."""
    return {"model": model, "created_at": now(), **_answer({}, is_chat=is_chat), "done": True, "done_reason": "load"}


def embedded(model: str, began: float, vectors: Sequence[torch.Tensor], tokens: int) -> dict[str, Any]:
    """Return the body of /api/embed. model, began: see OllamaFormat. tokens: those of all texts."""
    return {
        "model": model,
        "embeddings": [one.tolist() for one in vectors],
        "total_duration": int((perf_counter() - began) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": tokens,
    }


class OllamaFormat(BlockFormat):
    """One response. A call is one line, since its arguments are an object."""

    media_type: ClassVar[str] = "application/x-ndjson"

    def __init__(self, reply: Reply, model: str, began: float, *, is_chat: bool) -> None:
        """model: the name in the request. began: time of the request by `perf_counter`. is_chat: see `loaded`."""
        super().__init__(reply)
        self._model, self._began, self._is_chat = model, began, is_chat
        self._logprobs: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose text was not yet sent."""

    def whole(self) -> dict[str, Any]:
        """See Format."""
        self.read_whole()
        texts = {name: "".join(one.text for one in self.blocks if one.kind is kind) for kind, name in _NAMES.items()}
        calls = [one for one in self.blocks if one.kind is Kind.CALL]
        self._logprobs = [one.plain() for one in self.output.entries]
        return self._body({**texts, "tool_calls": [_call(one, i) for i, one in enumerate(calls)]}, **self._last())

    def added(self, event: Added) -> Iterator[bytes]:
        """See Format."""
        self._logprobs += [one.plain() for one in event.entries or ()]
        yield from super().added(event)

    def ended(self) -> Iterator[bytes]:
        """See Format."""
        yield from self.last_block_ended()
        yield _line(self._body({}, **self._last()))

    def failed(self, error: ApiError) -> bytes:
        """See Format."""
        return _line(error.body_at(OLLAMA_ROUTES))

    def block_begun(self, block: Block) -> Iterator[bytes]:
        """See BlockFormat."""
        yield from ()

    def block_added(self, block: Block, text: str) -> Iterator[bytes]:
        """See BlockFormat."""
        if block.kind is not Kind.CALL:
            yield _line(self._body({_NAMES[block.kind]: text}, done=False))

    def block_ended(self, block: Block) -> Iterator[bytes]:
        """See BlockFormat."""
        if block.kind is Kind.CALL:
            calls = [one for one in self.blocks if one.kind is Kind.CALL]
            yield _line(self._body({"tool_calls": [_call(block, calls.index(block))]}, done=False))

    def _body(self, message: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        logprobs, self._logprobs = self._logprobs, []
        return {
            "model": self._model,
            "created_at": now(),
            **_answer(message, is_chat=self._is_chat),
            **({"logprobs": logprobs} if logprobs else {}),
            **more,
        }

    def _last(self) -> dict[str, Any]:
        """Return the fields of a complete response, with durations in nanoseconds.

        The first pass, whose time is known, belongs to the output; the time before it is the prompt's, waiting included.
        """
        usage, end = self.reply.usage(), perf_counter()
        first = self.output.first_at - self.output.steps[0].total_s
        durations = {
            "total_duration": end - self._began,
            "load_duration": 0.0,
            "prompt_eval_duration": max(0.0, first - self._began),
            "eval_duration": end - max(first, self._began),
        }
        return {
            "done": True,
            "done_reason": "length" if self.output.finish_reason == "length" else "stop",
            **{name: int(seconds * 1e9) for name, seconds in durations.items()},
            "prompt_eval_count": usage.prompt,
            "eval_count": usage.generated,
            **self.statistics,
        }


def _line(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"{text}\n".encode("utf-8", "replace")


def _answer(message: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    """Return the field of a message, or those of a response without one."""
    given = {name: value for name, value in message.items() if value}
    text = given.pop("content", "")
    return {"message": {"role": "assistant", "content": text, **given}} if is_chat else {"response": text, **given}


def _call(block: Block, index: int) -> dict[str, Any]:
    return {"id": block.call_id, "function": {"index": index, "name": block.name, "arguments": block.arguments}}
