"""Calls that are written as a Python list, such as [f(x=1), g()], as Llama 3.2 and OLMo 3 write them.

Owns the reading of Python's literals and of JSON's within them. Nothing is evaluated.
"""

from __future__ import annotations

import ast
import json
import warnings
from contextlib import suppress
from typing import Any

from foresay.text.tool_calls.calls import CallPiece
from foresay.text.tool_calls.parsers import Reader, as_json


class PythonReader(Reader):
    """A Python list of function calls with keyword arguments, read when it is complete."""

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self._depth, self._quote, self._escaped = 0, "", False

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """See Reader."""
        for i, char in enumerate(text):
            self._count(char)
            if self._depth == 0:
                self.text += text[: i + 1]
                return text[i + 1 :], self._calls()
        self.text += text
        return "", []

    def _count(self, char: str) -> None:
        """Count open brackets outside strings."""
        if self._quote:
            if char == self._quote and not self._escaped:
                self._quote = ""
            self._escaped = char == "\\" and not self._escaped
        elif char in "'\"":
            self._quote = char
        else:
            self._depth += (char in "[({") - (char in "])}")

    def _calls(self) -> list[CallPiece]:
        calls = python_calls(self.text) or []
        self.ended, self.num_calls = True, len(calls)
        return [CallPiece(self.first + i, name, arguments) for i, (name, arguments) in enumerate(calls)]


_CONSTANTS = {"true": True, "false": False, "null": None}


def python_calls(text: str) -> list[tuple[str, str]] | None:
    """Return names and arguments, as JSON, of the calls in a text such as "[f(x=1), g()]"; None if it is another text."""
    text = text.strip()
    try:
        with warnings.catch_warnings(action="ignore"):  # escapes of JSON that Python does not have
            node = ast.parse(text, mode="eval").body
        if not isinstance(node, ast.List) or not node.elts:
            return None
        return [_python_call(one, text) for one in node.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _python_call(node: ast.expr, text: str) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
        raise ValueError("no call with keyword arguments")
    return ast.unparse(node.func), as_json({str(one.arg): _constant(one.value, text) for one in node.keywords})


def _constant(node: ast.expr, text: str) -> Any:
    """Return the value of a literal, in Python's or JSON's words. Raises ValueError for another expression."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_constant(one, text) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _constant(key, text) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key that is no string")
        return dict(zip(keys, (_constant(one, text) for one in node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no JSON value")
    if isinstance(value, str) and "\\" in (written := ast.get_source_segment(text, node) or ""):
        with suppress(ValueError):  # a grammar makes the model write JSON, whose escapes differ
            return json.loads(written)
    return value
