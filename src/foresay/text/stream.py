"""Incremental detokenization: text of tokens as they are committed, stop strings, and the origin of each piece of text.

Decides when text is final. Knows nothing about models or about how tokens were drafted and accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from foresay.decoding.outcome import Origin

_INCOMPLETE = "\ufffd"
_CONTEXT = 8
"""Tokens of the prompt by which the first tokens of an output are decoded."""
_PENDING, _KEPT = 8, 4
"""Withheld tokens of which the oldest are released, and how many remain: a character has at most 4 bytes."""
_specials: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()


class Piece(NamedTuple):
    """A piece of text, and the origin of the token that completed it."""

    text: str
    """The text."""
    origin: Origin
    """Draft, residual or bonus."""


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of special tokens; cached, because transformers builds the table at each call."""
    if not hasattr(tokenizer, "added_tokens_decoder"):
        return frozenset()
    found = _specials.get(tokenizer)
    if found is None:
        found = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        _specials[tokenizer] = found
    return found


class Detokenizer:
    """Decoder of one token at a time, which withholds characters whose bytes are incomplete.

    Each call decodes a bounded number of tokens.
    """

    def __init__(self, tokenizer: Any, visible: Collection[int] = (), *, context: Sequence[int] = ()) -> None:
        """visible: special tokens that are part of the text. context: token ids before the first one.

        Tokenizers that mark spaces drop the first space of a text, so an output is decoded after the end of its prompt.
        """
        self._tokenizer, self._visible = tokenizer, frozenset(visible)
        self._without_text = special_ids(tokenizer) - self._visible
        before = [int(token) for token in context[-4 * _CONTEXT :] if token not in self._without_text]
        start = max(0, len(before) - _CONTEXT)
        self._ids: list[int] = before[start:]
        """The last tokens: those before `_read` are context, the others are withheld."""
        while start and self._decode(len(self._ids)).startswith(_INCOMPLETE):  # it begins inside a character
            start -= 1
            self._ids = before[start:]
        self._read = len(self._ids)

    def _decode(self, end: int) -> str:
        text: str = self._tokenizer.decode(
            self._ids[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, possibly empty."""
        if token_id in self._without_text:
            return ""
        if token_id in self._visible:
            before = self.flush()
            return before + str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        self._ids.append(token_id)
        known, text = self._decode(self._read), self._decode(len(self._ids))
        first = self._read
        if not text.startswith(known):  # the token completes a character that the context ends with
            first, known = 0, known.rstrip(_INCOMPLETE)
        if len(text) <= len(known) or text.endswith(_INCOMPLETE):
            return self._release(known, text)
        return self._moved(len(self._ids), first, text[len(known) :])

    def _release(self, known: str, text: str) -> str:
        """Return the text of the oldest withheld tokens if there are many: their bytes never complete a character."""
        end = len(self._ids) - _KEPT
        if len(self._ids) - self._read < _PENDING:
            return ""
        head = self._decode(end)
        if text.startswith(head):
            return self._moved(end, self._read, head[len(known) :])
        return self._moved(len(self._ids), len(self._ids) - 1, text[len(known) :])

    def _moved(self, read: int, first: int, text: str) -> str:
        """Return a text after moving the context: it ends at `read`, and begins at `first`."""
        del self._ids[:first]
        self._read = read - first
        return text

    def all(self, token_ids: Sequence[int]) -> str:
        """Return the text of all tokens: `push` for each, then `flush`."""
        return "".join(map(self.push, token_ids)) + self.flush()

    def flush(self) -> str:
        """Return the withheld text, with incomplete characters as U+FFFD."""
        text = self._decode(len(self._ids))[len(self._decode(self._read)) :]
        self._read = len(self._ids)
        return text


def _find(text: str, strings: Sequence[str], before: int) -> int | None:
    """Return where the first of the strings begins that ends after the first `before` characters; None without one."""
    return min((at for one in strings if (at := text.find(one, max(0, before - len(one) + 1))) >= 0), default=None)


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
    context: Sequence[int] = ()
    """Token ids of the prompt."""
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
            self._detokenizer = Detokenizer(self.tokenizer, self.visible, context=self.context)
        for i, token in enumerate(token_ids):
            before = len(self.text)
            self.text += self._detokenizer.push(token)
            self._count += 1
            if self._count < self.min_new_tokens:
                continue
            self.cut_at = _find(self.text, self.strings, before)
            if self.cut_at is not None:
                return i + 1
        return None


class TextStream:
    """Pieces of final text from committed tokens.

    With stop strings, characters that may begin one are withheld until it is clear that they do not.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), visible: Collection[int] = (), *, context: Sequence[int] = ()
    ) -> None:
        """stops: stop strings. visible, context: see Detokenizer."""
        self._detokenizer = Detokenizer(tokenizer, visible, context=context)
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
        end = _find(whole, self._stops, self._before) if stopped else None
        return self._release(len(whole) if end is None else end)

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
