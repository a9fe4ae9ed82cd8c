"""Marks of formats as tokens, and texts that a grammar of calls accepts."""

from __future__ import annotations

import re
from typing import Any

from foresay.text.grammar import Grammar


def marks_in(text: str) -> list[str]:
    """The marks in a text that a family's tokenizer may have as tokens."""
    return sorted(set(re.findall(r"</?[\w:]+>|<[|\uff5c][^<>]+?>|<[^<>|]+[|]>|\[/?[A-Z_]+\]", text)))


def accepts(grammar: str, text: str, one: Any) -> bool:
    """True if an output may be exactly this text."""
    compiled = Grammar(grammar, one, len(one), [0])
    ids = one(text).input_ids
    matcher = compiled.mask_after(0)._matcher
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
