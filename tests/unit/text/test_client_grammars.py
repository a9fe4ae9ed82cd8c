"""Regular expressions, choices and grammars: which texts they match, and what is refused."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import pytest
import torch
from llguidance.gbnf_to_lark import gbnf_to_lark

from foresay.errors import ConfigError
from foresay.text import client_grammars
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
    (of_regex(r"\d[\d.]+[^\D]\D"), ["12.3x", "1.5x"], ["٣2.3x", "1٣3x", "12.٣x", "12.34"]),
    (of_regex(r"[]\d]\\d\[\d\]"), ["]\\d[7]", "5\\d[7]"], ["٣\\d[7]", "5\\d[٣]", "57[7]"]),
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


@cache
def compiled(source: str) -> tuple[Any, Grammar]:
    tokenizer = cached_tokenizer()
    return tokenizer, Grammar(source, tokenizer, len(tokenizer), [0])


@cache
def cached_tokenizer() -> Any:
    return tiny.tokenizer()


def matches(source: str, text: str) -> bool:
    """Whether a grammar allows each token of a text, and its end."""
    tokenizer, grammar = compiled(source)
    mask, ids = grammar.mask_after(0), tokenizer(text).input_ids
    scores = torch.zeros(1, len(tokenizer))
    return all(bool(mask(torch.tensor([ids[:i]]), scores)[0, one] == 0) for i, one in enumerate([*ids, 0]))


@pytest.mark.parametrize(("source", "texts", "others"), MATCHES)
def test_texts_that_match_alone_and_within_another_grammar(source: str, texts: list[str], others: list[str]) -> None:
    inner = f'start: "<" answer\nanswer: {rule_of(source)}\n'
    for text in texts:
        assert matches(source, text) and matches(inner, f"<{text}"), text
    for text in others:
        assert not matches(source, text) and not matches(inner, f"<{text}"), text


ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
"""A grammar of llama.cpp's examples: white space may contain the line's end, which follows it."""
LOST: list[tuple[str, list[str], list[str]]] = [
    (ARITHMETIC, ["a=1\n", "(a +12) *b = x1 \n", "a=b\n\nc=2\n"], ["a=1", "a=(\n"]),
    ('root ::= word root | "z"\nword ::= [a-z]+', ["az", "zz", "azbz"], ["z1", ""]),
    ('root ::= x | "(" root ")"\nx ::= "a" y | "ab"\ny ::= "bc" | "[" root "]"', ["abc", "(ab)", "((abc))"], ["abb"]),
    ('root ::= "x" root | ("a" | "ab") "b"', ["ab", "abb", "xxabb"], ["a"]),
    ('root ::= s "a" s | "<" root ">"\ns ::= [ ]{0,3} | " a"', ["a", "  a ", " aa", " a a"], ["b", "    a"]),
]
"""Grammars with recursion, whose texts a lexer of the rules without it would lose."""
KEPT: list[str] = [
    JSON,
    'root ::= "(" root ")" | word\nword ::= [a-c]{2,4} "!"',
    'root ::= "(" root ")" | "x" # "lone\n',
    'root ::= item ("," item)*\nitem ::= [0-9]+ | "[" root "]"',
    'root ::= "(" root ")" | word\nword ::= "<" [^>]{0,2000} ">"',
]
"""Grammars with recursion whose terminals lose nothing."""


@pytest.mark.parametrize(("text", "texts", "others"), LOST)
def test_no_text_of_a_grammar_with_recursion_is_lost(text: str, texts: list[str], others: list[str]) -> None:
    """With the control that terminals alone lose one."""
    source = of_grammar(text)
    inner = f'start: "<" answer ">"\nanswer: {rule_of(source)}\n'
    for one in texts:
        assert matches(source, one) and matches(inner, f"<{one}>"), one
    for one in others:
        assert not matches(source, one) and not matches(inner, f"<{one}>"), one
    fast = client_grammars.lark_of_gbnf(client_grammars._Gbnf(text).source)
    assert not all(matches(fast, one) for one in texts)


@pytest.mark.parametrize("text", KEPT)
def test_terminals_stay_where_they_lose_nothing(text: str) -> None:
    assert of_grammar(text) == client_grammars.lark_of_gbnf(client_grammars._Gbnf(text).source)


def test_only_terminals_that_lose_texts_are_read_by_characters() -> None:
    """A string stays a terminal next to numbers that end in white space: masks of characters take a thousand times longer."""
    text = 'root ::= item ("\\n" root)?\nitem ::= string | num\nstring ::= "\\"" [^"]* "\\""\nnum ::= [0-9]+ [ \\n]*'
    source = of_grammar(text)
    assert all(matches(source, one) for one in ('1 \n\n"a b"', '"\n"\n12'))
    lines = [line for line in source.splitlines() if ":" in line]
    assert any(line.startswith("r3:") for line in lines) and any(line.startswith("R2:") for line in lines), source


class RandomGrammar:
    """A small grammar over three letters, and whether it matches a text, by its definition."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.rules = {name: self._alternatives(name, 2) for name in ("root", "x", "y", "z")}

    def _alternatives(self, name: str, depth: int) -> Any:
        return ("|", [self._sequence(name, depth) for _ in range(self.dice.randrange(1, 4))])

    def _sequence(self, name: str, depth: int) -> Any:
        parts: list[Any] = []
        for _ in range(self.dice.randrange(1, 4)):
            one = self._part(name, depth, any(part[0] == "text" for part in parts))
            low, high = self.dice.choice([(1, 1)] * 4 + [(0, 1), (0, 3), (1, 3), (2, 2)])
            parts.append(one if (low, high) == (1, 1) or one[0] in ("rule", "|") else ("{", one, low, high))
        return (",", parts)

    def _part(self, name: str, depth: int, is_after_text: bool) -> Any:
        """A part; a rule may be named after a text only, so that no rule begins with itself, or a later one."""
        later = [one for one in ("x", "y", "z") if one > name or name == "root"]
        kind = self.dice.random()
        if kind < 0.35 and (is_after_text or later):
            return ("rule", self.dice.choice(["root", "x", "y", "z"] if is_after_text else later))
        if kind < 0.45 and depth:
            return self._alternatives(name, depth - 1)
        if kind < 0.7:
            return ("set", self.dice.choice(["ab", "bc", "abc"]))
        return ("text", self.dice.choice(["a", "b", "ab", "ba", "c", "abc"]))

    def source(self) -> str:
        return "\n".join(f"{name} ::= {self._written(rule)[2:-2]}" for name, rule in self.rules.items())

    def _written(self, node: Any) -> str:
        match node:
            case ("|", nodes):
                return f"( {' | '.join(map(self._written, nodes))} )"
            case (",", nodes):
                return " ".join(map(self._written, nodes))
            case ("{", one, low, high):
                return f"{self._written(one)}{{{low},{high}}}"
            case ("set", letters):
                return f"[{letters}]"
            case ("text", letters):
                return f'"{letters}"'
        return str(node[1])

    def matches(self, text: str) -> bool:
        return len(text) in self._ends(self.rules["root"], text, 0)

    def _ends(self, node: Any, text: str, at: int) -> set[int]:
        match node:
            case ("|", nodes):
                return {end for one in nodes for end in self._ends(one, text, at)}
            case (",", nodes):
                ends = {at}
                for one in nodes:
                    ends = {end for start in ends for end in self._ends(one, text, start)}
                return ends
            case ("{", one, low, high):
                ends, found = {at}, {at} if not low else set()
                for count in range(1, high + 1):
                    ends = {end for start in ends for end in self._ends(one, text, start)}
                    found |= ends if count >= low else set()
                return found
            case ("set", letters):
                return {at + 1} if text[at : at + 1] and text[at] in letters else set()
            case ("text", letters):
                return {at + len(letters)} if text.startswith(letters, at) else set()
        return self._ends(self.rules[node[1]], text, at)


