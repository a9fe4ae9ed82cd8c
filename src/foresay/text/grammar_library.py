"""Calls to the grammar library: a tokenizer's vocabulary in its form, and a schema or grammar compiled for it.

Owns the limits that the library enforces itself. Imports neither torch nor transformers, so that the processes that compile
schemas on trial start fast.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from foresay.errors import ConfigError

MAX_LEXER_STATES = 100_000
"""States that the automaton of one schema may have, about 1 kB each."""
_STYLE: Any = {"whitespace_pattern": r"[ \n\t]{0,8}"}
"""White space allowed between parts: enough for usual formatting, too little for an output of white space alone."""
_MAX_MESSAGE = 300


def vocabulary(tokenizer_json: str, vocab_size: int, eos: Sequence[int]) -> Any:
    """Build the library's tokenizer from the text of tokenizer.json, which takes up to a second.

    Raises ConfigError for a tokenizer that the library cannot use, and if the library is not installed.
    """
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise ConfigError("needs llguidance: pip install 'foresay[server]'", param="structured output") from None
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos) or None)
    except ValueError as error:
        raise ConfigError(f"cannot be used for structured output: {one_line(error)}", param="tokenizer") from None


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the part of a grammar in Lark's syntax that matches a schema."""
    return "%json " + json.dumps({**schema, "x-guidance": _STYLE})


def rule_of(source: Mapping[str, Any] | str) -> str:
    """Return the part of a grammar in Lark's syntax that matches a schema, or another grammar in Lark's syntax."""
    return f"%lark {{\n{source}\n}}" if isinstance(source, str) else json_rule(source)


def lark_of_gbnf(text: str) -> str:
    """Return a grammar of llama.cpp (GBNF) in Lark's syntax, as the library reads it. Raises what its reader raises."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    return str(gbnf_to_lark(text))


def gbnf_rules(text: str) -> Mapping[str, Any]:
    """Return the rules of a grammar of llama.cpp by name, as the library reads them. Raises what its reader raises."""
    from llguidance.gbnf_to_lark import GrammarParser, resolve

    rules = GrammarParser().parse(text)
    resolve(rules)
    return rules


def bytes_alone() -> Any:
    """Return a vocabulary of single bytes."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def compiled(tokenizer: Any, text: str, *, is_lark: bool = False) -> Any:
    """Compile a schema and compute its first mask. tokenizer: from `vocabulary`. text: JSON, or a grammar in Lark's syntax.

    Neither the library's limits nor ours bound time and memory here; see grammar_process.py.
    Raises ConfigError for a schema that the library does not support, and for one that matches no text.
    """
    from llguidance import LLMatcher, LLParserLimits

    noun = "grammar" if is_lark else "schema"
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    try:
        make = LLMatcher.grammar_from_lark if is_lark else partial(LLMatcher.grammar_from_json_schema, defaults=_STYLE)
        grammar = make(text)
        matcher = LLMatcher(tokenizer, grammar, limits=limits)
    except ValueError as error:
        raise ConfigError(f"is not supported: {one_line(error)}", param=noun) from None
    if matcher.is_error():
        raise ConfigError(f"is not supported: {one_line(matcher.get_error())}", param=noun)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ConfigError(f"matches no text ({one_line(matcher.get_error())})", param=noun)
    return matcher


def one_line(error: object) -> str:
    """Return the library's message on one line, without its marker for developers, and truncated if it quotes a long schema."""
    text = " ".join(str(error).replace("<non-verbose/>", "").split())
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]} ..."
