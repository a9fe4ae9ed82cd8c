"""Results of a request: text, tokens and Steps, complete (`Generation`) or streamed (`Chunk`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foresay.decoding.outcome import FinishReason, Step, TokenLogprob
from foresay.engine import Stats
from foresay.errors import RequestError
from foresay.text.stream import Piece, TextStream


@dataclass(frozen=True, slots=True)
class Generation:
    """Output of one request, with its Steps and statistics."""

    text: str
    """The output without special tokens, cut before a stop string."""
    token_ids: list[int]
    """Token ids of the output, including the stop token and the token that completed a stop string."""
    prompt_token_ids: list[int]
    """Token ids of the prompt; for an encoder-decoder, the encoder's input."""
    finish_reason: FinishReason
    steps: list[Step]
    """One per target pass."""
    stats: Stats
    seed: int | None
    """Seed that reproduces a sampled output; None for a greedy one."""
    exact: bool
    """True if the rule keeps the target's distribution."""
    draft_error: str | None = None
    """Error of the drafter, if it failed (the output is not affected)."""
    error: RequestError | None = None
    """Cause of FinishReason.ERROR; the output contains the tokens before it."""

    @property
    def num_cached(self) -> int:
        """Number of prompt tokens copied from a common prefix instead of prefilled."""
        return self.steps[0].num_cached if self.steps else 0

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Log-probabilities, one entry per output token; None unless requested."""
        if not self.steps or self.steps[0].logprobs is None:
            return None
        return [entry for step in self.steps for entry in step.logprobs or ()]

    def as_record(self) -> dict[str, Any]:
        """Return the output as plain data, for a line of JSON."""
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
        """Return the text token by token, with the origin of each."""
        stream = TextStream(tokenizer)
        out = [p for step in self.steps for p in stream.push(step.token_ids, step.origins)]
        return out + stream.finish(stopped=False)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text that one target pass adds to a streamed request."""

    index: int
    """Index of the prompt in a batch; in a session, the request's id."""
    text: str
    pieces: tuple[Piece, ...]
    """The text by origin of its tokens."""
    step: Step
    finish_reason: FinishReason | None
    generation: Generation | None = None
    """The complete result, in the last chunk."""

    @property
    def error(self) -> RequestError | None:
        """Cause of FinishReason.ERROR of this request."""
        return self.step.error
