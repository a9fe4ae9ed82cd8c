"""Calls whose arguments are tagged texts, as Qwen3-Coder writes them: <function=NAME><parameter=KEY>VALUE</parameter></function>.

A value is a plain text; the tool's schema decides whether it is a string or JSON. Owns this form of calls and its grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from foresay.errors import ConfigError
from foresay.text.grammar_library import json_rule
from foresay.text.tool_calls.calls import CallPiece, Tool
from foresay.text.tool_calls.loose_json import LooseJson
from foresay.text.tool_calls.parsers import Reader, as_json, has_surrogates, overlap
from foresay.text.tool_calls.schema_types import Allowed

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_PARAMETER, _END_FUNCTION, _END = "</parameter>", "</function>", "</tool_call>"
_STOPS = (_END_FUNCTION, _END, "<tool_call>")
"""Tags that end a call whose arguments are an object, even one that lacks brackets."""
_BOUNDS = frozenset({"pattern", "format", "minLength", "maxLength"})
"""Keywords of strings that the grammar does not express."""
_HEAD = re.compile(r"<(?:function|parameter)=([^<>\n]{0,256})(?:>|(?=[<\n]))")
"""The tag before a call or a value. Models forget its last character."""
_UNFINISHED = re.compile(r"<(?:function|parameter)=[^<>\n]{0,256}")
_LONGEST = 300
"""Characters of any tag, with a margin."""
_TAG = re.compile(rf"{_END_PARAMETER}|{_END_FUNCTION}|{_END}|{_HEAD.pattern}")
_AFTER = {
    _END_PARAMETER: (_PARAMETER, _END_FUNCTION, _END),
    _END_FUNCTION: (_END, "<tool_call>", _FUNCTION),
    _END: ("<tool_call>", _FUNCTION),
}
"""Tags that follow a closing tag that ends a value; before other text, the tag belongs to the value."""


class TaggedReader(Reader):
    """One call, to the end of its marker. A parameter is sent when it is complete."""

    def __init__(self, first: int, schemas: Mapping[str, Mapping[str, Any]], *, begun: bool = False) -> None:
        """schemas: of each tool's arguments. begun: True after "<function=" instead of "<tool_call>"."""
        super().__init__(first, _STOPS)
        self._schemas, self._unread = schemas, _FUNCTION if begun else ""
        self._names = schemas if begun else None
        """Names that a call may have, None for any."""
        self._schema: Mapping[str, Any] = {}
        self._keys = set[str]()
        self._key: str | None = None
        """The parameter whose value is read."""
        self._scanned = 0
        """Characters of the value that contain no tag that may end it."""
        self._object: LooseJson | None = None
        """Arguments that are written as an object instead of parameters."""
        self._is_last = self._is_closed = False

    def finish(self) -> tuple[str, list[CallPiece]]:
        """See Reader. Closes the value and the call."""
        self._is_last = True
        rest, out = self.push("")
        if self.num_calls and not self._is_closed:
            out += self._close() or [CallPiece(self.first, None, "")]
        return rest, out

    def _next(self) -> list[CallPiece] | None:
        if self._key is not None:
            return self._read_value(self._key)
        if self._object is not None and not self._object.done:
            return self._read_object(self._object)
        text = self._unread.lstrip()
        if not self.num_calls:
            return self._read_name(text)
        for tag in (_END_FUNCTION, _END) if not self._is_closed else (_END,):
            if text.startswith(tag):
                self._unread = text[len(tag) :]
                self.ended = tag == _END
                return self._close() if not self._is_closed else None
        takes = not self._is_closed and self._object is None
        if takes and (found := _HEAD.match(text)) and text.startswith(_PARAMETER):
            self._key, self._unread, self._scanned = _name(found), text[found.end() :], 0
            return []
        if takes and text.startswith("{") and not self._keys:
            self._unread, self._object = text, LooseJson(ends=_STOPS)
            return []
        if text.startswith(_PARAMETER) and not _UNFINISHED.fullmatch(text):
            text = "-"  # no tag: a name is short
        begins = (_END, *(() if self._is_closed else (_END_FUNCTION,)), *((_PARAMETER,) if takes else ()))
        if not any(one.startswith(text[: len(one)]) for one in begins):
            self.ended = True  # text that no call has
            return None if self._is_closed else self._close()
        return None

    def _read_name(self, text: str) -> list[CallPiece] | None:
        found = _HEAD.match(text) if text.startswith(_FUNCTION) else None
        name = _name(found) if found else ""
        if found is None and (
            _FUNCTION.startswith(text[: len(_FUNCTION)]) and (_UNFINISHED.fullmatch(text) or len(text) < 10)
        ):
            return None
        if found is None or not name or has_surrogates(name) or (self._names and name not in self._names):
            self.ended = True
            if self._names is not None:
                self._unread = self._unread[len(_FUNCTION) :]  # it was read before
            return None
        self._unread, self.num_calls = text[found.end() :], 1
        self._schema = self._schemas.get(name) or {}
        return [CallPiece(self.first, name, "")]

    def _sent(self, arguments: str) -> list[CallPiece]:
        return [CallPiece(self.first, None, arguments)] if arguments else []

    def _read_object(self, found: LooseJson) -> list[CallPiece] | None:
        sent, text = len(found.json), self._unread
        self._unread = found.push(text)
        self._drops = found.broken
        if found.broken or (self._is_last and not self._unread):
            found.close()
        return self._sent(found.json[sent:]) if text or found.done else None

    def _close(self) -> list[CallPiece]:
        """Close the arguments."""
        self._is_closed = True
        if self._object is not None and self._object.json:
            return []
        return self._sent("}" if self._keys else "{}")

    def _read_value(self, key: str) -> list[CallPiece] | None:
        found = self._end_of_value()
        if found is None:
            return None
        value, self._unread, self._key = self._unread[: found[0]], self._unread[found[1] :], None
        if key in self._keys:  # a repeated parameter: the first was sent
            return []
        opening = ", " if self._keys else "{"
        self._keys.add(key)
        value = value.removeprefix("\n").removesuffix("\n")
        properties = self._schema.get("properties")
        schema = (properties if isinstance(properties, Mapping) else {}).get(key)
        return self._sent(f"{opening}{as_json(key)}: {Allowed(schema, self._schema).json_of(value)}")

    def _end_of_value(self) -> tuple[int, int] | None:
        """Return where the value ends and where the text goes on. None if that is not known yet."""
        text = self._unread
        cut = max(overlap(text, one) for one in _AFTER)
        last = (len(text) - cut if cut > 1 else len(text), len(text))
        for found in _TAG.finditer(text, self._scanned):
            if found[1] is not None:  # the next parameter: the closing tag is missing
                if found[0].startswith(_PARAMETER) and self._may_be_next(_name(found)):
                    return found.start(), found.start()
                continue
            ends = found.start(), found.end() if found[0] == _END_PARAMETER else found.start()
            after = text[found.end() :].lstrip()
            if after.startswith(_AFTER[found[0]]) or (self._is_last and not after):
                return ends
            last = ends
            if not self._is_last and any(one.startswith(after) for one in _AFTER[found[0]]):
                self._scanned = found.start()
                return None
        if self._is_last:
            return last
        at = text.rfind("<", max(self._scanned, len(text) - _LONGEST))
        self._scanned = at if at >= 0 else len(text)
        return None

    def _may_be_next(self, key: str) -> bool:
        properties = self._schema.get("properties")
        return key not in self._keys | {self._key} and (
            not isinstance(properties, Mapping) or not properties or key in properties
        )


