"""Calls that are JSON objects: of a name and arguments, or, after a name, of arguments alone.

Owns which object is a call, and which members are its name and arguments.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from foresay.text.tool_calls.calls import CallPiece
from foresay.text.tool_calls.loose_json import LooseJson, repaired
from foresay.text.tool_calls.parsers import Reader, as_json, has_surrogates

_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "function", "tool_name")
_KEYS = {*_ARGUMENTS, *_NAMES, "type", "id", "tool_call_id"}
"""Members of an object that is a call."""
_NAMED = re.compile(r"\s*(?P<name>[^\s\[{]{1,256})\s*(?:\[.*)?", re.DOTALL)
"""A name without white space, before a marker or an object."""


class _Call:
    """A call that is read from a JSON object of a name and arguments."""

    def __init__(self, index: int, names: Collection[str] | None, ends: Collection[str]) -> None:
        """names: possible names, where no marker separates calls from answers: then an object with other members has arguments.

        ends: see LooseJson.
        """
        self.object, self._index, self._names = LooseJson(ends=ends), index, names
        self._name: str | None = None
        self._identity = ""
        """The id that the text gives the call."""
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
        name, identity = (self._name, self._identity) if first else (None, "")
        return [CallPiece(self._index, name, new, identity)] if first or new else []

    def _begins_as_one(self) -> bool:
        """True if an object has only members of calls up to name and arguments."""
        missing = [set(_NAMES), set(_ARGUMENTS)]
        for key in self.object.members:
            missing = [names for names in missing if key not in names]
            if key not in _KEYS or not missing:
                return key in _KEYS
        return True

    def _read_name(self) -> bool:
        for key in _NAMES:
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


class _NamedCall(_Call):
    """A call whose name was read before the object, which is its arguments."""

    def __init__(self, index: int, name: str, arguments: LooseJson, identity: str) -> None:
        super().__init__(index, None, ())
        self.object, self._name, self._identity = arguments, name, identity

    @property
    def may_be_one(self) -> bool:
        """See _Call."""
        return True

    def _read_arguments(self) -> str | None:
        return self.object.json if self.object.done or len(self.object.json) > 1 else None


class ObjectReader(Reader):
    """JSON objects of a name and arguments, with separators around them, up to `end`, or to the first other text.

    An object with a fault that was announced as a call is closed there.
    """

    _is_list = True
    """True if several objects may follow each other."""

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
        super().__init__(first, stops)
        self._separators = sorted(separators, key=len, reverse=True)
        self._marks, self._end, self._names = [*self._separators, *([end] if end else [])], end, names
        self._call: _Call | None = None

    def _next(self) -> list[CallPiece] | None:
        if not self._unread or (self._call is None and not self._find_object()):
            return None
        call = self._call
        assert call is not None
        self._unread = call.object.push(self._unread)
        out = self._read(call)
        if not call.is_known and (call.object.broken or not call.may_be_one):
            self.ended, self._unread = True, call.object.text + self._unread
        elif call.object.broken:  # what is wrong with it may be a missing bracket
            out += self._close(call)
            self._drops = not self._is_list or not self._unread.startswith(("{", "]"))
        if call.object.done:
            self._call, self.ended = None, self.ended or not (self._is_list or self._drops)
        return out

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


class NamedReader(ObjectReader):
    """A name, and an object of arguments after it, with marks between them."""

    _longest = 512
    """Characters before the object."""

    def __init__(
        self,
        first: int,
        *,
        head: re.Pattern[str] = _NAMED,
        end: str = "",
        separators: Collection[str] = (),
        stops: Collection[str] = (),
        quote: str = "",
    ) -> None:
        """head: the text before the object, with the name in a group "name", and the call's id, if it has one, in "identity".

        end: the marker after the call, if there is one. separators, stops: see ObjectReader. quote: see LooseJson.
        """
        super().__init__(first, separators=separators, end=end, stops=stops)
        self._head, self._is_list, self._quote = head, bool(end), quote

    def finish(self) -> tuple[str, list[CallPiece]]:
        """See Reader."""
        return "", [] if self._call is None else self._close(self._call)

    def _find_object(self) -> bool:
        if self.num_calls and self._end and not self._unread.lstrip().startswith("{"):
            return super()._find_object()
        head, brace, rest = self._unread.partition("{")
        found = self._head.fullmatch(head) if brace else None
        name = found["name"] if found is not None else ""
        marks = (*self._stops, *([self._end] if self._end else []))
        is_none = not name or has_surrogates(name) if brace else len(head) > self._longest
        if not brace and not self._end:  # no mark after the call would end a text that is none
            is_none = is_none or (bool(head.strip()) and self._head.fullmatch(head) is None)
        if self.num_calls or is_none or any(one in head for one in marks):
            self.ended = True
        elif found is not None:
            identity = found.groupdict().get("identity") or ""
            arguments = LooseJson(ends=self._stops, quote=self._quote)
            self._call, self._unread = _NamedCall(self.first, name, arguments, identity), brace + rest
            return True
        return False
