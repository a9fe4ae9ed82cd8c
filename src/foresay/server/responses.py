"""Responses in OpenAI's format: whole bodies, stream events, usage, and foresay's statistics.

Owns the formats and the state of one growing output. Knows no engine and no route.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import time
from typing import Any, Protocol
from uuid import uuid4

from foresay.decoding.outcome import FinishReason, Step
from foresay.generation.result import Chunk, Generation
from foresay.server.logprobs import Entry, Logprobs, as_chat, as_completion
from foresay.server.option_fields import Drafting
from foresay.text.tool_calls.calls import CallPiece, OutputParser, Pieces

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "stop"}


class Message:
    """The message that an output has become so far."""

    def __init__(self, parser: OutputParser | None) -> None:
        """parser: splits the text into reasoning, content and calls; None for content alone."""
        self._parser = parser
        self.content = self.reasoning = ""
        self.calls: list[tuple[str, list[str]]] = []
        """Name and pieces of the arguments of each call."""
        self.ids: list[str] = []
        """Id of each call."""
        self.is_cut = False
        """True if the output ended within a call, which was closed."""

    def add(self, text: str, *, ended: bool) -> Pieces:
        """Add text; return what it adds. ended: True if no more follows."""
        if self._parser is None:
            new = Pieces(text)
        else:
            new = self._parser.push(text)
            if ended:
                rest = self._parser.finish()
                self.is_cut = bool(rest.calls)
                new.add(rest)
        if new.ends_reasoning:
            self.reasoning, self.content = self.reasoning + self.content, ""
        self.content += new.content
        self.reasoning += new.reasoning
        for one in new.calls:
            if one.name is not None:
                self.calls.append((one.name, []))
                self.ids.append(f"call_{uuid4().hex[:24]}")
            self.calls[one.index][1].append(one.arguments)
        return new

    def identity(self, piece: CallPiece) -> dict[str, str]:
        """Return the id and type of a call, for its first piece."""
        return {} if piece.name is None else {"id": self.ids[piece.index], "type": "function"}


def _function(name: str | None, arguments: str) -> dict[str, str]:
    return ({} if name is None else {"name": name}) | {"arguments": arguments}


class Shape(Protocol):
    """Format of an output in one API."""

    prefix: str
    """Prefix of response ids."""
    whole: str
    """Object name of a whole response."""
    event: str
    """Object name of a stream event."""

    ends_apart: bool
    """True if an output's stream begins with an event of its role alone and ends with one of its finish reason alone."""

    def piece(self, message: Message, new: Pieces) -> dict[str, Any]:
        """Return the field of an event that adds to a message."""
        ...

    def answer(self, message: Message) -> dict[str, Any]:
        """Return the field of a whole response."""
        ...

    def logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Return the log-probabilities' field."""
        ...


class ChatShape:
    """Chat completions."""

    prefix, whole, event = "chatcmpl", "chat.completion", "chat.completion.chunk"
    ends_apart = True

    def piece(self, message: Message, new: Pieces) -> dict[str, Any]:
        """See Shape."""
        calls = [
            {"index": one.index, **message.identity(one), "function": _function(one.name, one.arguments)}
            for one in new.calls
        ]
        fields = {"content": new.content, "reasoning_content": new.reasoning, "tool_calls": calls}
        return {"delta": {name: value for name, value in fields.items() if value}}

    def answer(self, message: Message) -> dict[str, Any]:
        """See Shape."""
        calls = [
            {"id": message.ids[i], "type": "function", "function": _function(name, "".join(parts))}
            for i, (name, parts) in enumerate(message.calls)
        ]
        content = None if calls and not message.content.strip() else message.content
        fields = {"tool_calls": calls, "reasoning_content": message.reasoning}
        more = {name: value for name, value in fields.items() if value}
        return {"message": {"role": "assistant", "content": content, "refusal": None, **more}}

    def logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """See Shape."""
        return as_chat(entries)