TEXTS = ["".join(one) for count in range(5) for one in itertools.product("abc", repeat=count)]


def test_random_grammars_match_what_their_definition_matches() -> None:
    """With the control that the library's reader alone loses texts of some, and that both forms occur."""
    lost, forms = 0, set()
    for seed in range(30):
        grammar = RandomGrammar(seed)
        source, text = of_grammar(grammar.source()), grammar.source()
        fast = client_grammars.lark_of_gbnf(client_grammars._Gbnf(text).source)
        wanted = {one for one in TEXTS if grammar.matches(one)}
        if not wanted:  # the library refuses what matches no text, and there are texts of five letters and more
            continue
        assert {one for one in TEXTS if matches(source, one)} == wanted, text
        forms.add(source == fast)
        lost += source != fast and any(not matches(fast, one) for one in wanted)
    assert lost > 3 and forms == {True, False}


def test_a_grammar_that_is_too_large_to_be_examined_keeps_its_texts() -> None:
    names = [f"w{i}" for i in range(300)]
    rules = [f'{name} ::= "{i:03d}" [a-z]* | "{i:03d}x" root' for i, name in enumerate(names)]
    source = of_grammar("\n".join([f"root ::= {' | '.join(names)}", *rules]))
    assert matches(source, "007x000x008") and not matches(source, "007x009!")
    many = "\n".join(f'w{i} ::= "{i}-" [{chr(256 + i)}] "{i}+"' for i in range(400))
    with pytest.raises(ConfigError, match="different texts, characters and sets"):
        of_grammar('root ::= "(" root ")" | ' + " | ".join(f"w{i}" for i in range(400)) + "\n" + many)


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


@pytest.mark.parametrize("last", ["", "b", '" | "b'])
def test_rules_that_double_are_read_once(last: str) -> None:
    """Each of them names the next one twice: read as a tree, the work is 2 to the power of 60."""
    rules = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(1, 60))
    assert "start" in of_grammar(f'root ::= "a" root | r1\n{rules}\nr60 ::= "{last}"')


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
