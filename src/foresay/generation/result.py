"""Results of a request: text, tokens and Steps, complete (`Generation`) or streamed (`Chunk`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from typing import Any

from foresay.decoding.outcome import FinishReason, Origin, Step, TokenLogprob
from foresay.engine import Stats
from foresay.errors import ConfigError, RequestError
from foresay.text.formatting import MEANINGS
from foresay.text.stream import Piece, TextStream

_STYLES = {
    Origin.DRAFT: "background:rgba(46,160,67,.25)",
    Origin.RESIDUAL: "background:rgba(218,54,51,.25);text-decoration:underline",
    Origin.BONUS: "background:rgba(56,139,253,.25);text-decoration:underline dotted",
}
"""Style of each origin in HTML; lines under the text distinguish origins without colour."""


_SHOWN = 60
"""Characters of a text that its `repr` shows."""


@dataclass(frozen=True, slots=True, repr=False)
class Generation:
    """Output of one request, with its Steps and statistics."""

    text: str
    """The output without special tokens, cut before a stop string."""
    token_ids: list[int]
    """Token ids of the output, including the stop token and the token that completed a stop string."""
    prompt_token_ids: list[int]
    """Token ids of the prompt; for an encoder-decoder, the encoder's input."""
    finish_reason: FinishReason
    """Why the request ended."""
    steps: list[Step]
    """One per target pass."""
    stats: Stats
    """Counts over the Steps, and the rates derived from them."""
    seed: int | None
    """Seed that reproduces a sampled output; None for a greedy one."""
    exact: bool
    """True if the rule keeps the target's distribution."""
    stop_string: str | None = None
    """Stop string that ended the output."""
    draft_error: str | None = None
    """Error of the drafter, if it failed (the output is not affected)."""
    error: RequestError | None = None
    """Cause of FinishReason.ERROR; the output contains the tokens before it."""
    tokenizer: Any = field(default=None, repr=False, compare=False)
    """The target's tokenizer, from which `pieces` are computed; None without one."""
    context_token_ids: Sequence[int] = field(default=(), repr=False, compare=False)
    """Token ids that the output continues: the prompt, or the beginning of a decoder."""

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

    def __repr__(self) -> str:
        """Return one line: the beginning of the text, the numbers of tokens and passes, and why it ended."""
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        counts = f"{len(self.token_ids)} tokens in {len(self.steps)} passes"
        problem = f", draft_error={self.draft_error!r}" if self.draft_error else ""
        return f"<foresay.Generation {text!r}: {counts}, finish_reason={self.finish_reason.value}{problem}>"

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

    def pieces(self, tokenizer: Any = None) -> list[Piece]:
        """Return the text token by token, with the origin of each; a stop string is included.

        Args:
            tokenizer: The target's; by default the one that the output was decoded with.

        Raises:
            ConfigError: There is no tokenizer.
        """
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        if tokenizer is None:
            raise ConfigError("is needed for pieces of text, and the model was loaded without one", param="tokenizer")
        stream = TextStream(tokenizer, context=self.context_token_ids)
        out = [p for step in self.steps for p in stream.push(step.token_ids, step.origins)]
        return out + stream.finish(stopped=False)

    def _repr_html_(self) -> str:
        """Return the text for notebooks, coloured by the origin of its tokens; plain text without a tokenizer."""
        spans = escape(self.text) if self.tokenizer is None else _spans(self.pieces(), len(self.text))
        stats = self.stats
        counts = f"{stats.num_tokens} tokens in {stats.num_passes} target passes; finish reason: {self.finish_reason}"
        legend = " ".join(_span(origin.value, origin) for origin in Origin)
        return (
            f'<pre style="white-space:pre-wrap">{spans}</pre>'
            f"<small>{escape(counts)}{'' if self.tokenizer is None else f' &middot; {legend}'}</small>"
        )


def _spans(pieces: Iterable[Piece], length: int) -> str:
    """Return the first `length` characters of some pieces as HTML, one span per run of tokens with the same origin."""
    out = []
    for origin, run in groupby(pieces, key=lambda piece: piece.origin):
        text = "".join(piece.text for piece in run)[:length]
        length -= len(text)
        out.append(_span(text, origin) if text else "")
    return "".join(out)


def _span(text: str, origin: Origin) -> str:
    title = escape(f"{origin.value}: {MEANINGS[origin]}")
    return f'<span title="{title}" style="{_STYLES[origin]}">{escape(text)}</span>'


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text that one target pass adds to a streamed request."""

    index: int
    """Index of the prompt in a batch; in a session, the request's id."""
    text: str
    """The text that became final; the texts of all chunks make up the output's."""
    pieces: tuple[Piece, ...]
    """The text by origin of its tokens."""
    step: Step
    """Data of the pass: tokens, origins, drafted and accepted counts, times."""
    finish_reason: FinishReason | None
    """Why the request ended, in the last chunk; None before."""
    generation: Generation | None = None
    """The complete result, in the last chunk."""

    @property
    def error(self) -> RequestError | None:
        """Cause of FinishReason.ERROR of this request."""
        return self.step.error
