"""The terminals of a grammar for the texts of a format: marks that are tokens of their own are tokens, the rest is text.

Owns which of a tokenizer's tokens are marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_MARK = re.compile(r"<[^<>]+>")
"""Tokens that the grammar library takes for marks even if they are not special. Other tokens are text: it cannot take back one of
these that a grammar names by its id."""


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the special tokens of a tokenizer; none for a tokenizer of another library."""
    return {index: one.content for index, one in _added(tokenizer).items() if one.special}


def special_in(tokenizer: Any, texts: Iterable[str]) -> tuple[int, ...]:
    """Return the special tokens that occur in any of the texts."""
    whole = "\n".join(texts)
    return tuple(sorted(index for index, mark in special_tokens(tokenizer).items() if mark in whole))


def _added(tokenizer: Any) -> Mapping[int, Any]:
    return getattr(tokenizer, "added_tokens_decoder", None) or {}


class Terminals:
    """The terminals of texts, for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._marks = {
            one.content: index
            for index, one in _added(tokenizer).items()
            if one.content and (one.special or _MARK.fullmatch(one.content))
        }

    def __call__(self, text: str) -> str:
        """Return the terminals of a text, in Lark's syntax."""
        marks = sorted((one for one in self._marks if one in text), key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
        return " ".join(f"<[{self._marks[one]}]>" if i % 2 else json.dumps(one) for i, one in enumerate(parts) if one)

    def up_to(self, rule: str, ending: str) -> str:
        """Return the rule of any text up to an ending."""
        mark = min((at for one in self._marks if (at := ending.find(one)) >= 0), default=None)
        if mark is not None:  # the text before it is a part of the regular expression, which takes as much as it can
            before = re.escape(ending[:mark]).replace("\\\n", "\\n").replace("/", "\\/")
            return f"{rule}: /(.|\\n)*{before}/ {self(ending[mark:])}"
        return f"{rule}[suffix={json.dumps(ending)}]: /(.|\\n)*/"
