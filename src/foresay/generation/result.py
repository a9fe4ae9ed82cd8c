"""What a request came to: its text, tokens and Steps, whole or in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foresay.decoding.outcome import FinishReason, Step, TokenLogprob
from foresay.engine import Stats
from foresay.errors import RequestError
from foresay.text.stream import Piece, TextStream


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request wrote, and how."""

    text: str
    """The output, special tokens left out, cut before a stop string."""
    token_ids: list[int]
    """The output's ids; the stop token, and the token that completed a stop string, included."""
    prompt_token_ids: list[int]
    """The prompt's ids: of an encoder-decoder what its encoder read."""
    finish_reason: FinishReason
    steps: list[Step]
    """One per target pass; everything else here is read off them."""
    stats: Stats
    seed: int | None
    """The seed that reproduces a sampled output; None for a greedy one."""
    exact: bool
    """Whether the rule keeps the target's law."""
    draft_error: str | None = None
    """Why drafting ended early, when the drafter failed (the output is not affected)."""
    error: RequestError | None = None
    """Why the request ended with FinishReason.ERROR, after what it wrote until then."""

    @property
    def num_cached(self) -> int:
        """Prompt tokens that were taken from another row's slots instead of being filled."""
        return self.steps[0].num_cached if self.steps else 0

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """One per output token, when they were asked for."""
        if not self.steps or self.steps[0].logprobs is None:
            return None
        return [entry for step in self.steps for entry in step.logprobs or ()]

    def as_record(self) -> dict[str, Any]:
        """The output as plain data, for a line of JSON."""
        record: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": len(self.prompt_token_ids),
            "finish_reason": self.finish_reason.value,
            "seed": self.seed,
            "exact": self.exact,
            "stats": self.stats.as_dict(),
            "draft_error": self.draft_error,
        }
        if self.logprobs is not None:
            record["logprobs"] = [{"logprob": e.logprob, "top": [list(pair) for pair in e.top]} for e in self.logprobs]
        return record

    def pieces(self, tokenizer: Any) -> list[Piece]:
        """The text token by token, with who wrote each."""
        stream = TextStream(tokenizer)
        out = [p for step in self.steps for p in stream.push(step.token_ids, step.origins)]
        return out + stream.finish(stopped=False)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one target pass added to a streamed request."""

    index: int
    """Which prompt of a batch; of a session, the request's id."""
    text: str
    pieces: tuple[Piece, ...]
    """The text by who wrote it."""
    step: Step
    finish_reason: FinishReason | None
    generation: Generation | None = None
    """The whole, with the last chunk."""

    @property
    def error(self) -> RequestError | None:
        """Why this request, and no other, ended with FinishReason.ERROR."""
        return self.step.error
