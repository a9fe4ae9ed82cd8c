"""Typed events of a response: what each step adds to an output, and how the output ended.

Owns the state of one growing output and a response's token counts. Knows no API's format, no engine and no route.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from uuid import uuid4

from foresay.decoding.outcome import FinishReason, Step
from foresay.generation.result import Chunk, Generation
from foresay.server.logprobs import Entry, Logprobs
from foresay.server.option_fields import Drafting
from foresay.server.requests import ChatRequest, CompletionRequest
from foresay.text.tool_calls.calls import Parser, Pieces


@dataclass(frozen=True, slots=True)
class Added:
    """The addition of a step to an output, or a whole output."""

    output: Output
    message: Pieces
    """Content, reasoning and calls."""
    entries: Sequence[Entry] | None
    """Log-probabilities; None unless they were requested."""
    ended: bool
    """True if the output ends here."""
    chunk: Chunk | None = None
    """The step; None for a prompt or a whole output."""


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt that a response repeats: its text, and its tokens' log-probabilities if requested."""

    text: str = ""
    entries: Sequence[Entry] = ()


class Output:
    """One growing choice."""

    def __init__(
        self, index: int, logprobs: Logprobs | None = None, echo: Echo | None = None, parser: Parser | None = None
    ) -> None:
        """logprobs: collector of log-probabilities, if requested. echo: the repeated prompt.

        parser: splits the text into reasoning, content and calls; None for content alone.
        """
        self.index, self._logprobs, self._parser, self._echo = index, logprobs, parser, echo or Echo()
        self._message = Pieces()
        """The message so far, with one piece for each call."""
        self._is_cut = False
        """True if the output ended within a call, which was closed."""
        self.entries: list[Entry] = list(self._echo.entries)
        self.num_tokens = self.num_reasoning_tokens = 0
        """Tokens generated so far, and those of them up to the last one of the reasoning."""
        self.steps: list[Step] = []
        self.first_at = 0.0
        """Time of the first step's end, by `perf_counter`."""
        self.generation: Generation | None = None
        """The result at its end; None for a prompt alone."""

    def echoed(self, *, alone: bool) -> Added:
        """Return the prompt. alone: True if no token is generated after it."""
        return self._event(Pieces(self._echo.text), self._echo.entries, ended=alone)

    def take(self, chunk: Chunk) -> Added:
        """Add a step's chunk."""
        self.first_at = self.first_at or perf_counter()
        self.steps.append(chunk.step)
        self.generation = chunk.generation
        self.num_tokens += len(chunk.step.token_ids)
        ended, new = chunk.finish_reason is not None, list[Entry]()
        if self._logprobs is not None:
            own = self._logprobs.take(chunk.step, chunk.text, ended=ended)
            new = [replace(one, start=len(self._echo.text) + one.start) for one in own]
            self.entries += new
        return self._event(self._add_to_message(chunk, ended=ended), new, ended=ended, chunk=chunk)

    def whole(self) -> Added:
        """Return the whole output."""
        message = replace(self._message, content=self._echo.text + self._message.content)
        return self._event(message, self.entries, ended=True)

    def _event(self, message: Pieces, entries: Sequence[Entry], *, ended: bool, chunk: Chunk | None = None) -> Added:
        return Added(self, message, None if self._logprobs is None else entries, ended, chunk)

    def _add_to_message(self, chunk: Chunk, *, ended: bool) -> Pieces:
        """Add a chunk token by token, so that the count of reasoning does not depend on the length of drafts."""
        out, before = Pieces(), self.num_tokens - len(chunk.step.token_ids)
        for i, piece in enumerate(chunk.pieces):
            new = Pieces(piece.text) if self._parser is None else self._parser.push(piece.text)
            if new.reasoning or new.ends_reasoning:
                self.num_reasoning_tokens = before + i + 1
            out.add(new)
        if ended and self._parser is not None:
            rest = self._parser.finish()
            self._is_cut = bool(rest.calls)
            out.add(rest)
        out.calls = [
            one if one.name is None else replace(one, identity=one.identity or f"call_{uuid4().hex[:24]}")
            for one in out.calls
        ]
        self._message.add(out)
        return out

    @property
    def stop_string(self) -> str | None:
        """Stop string that ended the output."""
        return None if self.generation is None else self.generation.stop_string

    @property
    def finish_reason(self) -> str:
        """OpenAI's name of the reason why the output ended."""
        reason = FinishReason.LENGTH if self.generation is None else self.generation.finish_reason
        if reason is FinishReason.STOP and self._message.calls and not (self._is_cut and self.stop_string is not None):
            return "tool_calls"
        return "length" if reason is FinishReason.LENGTH else "stop"

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of a token."""
        entries = [one.logprob for step in self.steps for one in step.logprobs or ()]
        return sum(entries) / max(1, len(entries))


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a response. Each prompt is counted once for all its outputs."""

    prompt: int
    cached: int
    """Prompt tokens, and those of them that were read from cached slots."""
    generated: int
    reasoning: int
    """Generated tokens, and those of them of reasoning."""
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Reply:
    """A growing response. Output i * n + j is the j-th output of prompt i."""

    model: str
    fingerprint: str
    request: ChatRequest | CompletionRequest
    prompts: Sequence[int]
    """Tokens of each prompt."""
    outputs: Sequence[Output]
    is_predicted: bool
    """True if the usage counts accepted and rejected tokens of a prediction."""

    @property
    def drafting(self) -> Drafting:
        """Statistics and origins to report."""
        return self.request.foresay or Drafting()

    def best(self) -> list[Output]:
        """Return the most probable outputs of each prompt, by the mean log-probability of a token."""
        count, groups = self.request.returned, self._groups()
        if count < len(groups[0]):
            groups = [sorted(one, key=lambda output: -output.mean_logprob)[:count] for one in groups]
        return [output for group in groups for output in group]

    def usage(self) -> Usage:
        """Return the token counts so far."""
        steps = [step for one in self.outputs for step in one.steps]
        return Usage(
            sum(self.prompts),
            sum(min(one.steps[0].num_cached if one.steps else 0 for one in group) for group in self._groups()),
            sum(one.num_tokens for one in self.outputs),
            sum(one.num_reasoning_tokens for one in self.outputs),
            sum(step.num_drafted for step in steps),
            sum(step.num_accepted for step in steps),
        )

    def _groups(self) -> list[Sequence[Output]]:
        n = len(self.outputs) // len(self.prompts)
        return [self.outputs[i : i + n] for i in range(0, len(self.outputs), n)]
