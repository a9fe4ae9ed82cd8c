"""Regular expressions, choices and grammars: which texts they match, and what is refused."""

from __future__ import annotations

import pytest
import torch
from llguidance.gbnf_to_lark import gbnf_to_lark

from foresay.errors import ConfigError
from foresay.text.client_grammars import of_choices, of_grammar, of_regex
from foresay.text.grammar import Grammar
from foresay.text.grammar_library import rule_of
from helpers import tiny

JSON = r"""
root   ::= object
value  ::= object | array | string | ("true" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::=
  "[" ws ( # values
            value ("," ws value)*
  )? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
MATCHES: list[tuple[str, list[str], list[str]]] = [
    (of_regex(r"^\d{3}-\d{4}$"), ["555-1234"], ["555-123", "^555-1234$"]),
    (of_regex("a/b|c\\/d"), ["a/b", "c/d"], ["a/bc/d"]),
    (of_regex("a\nb\\\\"), ["a\nb\\"], ["anb"]),
    (of_choices(["a", "ab", 'é"\n', ""]), ["a", "ab", 'é"\n', ""], ["b", "aa"]),
    (of_grammar('root ::= "a"{2,3}'), ["aa", "aaa"], ["a", "aaaa"]),
    (of_grammar('root ::= word "z"\nword ::= [a-z]*'), ["z", "abz", "zz"], ["ab"]),
    (of_grammar('root ::= ("a" | "ab") "bc"'), ["abc", "abbc"], ["bc"]),
    (of_grammar('root ::= "(" root ")" | "x"'), ["x", "((x))"], ["((x)", "()"]),
    (of_grammar('root ::= "\\x41\\u00e9\\U0001F600\\"\\[\\n"'), ['Aé😀"[\n'], ["A"]),
    (of_grammar("root ::= [a&&b~/^]+"), ["a&b~/^"], ["", "c"]),
    (of_grammar("root ::= [^\\u00e9-\\u00ff\\]]"), ["a", "\n", "["], ["é", "]"]),
    (of_grammar("root ::= [+--]+ [x-]"), ["+,-x", "--"], ["+.x", "xx"]),
    (of_grammar("root ::= ."), ["\n", "é"], ["", "ab"]),
    (of_grammar('start ::= "a"\nroot ::= start fooBar foo-bar r0 # "\nfooBar ::= "b"\nfoo-bar ::= "c"\nr0 ::= ""'),
     ["abc"], ["ab"]),
    (of_grammar(JSON), ['{"a\\n": [true, {"é": {}}]}', "{\n\t}"], ['{"a" true}', '["a"]']),
    (of_grammar('%llguidance {}\n?start: "<a>" word // <b>\n# <c>\nword: /<[a-z]>/ | "%json" [word]\n%ignore / /'),
     ["<a> %json <b>"], ["<a>"]),
    (of_grammar("%import common.INT\nstart: INT"), ["12"], ["x"]),
]  # fmt: skip


def matches(source: str, text: str) -> bool:
    """Whether a grammar allows each token of a text, and its end."""
    tokenizer = tiny.tokenizer()
    mask, ids = Grammar(source, tokenizer, len(tokenizer), [0]).mask_after(0), tokenizer(text).input_ids
    scores = torch.zeros(1, len(tokenizer))
    return all(bool(mask(torch.tensor([ids[:i]]), scores)[0, one] == 0) for i, one in enumerate([*ids, 0]))


@pytest.mark.parametrize(("source", "texts", "others"), MATCHES)
def test_texts_that_match_alone_and_within_another_grammar(source: str, texts: list[str], others: list[str]) -> None:
    inner = f'start: "<" answer\nanswer: {rule_of(source)}\n'
    for text in texts:
        assert matches(source, text) and matches(inner, f"<{text}"), text
    for text in others:
        assert not matches(source, text) and not matches(inner, f"<{text}"), text


def test_the_librarys_reader_alone_restricts_a_grammar() -> None:
    """The control: without a terminal of the whole, the longest word leaves no `z`."""
    text = 'root ::= word "z"\nword ::= [a-z]*'
    assert matches(of_grammar(text), "abz") and not matches(gbnf_to_lark(text), "abz")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ('x ::= "a"', "no rule 'root'"),
        ("root ::= other", "no rule 'other'"),
        ('root ::= "a"\nroot ::= "b"', "'root' twice"),
        ('root ::= "\\q"', r"escape '\\\\q'"),
        ('root ::= "\\ud800"', "not a character"),
        ("root ::= [^]", "no characters"),
        ('root ::= "a" %', "cannot be read"),
        ("root ::= " + "(" * 3000, "cannot be read"),
        ("\n".join(f'{f"r{i}" if i else "root"} ::= "a"' for i in range(501)), "501 rules"),
        ('root ::= "' + "a" * 70_000 + '"', "bytes"),
        ('root ::= "a', "has no end"),
        ("root ::= [a", "has no end"),
        ('root ::= "a"{2', "has no end"),
        ('start: A\nA[lazy]: "a"', r"A\[lazy\]"),
        ("start: <think>", "<think>"),
        ("start: <[3]>", "<.3.>"),
        ("start: %json {}", "%json"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "%llguidance"),
    ],
)
def test_grammars_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of_grammar(text)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "' + '\\"' * 30_000 + "\\",
        "start: " + "<" * 200_000,
        'start: "' + '\\"' * 100_000 + "<",
        "start: " + "/\\" * 99_999,
    ],
)
def test_texts_without_an_end_are_read_once(text: str) -> None:
    """The work grows with the length: with its square, each of these takes minutes."""
    with pytest.raises(ConfigError):
        Grammar(of_grammar(text), tiny.tokenizer(), 260, [0])


@pytest.mark.parametrize("pattern", ["[.*", "(?=a)a", r"(a)\1", "a$b", "a)(?:b"])
def test_expressions_that_the_library_refuses(pattern: str) -> None:
    tokenizer = tiny.tokenizer()
    with pytest.raises(ConfigError, match="the grammar is not supported"):
        Grammar(of_regex(pattern), tokenizer, len(tokenizer), [0])


def test_nothing_to_match_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        of_regex("")
    with pytest.raises(ConfigError, match="backslash"):
        of_regex("a\\\\\\")
    with pytest.raises(ConfigError, match="nothing to choose"):
        of_choices([])
