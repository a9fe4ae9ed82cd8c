"""Expressions: `name` or `name(value, key=value)`, nested to any depth.

    max_gram
    prompt_lookup(max_ngram=6)
    cascade(model=A, model=B, max_gram; k=[[5, 14, 10], [0, 1, 10], [0, 0, 10]], lenience=2)

Owns the grammar and the binding of a call to a function's parameters; knows none of the names. Values are numbers, true, false,
none, quoted or bare words (a path needs quotes only if it contains one of , ; ( ) [ ] = or white space), lists and calls. Commas
and semicolons are equivalent.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from foresay.errors import ConfigError, UnknownNameError

_TOKEN = re.compile(r"""\s*(?:(?P<quoted>"[^"]*"|'[^']*')|(?P<mark>[,;()\[\]=])|(?P<word>[^\s,;()\[\]="']+))""")
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """A name with its values in order: (key, value), where key is None for a positional value."""

    name: str
    values: tuple[tuple[str | None, Any], ...] = ()

    def __str__(self) -> str:
        if not self.values:
            found = _TOKEN.fullmatch(self.name)
            return self.name if found is not None and found["word"] == self.name else _quoted(self.name)
        return f"{self.name}({', '.join(f'{k}={_shown(v)}' if k else _shown(v) for k, v in self.values)})"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Call) and not value.values:
        return f"{value.name}()"  # without parentheses it would be read as a word
    if isinstance(value, str) and not _is_bare(value):
        return _quoted(value)
    return str(value)


def _quoted(value: str) -> str:
    return f"'{value}'" if '"' in value else f'"{value}"'


def _is_bare(value: str) -> bool:
    """Return True if a text without quotes is read as the same text."""
    found = _TOKEN.fullmatch(value)
    return found is not None and found["word"] == value and _read(value) == value


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._split())
        self._next = 0

    def _split(self) -> Iterable[tuple[str, str, int]]:
        position, end = 0, len(self._text.rstrip())
        while position < end:
            found = _TOKEN.match(self._text, position)
            if found is None:
                quote = end - len(self._text[position:end].lstrip())
                text = f"has an unterminated quote at character {quote + 1}"
                raise ConfigError(text, param="expression", value=self._text)
            kind = str(found.lastgroup)
            yield kind, found[kind], found.start(kind)
            position = found.end()

    def _fail(self, wanted: str) -> ConfigError:
        if self._next < len(self._tokens):
            _, text, position = self._tokens[self._next]
            problem = f"must have {wanted} at character {position + 1}, not {text!r}"
            return ConfigError(problem, param="expression", value=self._text)
        return ConfigError(f"must have {wanted} at the end", param="expression", value=self._text)

    def _peek(self, mark: str) -> bool:
        return self._next < len(self._tokens) and self._tokens[self._next][:2] == ("mark", mark)

    def _take(self, mark: str) -> bool:
        found = self._peek(mark)
        self._next += found
        return found

    def whole(self) -> Call:
        value = self._value()
        if self._next < len(self._tokens):
            raise self._fail("the end")
        if isinstance(value, str):
            return Call(value)
        if value is None:
            return Call("none")
        if not isinstance(value, Call):
            text = "is neither a name nor a name with settings in parentheses"
            raise ConfigError(text, param="expression", value=self._text)
        return value

    def _value(self) -> Any:
        if self._take("["):
            return self._list()
        if self._next >= len(self._tokens) or self._tokens[self._next][0] == "mark":
            raise self._fail("a value")
        kind, text, _ = self._tokens[self._next]
        self._next += 1
        if kind == "quoted":
            return text[1:-1]
        if self._take("("):
            return Call(text, tuple(self._values()))
        return _read(text)

    def _list(self) -> list[Any]:
        out: list[Any] = []
        while not self._take("]"):
            if out and not (self._take(",") or self._take(";")):
                raise self._fail("',' or ']'")
            if not (out and self._peek("]")):
                out.append(self._value())
        return out

    def _values(self) -> Iterable[tuple[str | None, Any]]:
        first = True
        while not self._take(")"):
            if not first and not (self._take(",") or self._take(";")):
                raise self._fail("',' or ')'")
            first = False
            if self._peek(")"):
                continue
            value = self._value()
            if self._take("="):
                if not isinstance(value, str):
                    self._next -= 1
                    raise self._fail("',' or ')'")
                yield value, self._value()
            else:
                yield None, value


def _read(word: str) -> Any:
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def parse(text: str) -> Call:
    """Parse an expression. Raises ConfigError naming the position of a syntax error."""
    if not text.strip():
        raise ConfigError("is empty; give a name, such as suffix or suffix(keep=true)", param="expression", value=text)
    return _Parser(text).whole()


def apply(kind: str, call: Call, known: Mapping[str, Callable[..., T]]) -> T:
    """Call the function `known[call.name]` with the call's values. kind: noun for error messages, such as "drafter".

    Raises UnknownNameError for an unknown name or setting, ConfigError for values that are duplicate, missing or too many.
    An error of the function itself begins with the call.
    """
    if call.name not in known:
        raise UnknownNameError(kind, call.name, known)
    parameters = inspect.signature(known[call.name]).parameters
    free = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    names = [p.name for p in parameters.values() if p.kind is not p.VAR_POSITIONAL]
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for key, value in call.values:
        if variadic and key not in names:
            positional.append((key, value))
        elif key is None and len(positional) >= len(free):
            raise ConfigError(f"takes at most {len(free)} values without a name", param=kind, value=str(call))
        elif key is None:
            positional.append(value)
        elif key not in names:
            raise UnknownNameError("setting", key, names).about(f"{kind} {call.name!r}", owned=True)
        elif key in named:
            raise ConfigError(f"has {key} twice", param=kind, value=str(call))
        else:
            named[key] = value
    if twice := named.keys() & set(free[: len(positional)]):
        raise ConfigError(f"has {min(twice)} twice", param=kind, value=str(call))
    missing = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.name not in {*named, *free[: len(positional)]}
    ]
    if missing:
        text = f"needs {', '.join(missing)}, for example {call.name}({missing[0]}=...)"
        raise ConfigError(text, param=kind, value=call.name)
    try:
        return known[call.name](*positional, **named)
    except ConfigError as error:
        if error.subject is not None:  # the innermost expression is named
            raise
        raise error.about(str(call), owned=True) from None


def to_expression(value: object, known: Mapping[str, Callable[..., Any]]) -> str:
    """Return an expression that creates an equal object: its name and the settings that differ from their defaults.

    Settings are read from attributes of the same name. An object of an unknown class is represented by its class name.
    """
    name = next((name for name, maker in known.items() if maker is type(value)), None)
    if name is None:
        return type(value).__name__
    given = [
        (p.name, getattr(value, p.name))
        for p in inspect.signature(known[name]).parameters.values()
        if hasattr(value, p.name) and getattr(value, p.name) != p.default
    ]
    return str(Call(name, tuple(given)))
