"""Parsers of tool calls: the text before and between calls is content, and a reader reads the calls.

Owns which text is a call, and what becomes of text that is none; knows no format and no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from foresay.text.tool_calls.calls import CallPiece, Pieces, Start

_PART = 256
"""Characters that a parser of markers reads at once."""


class Reader:
    """Reader of the calls after one marker. Subclasses read the next part of the text."""

    def __init__(self, first: int, stops: Collection[str] = ()) -> None:
        """first: number of earlier calls of the output. stops: texts that end the rest of a call with a fault.

        That rest is lost: the beginning of the call was sent, so that the whole cannot become content.
        """
        self.first, self.num_calls = first, 0
        self.ended = False
        self.text = ""
        """All text so far."""
        self._unread, self._stops, self._drops = "", stops, False
        """_drops: True in the rest of a call with a fault."""

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """Read text; return the rest after the last call, and what was read. All text is read until `ended`."""
        self.text += text
        self._unread += text
        out: list[CallPiece] = []
        while not self.ended:
            if self._drops:
                _, stop, rest = split_at(self._unread, self._stops)
                self._unread, self._drops = stop + rest, not stop
            pieces = None if self._drops else self._next()
            if pieces is None:
                break
            out += pieces
        rest, self._unread = (self._unread, "") if self.ended else ("", self._unread)
        self.text = self.text[: len(self.text) - len(rest)]
        return rest, out

    def _next(self) -> list[CallPiece] | None:
        """Read the next part of the unread text. Returns None if more text is needed, or at the end of the calls."""
        raise NotImplementedError

    def finish(self) -> tuple[str, list[CallPiece]]:
        """End what was begun, at the end of the output. Returns the rest that belongs to no call, and what was read."""
        return "", []


Readers: TypeAlias = Mapping[str, Callable[[int], Reader]]
"""First character of calls, or "" for every other, -> a function from the number of earlier calls to their reader."""


class MarkedParser:
    """Calls after a marker, such as Hermes' <tool_call>: text before and between them is content."""

    def __init__(
        self, readers: Mapping[str, Readers], first: Readers | None = None, *, end: str = "", num_calls: int = 0
    ) -> None:
        """readers: those of what follows each marker. first: those of calls without a marker that begin the output.

        end: a marker after which nothing is read, "" for none. num_calls: earlier calls of the output.
        """
        self.num_calls, self.rest = num_calls, ""
        """rest: text after the end marker."""
        self.ended = False
        self._readers, self._next, self._last = readers, first or {}, end
        """_next: readers of which the next character chooses one."""
        self._text = self._begin = ""
        self._start = Start(trims=False)
        """The beginning of the content; white space after a call is dropped."""
        self._reader: Reader | None = None

    def push(self, text: str) -> Pieces:
        """See Parser. A long text is read in parts: after each marker, the rest of a part is read again."""
        out = Pieces()
        for at in range(0, len(text), _PART):
            self._push(text[at : at + _PART], out)
        return out

    def _push(self, text: str, out: Pieces) -> None:
        self._text += text
        while self._text:
            if self.ended:
                self.rest, self._text = self.rest + self._text, ""
            elif self._reader is None and not (self._choose() if self._next else self._find(out)):
                break
            if self._reader is None:
                continue
            self._text, pieces = self._reader.push(self._text)
            out.calls += pieces
            if not self._reader.ended:
                break
            self._end(out)

    def _choose(self) -> bool:
        """Choose the reader of what follows. Returns False if that is white space so far."""
        start = self._text.lstrip()
        if start:
            make = self._next.get(start[0]) or self._next.get("")
            self._next = {}
            if make is not None:
                self._begin += self._text[: -len(start)]
                self._text, self._reader = start, make(self.num_calls)
        return bool(start)

    def _find(self, out: Pieces) -> bool:
        """Add the content before the next marker. Returns False without one."""
        markers = (*self._readers, self._last) if self._last else self._readers
        before, self._begin, self._text = split_at(self._text, markers)
        out.content += self._start.trimmed(before)
        self.ended = bool(self._last) and self._begin == self._last
        self._next = self._readers.get(self._begin, {})
        return bool(self._begin)

    def finish(self) -> Pieces:
        """See Parser."""
        out = Pieces()
        while self._reader is not None:
            rest, pieces = self._reader.finish()
            out.calls += pieces
            self._text = rest if self._reader.num_calls else ""
            self._end(out)
            rest, self._text = self._text, ""
            out.add(self.push(rest))
        out.content += self._start.trimmed((self._begin if self._next else "") + self._text)
        self._text = ""
        return out

    def _end(self, out: Pieces) -> None:
        """End the calls after a marker; if there are none, all of their text is content."""
        assert self._reader is not None
        if self._reader.num_calls == 0:
            out.content += self._start.trimmed(self._begin + self._reader.text)
        else:
            self._start = Start(trims=True)
        self.num_calls += self._reader.num_calls
        self._reader = None


class GroupReader(Reader):
    """Calls with markers of their own between two markers; what is around them is dropped."""

    def __init__(self, first: int, readers: Mapping[str, Readers], *, end: str) -> None:
        """readers: see MarkedParser. end: the marker after the last call."""
        super().__init__(first)
        self._calls = MarkedParser(readers, end=end, num_calls=first)

    def _next(self) -> list[CallPiece] | None:
        if not self._unread:
            return None
        pieces = self._calls.push(self._unread)
        self._unread, self.ended = self._calls.rest, self._calls.ended
        self.num_calls = self._calls.num_calls - self.first
        return pieces.calls

    def finish(self) -> tuple[str, list[CallPiece]]:
        """See Reader."""
        pieces = self._calls.finish()
        self.num_calls = self._calls.num_calls - self.first
        return "", pieces.calls


def split_at(text: str, markers: Collection[str]) -> tuple[str, str, str]:
    """Return what is before the first of the markers, the marker, and the rest. Without one, the rest is what may begin one."""
    if found := [(at, one) for one in markers if (at := text.find(one)) >= 0]:
        at, marker = min(found)
        return text[:at], marker, text[at + len(marker) :]
    end = len(text) - max((overlap(text, one) for one in markers), default=0)
    return text[:end], "", text[end:]


def as_json(value: Any) -> str:
    """Return a value as JSON. Raises ValueError for one that JSON does not have, such as an infinite number."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value, allow_nan=False) if has_surrogates(text) else text


def has_surrogates(text: str) -> bool:
    """True if a text contains code points that are no characters, and cannot be sent."""
    return any("\ud800" <= char <= "\udfff" for char in text)


def overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of a text may begin a marker."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
