"""Chat prompts in which only the template's own control tokens are control tokens: one in a message is text, and opens no turn.

The template is rendered with random names in place of its control tokens. What looks like a control token afterwards came from
a message, wherever and however the template wrote it, and the text is encoded by a copy of the tokenizer to which only the
random names are control tokens. Knows no message format.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from functools import cached_property
from string import ascii_letters, digits, whitespace
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

from foresay.errors import PromptError, shown
from foresay.text.reasoning import REASONING

logger = logging.getLogger("foresay")

_PRIVATE = chr(0xF1000)
"""First and last character of a random name."""
_LOGIC = frozenset(mark for one in REASONING if not one.after for mark in (one.begin, one.end))
"""Marks of reasoning, which templates search in messages; those that open no turn."""
_WORD = re.compile(r"[\w .-]*")
"""Words of a template's own program: names of variables, and texts that it compares with roles and variables."""
_NAMES = (
    "role content reasoning_content tool_calls tool_call_id id type text function name description parameters arguments "
    "properties required tools title doc_id"
)
_FIELDS = frozenset(_NAMES.split())
"""Names of the fields of messages, tools and documents."""
_LETTERS = 0xAC00
"""First of the letters in place of a chat's, of a script that no template searches for."""
_known: WeakKeyDictionary[Any, ControlTokens] = WeakKeyDictionary()


def control_tokens_of(tokenizer: Any) -> ControlTokens | None:
    """Return the control tokens of a tokenizer; None if it is not one of the library `tokenizers`."""
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        return None
    found = _known.get(tokenizer)
    if found is None or found.size != len(tokenizer):
        found = _known[tokenizer] = ControlTokens(tokenizer)
    return found


class ControlTokens:
    """The control tokens of a tokenizer with their random names, and a copy of the tokenizer that knows only these names.

    Marks such as <|im_start|> count whether or not the tokenizer calls them special.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = [one for one in tokenizer.added_tokens_decoder.values() if one.content and not one.single_word]
        names = {one.content for one in added if one.special or re.fullmatch(r"<\|.+\|>", one.content)} - _LOGIC
        names = {name for name in names if not _WORD.fullmatch(name)}  # a word is a part of the template's program
        secret = f"{_PRIVATE}{secrets.token_hex(16)}"
        self._private = {name: f"{secret}.{i}{_PRIVATE}" for i, name in enumerate(sorted(names, key=len, reverse=True))}
        self._shown = {private: name for name, private in self._private.items()}
        self._backend, self.size = tokenizer.backend_tokenizer, len(tokenizer)
        self._normalized = any(one.normalized for one in added if one.content in names)
        self._begins = {name[:2] for name in names}
        used = sorted({*ascii_letters, *digits, *"".join(names)} - {*whitespace})
        self._others = str.maketrans({one: chr(_LETTERS + i) for i, one in enumerate(used)})
        self._was_refused = False
        self._own = re.compile("|".join(map(re.escape, self._private)) or r"(?!)")
        self._hidden = re.compile(f"{secret}\\.\\d+{_PRIVATE}")

    def hidden(self, text: str) -> str:
        """Return a text with random names in place of control tokens."""
        return self._own.sub(lambda found: self._private[found.group()], text)

    def shown(self, text: str) -> str:
        """Return a text with the control tokens' own names."""
        return self._hidden.sub(lambda found: self._shown.get(found.group(), found.group()), text)

    def are_in(self, text: str) -> bool:
        """True if a rendered text may contain a control token that the template did not write."""
        return self._normalized or any(begin in text for begin in self._begins)

    def encode(self, text: str, inputs: tuple[Any, Any], render: Callable[[Any, Any], str]) -> list[int]:
        """Return the token ids of a rendered text, in which only random names are control tokens.

        inputs: messages, and variables with tools. render: returns the text of others. Raises PromptError for a message with a
        control token that this template composes of parts, such as "<|" and a role: nothing separates the two.
        """
        tokenizer, original = self._copy
        text = self._composed(text, inputs, render)
        # `encode` keeps the interpreter's lock
        (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return [original.get(one, one) for one in encoded.ids]

    def _composed(self, text: str, inputs: tuple[Any, Any], render: Callable[[Any, Any], str]) -> str:
        """Return the text with random names for the control tokens that the template composes."""
        found = [name for name in self._private if name in text]
        try:
            plain = render(*(_disguised(one, self._others) for one in inputs)) if found else ""
        except Exception as error:  # a template is a program, and may refuse other texts than these
            if not self._was_refused:
                marks = ", ".join(found)
                logger.warning(
                    "the chat template refused placeholders (%s): if it composes %s, they are text", shown(error), marks
                )
            self._was_refused = True
            return text
        for name in found:
            if count := plain.count(name):
                if text.count(name) != count:
                    problem = f"a message contains the control token {name!r}; this chat template does not permit it"
                    raise PromptError(problem, param="messages", value=name)
                text = text.replace(name, self._private[name])
        return text

    @cached_property
    def _copy(self) -> tuple[Any, dict[int, int]]:
        """The copy, and the tokenizer's ids of the added tokens whose ids differ."""
        backend = json.loads(self._backend.to_str())
        _rename(backend, self._private)
        copy = type(self._backend).from_str(json.dumps(backend))
        copy.no_padding()
        copy.no_truncation()
        ids = {copy.token_to_id(one["content"]): one["id"] for one in backend["added_tokens"]}
        return copy, {own: index for own, index in ids.items() if own != index}


def _rename(backend: dict[str, Any], private: Mapping[str, str]) -> None:
    """Rename tokens in a tokenizer.json, and drop the merges that could make the old names."""
    for one in backend["added_tokens"]:
        if one["content"] in private:
            one.update(content=private[one["content"]], normalized=False)
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


def _disguised(values: Any, others: Mapping[int, str], key: str = "") -> Any:
    """Return messages, tools or variables with other letters in the texts and names that a client chooses.

    Lengths, and which texts and names are equal, stay: a template may refuse an id of another length, or look a name up. Knows
    the words that a template compares, such as roles. others: character -> another, also for all characters of control tokens.
    """
    if isinstance(values, str):
        return values if key not in _FIELDS - {"role", "type"} and _WORD.fullmatch(values) else values.translate(others)
    if isinstance(values, Mapping):
        own = frozenset() if key in ("properties", "arguments") else _FIELDS
        out = {}
        for name, one in values.items():
            kept = name in own or (not key and _WORD.fullmatch(name))
            out[name if kept else str(name).translate(others)] = _disguised(one, others, name if kept else "name")
        return out
    return [_disguised(one, others, key) for one in values] if isinstance(values, list | tuple) else values
