"""A JSON object that arrives in pieces: where it ends, and the texts of its members so far."""

from __future__ import annotations

import json
from typing import Any

_OPENING, _CLOSING = "{[", "}]"


class JsonObject:
    """Reader of one object. It checks the structure only; the texts of members may be invalid JSON."""

    def __init__(self) -> None:
        self.text = ""
        """The object so far."""
        self.members: dict[str, str] = {}
        """Text of each member's value, complete or growing."""
        self.complete: set[str] = set()
        """Members whose values have ended."""
        self.done = False
        self.broken = False
        """True if the text is no object."""
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        """The member whose value is read; None before its colon."""
        self._start = 0

    def push(self, text: str) -> str:
        """Read text up to the end of the object or to a fault; return the rest."""
        rest = ""
        for i, char in enumerate(text):
            if self.done or self.broken:
                rest = text[i:]
                break
            self._read(char)
        if self._key is not None:
            self.members[self._key] = self.text[self._start :].strip()
        return rest

    def value(self, key: str) -> Any:
        """Return a complete member's value. Raises ValueError if its text is no JSON."""
        return json.loads(self.members[key])

    def _read(self, char: str) -> None:
        if not self._depth and char != "{":
            self.broken = not char.isspace()
            return
        self.text += char
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in _OPENING:
            self._depth += 1
            if self._depth == 1:
                self._start = len(self.text)
                return
        elif char in _CLOSING:
            self._depth -= 1
        if self._depth == 0 or (self._depth == 1 and char == "," and not self._in_string):
            self._end_member()
            self.done = self._depth == 0
        elif self._key is None and self._depth == 1 and char == ":" and not self._in_string:
            self._end_key()

    def _end_key(self) -> None:
        try:
            key = json.loads(self.text[self._start : -1])
        except ValueError:
            key = None
        self._key, self._start, self.broken = key, len(self.text), not isinstance(key, str)

    def _end_member(self) -> None:
        if self._key is not None:
            self.members[self._key] = self.text[self._start : -1].strip()
            self.complete.add(self._key)
        self._key, self._start = None, len(self.text)
