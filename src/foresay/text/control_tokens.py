"""Texts that users insert into a chat template: a control token in them stays text, and opens no turn.

Texts are marked before the template inserts them, which separates control tokens of the template from those of a message. The
rendered text is encoded by a copy of the tokenizer whose control tokens have random names. Owns the marks and the copy; knows no
message format.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from foresay.errors import PromptError

_MARKS = range(0xF0000, 0xF1000)
"""Private characters of Unicode, one of which is the mark."""
_NAME = chr(0xF1000)
_known: WeakKeyDictionary[Any, _ControlTokens] = WeakKeyDictionary()


def marked(values: Any, tokenizer: Any) -> tuple[Any, str] | None:
    """Return messages, tools or other plain data with a mark inside every control token of its texts, and the mark.

    None if no text contains a control token or could form one with what follows it. Raises PromptError for a tokenizer that
    cannot encode a control token as text.
    """
    tokens, texts = _of(tokenizer), list(_texts(values))
    first = next((found for text in texts if (found := tokens.first_in(text)) is not None), None)
    if first is None:
        return None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        kind = type(tokenizer).__name__
        raise PromptError(
            f"a message contains {first!r} of a control token, which this tokenizer ({kind}) cannot encode as text; remove it"
        )
    every = "".join(texts)
    mark = next(chr(code) for code in _MARKS if chr(code) not in every)
    return _mapped(values, lambda text: tokens.marked(text, mark)), mark


def encode_marked(text: str, mark: str, tokenizer: Any) -> list[int]:
    """Return the token ids of a rendered template, in which control tokens with a mark are text."""
    return _of(tokenizer).encode(text, mark)


def _of(tokenizer: Any) -> _ControlTokens:
    found = _known.get(tokenizer)
    if found is None:
        found = _known[tokenizer] = _ControlTokens(tokenizer)
    return found


class _ControlTokens:
    """The control tokens of a tokenizer, and a copy of it to which they are private names."""

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self.names = tuple(sorted({one.content for one in added if one.special and one.content}, key=len, reverse=True))
        self._begins = {name[:2] for name in self.names}
        self._prefixes = {name[:size] for name in self.names for size in range(1, len(name))}
        self._longest = max(map(len, self.names), default=0)

    def first_in(self, text: str) -> str | None:
        """Return a control token in a text, or the beginning of one at its end."""
        ends: Iterator[str] = (text[-size:] for size in range(1, self._longest))
        inside = self.names if any(begin in text for begin in self._begins) else ()
        found = [name for name in inside if name in text] or [end for end in ends if end in self._prefixes]
        return found[0] if found else None

    def marked(self, text: str, mark: str) -> str:
        """Return a text with marks inside its control tokens, and after the beginning of one at its end."""
        cuts = {found.start() + 1 for name in self.names for found in re.finditer(f"(?={re.escape(name)})", text)}
        if any(text[-size:] in self._prefixes for size in range(1, self._longest)):
            cuts.add(len(text))
        ends = [0, *sorted(cuts), len(text)]
        return mark.join(text[begin:end] for begin, end in pairwise(ends))

    def encode(self, text: str, mark: str) -> list[int]:
        """See encode_marked."""
        tokenizer, private, original = self._copy
        pattern = f"(?:{'|'.join(map(re.escape, self.names))})(?!{mark})"
        text = re.sub(pattern, lambda found: private[found.group()], text)
        text = text.replace(mark, "").replace(json.dumps(mark)[1:-1], "")  # a template may write JSON in ASCII
        return [original.get(one, one) for one in tokenizer.encode(text, add_special_tokens=False).ids]

    @cached_property
    def _copy(self) -> tuple[Any, dict[str, str], dict[int, int]]:
        """The copy, its names of the control tokens, and the tokenizer's ids of those whose ids differ."""
        backend = json.loads(self._backend.to_str())
        secret = f"{_NAME}{secrets.token_hex(16)}"
        private = {name: f"{secret}.{i}{_NAME}" for i, name in enumerate(self.names)}
        _rename(backend, private)
        copy = type(self._backend).from_str(json.dumps(backend))
        copy.no_padding()
        copy.no_truncation()
        ids = {copy.token_to_id(one["content"]): one["id"] for one in backend["added_tokens"]}
        return copy, private, {own: index for own, index in ids.items() if own != index}


def _rename(backend: dict[str, Any], private: Mapping[str, str]) -> None:
    """Rename tokens in a tokenizer.json, and drop the merges that could make the old names."""
    for one in backend["added_tokens"]:
        one["content"] = private.get(one["content"], one["content"])
    model = backend["model"]
    if model.get("unk_token") in private:
        model["unk_token"] = private[model["unk_token"]]
    vocab = model["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = [[private.get(piece, piece), *rest] for piece, *rest in vocab]
        return
    inside = private.keys() & vocab.keys()
    for name in inside:
        vocab[private[name]] = vocab.pop(name)
    if inside and "merges" in model:
        pairs = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
        model["merges"] = [list(one) for one in pairs if not inside & {"".join(one), *one}]


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for one in values.values():
            yield from _texts(one)
    elif isinstance(values, list | tuple):
        for one in values:
            yield from _texts(one)


def _mapped(values: Any, change: Callable[[str], str]) -> Any:
    if isinstance(values, str):
        return change(values)
    if isinstance(values, Mapping):
        return {key: _mapped(one, change) for key, one in values.items()}
    return [_mapped(one, change) for one in values] if isinstance(values, list | tuple) else values
