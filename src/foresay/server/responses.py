"""Responses in OpenAI's format: whole bodies, stream events, usage, and foresay's statistics.

Owns the formats and the state of one growing output. Knows no engine and no route.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import time
from typing import Any, Protocol
from uuid import uuid4

from foresay.decoding.outcome import FinishReason, Step
from foresay.generation.result import Chunk, Generation
from foresay.server.logprobs import Entry, Logprobs, as_chat, as_completion
from foresay.server.requests import Drafting

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "stop"}


class Shape(Protocol):
    """Format of an output in one API."""

    prefix: str
    """Prefix of response ids."""
    whole: str
    """Object name of a whole response."""
    event: str
    """Object name of a stream event."""

    def piece(self, text: str, *, first: bool) -> dict[str, Any]:
        """Return the text's field of an event. first: True for the output's first event."""
        ...

    def answer(self, text: str) -> dict[str, Any]:
        """Return the text's field of a whole response."""
        ...

    def logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Return the log-probabilities' field."""
        ...


class ChatShape:
    """Chat completions."""

    prefix, whole, event = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def piece(self, text: str, *, first: bool) -> dict[str, Any]:
        """See Shape."""
        return {"delta": ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})}

    def answer(self, text: str) -> dict[str, Any]:
        """See Shape."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """See Shape."""
        return as_chat(entries)


class CompletionShape:
    """Completions, whose events and whole responses have the same format."""

    prefix, whole, event = "cmpl", "text_completion", "text_completion"

    def piece(self, text: str, *, first: bool) -> dict[str, Any]:
        """See Shape."""
        return {"text": text}

    def answer(self, text: str) -> dict[str, Any]:
        """See Shape."""
        return {"text": text}

    def logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """See Shape."""
        return as_completion(entries)


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt that a response repeats: its text, and its tokens' log-probabilities if requested."""

    text: str = ""
    entries: Sequence[Entry] = ()


class Output:
    """One growing choice."""

    def __init__(
        self, index: int, shape: Shape, options: Drafting, logprobs: Logprobs | None, echo: Echo | None = None
    ) -> None:
        """options: statistics to report. logprobs: collector of log-probabilities, if requested. echo: the repeated prompt."""
        self._index, self._shape, self._options, self._logprobs = index, shape, options, logprobs
        self._echo = echo or Echo()
        self._entries: list[Entry] = list(self._echo.entries)
        self.num_tokens = 0
        """Tokens generated so far."""
        self.steps: list[Step] = []
        self.generation: Generation | None = None

    def echoed(self, *, alone: bool) -> dict[str, Any]:
        """Return the prompt as a choice of the first stream event. alone: True if no token is generated after it."""
        ended = FinishReason.LENGTH if alone else None
        return self._choice(self._shape.piece(self._echo.text, first=True), self._echo.entries, ended, {})

    def take(self, chunk: Chunk) -> dict[str, Any]:
        """Add a step's chunk, and return it as a choice of an event."""
        first = not self.steps
        self.steps.append(chunk.step)
        self.generation = chunk.generation
        self.num_tokens += len(chunk.step.token_ids)
        new = []
        if self._logprobs is not None:
            own = self._logprobs.take(chunk.step, chunk.text, ended=chunk.finish_reason is not None)
            new = [replace(one, start=len(self._echo.text) + one.start) for one in own]
            self._entries += new
        extension: dict[str, Any] = {}
        if self._options.origins:
            extension = {
                "origins": [[one.text, str(one.origin)] for one in chunk.pieces],
                "tokens": len(chunk.step.token_ids),
                "drafted": chunk.step.num_drafted,
            }
        return self._choice(self._shape.piece(chunk.text, first=first), new, chunk.finish_reason, extension)

    def whole(self) -> dict[str, Any]:
        """Return the output as a choice of a whole response. Without a generation it contains the prompt alone."""
        done = self.generation
        text, ended = (done.text, done.finish_reason) if done is not None else ("", FinishReason.LENGTH)
        return self._choice(self._shape.answer(self._echo.text + text), self._entries, ended, {})

    def _choice(
        self, content: dict[str, Any], entries: Sequence[Entry], ended: FinishReason | None, extension: dict[str, Any]
    ) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._shape.logprobs(entries)
        reason = None if ended is None else _REASONS[ended]
        if self._options.stats and self.generation is not None:
            extension = extension | statistics(self.generation)
        extra = {"foresay": extension} if extension else {}
        return {"index": self._index, **content, "logprobs": logprobs, "finish_reason": reason, **extra}


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


@dataclass(frozen=True, slots=True)
class ResponseFields:
    """Fields shared by all events of one response."""

    id: str
    created: int
    model: str
    fingerprint: str

    @staticmethod
    def new(prefix: str, model: str, fingerprint: str) -> ResponseFields:
        """Return the fields of a response that starts now."""
        return ResponseFields(f"{prefix}-{uuid4().hex[:24]}", int(time()), model, fingerprint)

    def body(self, kind: str, choices: Sequence[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        """Return the body of an event or of a whole response."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": list(choices),
            **extra,
        }


def usage(prompts: Sequence[int], outputs: Sequence[Output]) -> dict[str, Any]:
    """Return the usage: prompt tokens, generated tokens, and prompt tokens read from cached slots.

    prompts: token count of each prompt, counted once for all its outputs. Output i * n + j is the j-th output of prompt i.
    """
    n = len(outputs) // len(prompts)
    generated = sum(one.num_tokens for one in outputs)
    cached_per_output = [one.steps[0].num_cached if one.steps else 0 for one in outputs]
    cached = sum(min(cached_per_output[i * n : (i + 1) * n]) for i in range(len(prompts)))
    return {
        "prompt_tokens": sum(prompts),
        "completion_tokens": generated,
        "total_tokens": sum(prompts) + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def encode_event(body: dict[str, Any] | str) -> bytes:
    """Encode a server-sent event."""
    text = (
        body if isinstance(body, str) else json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    )
    return f"data: {text}\n\n".encode("utf-8", "replace")
