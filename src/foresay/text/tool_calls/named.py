"""Calls as Mistral's newer models write them: a name, optional markers, and an object of arguments.

Owns which text is a name.
"""

from __future__ import annotations

import re

from foresay.text.tool_calls.calls import CallPiece
from foresay.text.tool_calls.loose_json import LooseJson
from foresay.text.tool_calls.parsers import Reader, after_fault, has_surrogates

_NAMED = re.compile(r"\s*([^\s\[{]{1,256})\s*(?:\Z|[\[{])")
"""A name without white space, before a marker or an object."""


class NamedReader(Reader):
    """Mistral's newer form: a name, optional markers, and an object of arguments.

    The rest of an object with a fault is lost up to `stop` if its beginning was sent.
    """

    def __init__(self, first: int, stop: str) -> None:
        """stop: the marker of the next call."""
        super().__init__(first)
        self._head, self._object, self._sent, self._stop = "", LooseJson(ends=[stop]), 0, stop
        self._unread, self._drops = "", False
        """_drops: True in the rest of an object with a fault."""

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """See Reader."""
        self.text += text
        pieces: list[CallPiece] = []
        if not self._object.text:
            self._head += text
            at = self._head.find("{")
            if self._head.strip() and not _NAMED.match(self._head):
                self.ended, self.text = True, self.text[: -len(self._head)]
                return self._head, []
            if at < 0:
                return "", []
            text, self._head = self._head[at:], self._head[:at]
        if not self._drops:
            text = self._object.push(text)
            pieces, is_broken = self._pieces(), self._object.broken
            self._drops = is_broken and self.num_calls > 0
            self.ended = self._object.done or (is_broken and not self._drops)
            if self._drops:
                self._object.close()
                pieces += self._pieces()
        if self._drops:
            self._unread, self._drops = after_fault(self._unread + text, [self._stop])
            text, self.ended = "" if self._drops else self._unread, not self._drops
        self.text = self.text[: len(self.text) - len(text)]
        return text, pieces

    def finish(self) -> tuple[str, list[CallPiece]]:
        """See Reader."""
        self._object.close()
        return "", self._pieces()

    def _pieces(self) -> list[CallPiece]:
        found, name = self._object, _NAMED.match(self._head + "{")
        new = found.json[self._sent :] if found.done or len(found.json) > 1 else ""
        if not new or name is None or has_surrogates(name[1]):
            return []
        self._sent += len(new)
        is_first, self.num_calls = not self.num_calls, 1
        return [CallPiece(self.first, name[1] if is_first else None, new)]
