"""Incremental detokenization: text of tokens as they are committed, stop strings, and the origin of each piece of text.

Decides when text is final. Knows nothing about models or about how tokens were drafted and accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from foresay.decoding.outcome import Origin

_INCOMPLETE = "\ufffd"


class Piece(NamedTuple):
    """A piece of text, and the origin of the token that completed it: draft, residual or bonus."""

    text: str
    origin: Origin


class Detokenizer:
    """Decoder of one token at a time, which withholds characters whose bytes are incomplete."""

    def __init__(self, tokenizer: Any, visible: Collection[int] = ()) -> None:
        """visible: special tokens that are part of the text."""
        self._tokenizer, self._visible = tokenizer, frozenset(visible)
        self._ids: list[int] = []
        self._prefix = self._read = 0

    def _decode(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(
            self._ids[start:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, possibly empty."""
        if token_id in self._visible:
            before = self.flush()
            self._ids.append(token_id)
            self._prefix = self._read = len(self._ids)
            return before + str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        self._ids.append(token_id)
        known = self._decode(self._prefix, self._read)
        text = self._decode(self._prefix, len(self._ids))
        if len(text) <= len(known) or text.endswith(_INCOMPLETE):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return text[len(known) :]

    def all(self, token_ids: Sequence[int]) -> str:
        """Return the text of all tokens: `push` for each, then `flush`."""
        return "".join(map(self.push, token_ids)) + self.flush()

    def flush(self) -> str:
        """Return the withheld text, with incomplete characters as U+FFFD."""
        known = self._decode(self._prefix, self._read)
        text = self._decode(self._prefix, len(self._ids))
        self._prefix = self._read = len(self._ids)
        return text[len(known) :]


@dataclass(slots=True)
class StopStrings:
    """A stop condition that ends the output with the token that completes one of the strings.

    `cut_at` is then the index in the text where the first of them begins. A string completed within the first
    `min_new_tokens` tokens does not stop the output.
    """

    tokenizer: Any
    strings: tuple[str, ...]
    min_new_tokens: int = 0
    visible: tuple[int, ...] = ()
    text: str = ""
    cut_at: int | None = None
    _count: int = 0
    _detokenizer: Detokenizer | None = None

    @property
    def matched(self) -> str | None:
        """The string that ended the output; of several that begin at the same index, the first."""
        if self.cut_at is None:
            return None
        return next(one for one in self.strings if self.text.startswith(one, self.cut_at))

    def __call__(self, token_ids: Sequence[int]) -> int | None:
        """Return how many of these uncommitted tokens to keep if the output ends within them, else None."""
        if self._detokenizer is None:
            self._detokenizer = Detokenizer(self.tokenizer, self.visible)
        for i, token in enumerate(token_ids):
            before = len(self.text)
            self.text += self._detokenizer.push(token)
            self._count += 1
            if self._count < self.min_new_tokens:
                continue
            found = [self.text.find(s, max(0, before - len(s) + 1)) for s in self.strings]
            indices = [index for index in found if index >= 0]
            if indices:
                self.cut_at = min(indices)
                return i + 1
        return None


class TextStream:
    """Pieces of final text from committed tokens.

    With stop strings, characters that may begin one are withheld until it is clear that they do not.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), visible: Collection[int] = ()) -> None:
        """stops: stop strings. visible: see Detokenizer."""
        self._detokenizer = Detokenizer(tokenizer, visible)
        self._stops = tuple(stops)
        self._pending: list[Piece] = []
        self._last = Origin.BONUS
        self._before = 0

    def push(self, token_ids: Sequence[int], origins: Sequence[Origin]) -> list[Piece]:
        """Return the pieces that become final with these tokens. origins: one per token."""
        for token, origin in zip(token_ids, origins, strict=True):
            self._last = origin
            self._before = sum(len(piece.text) for piece in self._pending)
            if text := self._detokenizer.push(token):
                self._pending.append(Piece(text, origin))
        if not self._stops:
            out, self._pending = self._pending, []
            return out
        return self._release(self._releasable())

    def finish(self, *, stopped: bool) -> list[Piece]:
        """Return the remaining pieces, cut before the first stop string if one ended the output."""
        if text := self._detokenizer.flush():
            self._pending.append(Piece(text, self._last))
        whole = "".join(piece.text for piece in self._pending)
        end = len(whole)
        if stopped:
            indices = [p for s in self._stops if (p := whole.find(s, max(0, self._before - len(s) + 1))) >= 0]
            end = min(indices, default=end)
        return self._release(end)

    def _releasable(self) -> int:
        """Count the withheld characters that cannot belong to a stop string."""
        whole = "".join(piece.text for piece in self._pending)
        for start in range(max(0, self._before - max(map(len, self._stops)) + 1), len(whole)):
            if any(s.startswith(whole[start:]) or whole.startswith(s, start) for s in self._stops):
                return start
        return len(whole)

    def _release(self, count: int) -> list[Piece]:
        out: list[Piece] = []
        self._before = max(0, self._before - count)
        while self._pending and count > 0:
            piece = self._pending.pop(0)
            if len(piece.text) > count:
                self._pending.insert(0, Piece(piece.text[count:], piece.origin))
                piece = Piece(piece.text[:count], piece.origin)
            count -= len(piece.text)
            out.append(piece)
        return out
