"""Parsers of tool calls, one for each kind of format.

A parser looks for the marker before a call, reads the call, and continues after it. Owns which text is a call; knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from foresay.text.tool_calls.calls import CallPiece, Pieces, Start
from foresay.text.tool_calls.json_object import JsonObject

_ARGUMENTS = ("arguments", "parameters")
_KEYS = {*_ARGUMENTS, "name", "function", "type", "id"}
"""Members of an object that is a call."""


class _Call:
    """A call that is read from a JSON object of a name and arguments."""

    def __init__(self, index: int, names: Collection[str] | None) -> None:
        """names: possible names; None for any."""
        self.object, self._index, self._names = JsonObject(), index, names
        self._name: str | None = None
        self._key: str | None = None
        """The member that has the arguments, once it is known."""
        self._sent = 0

    @property
    def is_known(self) -> bool:
        """True once the name was read, so that the call was announced."""
        return self._name is not None

    @property
    def may_be_one(self) -> bool:
        """True while the object may still be a call."""
        return not self.object.done and self.object.members.keys() <= _KEYS

    def pieces(self) -> list[CallPiece]:
        """Return what the object adds to the call since the last time."""
        first = not self.is_known
        if first and not self._read_name():
            return []
        new = self._new_arguments()
        return [CallPiece(self._index, self._name if first else None, new)] if first or new else []

    def _read_name(self) -> bool:
        for key in ("name", "function"):
            if key in self.object.complete:
                try:
                    name = self.object.value(key)
                except (ValueError, RecursionError):
                    name = None
                is_one = isinstance(name, str) and name and not has_surrogates(name)
                is_one = is_one and (self._names is None or name in self._names)
                self._name = name if is_one else None
        return self.is_known

    def _new_arguments(self) -> str:
        key = self._key = self._key or next((key for key in self.object.members if key in _ARGUMENTS), None)
        if key is None:
            text = "{}" if self.object.done else ""
        else:
            text = self.object.members[key]
            if not text.startswith("{"):  # some models write the object as a string
                text = self._as_object(key) if key in self.object.complete else ""
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        return new

    def _as_object(self, key: str) -> str:
        try:
            value = self.object.value(key)
            value = json.loads(value) if isinstance(value, str) else value
            return as_json(value) if isinstance(value, dict) else "{}"
        except (ValueError, RecursionError):
            return "{}"


class MarkedParser:
    """Calls after a marker, such as Hermes' <tool_call>: text before and between them is content."""

    def __init__(self, readers: Mapping[str, Callable[[int], Reader]]) -> None:
        """readers: for each marker a function from the number of calls so far to the reader of what follows."""
        self.num_calls = 0
        self._readers = readers
        self._text = self._begin = ""
        self._start = Start(trims=False)
        """The beginning of the content; white space after a call is dropped."""
        self._reader: Reader | None = None

    def push(self, text: str) -> Pieces:
        """See Parser."""
        out = Pieces()
        self._text += text
        while self._text:
            if self._reader is None:
                found = [(at, marker) for marker in self._readers if (at := self._text.find(marker)) >= 0]
                rest = max(overlap(self._text, marker) for marker in self._readers)
                end, self._begin = min(found, default=(len(self._text) - rest, ""))
                out.content += self._start.trimmed(self._text[:end])
                self._text = self._text[end + len(self._begin) :]
                if not found:
                    break
                self._reader = self._readers[self._begin](self.num_calls)
            self._text, pieces = self._reader.push(self._text)
            out.calls += pieces
            if not self._reader.ended:
                break
            self._end(out)
        return out

    def finish(self) -> Pieces:
        """See Parser."""
        out, text = Pieces(), self._text
        self._text = ""
        if self._reader is not None:
            self._end(out)
        out.content += self._start.trimmed(text)
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


class Reader:
    """Reader of the calls after one marker. Subclasses read the text."""

    def __init__(self, first: int) -> None:
        """first: number of earlier calls of the output."""
        self.first, self.num_calls = first, 0
        self.ended = False
        self.text = ""
        """All text so far."""

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """Read text; return the rest after the last call, and what was read. All text is read until `ended`."""
        raise NotImplementedError


class ObjectReader(Reader):
    """JSON objects of a name and arguments, with separators around them, up to `end`, or to the first other text."""

    def __init__(
        self, first: int, *, separators: str = "", end: str = "", names: Collection[str] | None = None
    ) -> None:
        """separators: characters besides white space around objects. end: the marker after the last call, if there is one.

        names: possible names of calls; None for any.
        """
        super().__init__(first)
        self._separators, self._end, self._names = separators, end, names
        self._call: _Call | None = None
        self._unread = ""

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """See Reader."""
        self.text += text
        self._unread += text
        out: list[CallPiece] = []
        while self._unread and not self.ended:
            if self._call is None and not self._find_object():
                break
            assert self._call is not None
            was_known = self._call.is_known
            self._unread = self._call.object.push(self._unread)
            out += self._call.pieces()
            self.num_calls += self._call.is_known and not was_known
            if not self._call.is_known and (self._call.object.broken or not self._call.may_be_one):
                self.ended, self._unread = True, self._call.object.text + self._unread
            elif self._call.object.broken:
                self.ended = True
            elif self._call.object.done:
                self._call = None
        rest, self._unread = (self._unread, "") if self.ended else ("", self._unread)
        self.text = self.text[: len(self.text) - len(rest)]
        return rest, out

    def _find_object(self) -> bool:
        """Skip what is around objects; return True at the beginning of one. Ends at the marker or at other text."""
        text = self._unread.lstrip(" \t\r\n" + self._separators)
        if self._end and text.startswith(self._end):
            self.ended, self._unread = True, text[len(self._end) :]
        elif text and not (self._end and self._end.startswith(text)):
            if text[0] == "{":
                self._unread, self._call = text, _Call(self.first + self.num_calls, self._names)
                return True
            self.ended = True
        return False


