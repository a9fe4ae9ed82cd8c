"""Regular expressions, choices and grammars: which texts they match, and what is refused."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
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
from helpers.refusals import refused

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
Texts = list[str]
MATCHES: list[tuple[Callable[[Any], str], Any, Texts, Texts]] = [
    (of_regex, r"^\d{3}-\d{4}$", ["555-1234"], ["555-123", "^555-1234$"]),
    (of_regex, r"\d[\d.]+[^\D]\D", ["12.3x", "1.5x"], ["٣2.3x", "1٣3x", "12.٣x", "12.34"]),
    (of_regex, r"[]\d]\\d\[\d\]", ["]\\d[7]", "5\\d[7]"], ["٣\\d[7]", "5\\d[٣]", "57[7]"]),
    (of_regex, "a/b|c\\/d", ["a/b", "c/d"], ["a/bc/d"]),
    (of_regex, "a\nb\\\\", ["a\nb\\"], ["anb"]),
    (of_choices, ["a", "ab", 'é"\n', ""], ["a", "ab", 'é"\n', ""], ["b", "aa"]),
    (of_grammar, 'root ::= "a"{2,3}', ["aa", "aaa"], ["a", "aaaa"]),
    (of_grammar, 'root ::= word "z"\nword ::= [a-z]*', ["z", "abz", "zz"], ["ab"]),
    (of_grammar, 'root ::= ("a" | "ab") "bc"', ["abc", "abbc"], ["bc"]),
    (of_grammar, 'root ::= "(" root ")" | "x"', ["x", "((x))"], ["((x)", "()"]),
    (of_grammar, 'root ::= "\\x41\\u00e9\\U0001F600\\"\\[\\n"', ['Aé😀"[\n'], ["A"]),
    (of_grammar, "root ::= [a&&b~/^]+", ["a&b~/^"], ["", "c"]),
    (of_grammar, "root ::= [^\\u00e9-\\u00ff\\]]", ["a", "\n", "["], ["é", "]"]),
    (of_grammar, "root ::= [+--]+ [x-]", ["+,-x", "--"], ["+.x", "xx"]),
    (of_grammar, "root ::= .", ["\n", "é"], ["", "ab"]),
    (of_grammar, 'start ::= "a"\nroot ::= start fooBar foo-bar r0 # "\nfooBar ::= "b"\nfoo-bar ::= "c"\nr0 ::= ""',
     ["abc"], ["ab"]),
    (of_grammar, JSON, ['{"a\\n": [true, {"é": {}}]}', "{\n\t}"], ['{"a" true}', '["a"]']),
    (of_grammar, '%llguidance {}\n?start: "<a>" word // <b>\n# <c>\nword: /<[a-z]>/ | "%json" [word]\n%ignore / /',
     ["<a> %json <b>"], ["<a>"]),
    (of_grammar, "%import common.INT\nstart: INT", ["12"], ["x"]),
]  # fmt: skip


ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
"""A grammar of llama.cpp's examples: white space may contain the line's end, which follows it."""
LOST: list[tuple[str, Texts, Texts]] = [
    (ARITHMETIC, ["a=1\n", "(a +12) *b = x1 \n", "a=b\n\nc=2\n"], ["a=1", "a=(\n"]),
    ('root ::= word root | "z"\nword ::= [a-z]+', ["az", "zz", "azbz"], ["z1", ""]),
    ('root ::= x | "(" root ")"\nx ::= "a" y | "ab"\ny ::= "bc" | "[" root "]"', ["abc", "(ab)", "((abc))"], ["abb"]),
    ('root ::= "x" root | ("a" | "ab") "b"', ["ab", "abb", "xxabb"], ["a"]),
    ('root ::= ("(" root ")" | w)*\nw ::= "a" | "aab"', ["aa", "aaab", "(aa)a"], ["ab", "b"]),
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


@cache
def tokenizer() -> Any:
    return tiny.tokenizer()


@cache
def compiled(source: str) -> Grammar:
    return Grammar(source, tokenizer(), len(tokenizer()), [0])


def matches(source: str, text: str) -> bool:
    """Whether a grammar allows each token of a text, and its end."""
    mask, ids = compiled(source).mask_after(0), tokenizer()(text).input_ids
    scores = torch.zeros(1, len(tokenizer()))
    return all(bool(mask(torch.tensor([ids[:i]]), scores)[0, one] == 0) for i, one in enumerate([*ids, 0]))


def terminals(text: str) -> str:
    """A grammar in GBNF whose rules without recursion are all terminals."""
    return client_grammars.lark_of_gbnf(client_grammars._Gbnf(text).source)


@pytest.mark.parametrize(("read", "given", "texts", "others"), [*MATCHES, *((of_grammar, *one) for one in LOST)])
def test_texts_that_match_alone_and_within_another_grammar(
    read: Callable[[Any], str], given: Any, texts: Texts, others: Texts
) -> None:
    source = read(given)
    inner = f'start: "<" answer ">"\nanswer: {rule_of(source)}\n'
    for text in texts:
        assert matches(source, text) and matches(inner, f"<{text}>"), text
    for text in others:
        assert not matches(source, text) and not matches(inner, f"<{text}>"), text


def test_only_terminals_that_lose_texts_are_read_by_characters() -> None:
    """Masks of characters take a thousand times longer."""
    for text, texts, _ in LOST:
        assert not all(matches(terminals(text), one) for one in texts), "control"
    assert not matches(gbnf_to_lark('root ::= word "z"\nword ::= [a-z]*'), "abz"), (
        "control: of MATCHES, by the library's reader"
    )
    for text in KEPT:
        assert of_grammar(text) == terminals(text)
    text = 'root ::= item ("\\n" root)?\nitem ::= string | num\nstring ::= "\\"" [^"]* "\\""\nnum ::= [0-9]+ [ \\n]*'
    source = of_grammar(text)
    assert all(matches(source, one) for one in ('1 \n\n"a b"', '"\n"\n12'))
    assert re.search("^r3:", source, re.MULTILINE) and re.search("^R2:", source, re.MULTILINE), (
        "the string is a terminal"
    )


Ends = Callable[[str, int], set[int]]


def in_order(parts: Sequence[Ends], text: str, at: int) -> set[int]:
    """Where parts may end that follow each other."""
    ends = {at}
    for part in parts:
        ends = {end for start in ends for end in part(text, start)}
    return ends


class RandomGrammar:
    """A small grammar over three letters; each part is its source, and where it may end in a text, by its definition."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.rules = {name: self.alternatives(name, 2) for name in ("root", "x", "y", "z")}
        self.source = "\n".join(f"{name} ::= {source}" for name, (source, _) in self.rules.items())

    def matches(self, text: str) -> bool:
        return len(text) in self.rules["root"][1](text, 0)

    def alternatives(self, name: str, depth: int) -> tuple[str, Ends]:
        sources, ends = zip(*(self.sequence(name, depth) for _ in range(self.dice.randrange(1, 4))), strict=True)
        return " | ".join(sources), lambda text, at: {end for one in ends for end in one(text, at)}

    def sequence(self, name: str, depth: int) -> tuple[str, Ends]:
        sources, parts = list[str](), list[Ends]()
        for _ in range(self.dice.randrange(1, 4)):
            source, ends = self.part(name, depth, any(one.endswith('"') for one in sources))
            low, high = self.dice.choice([(1, 1)] * 4 + [(0, 1), (0, 3), (1, 3), (2, 2)])
            if (low, high) != (1, 1) and source[0] in '["':
                source, ends = f"{source}{{{low},{high}}}", partial(self.repeated, ends, low, high)
            sources.append(source)
            parts.append(ends)
        return " ".join(sources), partial(in_order, parts)

    @staticmethod
    def repeated(ends: Ends, low: int, high: int, text: str, at: int) -> set[int]:
        return {end for count in range(low, high + 1) for end in in_order([ends] * count, text, at)}

    def part(self, name: str, depth: int, is_after_text: bool) -> tuple[str, Ends]:
        """A part; a rule may be named after a text only, so that no rule begins with itself, or a later one."""
        later = [one for one in ("x", "y", "z") if one > name or name == "root"]
        kind = self.dice.random()
        if kind < 0.35 and (is_after_text or later):
            rule = self.dice.choice(["root", "x", "y", "z"] if is_after_text else later)
            return rule, lambda text, at: self.rules[rule][1](text, at)
        if kind < 0.45 and depth:
            source, ends = self.alternatives(name, depth - 1)
            return f"( {source} )", ends
        if kind < 0.7:
            letters = self.dice.choice(["ab", "bc", "abc"])
            return f"[{letters}]", lambda text, at: {at + 1} if text[at : at + 1] in [*letters] else set()
        word = self.dice.choice(["a", "b", "ab", "ba", "c", "abc"])
        return f'"{word}"', lambda text, at: {at + len(word)} if text.startswith(word, at) else set()


