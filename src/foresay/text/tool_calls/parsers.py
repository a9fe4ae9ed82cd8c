"""Parsers of tool calls, one for each kind of format.

A parser looks for the marker before a call, reads the call, and continues after it. Owns which text is a call; knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from foresay.text.tool_calls.calls import CallPiece, Pieces, Start
from foresay.text.tool_calls.loose_json import LooseJson, repaired

_PART = 256
"""Characters that a parser of markers reads at once."""
_ARGUMENTS = ("arguments", "parameters")
_KEYS = {*_ARGUMENTS, "name", "function", "type", "id"}
"""Members of an object that is a call."""


class _Call:
    """A call that is read from a JSON object of a name and arguments."""

    def __init__(self, index: int, names: Collection[str] | None, ends: Collection[str]) -> None:
        """names: possible names, where no marker separates calls from answers: then an object with other members has arguments.

        ends: see LooseJson.
        """
        self.object, self._index, self._names = LooseJson(ends=ends), index, names
        self._name: str | None = None
        self._arguments: str | None = None
        """The member that has the arguments, once it is known."""
        self._sent = 0
        self.is_known = False
        """True once the name and the beginning of the arguments were read, so that the call was announced."""

    @property
    def may_be_one(self) -> bool:
        """True while the object may still be a call."""
        return not self.object.done and self.object.members.keys() <= _KEYS

    def pieces(self) -> list[CallPiece]:
        """Return what the object adds to the call since the last time."""
        arguments = self._read_arguments()
        if arguments is None or not (self._name or (self._begins_as_one() and self._read_name())):
            return []
        first, self.is_known = not self.is_known, True
        new, self._sent = arguments[self._sent :], max(self._sent, len(arguments))
        return [CallPiece(self._index, self._name if first else None, new)] if first or new else []

    def _begins_as_one(self) -> bool:
        """True if an object has only members of calls up to name and arguments."""
        missing = [{"name", "function"}, set(_ARGUMENTS)]
        for key in self.object.members:
            missing = [names for names in missing if key not in names]
            if key not in _KEYS or not missing:
                return key in _KEYS
        return True

    def _read_name(self) -> bool:
        for key in ("name", "function"):
            name = self._value(key)
            name = name.get("name") if isinstance(name, dict) else name
            is_one = isinstance(name, str) and name and not has_surrogates(name)
            if is_one and (self._names is None or name in self._names):
                self._name = name
                return True
        return False

    def _value(self, key: str) -> Any:
        """Return a complete member's value, None for one that is missing or too deep."""
        try:
            return self.object.value(key) if key in self.object.complete else None
        except RecursionError:
            return None

    def _read_arguments(self) -> str | None:
        """Return the arguments so far, as the text of an object. None if they have not begun, or are no arguments."""
        members = self.object.members
        self._arguments = self._arguments or next((key for key in members if key in _ARGUMENTS), None)
        if self._arguments is None:
            inner = self._value("function")  # OpenAI's form: an object that contains name and arguments
            whole = inner if isinstance(inner, dict) else dict.fromkeys(members) if self.object.done else None
            if whole is None or (self._names is not None and not {"name", *_ARGUMENTS} >= whole.keys()):
                return None
            inner = next((whole[key] for key in _ARGUMENTS if key in whole), {})
            return as_json(inner) if isinstance(inner, dict) else None
        if members[self._arguments].startswith("{"):
            return members[self._arguments]
        if self._arguments not in self.object.complete:
            return None
        value = self._value(self._arguments)  # some models write the object as a string
        is_none = members[self._arguments] == "null"
        return repaired(value or "{}") if isinstance(value, str) else "{}" if is_none else None


class MarkedParser:
    """Calls after a marker, such as Hermes' <tool_call>: text before and between them is content."""

    def __init__(
        self,
        readers: Mapping[str, Callable[[int], Reader]],
        first: Mapping[str, Callable[[int], Reader]] | None = None,
    ) -> None:
        """readers: for each marker a function from the number of calls so far to the reader of what follows.

        first: the same for characters that begin calls without a marker if they begin the output.
        """
        self.num_calls = 0
        self._readers, self._first = readers, first or {}
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
            if self._reader is None and not self._find(out):
                break
            assert self._reader is not None
            self._text, pieces = self._reader.push(self._text)
            out.calls += pieces
            if not self._reader.ended:
                break
            self._end(out)

    def _find(self, out: Pieces) -> bool:
        """Add the content before the next calls, and begin to read them. Returns False if none begin."""
        if self._first:
            start = self._text.lstrip()
            make = self._first.get(start[:1])
            if not start:
                return False
            self._first = {}
            if make is not None:
                self._begin, self._text = self._text[: -len(start)], start
                self._reader = make(self.num_calls)
                return True
        found = [(at, marker) for marker in self._readers if (at := self._text.find(marker)) >= 0]
        rest = max(overlap(self._text, marker) for marker in self._readers)
        end, self._begin = min(found, default=(len(self._text) - rest, ""))
        out.content += self._start.trimmed(self._text[:end])
        self._text = self._text[end + len(self._begin) :]
        if found:
            self._reader = self._readers[self._begin](self.num_calls)
        return bool(found)

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
        out.content += self._start.trimmed(self._text)
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

    def finish(self) -> tuple[str, list[CallPiece]]:
        """End what was begun, at the end of the output. Returns the rest that belongs to no call, and what was read."""
        return "", []


