"""Log-probabilities of one growing output: each with the text, bytes and position of its token.

Owns which entries belong to the text sent so far (text may be delayed, and is cut before a stop string), and the two shapes of
OpenAI's API. Knows no route.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from foresay.decoding.outcome import Step, TokenLogprob
from foresay.text.stream import Detokenizer
from foresay.text.tokenizer import token_bytes

MIN_LOGPROB = -9999.0
"""Stands for the logarithm of 0, which JSON cannot represent."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Log-probability of one token."""

    raw: bytes
    """UTF-8 bytes of the token, possibly part of a character."""
    value: float | None
    """None for a prompt's first token, which has no context."""

    @property
    def name(self) -> str:
        """Text of the token, or an escape of its bytes if they are not valid UTF-8, so that such tokens have distinct names."""
        try:
            return self.raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{one:02x}" for one in self.raw)

    def plain(self) -> dict[str, Any]:
        """Return the shape of chat completions."""
        return {"token": self.name, "logprob": self.value, "bytes": list(self.raw)}


@dataclass(frozen=True, slots=True)
class Entry:
    """A token of the output."""

    own: Likelihood
    top: list[Likelihood]
    """The most probable tokens at this position."""
    start: int
    """Offset in the output's text, in characters."""

    def plain(self) -> dict[str, Any]:
        """Return the shape of chat completions."""
        return self.own.plain() | {"top_logprobs": [other.plain() for other in self.top]}


def of_prompt(tokenizer: Any, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> list[Entry]:
    """Return the entries of a prompt's tokens. logprobs: one per token, None for the first."""
    detokenizer, out, start = Detokenizer(tokenizer), list[Entry](), 0
    for token, one in zip(token_ids, logprobs, strict=True):
        own = _likelihood(tokenizer, token, None if one is None else one.logprob)
        out.append(
            Entry(own, [_likelihood(tokenizer, *other) for other in (one.top if one is not None else ())], start)
        )
        start += len(detokenizer.push(token))
    return out


class Logprobs:
    """Entries of one output that wait for their text to be sent."""

    def __init__(self, tokenizer: Any, visible: Collection[int] = (), *, context: Sequence[int] = ()) -> None:
        """visible, context: see Detokenizer."""
        self._tokenizer, self._detokenizer = tokenizer, Detokenizer(tokenizer, visible, context=context)
        self._waiting: list[Entry] = []
        self._generated = self._sent = 0

    def take(self, step: Step, text: str, *, ended: bool) -> list[Entry]:
        """Return the entries whose text starts within the text sent so far, including `text`; at the end also those without text.

        Tokens after a cut are omitted.
        """
        for token, one in zip(step.token_ids, step.logprobs or (), strict=True):
            top = [_likelihood(self._tokenizer, *other) for other in one.top]
            self._waiting.append(Entry(_likelihood(self._tokenizer, token, one.logprob), top, self._generated))
            self._generated += len(self._detokenizer.push(token))
        self._sent += len(text)
        if ended:
            self._generated += len(self._detokenizer.flush())
        whole = ended and self._sent >= self._generated
        count = len(self._waiting) if whole else sum(one.start < self._sent for one in self._waiting)
        out, self._waiting = self._waiting[:count], self._waiting[count:]
        return out


def _likelihood(tokenizer: Any, token: int, value: float | None) -> Likelihood:
    return Likelihood(token_bytes(tokenizer, token), None if value is None else max(MIN_LOGPROB, value))


def as_chat(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the shape of chat completions."""
    return {"content": [one.plain() for one in entries], "refusal": None}


def as_completion(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the shape of completions."""
    return {
        "tokens": [one.own.name for one in entries],
        "token_logprobs": [one.own.value for one in entries],
        "top_logprobs": [
            None if one.own.value is None else {other.name: other.value for other in (*one.top, one.own)}
            for one in entries
        ],
        "text_offset": [one.start for one in entries],
    }
