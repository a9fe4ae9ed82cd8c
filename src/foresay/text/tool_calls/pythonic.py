"""Calls that are written as a Python list, such as [f(x=1), g()], as Llama 4 and LFM2 write them, or in lines, as OLMo 3 does.

Owns the grammar of the list: names and parameters may be any words, and literals are those of LooseJson. Nothing is evaluated.
"""

from __future__ import annotations

import json
import re

from foresay.text.tool_calls.calls import CallPiece
from foresay.text.tool_calls.loose_json import LooseJson
from foresay.text.tool_calls.parsers import Reader, as_json

_NAME = r"[^\s()\[\]{}<>,;:=\"'0-9][^\s()\[\]{}<>,;:=\"']*"
_FIRST, _NEXT, _LAST, _CALL = (
    re.compile(rf"\s*{one}")
    for one in (rf"\[\s*({_NAME})\s*\(", rf",\s*({_NAME})\s*\(", r",?\s*\]", rf"({_NAME})\s*\(")
)
_UNFINISHED = re.compile(rf"\s*([\[,]\s*({_NAME}\s*)?)?")
_UNFINISHED_LINE = re.compile(rf"\s*({_NAME}\s*)?")


class PythonReader(Reader):
    """A Python list of function calls with keyword arguments, or calls in lines, read when they are complete."""

    def __init__(self, first: int, end: str = "", *, lines: bool = False) -> None:
        """end: a marker that may follow the list. lines: True for calls in lines, after which the marker comes."""
        super().__init__(first)
        self._end = end
        self._begins, self._goes_on = (_CALL, _CALL) if lines else (_FIRST, _NEXT)
        self._ends = re.compile(rf"\s*(?={re.escape(end)})") if lines else _LAST
        self._unfinished = _UNFINISHED_LINE if lines else _UNFINISHED
        self._calls: list[tuple[str, LooseJson]] = []

    def _next(self) -> list[CallPiece] | None:
        if not self._unread:
            return None
        if self.num_calls:
            after = self._unread.lstrip()
            if len(after) < len(self._end) and self._end.startswith(after):
                return None
            self.ended, self._unread = True, after.removeprefix(self._end) if self._end else self._unread
        elif self._calls and not self._calls[-1][1].done:
            self._unread = self._calls[-1][1].push(self._unread)
            self.ended = self._calls[-1][1].broken
        elif found := (self._goes_on if self._calls else self._begins).match(self._unread):
            self._calls.append((found[1], LooseJson("(")))
            self._unread = self._unread[found.end() - 1 :]
        elif self._calls and (found := self._ends.match(self._unread)):
            self._unread = self._unread[found.end() :]
            pieces = self._read()
            self.ended = not self.num_calls or not self._end
            return pieces
        elif self._unfinished.fullmatch(self._unread) or (self._end and self._end.startswith(self._unread.lstrip())):
            return None
        else:
            self.ended = True
        return []

    def finish(self) -> tuple[str, list[CallPiece]]:
        """See Reader. A list of complete calls whose last bracket is missing is one."""
        is_whole = not self.num_calls and self._calls and self._calls[-1][1].done and not self._unread.strip()
        return "", self._read() if is_whole else []

    def _read(self) -> list[CallPiece]:
        """Return the calls; none if a value is no JSON."""
        try:
            texts = [(name, as_json(json.loads(one.json))) for name, one in self._calls]
        except (ValueError, RecursionError):
            return []
        self.num_calls = len(texts)
        return [CallPiece(self.first + i, name, arguments) for i, (name, arguments) in enumerate(texts)]