def _name(head: re.Match[str]) -> str:
    """Return the name of a tag, without quotes around it."""
    return head[1].strip().strip("\"'")


def rules_of(rule: str, tool: Tool) -> list[str]:
    """Return the rules of a call's parameters: the required ones, then others, in the order of the schema.

    Raises ConfigError for strings with bounds that the grammar does not express.
    """
    names, count = ordered(tool)
    shared, properties = definitions(tool), tool.parameters.get("properties", {})
    rules, parts = list[str](), []
    for i, name in enumerate(names):
        parts.append(f"{rule}_{i}" if i < count else f"({rule}_{i})?")
        opening, ending = json.dumps(f"{_PARAMETER}{name}>\n"), f"\n{_END_PARAMETER}\n"
        rules += _value(f"{rule}_{i}", opening, ending, properties[name], shared, tool.name)
    return [f"{rule}: " + (" ".join(parts) or '""'), *rules]


def definitions(tool: Tool) -> dict[str, Any]:
    """Return the part of a tool's schema to which the schemas of its parameters may refer."""
    return {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}


def ordered(tool: Tool) -> tuple[list[str], int]:
    """Return the names of a tool's parameters, the required ones first, and the number of these.

    Raises ConfigError for parameters that are no schema of an object.
    """
    properties, required = tool.parameters.get("properties", {}), tool.parameters.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise ConfigError(f"the parameters of {tool.name!r} are no JSON schema of an object")
    return sorted(properties, key=lambda name: name not in required), sum(name in required for name in properties)


def _value(rule: str, opening: str, ending: str, schema: Any, shared: Mapping[str, Any], tool: str) -> list[str]:
    allowed = Allowed(schema, shared)
    if not allowed.has_strings:
        whole = {**shared, **schema} if isinstance(schema, Mapping) else {}
        return [f"{rule}: {opening} {rule}_json {json.dumps(ending)}", f"{rule}_json: {json_rule(whole)}"]
    if bounds := sorted(_BOUNDS & allowed.keywords):
        raise ConfigError(
            f"{tool!r} has a string with {bounds[0]!r}, which calls of this model do not express; use tool_choice='auto'"
        )
    if allowed.texts is not None:
        texts = " | ".join(map(json.dumps, allowed.texts))
        return [f"{rule}: {opening} ({texts}) {json.dumps(ending)}"]
    return [f"{rule}: {opening} {rule}_text", f"{rule}_text[suffix={json.dumps(ending)}]: /(.|\\n)*/"]
