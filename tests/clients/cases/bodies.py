"""Requests that many cases share."""

from __future__ import annotations

from typing import Any

from clients.cases.case import Request

KEY = "sk-of-the-cases"
"""The key of servers that need one."""
ORIGIN = "http://trusted.example"
"""The origin that servers with origins allow."""
TALK = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "What is 1+1?"}]
HELLO = [{"role": "user", "content": "Hello"}]
PROMPT = "Hello, my name is"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


def shape(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    """Return the schema of an object without other members; all are required unless some are named."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def tool(name: str, properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    parameters = shape(properties, required)
    return {"type": "function", "function": {"name": name, "description": "A tool", "parameters": parameters}}


WEATHER = tool(
    "get_current_weather",
    {
        "city": {"type": "string", "maxLength": 8},
        "state": {"type": "string", "maxLength": 2},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    ["city", "unit"],
)
WEATHER_OF_RESPONSES = {"type": "function", **WEATHER["function"], "strict": True}
WEATHER_OF_MESSAGES = {
    "name": "get_current_weather", "description": "A tool", "input_schema": WEATHER["function"]["parameters"],
}  # fmt: skip
SEARCH = tool("web_search", {"terms": {"type": "string"}})
FLAG = tool("test", {"success": {"type": "boolean", "const": True}})


def get(path: str, **more: Any) -> Request:
    return Request(method="GET", path=path, **more)


def post(path: str, body: Any, **more: Any) -> Request:
    return Request(path=path, body=body, **more)


def chat(messages: Any = TALK, **fields: Any) -> Request:
    return Request(path="/v1/chat/completions", body={"messages": messages, **fields})


def complete(prompt: Any = PROMPT, **fields: Any) -> Request:
    return Request(path="/v1/completions", body={"prompt": prompt, **fields})


def call(
    name: str = "get_current_weather", arguments: str = '{"city": "Dallas"}', id: str = "call_6789"
) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def choice(name: str) -> dict[str, Any]:
    """Return the tool choice of a function."""
    return {"type": "function", "function": {"name": name}}
