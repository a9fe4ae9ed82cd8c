"""Calls with tagged texts, as Qwen3-Coder writes them: <function=NAME><parameter=KEY>VALUE</parameter></function>.

A value is a plain text; the tool's schema decides whether it is a string or JSON. Owns this form of calls and its grammar, for
all families that have it with tags of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from foresay.errors import ConfigError
from foresay.text.grammar_library import json_rule
from foresay.text.tool_calls.calls import CallPiece, Tool
from foresay.text.tool_calls.loose_json import LooseJson
from foresay.text.tool_calls.parsers import Reader, as_json, has_surrogates, overlap
from foresay.text.tool_calls.schema_types import Allowed
from foresay.text.tool_calls.terminals import Terminals

_BOUNDS = frozenset({"pattern", "format", "minLength", "maxLength"})
"""Keywords of strings that the grammar does not express."""
_FENCE = "```json"
_LONGEST = 300
"""Characters of any tag, with a margin."""


@dataclass(frozen=True)
class Tags:
    """The tags of one family."""

    name: str = "<function="
    """Text before a call's name, "" where the name follows the mark of a call."""
    after_name: str = ">"
    key: str = "<parameter="
    """Text before a parameter's name."""
    value: str = ">"
    """Text between a parameter's name and its value; between two tags, white space may follow the first."""
    end_value: str = "</parameter>"
    end_call: str = "</function>"
    """Text after the last parameter, "" for none."""
    end: str = "</tool_call>"
    """Mark after a call, "" for none."""
    begin: str = "<tool_call>"
    """Mark before a call, "" for none."""
    written: tuple[str, str, str] = ("<parameter=", ">\n", "\n</parameter>\n")
    """Texts before a parameter's name, before its value and after it, as a required call has them."""

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """Tags that end a call whose arguments are an object, even one that lacks brackets."""
        return tuple(one for one in (self.end_call, self.end, self.begin) if one)

    @cached_property
    def after(self) -> dict[str, tuple[str, ...]]:
        """Tags that follow a closing tag that ends a value; before other text, the tag belongs to the value."""
        found = {
            self.end_value: (self.key, self.end_call, self.end),
            self.end_call: (self.end, self.begin, self.name),
            self.end: (self.begin, self.name),
        }
        return {tag: tuple(one for one in some if one) for tag, some in found.items() if tag}

    @cached_property
    def head(self) -> re.Pattern[str]:
        """The tag before a value. Models forget its last character."""
        value = r"\s*".join(map(re.escape, re.findall("<[^>]*>|[^<]+", self.value)))
        return re.compile(rf"{re.escape(self.key)}([^<>\n]{{0,256}})(?:{value}{self._forgotten})")

    @cached_property
    def name_head(self) -> re.Pattern[str]:
        """The tag before a call, or its name alone."""
        if self.name:
            name = re.escape(self.name)
            return re.compile(rf"{name}([^<>\n]{{0,256}})(?:{re.escape(self.after_name)}{self._forgotten})")
        following = "" if self.after_name else rf"(?=\s*(?:{re.escape(self.key)}|{re.escape(self.end)}))"
        return re.compile(rf"([^\s<>{{}}]{{1,256}})\s*{re.escape(self.after_name)}{following}")

    @cached_property
    def tag(self) -> re.Pattern[str]:
        """A tag that may end a value; group 1 is the name of a further parameter."""
        closing = "|".join(map(re.escape, self.after))
        return re.compile(f"{closing}|{self.head.pattern}")

    @property
    def _forgotten(self) -> str:
        return r"|(?=[<\n])" if self.value == ">" else ""

    def may_begin_key(self, text: str) -> bool:
        """True if a text may be the beginning of the tag before a value."""
        if not text.startswith(self.key):
            return self.key.startswith(text)
        return _goes_on(r"[^<>\n]{0,256}", text[len(self.key) :], [self.value])

    def may_begin_name(self, text: str) -> bool:
        """True if a text may be the beginning of the tag before a call, or of its name."""
        if not self.name:
            return _goes_on(r"[^\s<>{}]{0,256}", text, [self.after_name] if self.after_name else [self.key, self.end])
        if not text.startswith(self.name):
            return self.name.startswith(text)
        return _goes_on(r"[^<>\n]{0,256}", text[len(self.name) :], [self.after_name])


def _goes_on(name: str, text: str, following: Sequence[str]) -> bool:
    """True if a text is a name and the beginning of one of the texts after it. name: its regular expression."""
    found = re.match(name, text)
    rest = "".join(text[found.end() if found else 0 :].split())
    return any(one.startswith(rest) for one in following)


QWEN = Tags()
SEED = Tags(end="</seed:tool_call>", begin="<seed:tool_call>", written=("<parameter=", ">", "</parameter>\n"))
MINIMAX = Tags(
    name="<invoke name=", key="<parameter name=", end_call="</invoke>", end="", begin="",
    written=('<parameter name="', '">', "</parameter>\n"),
)  # fmt: skip
STEP = Tags(
    name="<steptml:invoke name=", key="<steptml:parameter name=", end_value="</steptml:parameter>", end_call="</steptml:invoke>",
    end="<\uff5ctool_call_end\uff5c>", begin="<\uff5ctool_call_begin\uff5c>",
    written=('<steptml:parameter name="', '">', "</steptml:parameter>\n"),
)  # fmt: skip
GLM = Tags(
    name="", after_name="", key="<arg_key>", value="</arg_key><arg_value>", end_value="</arg_value>", end_call="",
    written=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)  # fmt: skip
