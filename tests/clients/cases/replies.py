"""Replies of a server: whole bodies, and streams put together. Owns paths into them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "MISSING", "__bool__": lambda self: False})()
"""The value of a path that leads nowhere."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A response. body: its JSON, or what `stream` makes of its events; text where it is neither. Status 0: none came in time."""

    status: int
    headers: Mapping[str, str]
    text: str
    body: Any


def parsed(text: str, content_type: str) -> Any:
    """Return the body of a response."""
    if content_type.startswith("text/event-stream"):
        return stream(text)
    try:
        return json.loads(text)
    except ValueError:
        return text


def stream(text: str) -> dict[str, Any]:
    """Return a stream as events, and what they amount to: texts, reasoning and calls by choice, finish reasons, usages."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [choice for event in events for choice in event.get("choices") or ()]
    texts: dict[str, str] = {}
    reasoning = ""
    for choice in choices:
        delta = choice.get("delta") or {}
        piece = choice.get("text") or delta.get("content") or ""
        texts[str(choice["index"])] = texts.get(str(choice["index"]), "") + piece
        reasoning += delta.get("reasoning_content") or ""
    return {
        "events": events,
        "kinds": [event.get("type") for event in events],
        "of": _by_kind(events),
        "output_text": "".join(event["delta"] for event in events if event.get("type") == "response.output_text.delta"),
        "names": [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")],
        "texts": texts,
        "reasoning": reasoning,
        "calls": _calls(choices),
        "finish_reasons": [choice["finish_reason"] for choice in choices if choice.get("finish_reason")],
        "usages": [event["usage"] for event in events if event.get("usage")],
        "done": lines[-1:] == ["[DONE]"],
    }


def _by_kind(events: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The events of each kind. Its dots are colons, since dots separate the parts of a path."""
    found: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        found.setdefault(str(event.get("type")).replace(".", ":"), []).append(event)
    return found


def _calls(choices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    pieces = [one for choice in choices for one in (choice.get("delta") or {}).get("tool_calls") or ()]
    for one in pieces:
        call = calls.setdefault(one["index"], {"ids": [], "names": [], "arguments": ""})
        call["ids"] += [one["id"]] if "id" in one else []
        call["names"] += [one["function"]["name"]] if "name" in one["function"] else []
        call["arguments"] += one["function"].get("arguments") or ""
    return [calls[index] for index in sorted(calls)]


def values_at(body: Any, path: str) -> list[Any]:
    """Return the values of a path whose parts are names, indices, or * for every item; nothing where it leads nowhere."""
    values = [body]
    for part in path.split(".") if path else ():
        values = [item for value in values for item in _items(value, part)]
    return values


def _items(value: Any, part: str) -> list[Any]:
    if isinstance(value, list):
        if part == "*":
            return value
        index = int(part) if part.lstrip("-").isdigit() else len(value)
        return [value[index]] if -len(value) <= index < len(value) else []
    if isinstance(value, dict):
        return list(value.values()) if part == "*" else [value[part]] if part in value else []
    return []


def value_at(body: Any, path: str) -> Any:
    """Return the value of a path without *, or MISSING."""
    found = values_at(body, path)
    return found[0] if found else MISSING