class NamedReader(Reader):
    """Mistral's newer form: a name, optional markers, and an object of arguments."""

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self._head, self._object, self._sent = "", JsonObject(), 0

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """See Reader."""
        self.text += text
        if not self.num_calls:
            head, brace, text = text.partition("{")
            self._head += head
            if not brace:
                return "", []
            text = brace + text
        rest = self._object.push(text)
        name = self._head.partition("[")[0].strip() if not self.num_calls else None
        self.ended = self._object.done or self._object.broken
        self.text = self.text[: len(self.text) - len(rest)]
        new, self._sent = self._object.text[self._sent :], len(self._object.text)
        if not new or name == "" or (name and has_surrogates(name)):
            return rest, []
        self.num_calls = 1
        return rest, [CallPiece(self.first, name, new)]


class MistralReader(Reader):
    """A list of objects, or the newer form: the first character decides."""

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self._inner: Reader | None = None

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """See Reader."""
        if self._inner is None:
            text = (self.text + text).lstrip()
            self.text = ""
            if not text:
                return "", []
            is_list = text[0] in "[{"
            self._inner = ObjectReader(self.first, separators="[,", end="]") if is_list else NamedReader(self.first)
        rest, pieces = self._inner.push(text)
        self.text, self.num_calls, self.ended = self._inner.text, self._inner.num_calls, self._inner.ended
        return rest, pieces


class WholeParser:
    """An output that is all calls or all content: the first characters decide, after an optional marker."""

    def __init__(self, opening: str, reader: Reader, markers: Sequence[str] = ()) -> None:
        """opening: the character that begins calls. markers: texts before or after calls that are dropped."""
        self.num_calls = 0
        self._opening, self._reader, self._markers = opening, reader, markers
        self._text = ""
        self._is_content = False
        self._start = Start(trims=True)

    def push(self, text: str) -> Pieces:
        """See Parser."""
        if self._is_content:
            return Pieces(text)
        if self._reader.ended:
            return Pieces(self._behind(text))
        self._text += text
        start = self._text.lstrip()
        for marker in self._markers:
            start = start.removeprefix(marker).lstrip()
        if not start or any(marker.startswith(start) for marker in self._markers):
            return Pieces()
        if start[0] != self._opening:
            return self._as_content()
        rest, pieces = self._reader.push(text if self._reader.text else start)
        self.num_calls = self._reader.num_calls
        if self._reader.ended and not self.num_calls:
            return self._as_content()
        if self._reader.ended:
            self._text = ""
            return Pieces(self._behind(rest), calls=pieces)
        return Pieces(calls=pieces)

    def _behind(self, text: str) -> str:
        """Return text after the calls, without markers."""
        self._text += text
        for marker in self._markers:
            self._text = self._text.replace(marker, "")
        end = len(self._text) - max((overlap(self._text, marker) for marker in self._markers), default=0)
        out, self._text = self._start.trimmed(self._text[:end]), self._text[end:]
        return out

    def finish(self) -> Pieces:
        """See Parser."""
        if self._reader.ended and self.num_calls:
            return Pieces(self._start.trimmed(self._text))
        return Pieces() if self._is_content or self.num_calls else self._as_content()

    def _as_content(self) -> Pieces:
        text, self._text, self._is_content = self._text, "", True
        return Pieces(text)


class FirstParser:
    """One of two parsers: the first character decides."""

    def __init__(self, opening: str, whole: WholeParser, other: MarkedParser) -> None:
        """opening: the character of outputs for `whole`; `other` parses the rest."""
        self._opening, self._whole, self._other = opening, whole, other
        self._chosen: WholeParser | MarkedParser | None = None
        self._text = ""

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return 0 if self._chosen is None else self._chosen.num_calls

    def push(self, text: str) -> Pieces:
        """See Parser."""
        if self._chosen is not None:
            return self._chosen.push(text)
        self._text += text
        start = self._text.lstrip()
        if not start:
            return Pieces()
        self._chosen = self._whole if start[0] == self._opening else self._other
        return self._chosen.push(self._text)

    def finish(self) -> Pieces:
        """See Parser."""
        return Pieces(self._text) if self._chosen is None else self._chosen.finish()


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
