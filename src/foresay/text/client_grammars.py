"""Grammars as clients write them (a regular expression, choices, GBNF, Lark), each as one grammar in Lark's syntax.

Owns what is refused because the grammar library would read it otherwise. GBNF is translated by the library's own reader, which
this module gives names, characters and a root that it reads exactly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from foresay.errors import ConfigError
from foresay.text.gbnf_terminals import losing_texts
from foresay.text.grammar_library import gbnf_rules, lark_of_gbnf, one_line

MAX_RULES, MAX_GBNF_BYTES = 500, 1 << 16
"""Limits on a grammar in GBNF: the library's reader takes time in proportion to rules x bytes."""
_IS_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_GBNF_PARTS = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*")|(?P<set>\[(?:\\.|[^\]\\])*\])|#[^\r\n]*|\{[^}]*\}|(?P<open>["\[{].*)'
    r"|(?P<name>[\w-]+)(?P<rule>\s*::=)?|(?P<any>\.)|.",
    re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\([\"\\\[\]nrt])|([^\\])", re.DOTALL
)
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}
_ANY = "[\\x00-\U0010ffff]"
_LARK_TEXTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/|["/][^\n]*|^[ \t]*%llguidance[ \t]*\{[ \t]*\}',
    re.MULTILINE,
)
_LARK_REFUSED = re.compile(
    r"%(?!ignore\b|import\b)\w+|<[^\s>]{0,20}>?|^[ \t]*[?!]*\w+[ \t]*\[[^\]\n]*\][ \t]*:", re.MULTILINE
)


class Written(NamedTuple):
    """A constraint as a client wrote it, which may take any time and memory to read: SchemaCompiler.read has limits."""

    kind: str
    """A name in KINDS."""
    value: Any

    def read(self) -> Mapping[str, Any] | str:
        """Return the JSON schema, or the grammar in Lark's syntax. Raises ConfigError for one that is refused."""
        return KINDS[self.kind](self.value)