def test_random_grammars_match_what_their_definition_matches() -> None:
    """With the control that the library's reader alone loses texts of some, and that both forms occur."""
    every = ["".join(one) for count in range(5) for one in itertools.product("abc", repeat=count)]
    lost, forms = 0, set()
    for seed in range(20):
        grammar = RandomGrammar(seed)
        source, fast = of_grammar(grammar.source), terminals(grammar.source)
        wanted = {one for one in every if grammar.matches(one)}
        if not wanted:  # the library refuses what matches no text, and there are texts of five letters and more
            continue
        assert {one for one in every if matches(source, one)} == wanted, grammar.source
        forms.add(source == fast)
        lost += source != fast and any(not matches(fast, one) for one in wanted)
    assert lost > 1 and forms == {True, False}


def test_a_grammar_that_is_too_large_to_be_examined_keeps_its_texts() -> None:
    names = [f"w{i}" for i in range(300)]
    rules = [f'{name} ::= "{i:03d}" [a-z]* | "{i:03d}x" root' for i, name in enumerate(names)]
    source = of_grammar("\n".join([f"root ::= {' | '.join(names)}", *rules]))
    assert matches(source, "007x000x008") and not matches(source, "007x009!")


MANY = [f"w{i}" for i in range(400)]
REFUSED = [
    "", 'x ::= "a"', "root ::= other", 'root ::= "a"\nroot ::= "b"', 'root ::= "\\q"', 'root ::= "\\ud800"', "root ::= [^]",
    'root ::= "a" %', "root ::= " + "(" * 3000, "\n".join(f'{f"r{i}" if i else "root"} ::= "a"' for i in range(501)),
    'root ::= "' + "a" * 70_000 + '"', 'root ::= "a', "root ::= [a", 'root ::= "a"{2', 'start: A\nA[lazy]: "a"', "start: <think>",
    "start: <[3]>", "start: %json {}", '%llguidance {"no_forcing": true}\nstart: "a"',
    f'root ::= "(" root ")" | {" | ".join(MANY)}\n'
    + "\n".join(f'{w} ::= "{w}-" [{chr(256 + i)}] "{w}+"' for i, w in enumerate(MANY)),
]  # fmt: skip
"""Empty, without or with too many rules, unknown or impossible characters, no end, what Lark's form has and the library drops."""


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_grammars_that_are_refused(case: int) -> None:
    with refused("grammar"):
        of_grammar(REFUSED[case])


