"""The format of tool calls that a model's chat template has: the one whose parser reads back what the template writes.

A template that describes calls and writes them without marks, or not at all, has the format all of whose signs it contains.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from foresay.errors import ConfigError
from foresay.text.reasoning import Reasoning, reasoning_of
from foresay.text.tool_calls.calls import Pieces
from foresay.text.tool_calls.families import FORMATS, NUMBER, ToolFormat
from foresay.text.tool_calls.message import MessageParser
from foresay.text.tool_calls.terminals import special_in, special_tokens

_CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("get_weather", {"city": "Rome", "days": 3}),
    ("get_time", {"zone": "Oslo"}),
)
"""Calls that a template is given to write."""
_SCHEMAS: dict[str, Any] = {
    name: {
        "type": "object",
        "properties": {key: {"type": "string" if isinstance(one, str) else "integer"} for key, one in given.items()},
    }
    for name, given in _CALLS
}
_TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": one}}
    for name, one in _SCHEMAS.items()
]
_IDENTITIES = (("functions.get_weather:0", "functions.get_time:1"), ("abcdefgh1", "abcdefgh2"))
"""Ids of the calls: as Kimi K2's templates need them, and as Mistral's do."""
_known: WeakKeyDictionary[Any, tuple[str, ToolFormat | None]] = WeakKeyDictionary()


def has_format(tokenizer: Any) -> bool:
    """True if a chat template's format of calls is known."""
    return describes_tools(tokenizer) and _found(tokenizer) is not None


def format_of(tokenizer: Any, name: str = "auto") -> ToolFormat:
    """Return the format of a tokenizer's tool calls. name: one of FORMATS, or "auto".

    Raises ConfigError for a model without a chat template for tools, or with an unknown format.
    """
    if not describes_tools(tokenizer):
        raise ConfigError("are not described by the chat template of this model", param="tools")
    found = _found(tokenizer) if name == "auto" else FORMATS[name]
    if found is None:
        names = ", ".join(FORMATS)
        text = f"of this model is not known; choose it by --tool-format: {names}"
        raise ConfigError(text, param="tool_format", value=name)
    return found


def message_format(tokenizer: Any) -> ToolFormat | None:
    """Return the format of whole messages that a chat template has, None if it has none."""
    return next((one for one in _by_signs(_template(tokenizer)) if one.message is not None), None)


def describes_tools(tokenizer: Any) -> bool:
    """True if the chat template describes tools to the model."""
    return "tools" in _template(tokenizer)


def _template(tokenizer: Any) -> str:
    """Return the chat template that is used with tools."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    try:
        return str(tokenizer.get_chat_template(tools=[{}]))
    except (ValueError, AttributeError):  # several templates, none of them the default; not a transformers tokenizer
        return ""


def visible_ids(chosen: ToolFormat | None, tokenizer: Any, *, reasoning: Reasoning | None = None) -> tuple[int, ...]:
    """Return the special tokens that must stay in the text of an output: those of a format, and the marks of reasoning."""
    marks = () if reasoning is None else (reasoning.begin, reasoning.end)
    return special_in(tokenizer, (*(() if chosen is None else chosen.texts), *marks))


def _found(tokenizer: Any) -> ToolFormat | None:
    template = _template(tokenizer)
    known = _known.get(tokenizer)
    if known is None or known[0] != template:
        known = _known[tokenizer] = template, message_format(tokenizer) or _read_back(tokenizer, template)
    return known[1]


def _by_signs(template: str) -> list[ToolFormat]:
    """Return the formats all of whose signs a template has, those with the most signs first."""
    found = [one for one in FORMATS.values() if all(sign in template for sign in one.signs)]
    return sorted(found, key=lambda one: -len(one.signs))


def _read_back(tokenizer: Any, template: str) -> ToolFormat | None:
    """Return the format that reads what a template writes; by its signs for a template that writes no calls."""
    by_signs = _by_signs(template)
    forms: list[Any] = [dict, json.dumps]
    ways = [(ids[:count], form) for ids in _IDENTITIES for count in (2, 1) for form in forms]
    texts = [text for ids, form in ways if _CALLS[0][0] in (text := _written(tokenizer, ids, form))]
    found = [(likeness, one) for one in FORMATS.values() if (likeness := _likeness(one, tokenizer, texts))[0]]
    if found:
        return max(found, key=lambda each: (each[0][0], each[1] in by_signs, each[0][1]))[1]
    # calls without a format's marks, or none at all, are no form of the model's own
    return next((one for one in by_signs if not any(sign in text for text in texts for sign in one.signs)), None)


def _written(tokenizer: Any, identities: Sequence[str], form: Callable[[Any], Any]) -> str:
    """Return what a template writes of an assistant's message with calls, "" if it refuses it. form: of a call's arguments."""
    calls = [
        {"id": identity, "type": "function", "function": {"name": name, "arguments": form(arguments)}}
        for identity, (name, arguments) in zip(identities, _CALLS, strict=False)
    ]
    user = {"role": "user", "content": "x"}

    def render(messages: Sequence[Mapping[str, Any]], prompt: bool = False) -> str:
        how: dict[str, Any] = {"tools": _TOOLS, "tokenize": False, "add_generation_prompt": prompt}
        return str(tokenizer.apply_chat_template(list(messages), **how))

    with suppress(Exception):  # a template is a program and may raise anything
        before = render([user], prompt=True)
        text = render([user, {"role": "assistant", "content": "", "tool_calls": calls}])
        same = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
        return text[same:]
    return ""


def _likeness(one: ToolFormat, tokenizer: Any, texts: Sequence[str]) -> tuple[int, int]:
    """Return how well a format fits what a template wrote, 0 if its parser does not read it, and the length of its own text."""
    opening = (one.around[0] + one.call[0] + _CALLS[0][0] + one.call[1]).replace(NUMBER, "0")
    best = 0
    for text in texts:
        calls, content = _read(one, tokenizer, text)
        if calls == [each for each in _CALLS if each[0] in text]:
            spelled = 2 * (opening in text) + ("".join(opening.split()) in "".join(text.split()))
            best = max(best, 1 + (not content.strip()) + 2 * spelled)
    return best, len(opening)


def _read(one: ToolFormat, tokenizer: Any, text: str) -> tuple[list[tuple[str, Any]], str]:
    """Return the calls and the content that a format's parser finds in a text without the special tokens that stay hidden."""
    reasoning, out = reasoning_of(tokenizer), Pieces()
    visible = visible_ids(one, tokenizer, reasoning=reasoning)
    for index, mark in special_tokens(tokenizer).items():
        text = text if index in visible else text.replace(mark, "")
    make = one.message or partial(MessageParser, one.parser and one.parser(_SCHEMAS, False), reasoning=reasoning)
    parser = make()
    out.add(parser.push(text))
    out.add(parser.finish())
    return [(piece.name, _object(piece.arguments)) for piece in out.calls if piece.name is not None], out.content


def _object(arguments: str) -> Any:
    with suppress(ValueError):
        return json.loads(arguments)
    return None