class CompletionShape:
    """Completions, whose events and whole responses have the same format."""

    prefix, whole, event = "cmpl", "text_completion", "text_completion"
    ends_apart = False

    def piece(self, message: Message, new: Pieces) -> dict[str, Any]:
        """See Shape."""
        return {"text": new.content}

    def answer(self, message: Message) -> dict[str, Any]:
        """See Shape."""
        return {"text": message.content}

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
        self,
        index: int,
        shape: Shape,
        options: Drafting,
        logprobs: Logprobs | None,
        echo: Echo | None = None,
        parser: OutputParser | None = None,
    ) -> None:
        """options: statistics to report. logprobs: collector of log-probabilities, if requested. echo: the repeated prompt.

        parser: see Message.
        """
        self._index, self._shape, self._options, self._logprobs = index, shape, options, logprobs
        self._echo, self._message = echo or Echo(), Message(parser)
        self._entries: list[Entry] = list(self._echo.entries)
        self.num_tokens = self.num_reasoning_tokens = 0
        """Tokens generated so far, and those of them up to the last one of the reasoning."""
        self.steps: list[Step] = []
        self.generation: Generation | None = None

    def echoed(self, *, alone: bool) -> dict[str, Any]:
        """Return the prompt as a choice of the first stream event. alone: True if no token is generated after it."""
        ended = FinishReason.LENGTH if alone else None
        return self._choice({"text": self._echo.text}, self._echo.entries, ended, {})

    def take(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Add a step's chunk, and return it as choices of successive events."""
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
        ended = chunk.finish_reason
        pieces = self._add_to_message(chunk, ended=ended is not None)
        field = self._shape.piece(self._message, pieces)
        if not self._shape.ends_apart:
            return [self._choice(field, new, ended, extension)]
        out = [self._choice({"delta": {"role": "assistant", "content": ""}}, (), None, {})] if first else []
        if pieces or new or extension:
            out.append(self._choice(field, new, None, extension))
        return out if ended is None else [*out, self._choice({"delta": {}}, (), ended, {})]

    def _add_to_message(self, chunk: Chunk, *, ended: bool) -> Pieces:
        """Add a chunk token by token, so that the count of reasoning does not depend on the length of drafts."""
        out, before = Pieces(), self.num_tokens - len(chunk.step.token_ids)
        for i, piece in enumerate(chunk.pieces):
            new = self._message.add(piece.text, ended=False)
            if new.reasoning or new.ends_reasoning:
                self.num_reasoning_tokens = before + i + 1
            out.add(new)
        out.add(self._message.add("", ended=ended))
        return out

    def whole(self) -> dict[str, Any]:
        """Return the output as a choice of a whole response. Without a generation it contains the prompt alone."""
        ended = self.generation.finish_reason if self.generation is not None else FinishReason.LENGTH
        if self._echo.text:
            return self._choice({"text": self._echo.text + self._message.content}, self._entries, ended, {})
        return self._choice(self._shape.answer(self._message), self._entries, ended, {})

    def _choice(
        self, content: dict[str, Any], entries: Sequence[Entry], ended: FinishReason | None, extension: dict[str, Any]
    ) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._shape.logprobs(entries)
        reason = None if ended is None else _REASONS[ended]
        is_cut = self._message.is_cut and self.generation is not None and self.generation.stop_string is not None
        if ended is FinishReason.STOP and self._message.calls and not is_cut:
            reason = "tool_calls"
        stopped = {}
        if ended is not None and self.generation is not None:
            stopped = {"stop_reason": self.generation.stop_string}
        if self._options.stats and ended is not None and self.generation is not None:
            extension = extension | statistics(self.generation)
        extra = {"foresay": extension} if extension else {}
        return {"index": self._index, **content, "logprobs": logprobs, "finish_reason": reason, **stopped, **extra}


def most_probable(outputs: Sequence[Output], count: int) -> Sequence[Output]:
    """Return the `count` outputs with the highest mean log-probability of a token, which all of them have if some are dropped."""
    if count == len(outputs):
        return outputs

    def mean(output: Output) -> float:
        entries = [one.logprob for step in output.steps for one in step.logprobs or ()]
        return sum(entries) / max(1, len(entries))

    return sorted(outputs, key=mean, reverse=True)[:count]


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


def usage(prompts: Sequence[int], outputs: Sequence[Output], *, is_predicted: bool = False) -> dict[str, Any]:
    """Return the usage: prompt tokens, generated tokens, and prompt tokens read from cached slots.

    prompts: token count of each prompt, counted once for all its outputs. Output i * n + j is the j-th output of prompt i.
    is_predicted: count accepted and rejected draft tokens as those of a prediction.
    """
    n = len(outputs) // len(prompts)
    generated = sum(one.num_tokens for one in outputs)
    cached_per_output = [one.steps[0].num_cached if one.steps else 0 for one in outputs]
    cached = sum(min(cached_per_output[i * n : (i + 1) * n]) for i in range(len(prompts)))
    out = {
        "prompt_tokens": sum(prompts),
        "completion_tokens": generated,
        "total_tokens": sum(prompts) + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    details: dict[str, int] = {}
    if reasoning := sum(one.num_reasoning_tokens for one in outputs):
        details["reasoning_tokens"] = reasoning
    if is_predicted:
        steps = [step for one in outputs for step in one.steps]
        accepted = sum(step.num_accepted for step in steps)
        rejected = sum(step.num_drafted for step in steps) - accepted
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    return out | ({"completion_tokens_details": details} if details else {})
