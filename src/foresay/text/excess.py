"""The limits of a caller on a text: its tokens, counted before all of it is tokenized, and the memory that this takes.

Owns two lower bounds on a text's number of tokens: its bytes over those of the vocabulary's longest token, and the tokens of a
beginning that ends where no token of the vocabulary can cross. Estimates nothing: a text that no bound covers is tokenized.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from foresay.errors import ContextLengthError
from foresay.text.tokenizer import NAMED_BYTES

_CUTS = (
    (re.compile(r"[A-Za-z](?=[ \n])"), re.compile("[A-Za-z][ \n\u2581\u0120\u010a]")),
    (re.compile(r"\S\n(?=\S)"), re.compile("[\n\u010a][^\\s\u2581\u0120\u0109-\u010d]")),
)
"""Where a text may be cut, and the tokens that would cross such a cut. Vocabularies name a space U+2581 or (by bytes) U+0120."""
_CHARACTERS = 6
"""Characters of the first beginning for each token of the limit: more than a token of natural text has."""
_GROWTH = 8
_WINDOW = 4096
"""Characters in which the end of a beginning is searched."""
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "Split", "Punctuation"}
"""Pre-tokenizers that drop no character, unless their behaviour is "Removed"."""
_facts: WeakKeyDictionary[Any, _Facts] = WeakKeyDictionary()


TOKENIZING_BYTES = 288
"""Memory that tokenizing takes for each byte of a text, where each character or word is a token."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a text that is about to be tokenized."""

    most: int | None = None
    """Tokens that the caller takes."""
    reserve: Callable[[int], None] = lambda needed: None
    """Called with the bytes that the work takes; raises to refuse it."""

    def check(self, tokenizer: Any, text: str) -> None:
        """Raise ContextLengthError for a text that certainly has more than `most` tokens, and what `reserve` raises."""
        if self.most is not None and tokenizer is not None and (count := lower_bound(tokenizer, text, self.most)):
            problem = f"the prompt has at least {count} tokens, and the model's context is {self.most + 1}"
            raise ContextLengthError(problem)
        self.reserve(TOKENIZING_BYTES * len(text.encode("utf-8", "replace")))


def lower_bound(tokenizer: Any, text: str, most: int) -> int:
    """Return a number above `most` that the text's tokens reach for certain, or 0 if no bound proves it.

    Special tokens that the tokenizer adds are not counted.
    """
    if len(text) <= _CHARACTERS * most:
        return 0
    facts = _of(tokenizer)
    if facts.longest is not None and len(text) > most * facts.longest // 4:
        normalizer = tokenizer.backend_tokenizer.normalizer
        data = (text if normalizer is None else normalizer.normalize_str(text)).encode("utf-8", "replace")
        if (bound := -(-len(data.translate(None, facts.missing)) // facts.longest)) > most:
            return bound
    return len(beginning(tokenizer, text, most))


def beginning(tokenizer: Any, text: str, most: int) -> list[int]:
    """Return the ids of a beginning of more than `most` tokens, with which the whole text's ids begin; empty if none is found."""
    cuts, size = _of(tokenizer).cuts, max(1, _CHARACTERS * most)
    while cuts and size <= len(text) // 2:
        if end := max(_last(cut, text, size) for cut in cuts):
            ids: list[int] = tokenizer(text[:end], add_special_tokens=False, verbose=False).input_ids
            if len(ids) > most:
                return ids
        size *= _GROWTH
    return []


def first_tokens(tokenizer: Any, text: str, most: int, limits: Limits) -> list[int]:
    """Return at most `most` ids of a beginning of a text; the last ones may differ from the whole text's. Raises as `reserve`."""
    size = _CHARACTERS * most
    while True:
        part = text[:size]
        limits.check(None, part)
        ids: list[int] = tokenizer(part, add_special_tokens=False, verbose=False).input_ids
        if len(ids) > most or size >= len(text):
            return ids[:most]
        size *= _GROWTH


def _last(cut: re.Pattern[str], text: str, size: int) -> int:
    """Return the last cut before `size`, 0 if none is near."""
    return max((found.end() for found in cut.finditer(text, max(0, size - _WINDOW), size)), default=0)


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts about a vocabulary."""

    cuts: tuple[re.Pattern[str], ...] = ()
    """Where a text may be cut: no token crosses it."""
    longest: int | None = None
    """Bytes of the longest token; None if a token may stand for a text of any length."""
    missing: bytes = b""
    """Bytes that have no token: they may be dropped."""


def _of(tokenizer: Any) -> _Facts:
    try:
        found = _facts.get(tokenizer)
        if found is None:
            found = _facts[tokenizer] = _read(tokenizer)
    except TypeError:  # not hashable, or without weak references
        return _Facts()
    return found


def _read(tokenizer: Any) -> _Facts:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "model", None)).__name__ not in ("BPE", "Unigram"):
        return _Facts()
    names = set(tokenizer.get_vocab())
    cuts = tuple(cut for cut, crossing in _CUTS if not any(map(crossing.search, names)))
    added = tokenizer.added_tokens_decoder.values()
    parts = list(_parts(backend.pre_tokenizer))
    by_bytes = any(one["type"] == "ByteLevel" for one in parts)
    keeps = (
        type(backend.model).__name__ == "BPE"
        and (by_bytes or (backend.model.byte_fallback and names.issuperset(f"<0x{byte:02X}>" for byte in range(256))))
        and all(one["type"] in _KEEPING and one.get("behavior") != "Removed" for one in parts)
        and all(one["type"] != "Strip" for one in _parts(backend.normalizer))
        and not any(one.lstrip or one.rstrip for one in added)
    )
    if not keeps:
        return _Facts(cuts)
    longest = max(len(one) if by_bytes else len(one.encode("utf-8", "replace")) for one in names)
    longest = max([longest, *(len(one.content.encode("utf-8", "replace")) for one in added)])
    missing = bytes(byte for name, byte in NAMED_BYTES.items() if name not in names) if by_bytes else b""
    return _Facts(cuts, longest, missing)


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the descriptions of a normalizer or pre-tokenizer and, of a sequence, those of its parts."""
    pending = [] if component is None else [json.loads(component.__getstate__())]
    while pending:
        one = pending.pop()
        if one["type"] == "Sequence":
            pending += one.get("normalizers", []) + one.get("pretokenizers", [])
        else:
            yield one
