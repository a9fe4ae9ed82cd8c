"""A chat template with tools, a model's text with reasoning and two calls, and tools to offer."""

from __future__ import annotations

import json
import random
from typing import Any

from foresay.text.tool_calls.calls import Pieces
from foresay.text.tool_calls.families import FORMATS, NUMBER, ToolFormat
from foresay.text.tool_calls.message import MessageParser

TEMPLATE = (
    "<bos>{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<user>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "{% if message.tool_call_id %}{{ message.tool_call_id }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PIECES = (
    *("<think>", "\nWhat is", " asked?", "</think>", "\n\n", "Let me look", "."),
    *("<tool_call>", '\n{"name": "wea', 'ther", "arg', 'uments": {"ci', 'ty": "Rome"', "}}\n", "</tool_call>"),
    *("\n<tool_call>\n", '{"name": "time", "arguments": ', "{}", "}\n </tool_call>"),
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
TALK: list[Any] = [{"role": "user", "content": "hello there"}]


def read_output(parser: Any, text: str, cuts: int | random.Random) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning and calls of an output, cut into pieces of a length or of random ones."""
    out, at = Pieces(), 0
    while at < len(text):
        step = cuts if isinstance(cuts, int) else cuts.randrange(1, 12)
        out.add(parser.push(text[at : at + step]))
        at += step
    out.add(parser.finish())
    calls: list[tuple[str, str]] = []
    for one in out.calls:
        if one.name is not None:
            assert one.index == len(calls), "calls are numbered in order"
            calls.append((one.name, ""))
        calls[one.index] = (calls[one.index][0], calls[one.index][1] + one.arguments)
    assert parser.num_calls == len(calls)
    return out.content, out.reasoning, calls


def parser_of(name: str, schemas: Any, **more: Any) -> Any:
    """The parser of a message in a format, or of one without calls."""
    chosen = FORMATS.get(name)
    if chosen is not None and chosen.message is not None:
        return chosen.message()
    return MessageParser(None if chosen is None or chosen.parser is None else chosen.parser(schemas, False), **more)


def written(one: ToolFormat, *calls: tuple[str, dict[str, Any]], value: Any = json.dumps) -> str:
    """Calls as the family writes them. value: returns the text of a Python argument."""
    texts = []
    for name, arguments in calls:
        inside = json.dumps(arguments)
        if one.is_python:
            inside = ", ".join(f"{k}={value(v)}" for k, v in arguments.items())
        if one.tags is not None:
            before, middle, after = one.tags.written
            shown = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
            inside = "".join(before + k + middle + v + after for k, v in shown.items())
        if one.quote:
            inside = ",".join(f"{k}:{_quoted(v, one.quote)}" for k, v in arguments.items())
        texts.append((one.call[0] + name + one.call[1]).replace(NUMBER, str(len(texts))) + inside + one.call[2])
    return one.around[0] + one.around[1].join(texts) + one.around[2]


def _quoted(value: Any, quote: str) -> str:
    """A value with marks around its texts, as Gemma 4 writes it."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_quoted(v, quote)}" for k, v in value.items()) + "}"
    return "[" + ",".join(_quoted(one, quote) for one in value) + "]" if isinstance(value, list) else json.dumps(value)
