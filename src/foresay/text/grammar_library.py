"""The grammar library's part: a tokenizer's vocabulary as it needs it, and a schema compiled for that.

Owns the limits that the library enforces itself. Imports neither torch nor transformers, so that the processes that try schemas
start fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foresay.errors import ConfigError

MAX_LEXER_STATES = 100_000
"""States that the automaton of one schema may have, about 1 kB each."""
_STYLE: Any = {"whitespace_pattern": r"[ \n\t]{0,8}"}
"""Blanks between parts: as many as people write, and no output of blanks alone."""
_MAX_MESSAGE = 300


def vocabulary(tokenizer_json: str, vocab_size: int, eos: Sequence[int]) -> Any:
    """The library's tokenizer, made from the text of a tokenizer.json; takes up to a second.

    Raises ConfigError for a tokenizer that it cannot use, and without the library.
    """
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise ConfigError("structured output needs llguidance: pip install 'foresay[server]'") from None
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos) or None)
    except ValueError as error:
        raise ConfigError(f"this tokenizer cannot be used for structured output: {one_line(error)}") from None


def compiled(known: Any, schema: str) -> Any:
    """A matcher for a schema, its first mask computed. known: from `vocabulary`. schema: JSON.

    Neither the library's limits nor ours bound the time and memory that this takes; see grammar_child.py.
    Raises ConfigError for a schema that the library does not understand, and for one that no text fits.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    try:
        matcher = LLMatcher(known, LLMatcher.grammar_from_json_schema(schema, defaults=_STYLE), limits=limits)
    except ValueError as error:
        raise ConfigError(f"the schema is not understood: {one_line(error)}") from None
    if matcher.is_error():
        raise ConfigError(f"the schema is not understood: {one_line(matcher.get_error())}")
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ConfigError(f"no text fits the schema ({one_line(matcher.get_error())})")
    return matcher


def one_line(error: object) -> str:
    """The library's message on one line, without what it adds for its own developers, and cut where it quotes a long schema."""
    text = " ".join(str(error).replace("<non-verbose/>", "").split())
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]} ..."