HUNYUAN = replace(GLM, after_name="<tool_sep>")


class TaggedReader(Reader):
    """One call, to the end of its marker. A parameter is sent when it is complete."""

    def __init__(
        self,
        first: int,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        tags: Tags = QWEN,
        begun: bool = False,
        names: Collection[str] | None = None,
    ) -> None:
        """schemas: of each tool's arguments. begun: True after the text before a name instead of the mark of a call.

        names: names that a call may have, None for any."""
        super().__init__(first, tags.stops)
        self._schemas, self._tags, self._names = schemas, tags, names
        self._before = self._unread = tags.name if begun else ""
        """The beginning of the call that was read before."""
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
        text, tags = self._unread.lstrip(), self._tags
        if not self.num_calls:
            return self._read_name(text)
        endings = [one for one in (() if self._is_closed else (tags.end_call,)) + (tags.end,) if one]
        if found := next((one for one in endings if text.startswith(one)), None):
            self._unread = text[len(found) :]
            self.ended = found == endings[-1] and found == (tags.end or tags.end_call)
            return self._close() if not self._is_closed else None
        takes = not self._is_closed and self._object is None
        if takes and (head := tags.head.match(text)):
            self._key, self._unread, self._scanned = _name(head), text[head.end() :], 0
            return []
        if fence := self._fence(text):
            self._unread = text[len(fence) :]
            return []
        if takes and text.startswith("{") and not self._keys:
            self._unread, self._object = text, LooseJson(ends=tags.stops)
            return []
        if any(one.startswith(text) for one in (*endings, _FENCE)) or (takes and tags.may_begin_key(text)):
            return None
        self.ended = True  # text that no call has
        return None if self._is_closed else self._close()

    def _fence(self, text: str) -> str:
        """Return the fence of a block of code around an object, with which a text begins; "" for none, or one that may go on."""
        is_cut = _FENCE.startswith(text) and not self._is_last
        return next(
            (one for one in (_FENCE, _FENCE[:3]) if text.startswith(one) and (text == _FENCE or not is_cut)), ""
        )

    def _read_name(self, text: str) -> list[CallPiece] | None:
        found = self._tags.name_head.match(text)
        if found is None and self._tags.may_begin_name(text):
            return None
        name = _name(found) if found else ""
        if found is None or not name or has_surrogates(name) or (self._names is not None and name not in self._names):
            self.ended = True
            self._unread = self._unread[len(self._before) :]
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
        if self._tags.name:  # a value may have lines of its own
            value = value.removeprefix("\n").removesuffix("\n")
        properties = self._schema.get("properties")
        schema = (properties if isinstance(properties, Mapping) else {}).get(key)
        return self._sent(f"{opening}{as_json(key)}: {Allowed(schema, self._schema).json_of(value)}")

    def _end_of_value(self) -> tuple[int, int] | None:
        """Return where the value ends and where the text goes on. None if that is not known yet."""
        text, tags = self._unread, self._tags
        cut = max(overlap(text, one) for one in tags.after)
        last = (len(text) - cut if cut > 1 else len(text), len(text))
        for found in tags.tag.finditer(text, self._scanned):
            if found[1] is not None:  # the next parameter: the closing tag is missing
                if self._may_be_next(_name(found)):
                    return found.start(), found.start()
                continue
            ends = found.start(), found.end() if found[0] == tags.end_value else found.start()
            after, following = text[found.end() :].lstrip(), tags.after[found[0]]
            if after.startswith(following) or (self._is_last and not after):
                return ends
            last = ends
            if not self._is_last and any(one.startswith(after) for one in following):
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


def rules_of(tags: Tags, rule: str, tool: Tool, terminals: Terminals) -> list[str]:
    """Return the rules of a call's parameters: the required ones, then others, in the order of the schema.

    Raises ConfigError for strings with bounds that the grammar does not express.
    """
    names, count = ordered(tool)
    shared, properties = definitions(tool), tool.parameters.get("properties", {})
    rules, parts = list[str](), []
    for i, name in enumerate(names):
        parts.append(f"{rule}_{i}" if i < count else f"({rule}_{i})?")
        before, middle, ending = tags.written
        opening = terminals(before + name + middle)
        value = value_rules(f"{rule}_{i}", ending, properties[name], shared, tool.name, terminals)
        rules += [value[0].replace(": ", f": {opening} ", 1), *value[1:]]
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
        raise ConfigError("has parameters that are no JSON schema of an object", param="tool", value=tool.name)
    return sorted(properties, key=lambda name: name not in required), sum(name in required for name in properties)


def value_rules(
    rule: str, ending: str, schema: Any, shared: Mapping[str, Any], tool: str, terminals: Terminals
) -> list[str]:
    """Return the rules of a value with the text after it: a plain text where strings are allowed, else JSON.

    Raises ConfigError for strings with bounds that the grammar does not express.
    """
    allowed = Allowed(schema, shared)
    if not allowed.has_strings:
        whole = {**shared, **schema} if isinstance(schema, Mapping) else {}
        return [f"{rule}: {rule}_json {terminals(ending)}", f"{rule}_json: {json_rule(whole)}"]
    if bounds := sorted(_BOUNDS & allowed.keywords):
        text = f"has a string with {bounds[0]!r}, which calls of this model do not express; use tool_choice='auto'"
        raise ConfigError(text, param="tool", value=tool)
    if allowed.texts is not None:
        return [f"{rule}: ({' | '.join(map(json.dumps, allowed.texts))}) {terminals(ending)}"]
    return [f"{rule}: {rule}_text", terminals.up_to(f"{rule}_text", ending)]
