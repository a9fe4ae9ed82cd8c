"""Answers in OpenAI's words: whole ones, a stream's events, usage, and our own statistics.

Owns the shapes, and one output as it grows. Knows no engine and no route.
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
    """How one API tells an output."""

    prefix: str
    """Of ids."""
    whole: str
    """What it calls a whole answer."""
    event: str
    """What it calls a piece of one."""

    def piece(self, text: str, *, first: bool) -> dict[str, Any]:
        """What an event has of an output. first: whether it is the output's first."""
        ...

    def answer(self, text: str) -> dict[str, Any]:
        """What a whole answer has of it."""
        ...

    def logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Log-probabilities."""
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
    """Completions, whose pieces are told as the whole is."""

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
    """A prompt as its answer repeats it: the text, and its tokens' log-probabilities where they were requested."""

    text: str = ""
    entries: Sequence[Entry] = ()


class Output:
    """One choice as it grows."""

    def __init__(
        self, place: int, shape: Shape, told: Drafting, logprobs: Logprobs | None, echo: Echo | None = None
    ) -> None:
        """told: fields to report in addition to its text. logprobs: its own, if requested. echo: the prompt before its text."""
        self._place, self._shape, self._told, self._logprobs = place, shape, told, logprobs
        self._echo = echo or Echo()
        self._entries: list[Entry] = list(self._echo.entries)
        self.num_tokens = 0
        """Tokens generated so far."""
        self.steps: list[Step] = []
        self.generation: Generation | None = None

    def echoed(self, *, alone: bool) -> dict[str, Any]:
        """The prompt as a choice of a stream's first event. alone: nothing is generated after it."""
        ended = FinishReason.LENGTH if alone else None
        return self._choice(self._shape.piece(self._echo.text, first=True), self._echo.entries, ended, {})

    def take(self, chunk: Chunk) -> dict[str, Any]:
        """What a pass added, as a choice of an event."""
        first = not self.steps
        self.steps.append(chunk.step)
        self.generation = chunk.generation
        self.num_tokens += len(chunk.step.token_ids)
        new = []
        if self._logprobs is not None:
            own = self._logprobs.take(chunk.step, chunk.text, ended=chunk.finish_reason is not None)
            new = [replace(one, start=len(self._echo.text) + one.start) for one in own]
            self._entries += new
        ours: dict[str, Any] = {}
        if self._told.origins:
            ours = {
                "origins": [[one.text, str(one.origin)] for one in chunk.pieces],
                "tokens": len(chunk.step.token_ids),
                "drafted": chunk.step.num_drafted,
            }
        return self._choice(self._shape.piece(chunk.text, first=first), new, chunk.finish_reason, ours)

    def whole(self) -> dict[str, Any]:
        """All of it, as a choice of an answer. Without a generation it is the prompt alone."""
        done = self.generation
        text, ended = (done.text, done.finish_reason) if done is not None else ("", FinishReason.LENGTH)
        return self._choice(self._shape.answer(self._echo.text + text), self._entries, ended, {})

    def _choice(
        self, said: dict[str, Any], entries: Sequence[Entry], ended: FinishReason | None, ours: dict[str, Any]
    ) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._shape.logprobs(entries)
        reason = None if ended is None else _REASONS[ended]
        if self._told.stats and self.generation is not None:
            ours = ours | statistics(self.generation)
        more = {"foresay": ours} if ours else {}
        return {"index": self._place, **said, "logprobs": logprobs, "finish_reason": reason, **more}


def statistics(generation: Generation) -> dict[str, Any]:
    """How an output was drafted for."""
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
class Names:
    """What the events of one answer have in common."""

    id: str
    created: int
    model: str
    fingerprint: str

    @staticmethod
    def new(prefix: str, model: str, fingerprint: str) -> Names:
        """Of an answer that begins now."""
        return Names(f"{prefix}-{uuid4().hex[:24]}", int(time()), model, fingerprint)

    def body(self, kind: str, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """What is sent."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": list(choices),
            **more,
        }


def usage(prompts: Sequence[int], outputs: Sequence[Output]) -> dict[str, Any]:
    """Tokens read, written, and read from slots that were there.

    prompts: tokens of each, which count once however many outputs it has: output i * n + j is the j-th of prompt i.
    """
    n = len(outputs) // len(prompts)
    written = sum(one.num_tokens for one in outputs)
    begun = [one.steps[0].num_cached if one.steps else 0 for one in outputs]
    cached = sum(min(begun[i * n : (i + 1) * n]) for i in range(len(prompts)))
    return {
        "prompt_tokens": sum(prompts),
        "completion_tokens": written,
        "total_tokens": sum(prompts) + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def sent(body: dict[str, Any] | str) -> bytes:
    """A server-sent event."""
    text = (
        body if isinstance(body, str) else json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    )
    return f"data: {text}\n\n".encode("utf-8", "replace")
