"""Formats of responses: the typed events of a reply as the bodies and stream events of an API; here OpenAI's completions.

Owns the encoding of server-sent events. Knows no engine and no route.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import time
from typing import Any, ClassVar
from uuid import uuid4

from foresay.generation.result import Generation
from foresay.server.errors import ApiError
from foresay.server.events import Added, Reply
from foresay.server.logprobs import Entry, as_chat, as_completion
from foresay.text.tool_calls.calls import CallPiece


def encode_event(body: Mapping[str, Any] | str, name: str | None = None) -> bytes:
    """Encode a server-sent event. name: its type."""
    text = (
        body if isinstance(body, str) else json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    )
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode("utf-8", "replace")


class Format:
    """Format of one response. A stream is `begun`, `added` for each event, and `ended` or `failed`."""

    media_type: ClassVar[str] = "text/event-stream"

    def __init__(self, reply: Reply) -> None:
        self.reply, self.created = reply, int(time())

    def whole(self) -> dict[str, Any]:
        """Return the body of a whole response."""
        raise NotImplementedError

    def begun(self) -> Iterable[bytes]:
        """Return the events before the first step."""
        return ()

    def added(self, event: Added) -> Iterable[bytes]:
        """Return the events of what a step adds."""
        raise NotImplementedError

    def ended(self) -> Iterable[bytes]:
        """Return the events after the last step."""
        raise NotImplementedError

    def failed(self, error: ApiError) -> bytes:
        """Return the event of an error: the status has been sent."""
        return encode_event(error.body())


class CompletionFormat(Format):
    """Completions, whose events and whole responses have the same format."""

    prefix: ClassVar[str] = "cmpl"
    """Prefix of response ids."""
    names: ClassVar[tuple[str, str]] = ("text_completion", "text_completion")
    """Object names of a whole response and of a stream event."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._id = f"{self.prefix}-{uuid4().hex[:24]}"

    def whole(self) -> dict[str, Any]:
        """See Format."""
        outputs = [one.whole() for one in self.reply.best()]
        choices = [{**self._choice(self._answer(one), one), "index": i} for i, one in enumerate(outputs)]
        return self._body(self.names[0], choices, usage=self._usage())

    def begun(self) -> Iterator[bytes]:
        """See Format. A response that repeats its prompts begins with them."""
        request = self.reply.request
        for one in self.reply.outputs if request.echoes else ():
            yield from self.added(one.echoed(alone=request.only_prompt))

    def added(self, event: Added) -> Iterator[bytes]:
        """See Format."""
        for choice in self._choices(event):
            yield self._event(choice)

    def ended(self) -> Iterator[bytes]:
        """See Format."""
        if self.reply.request.with_usage:
            yield self._event()
        yield encode_event("[DONE]")

    def _answer(self, event: Added) -> dict[str, Any]:
        """Return the field of a whole response."""
        return {"text": event.message.content}

    def _choices(self, event: Added) -> Iterator[dict[str, Any]]:
        """Yield the choices of a step's stream events."""
        yield self._choice(self._answer(event), event)

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        return as_completion(entries)

    def _event(self, *choices: dict[str, Any]) -> bytes:
        request, extra = self.reply.request, dict[str, Any]()
        if request.with_usage:
            extra = {"usage": self._usage() if request.with_running_usage or not choices else None}
        return encode_event(self._body(self.names[1], choices, **extra))

    def _body(self, kind: str, choices: Sequence[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self.created,
            "model": self.reply.model,
            "system_fingerprint": self.reply.fingerprint,
            "choices": choices,
            **extra,
        }

    def _choice(self, content: dict[str, Any], event: Added) -> dict[str, Any]:
        extension, generation, stopped = dict[str, Any](), event.output.generation, {}
        if event.chunk is not None and self.reply.drafting.origins:
            step, origins = event.chunk.step, [[one.text, str(one.origin)] for one in event.chunk.pieces]
            extension = {"origins": origins, "tokens": len(step.token_ids), "drafted": step.num_drafted}
        if event.ended and generation is not None:
            stopped = {"stop_reason": generation.stop_string}
            extension |= statistics(generation) if self.reply.drafting.stats else {}
        return {
            "index": event.output.index,
            **content,
            "logprobs": None if event.entries is None else self._logprobs(event.entries),
            "finish_reason": event.output.finish_reason if event.ended else None,
            **stopped,
            **({"foresay": extension} if extension else {}),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.reply.usage()
        details = {"reasoning_tokens": usage.reasoning} if usage.reasoning else {}
        if self.reply.is_predicted:
            details["accepted_prediction_tokens"] = usage.accepted
            details["rejected_prediction_tokens"] = usage.drafted - usage.accepted
        return {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.generated,
            "total_tokens": usage.prompt + usage.generated,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
            **({"completion_tokens_details": details} if details else {}),
        }


class ChatFormat(CompletionFormat):
    """Chat completions. A stream of an output begins with an event of its role, and ends with one of its finish reason."""

    prefix, names = "chatcmpl", ("chat.completion", "chat.completion.chunk")

    def _answer(self, event: Added) -> dict[str, Any]:
        one = event.message
        content = None if one.calls and not one.content.strip() else one.content
        more = _given(tool_calls=[_call(call) for call in one.calls], reasoning_content=one.reasoning)
        return {"message": {"role": "assistant", "content": content, "refusal": None, **more}}

    def _choices(self, event: Added) -> Iterator[dict[str, Any]]:
        bare = replace(event, entries=None if event.entries is None else (), chunk=None)
        if len(event.output.steps) == 1:
            yield self._choice({"delta": {"role": "assistant", "content": ""}}, replace(bare, ended=False))
        if event.message or event.entries or self.reply.drafting.origins:
            one, calls = event.message, [{"index": call.index, **_call(call)} for call in event.message.calls]
            delta = _given(content=one.content, reasoning_content=one.reasoning, tool_calls=calls)
            yield self._choice({"delta": delta}, replace(event, ended=False))
        if event.ended:
            yield self._choice({"delta": {}}, bare)

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        return as_chat(entries)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _call(call: CallPiece) -> dict[str, Any]:
    """Return a call, or a piece of one: the first names the function."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.identity, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def statistics(generation: Generation) -> dict[str, Any]:
    """Return the drafting statistics of an output."""
    stats = generation.stats
    return {
        "passes": stats.num_passes,
        "drafted": stats.num_drafted,
        "accepted": stats.num_accepted,
        "tokens_per_pass": None if stats.block_efficiency is None else round(stats.block_efficiency, 4),
        "steps": [[step.num_drafted, step.num_accepted] for step in generation.steps],
        "seed": generation.seed,
        "exact": generation.exact,
        "draft_error": generation.draft_error,
    }
