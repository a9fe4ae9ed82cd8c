"""A chat template with tools, a model's text with reasoning and two calls, and tools to offer."""

from __future__ import annotations

from typing import Any

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
