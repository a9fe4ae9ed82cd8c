"""A conversation of separate items (texts, reasoning, calls and results) as messages of a chat.

Owns which items form one message of the assistant. Knows no API's fields.
"""

from __future__ import annotations

from typing import Any


class History:
    """A growing list of messages."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._open = False
        """True if the last message is the assistant's, and the next item of the assistant may belong to it."""

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages. One of reasoning alone has an empty text."""
        return [
            {**one, "content": ""} if one["content"] is None and "tool_calls" not in one else one
            for one in self._messages
        ]

    def add_text(self, role: str, text: str) -> None:
        """Add a text. Reasoning and text of the assistant, then its calls, are one message."""
        if role == "assistant":
            self._assistant(before_text=True)["content"] = text
        else:
            self._open = False
            self._messages.append({"role": role, "content": text})

    def add_reasoning(self, text: str) -> None:
        """Add reasoning of the assistant."""
        last = self._assistant(before_text=True)
        if text:
            last["reasoning_content"] = last.get("reasoning_content", "") + text

    def add_call(self, identity: str, name: str, arguments: Any) -> None:
        """Add a call of the assistant. arguments: a text or an object."""
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}})

    def add_result(self, identity: str, text: str) -> None:
        """Add the result of a call."""
        self._open = False
        self._messages.append({"role": "tool", "tool_call_id": identity, "content": text})

    def _assistant(self, *, before_text: bool = False) -> dict[str, Any]:
        """Return the message to which an item belongs. before_text: True if one with a text or calls is complete."""
        last = self._messages[-1] if self._open else None
        if last is None or (before_text and (last["content"] is not None or "tool_calls" in last)):
            self._messages.append({"role": "assistant", "content": None})
            self._open = True
        return self._messages[-1]
