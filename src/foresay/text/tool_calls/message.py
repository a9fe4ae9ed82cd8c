"""A chat message as it is generated: its reasoning, its content and its tool calls."""

from __future__ import annotations

from foresay.text.reasoning import Reasoning
from foresay.text.tool_calls.calls import CallParser, Pieces, Start
from foresay.text.tool_calls.parsers import split_at


class MessageParser:
    """Splits an output into reasoning, content and calls."""

    def __init__(
        self,
        calls: CallParser | None,
        *,
        reasoning: Reasoning | None = None,
        is_open: bool = False,
        is_closed: bool = False,
    ) -> None:
        """calls: parser of tool calls, if there are tools. reasoning: its marks, if the model reasons.

        is_open, is_closed: True if the output begins inside reasoning, or after it.
        """
        self._calls = calls
        self._text, self._is_inside, self._is_first = "", is_open, reasoning is not None and not is_open
        self._start = Start(trims=True)
        """The beginning of reasoning or content."""
        self._reasoning = reasoning
        self._may_end = reasoning is not None and not is_closed
        """True while reasoning may end whose beginning the model left out."""

    @property
    def num_calls(self) -> int:
        """Calls of the message so far."""
        return self._calls.num_calls if self._calls else 0

    def push(self, text: str) -> Pieces:
        """Return what the next text adds to the message."""
        if self._reasoning is None:
            return self._content(text)
        begin, ending = self._reasoning.begin, self._reasoning.end
        self._text += text
        if self._is_first:
            start = self._text.lstrip()
            if begin.startswith(start):
                return Pieces()
            self._is_first, self._is_inside = False, start.startswith(begin)
            self._text = start.removeprefix(begin) if self._is_inside else self._text
            self._may_end = self._may_end and not self._is_inside
            self._start = Start(trims=self._is_inside)
        out = Pieces()
        if self._is_inside:
            before, end, self._text = split_at(self._text, (ending,))
            out.reasoning = self._start.trimmed(before)
            if not end:
                return out
            self._is_inside, self._start = False, Start(trims=True)
            self._may_end = False
        if self._may_end and not self.num_calls:
            self._read_to(ending, out)
            if not out.ends_reasoning:
                return out
        text, self._text = self._start.trimmed(self._text), ""
        out.add(self._content(text))
        return out

    def _read_to(self, ending: str, out: Pieces) -> None:
        """Add content up to the end of reasoning that had no beginning, if it comes: then the content was reasoning."""
        before, end, rest = split_at(self._text, (ending,))
        out.add(self._content(self._start.trimmed(before)))
        self._text = end + rest
        if end and not self.num_calls and self._calls is not None:
            out.add(self._calls.finish())
        if end and not self.num_calls:
            out.add(Pieces(ends_reasoning=True))
            self._may_end, self._start, self._text = False, Start(trims=True), rest
        elif self.num_calls:
            out.add(self._content(self._text))
            self._may_end, self._text = False, ""

    def finish(self) -> Pieces:
        """Return what is left at the end of the output."""
        text, self._text = self._text, ""
        out = Pieces(reasoning=text) if self._is_inside else self._content(text)
        if self._calls is not None:
            out.add(self._calls.finish())
        return out

    def _content(self, text: str) -> Pieces:
        return Pieces(text) if self._calls is None else self._calls.push(text)