class ObjectReader(Reader):
    """JSON objects of a name and arguments, with separators around them, up to `end`, or to the first other text.

    An object with a fault that was announced as a call is closed there, and the text up to the next of `stops` is lost: its
    beginning was sent, so that the whole cannot become content.
    """

    def __init__(
        self,
        first: int,
        *,
        separators: Collection[str] = "",
        end: str = "",
        names: Collection[str] | None = None,
        stops: Collection[str] = (),
    ) -> None:
        """separators: texts besides white space around objects. end: the marker after the last call, if there is one.

        names: possible names of calls; None for any. stops: markers that end an object, even one that lacks brackets.
        """
        super().__init__(first)
        self._stops, self._drops = stops, False
        """_drops: True in the rest of an object with a fault."""
        self._separators = sorted(separators, key=len, reverse=True)
        self._marks, self._end, self._names = [*self._separators, *([end] if end else [])], end, names
        self._call: _Call | None = None
        self._unread = ""

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """See Reader."""
        self.text += text
        self._unread += text
        out: list[CallPiece] = []
        while self._unread and not self.ended:
            if self._drops:
                self._unread, self._drops = after_fault(self._unread, self._stops)
            if self._drops or (self._call is None and not self._find_object()):
                break
            assert self._call is not None
            call = self._call
            self._unread = call.object.push(self._unread)
            out += self._read(call)
            if not call.is_known and (call.object.broken or not call.may_be_one):
                self.ended, self._unread = True, call.object.text + self._unread
            elif call.object.broken:  # what is wrong with it may be a missing bracket
                out += self._close(call)
                self._drops = not self._unread.startswith(("{", "]"))
            if call.object.done:
                self._call = None
        rest, self._unread = (self._unread, "") if self.ended else ("", self._unread)
        self.text = self.text[: len(self.text) - len(rest)]
        return rest, out

    def finish(self) -> tuple[str, list[CallPiece]]:
        """See Reader."""
        if self._call is None:
            return "", []
        return ("", self._close(self._call)) if self._call.is_known else (self._call.object.text, [])

    def _read(self, call: _Call) -> list[CallPiece]:
        was_known, pieces = call.is_known, call.pieces()
        self.num_calls += call.is_known and not was_known
        return pieces

    def _close(self, call: _Call) -> list[CallPiece]:
        call.object.close()
        return self._read(call)

    def _find_object(self) -> bool:
        """Skip what is around objects; return True at the beginning of one. Ends at the marker or at other text."""
        text = self._unread.lstrip()
        while not any(len(text) < len(one) and one.startswith(text) for one in self._marks):
            found = next((one for one in self._separators if text.startswith(one)), None)
            if found is None:
                break
            text = text[len(found) :].lstrip()
        else:
            self._unread = text
            return False
        self._unread = text
        if self._end and text.startswith(self._end):
            self.ended, self._unread = True, text[len(self._end) :]
        elif text.startswith("{"):
            self._call = _Call(self.first + self.num_calls, self._names, self._stops)
            return True
        elif text:
            self.ended = True
        return False


class EitherReader(Reader):
    """One of several readers: the first character decides."""

    def __init__(
        self, first: int, readers: Mapping[str, Callable[[int], Reader]], other: Callable[[int], Reader]
    ) -> None:
        """readers: by first character. other: for every other character."""
        super().__init__(first)
        self._readers, self._other = readers, other
        self._inner: Reader | None = None
        self._before = ""
        """White space at the beginning."""

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """See Reader."""
        if self._inner is None:
            self.text += text
            text = self.text.lstrip()
            if not text:
                return "", []
            self._before = self.text[: -len(text)]
            self._inner = self._readers.get(text[0], self._other)(self.first)
        rest, pieces = self._inner.push(text)
        self._update()
        return rest, pieces

    def finish(self) -> tuple[str, list[CallPiece]]:
        """See Reader."""
        if self._inner is None:
            return "", []
        rest, pieces = self._inner.finish()
        self._update()
        return rest, pieces

    def _update(self) -> None:
        assert self._inner is not None
        self.text, self.num_calls, self.ended = (
            self._before + self._inner.text,
            self._inner.num_calls,
            self._inner.ended,
        )


def after_fault(text: str, stops: Collection[str]) -> tuple[str, bool]:
    """Return a text from the first of the stops on; without one, what may begin one, and True."""
    found = [at for one in stops if (at := text.find(one)) >= 0]
    cut = min(found, default=len(text) - max((overlap(text, one) for one in stops), default=0))
    return text[cut:], not found


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
