"""Calls whose arguments are tagged texts, as Qwen3-Coder writes them: <function=NAME><parameter=KEY>VALUE</parameter></function>.

A value is a plain text; the tool's schema decides whether it is a string or JSON. Owns this form of calls and its grammar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from foresay.errors import ConfigError
from foresay.text.grammar_library import json_rule
from foresay.text.tool_calls.calls import CallPiece, Tool
from foresay.text.tool_calls.parsers import Reader, as_json, has_surrogates, overlap

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_PARAMETER, _END_FUNCTION, _END = "</parameter>", "</function>", "</tool_call>"
_BOUNDS = frozenset({"pattern", "format", "minLength", "maxLength"})
"""Keywords of strings that the grammar does not express."""


class TaggedReader(Reader):
    """One call, to the end of its marker. A parameter is sent when it is complete."""

    def __init__(self, first: int, schemas: Mapping[str, Mapping[str, Any]], *, begun: bool = False) -> None:
        """schemas: of each tool's arguments. begun: True after "<function=" instead of "<tool_call>"."""
        super().__init__(first)
        self._schemas, self._unread = schemas, _FUNCTION if begun else ""
        self._schema: Mapping[str, Any] = {}
        self._count = 0
        self._is_closed = False

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """See Reader."""
        self.text += text
        self._unread += text
        out: list[CallPiece] = []
        while not self.ended and (piece := self._next()) is not None:
            if piece.name is not None or piece.arguments:
                out.append(piece)
        rest = self._unread if self.ended else ""
        self.text = self.text[: len(self.text) - len(rest)]
        return rest, out

    def _next(self) -> CallPiece | None:
        """Read the next complete part. Returns None if more text is needed, or at the end of the call."""
        text = self._unread.lstrip()
        if not self.num_calls:
            return self._read_name(text)
        if self._is_closed:
            is_open = not text or (overlap(text, _END) == len(text))
            self.ended, self._unread = not is_open, text.removeprefix(_END)
            return None
        if text.startswith(_END_FUNCTION):
            self._is_closed, self._unread = True, text[len(_END_FUNCTION) :]
            return CallPiece(self.first, None, "}" if self._count else "{}")
        head, closes, rest = text.partition(">")
        value, ends, after = rest.partition(_END_PARAMETER)
        if text.startswith(_PARAMETER) and closes:
            if not ends:
                return None
            self._unread = after
            return CallPiece(self.first, None, self._member(head[len(_PARAMETER) :], value))
        if not any(one.startswith(text[: len(one)]) for one in (_END_FUNCTION, _PARAMETER)):
            self.ended = True  # text that no call has
        return None

    def _read_name(self, text: str) -> CallPiece | None:
        head, closes, rest = text.partition(">")
        name = head.removeprefix(_FUNCTION).strip()
        if not text.startswith(_FUNCTION[: len(text)]) or (closes and (not name or has_surrogates(name))):
            self.ended = True
            return None
        if not closes:
            return None
        self._unread, self.num_calls = rest, 1
        self._schema = self._schemas.get(name) or {}
        return CallPiece(self.first, name, "")

    def _member(self, key: str, text: str) -> str:
        """Return a parameter as a member of the object of arguments."""
        text = text.removeprefix("\n").removesuffix("\n")
        properties = self._schema.get("properties")
        value: Any = text
        if not is_string((properties if isinstance(properties, Mapping) else {}).get(key)):
            with suppress(ValueError, RecursionError):
                value = json.loads(text)
        opening = "{" if self._count == 0 else ", "
        self._count += 1
        try:
            return f"{opening}{as_json(key)}: {as_json(value)}"
        except ValueError:  # NaN, which JSON does not have
            return f"{opening}{as_json(key)}: {as_json(text)}"


def is_string(schema: Any) -> bool:
    """True if a schema's values are strings alone."""
    if not isinstance(schema, Mapping):
        return False
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return isinstance(values, list) and all(isinstance(one, str) for one in values)
    return schema.get("type") == "string"


def rules_of(rule: str, tool: Tool) -> list[str]:
    """Return the rules of a call's parameters: the required ones, then others, in the order of the schema.

    Raises ConfigError for strings with bounds that the grammar does not express.
    """
    properties = tool.parameters.get("properties") or {}
    required = tool.parameters.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise ConfigError(f"the parameters of {tool.name!r} are no JSON schema of an object")
    names = [name for name in properties if name in required]
    names += [name for name in properties if name not in required]
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    rules, parts = list[str](), []
    for i, name in enumerate(names):
        parts.append(f"{rule}_{i}" if name in required else f"({rule}_{i})?")
        opening, ending = json.dumps(f"{_PARAMETER}{name}>\n"), f"\n{_END_PARAMETER}\n"
        rules += _value(f"{rule}_{i}", opening, ending, properties[name], shared, tool.name)
    return [f"{rule}: " + (" ".join(parts) or '""'), *rules]


def _value(rule: str, opening: str, ending: str, schema: Any, shared: Mapping[str, Any], tool: str) -> list[str]:
    if not is_string(schema):
        whole = {**shared, **schema} if isinstance(schema, Mapping) else {}
        return [f"{rule}: {opening} {rule}_json {json.dumps(ending)}", f"{rule}_json: {json_rule(whole)}"]
    if bounds := sorted(_BOUNDS & schema.keys()):
        raise ConfigError(
            f"{tool!r} has a string with {bounds[0]!r}, which calls of this model do not express; use tool_choice='auto'"
        )
    if "enum" in schema or "const" in schema:
        texts = " | ".join(json.dumps(one) for one in schema.get("enum", [schema.get("const")]))
        return [f"{rule}: {opening} ({texts}) {json.dumps(ending)}"]
    return [f"{rule}: {opening} {rule}_text", f"{rule}_text[suffix={json.dumps(ending)}]: /(.|\\n)*/"]