def of_schema(text: str) -> Mapping[str, Any]:
    """Return a JSON schema. Raises ConfigError for a text that is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the schema is not JSON: {one_line(error)}") from None
    if not isinstance(found, dict):
        raise ConfigError("the schema is not an object")
    return found


def of_regex(pattern: str) -> str:
    r"""Return the grammar of a text that a regular expression matches as a whole. Raises ConfigError for an empty one.

    `\d` is a digit from 0 to 9, as in JSON schemas; the library's is one of any script. The library refuses what it does not
    support, but for a backslash at the end, which it would drop.
    """
    if not pattern:
        raise ConfigError("the regular expression is empty")
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ConfigError("the regular expression ends with a backslash that escapes nothing")
    sets, parts = 0, []
    for part in re.findall(r"\\.|\[\^?\]?|.", pattern, re.DOTALL):  # a bracket that begins a set does not end it
        sets += part.startswith("[") - (part == "]" and sets > 0)
        parts.append(_in_slashes(part, in_set=sets > 0))
    return f"start: /{''.join(parts)}/\n"


def _in_slashes(part: str, *, in_set: bool) -> str:
    """Return an escape or a character as it stands between slashes. in_set: True inside brackets, which may be nested."""
    digit = {r"\d": "0-9" if in_set else "[0-9]", r"\D": "[^0-9]"}
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n", **digit}.get(part, part)


def of_choices(choices: Sequence[str]) -> str:
    """Return the grammar of one of several texts. Raises ConfigError without any."""
    if not choices:
        raise ConfigError("there is nothing to choose from")
    texts = " | ".join(json.dumps(one, ensure_ascii=False) for one in choices)
    return f"start: CHOICE\nCHOICE: {texts}\n"


def of_grammar(text: str) -> str:
    """Return a grammar in GBNF (rules with `::=`, from `root`) or in Lark's syntax (from `start`) as Lark.

    Raises ConfigError for GBNF that cannot be read, and for parts of Lark that would not be applied.
    """
    if _IS_GBNF.search(text):
        return _from_gbnf(text)
    if not text.strip():
        raise ConfigError("the grammar is empty")
    if found := _LARK_REFUSED.search(_LARK_TEXTS.sub('""', text)):
        raise ConfigError(
            f"the grammar's {found[0].strip()!r} is not supported: rules have no attributes, no tokens and no statements "
            "but %import and %ignore"
        )
    return text


def _from_gbnf(text: str) -> str:
    """Return a grammar in GBNF as Lark, which matches the same texts.

    Rules without recursion are terminals, which are fast: a grammar without any recursion is one terminal, and no token boundary
    restricts it. Of those that would lose texts, the characters are the terminals.
    """
    if len(text) > MAX_GBNF_BYTES:
        raise ConfigError(f"the grammar has {len(text)} bytes; at most {MAX_GBNF_BYTES} bytes are allowed")
    gbnf = _Gbnf(text)
    try:
        fast = lark_of_gbnf(gbnf.source)
        if gbnf_rules(gbnf.source)["start"].alternatives.is_terminal():
            return fast
        split = gbnf.split()
        if not (rules := losing_texts(split)):
            return fast
        return re.sub(r"\b[RL]\d+\b", lambda at: at[0].lower() if at[0] in rules else at[0], lark_of_gbnf(split))
    except ConfigError:
        raise
    except Exception as error:  # the reader raises errors of several kinds, RecursionError too
        raise ConfigError(f"the grammar cannot be read: {one_line(error)}") from None


class _Gbnf:
    """A grammar in GBNF in two forms: with rules renamed, and also with a rule for each text, character and set."""

    def __init__(self, text: str) -> None:
        """Raises ConfigError for a text without end, unknown escapes, and rules that are missing, double or too many."""
        self._text = text
        self._names: dict[str, str] = {"root": "r0"}
        self._defined, self._used = list[str](), list[str]()
        self._rules: dict[str, str] = {}
        """Texts, characters and sets -> names of their rules."""
        self.source = "root ::= r0\n" + _GBNF_PARTS.sub(lambda found: self._part(found)[0], text)
        self._check()

    def split(self) -> str:
        """Return the form with a rule for each text, character and set. Raises ConfigError for too many of them."""
        if len(self._rules) > 2 * MAX_RULES:
            text = f"the grammar has {len(self._rules)} different texts, characters and sets; at most {2 * MAX_RULES} are allowed"
            raise ConfigError(text)
        split = _GBNF_PARTS.sub(lambda found: self._part(found)[1], self._text)
        # first the rules that are terminals, which the reader then knows as such in its first turn
        return "\n".join([*(f"{name} ::= {rule}" for rule, name in self._rules.items()), "root ::= r0", split])

    def _part(self, found: re.Match[str]) -> tuple[str, str]:
        """Return a part of the grammar in both forms."""
        if found["open"] is not None:
            raise ConfigError(f"the grammar's {found[0][:20]!r} has no end")
        if found["name"] is not None:
            (self._defined if found["rule"] else self._used).append(found["name"])
            name = self._names.setdefault(found["name"], f"r{len(self._names)}") + (found["rule"] or "")
            return name, name
        if found["text"] is not None:
            characters = _characters(found[0][1:-1])
            letters = [self._rule("c", f'"{_in_text(one)}"') for one in characters]
            whole = '"' + "".join(map(_in_text, characters)) + '"'
            return whole, f" {self._rule('l', ' '.join(letters))} " if letters else whole
        if found["set"] or found["any"]:
            source = _ANY if found["any"] else _set(found[0])
            return source, f" {self._rule('c', source)} "
        return found[0], "" if found[0].startswith("#") else found[0]

    def _rule(self, kind: str, source: str) -> str:
        return self._rules.setdefault(source, f"{kind}{len(self._rules)}")

    def _check(self) -> None:
        defined = self._defined
        if len(defined) > MAX_RULES:
            raise ConfigError(f"the grammar has {len(defined)} rules; at most {MAX_RULES} are allowed")
        if missing := next((name for name in dict.fromkeys(("root", *self._used)) if name not in defined), None):
            raise ConfigError(f"the grammar has no rule {missing!r}")
        if twice := next((name for name in defined if defined.count(name) > 1), None):
            raise ConfigError(f"the grammar defines {twice!r} twice")


def _set(text: str) -> str:
    """Return a set of characters, such as [^a-z], whose characters are no operators of regular expressions."""
    inside = text[1:-1]
    negated = inside.startswith("^")
    found, ranges, i = _characters(inside[negated:]), list[tuple[int, int]](), 0
    while i < len(found):
        is_range = i + 2 < len(found) and found[i + 1] == "-"
        ranges.append((ord(found[i]), ord(found[i + 2 * is_range])))
        i += 3 if is_range else 1
    if not ranges or any(low > high for low, high in ranges):
        raise ConfigError(f"the grammar's set {text} has no characters")
    ends = (_in_set(chr(low)) + (f"-{_in_set(chr(high))}" if high > low else "") for low, high in ranges)
    return f"[{'^' if negated else ''}{''.join(ends)}]"


def _characters(text: str) -> list[str]:
    """Return the characters of a text with GBNF's escapes. Raises ConfigError for another escape."""
    out, end = list[str](), 0
    while end < len(text):
        found = _CHARACTER.match(text, end)
        if found is None:
            raise ConfigError(f"the grammar's escape {text[end : end + 2]!r} is not known")
        code = found[1] or found[2] or found[3]
        if code and (int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) < 0xE000):
            raise ConfigError(f"the grammar's escape {found[0]!r} is not a character")
        out.append(chr(int(code, 16)) if code else _NAMED.get(found[4], found[4]) if found[4] else found[5])
        end = found.end()
    return out


def _in_text(one: str) -> str:
    return f"\\{one}" if one in '"\\' else f"\\x{ord(one):02x}" if ord(one) < 32 else one


def _in_set(one: str) -> str:
    return one if one.isalnum() or ord(one) > 127 else f"\\x{ord(one):02x}"


KINDS: Mapping[str, Callable[[Any], Mapping[str, Any] | str]] = {
    "json": of_schema,
    "json_schema": of_schema,
    "regex": of_regex,
    "choice": of_choices,
    "grammar": of_grammar,
}
"""Kinds of constraints -> functions from a text, or several, to the schema or grammar."""
