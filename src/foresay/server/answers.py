"""Answers in OpenAI's words: whole ones, a stream's events, usage, log-probabilities, and our own statistics.

Owns the shapes. Knows no engine and no route.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any
from uuid import uuid4

from foresay.decoding.outcome import FinishReason, Step, TokenLogprob
from foresay.generation.result import Chunk, Generation

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "stop"}


@dataclass(slots=True)
class Output:
    """One choice as it grows."""

    steps: list[Step] = field(default_factory=list)
    generation: Generation | None = None

    def take(self, chunk: Chunk) -> None:
        """What a pass added."""
        self.steps.append(chunk.step)
        self.generation = chunk.generation or self.generation


class Names:
    """What the events of one answer have in common."""

    def __init__(self, kind: str, prefix: str, model: str) -> None:
        self._same = {"id": f"{prefix}-{uuid4().hex[:24]}", "object": kind, "created": int(time()), "model": model}

    def event(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A body with these choices."""
        return {**self._same, "choices": list(choices), **more}


def finish_reason(reason: FinishReason | None) -> str | None:
    """OpenAI's word for why an output ended."""
    return None if reason is None else _REASONS[reason]


def usage(prompts: Sequence[int], outputs: Sequence[Output]) -> dict[str, Any]:
    """Tokens read, written, and read from slots that were there. prompts: tokens of each, once however many outputs it has."""
    written = sum(len(step.token_ids) for one in outputs for step in one.steps)
    cached = sum(min(step.num_cached for step in one.steps[:1]) for one in outputs if one.steps)
    read = sum(prompts)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": min(cached, read)},
    }


def statistics(output: Output) -> dict[str, Any]:
    """How an output was drafted for."""
    assert output.generation is not None
    stats = output.generation.stats
    return {
        "passes": stats.num_passes,
        "drafted": stats.num_drafted,
        "accepted": stats.num_accepted,
        "tokens_per_pass": None if stats.block_efficiency is None else round(stats.block_efficiency, 4),
        "steps": [[step.num_drafted, step.num_accepted] for step in output.steps],
        "seed": output.generation.seed,
        "exact": output.generation.exact,
        "draft_error": output.generation.draft_error,
    }


def origins(chunk: Chunk) -> list[list[str]]:
    """Who wrote which text of a chunk."""
    return [[piece.text, str(piece.origin)] for piece in chunk.pieces]


class Logprobs:
    """Log-probabilities of tokens with their texts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def _text(self, token: int) -> str:
        text: str = self._tokenizer.decode([token])
        return text

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8"))}

    def chat(self, steps: Sequence[Step]) -> dict[str, Any] | None:
        """As chat completions have them; None where none were asked for."""
        pairs = _pairs(steps)
        if pairs is None:
            return None
        content = [
            self._entry(token, one.logprob) | {"top_logprobs": [self._entry(*top) for top in one.top]}
            for token, one in pairs
        ]
        return {"content": content, "refusal": None}

    def completion(self, steps: Sequence[Step], start: int = 0) -> dict[str, Any] | None:
        """As completions have them. start: characters of the output before these."""
        pairs = _pairs(steps)
        if pairs is None:
            return None
        tokens = [self._text(token) for token, _ in pairs]
        offsets = [start]
        for text in tokens:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for _, one in pairs],
            "top_logprobs": [{self._text(token): value for token, value in one.top} for _, one in pairs],
            "text_offset": offsets[:-1],
        }


def _pairs(steps: Sequence[Step]) -> list[tuple[int, TokenLogprob]] | None:
    if all(step.logprobs is None for step in steps):
        return None
    return [pair for step in steps for pair in zip(step.token_ids, step.logprobs or (), strict=True)]


def sent(body: dict[str, Any] | str) -> bytes:
    """A server-sent event."""
    text = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode("utf-8", "replace")