def test_expressions_and_choices_that_are_refused() -> None:
    for pattern in ("[.*", "(?=a)a", r"(a)\1", "a$b", "a)(?:b"):
        with refused("grammar"):
            compiled(of_regex(pattern))
    for pattern in ("", "a\\\\\\"):
        with refused("regex", pattern):
            of_regex(pattern)
    with refused("choices", ()):
        of_choices([])


@pytest.mark.parametrize(
    ("before", "part", "count", "after"),
    [
        ('root ::= "', '\\"', 30_000, "\\"),
        ("start: ", "<", 200_000, ""),
        ('start: "', '\\"', 100_000, "<"),
        ("start: ", "/\\", 99_999, ""),
    ],
)
def test_texts_without_an_end_are_read_once(before: str, part: str, count: int, after: str) -> None:
    """The work grows with the length: with its square, each of these takes minutes."""
    with pytest.raises(ConfigError):
        compiled(of_grammar(before + part * count + after))


@pytest.mark.parametrize("last", ["", "b", '" | "b'])
def test_rules_that_double_are_read_once(last: str) -> None:
    """Each of them names the next one twice: read as a tree, the work is 2 to the power of 60."""
    rules = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(1, 60))
    assert "start" in of_grammar(f'root ::= "a" root | r1\n{rules}\nr60 ::= "{last}"')
