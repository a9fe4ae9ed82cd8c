"""Log-probabilities of one output as its text grows: each with the text, bytes and place of its token.

Owns which of them belong to the text that is sent, since text may be held back, and is cut before a stop string; and the two
shapes that OpenAI's clients read. Knows no route.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foresay.decoding.outcome import Step, TokenLogprob
from foresay.text.stream import Detokenizer
from foresay.text.tokenizer import token_bytes

LEAST = -9999.0
"""What stands for the logarithm of nothing, which JSON has no number for."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Of one token."""

    raw: bytes
    """What it writes."""
    value: float | None
    """None of a prompt's first token, which nothing precedes."""

    @property
    def name(self) -> str:
        """Its text; of bytes that are no text, their numbers, so that two such tokens do not share a name."""
        try:
            return self.raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{one:02x}" for one in self.raw)

    def plain(self) -> dict[str, Any]:
        """As chat completions have it."""
        return {"token": self.name, "logprob": self.value, "bytes": list(self.raw)}


@dataclass(frozen=True, slots=True)
class Entry:
    """A token of the output."""

    own: Likelihood
    top: list[Likelihood]
    """The likeliest in its place."""
    start: int
    """Characters of the output before it."""


def of_prompt(tokenizer: Any, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> list[Entry]:
    """Entries of a prompt's tokens. logprobs: one per token, None for the first."""
    detokenizer, out, start = Detokenizer(tokenizer), list[Entry](), 0
    for token, one in zip(token_ids, logprobs, strict=True):
        own = _likelihood(tokenizer, token, None if one is None else one.logprob)
        out.append(
            Entry(own, [_likelihood(tokenizer, *other) for other in (one.top if one is not None else ())], start)
        )
        start += len(detokenizer.push(token))
    return out


class Logprobs:
    """Of one output."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._detokenizer = tokenizer, Detokenizer(tokenizer)
        self._waiting: list[Entry] = []
        self._written = self._sent = 0

    def take(self, step: Step, text: str, *, ended: bool) -> list[Entry]:
        """Those whose text begins within what has been sent, `text` included; in the end also those that write nothing.

        Tokens behind a cut are left out.
        """
        for token, one in zip(step.token_ids, step.logprobs or (), strict=True):
            top = [_likelihood(self._tokenizer, *other) for other in one.top]
            self._waiting.append(Entry(_likelihood(self._tokenizer, token, one.logprob), top, self._written))
            self._written += len(self._detokenizer.push(token))
        self._sent += len(text)
        if ended:
            self._written += len(self._detokenizer.flush())
        whole = ended and self._sent >= self._written
        many = len(self._waiting) if whole else sum(one.start < self._sent for one in self._waiting)
        out, self._waiting = self._waiting[:many], self._waiting[many:]
        return out


def _likelihood(tokenizer: Any, token: int, value: float | None) -> Likelihood:
    return Likelihood(token_bytes(tokenizer, token), None if value is None else max(LEAST, value))


def as_chat(entries: Sequence[Entry]) -> dict[str, Any]:
    """As chat completions have them."""
    content = [one.own.plain() | {"top_logprobs": [other.plain() for other in one.top]} for one in entries]
    return {"content": content, "refusal": None}


def as_completion(entries: Sequence[Entry]) -> dict[str, Any]:
    """As completions have them."""
    return {
        "tokens": [one.own.name for one in entries],
        "token_logprobs": [one.own.value for one in entries],
        "top_logprobs": [
            None if one.own.value is None else {other.name: other.value for other in one.top} for one in entries
        ],
        "text_offset": [one.start for one in entries],
    }
