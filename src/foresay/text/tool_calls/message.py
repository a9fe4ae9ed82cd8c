"""A chat message as it is generated: its reasoning, its content and its tool calls."""

from __future__ import annotations

from typing import Any

from foresay.text.tool_calls.calls import CallParser, Pieces, Start
from foresay.text.tool_calls.parsers import split_at

BEGIN, END = "<think>", "</think>"
_LAST_TOKENS = 8


def has_reasoning(tokenizer: Any) -> bool:
    """True if the chat template marks reasoning."""
    return END in str(getattr(tokenizer, "chat_template", None) or "")


def is_open(tokenizer: Any, prompt: list[int]) -> bool:
    """True if a prompt ends inside reasoning, so that the output begins there."""
    return _end(tokenizer, prompt).endswith(BEGIN)


def is_closed(tokenizer: Any, prompt: list[int]) -> bool:
    """True if a prompt ends after reasoning, so that the output has none."""
    return _end(tokenizer, prompt).endswith(END)


def _end(tokenizer: Any, prompt: list[int]) -> str:
    return str(tokenizer.decode(prompt[-_LAST_TOKENS:])).rstrip()


class MessageParser:
    """Splits an output into reasoning, content and calls."""

    def __init__(
        self,
        calls: CallParser | None,
        *,
        reasons: bool = False,
        is_open: bool = False,
        is_closed: bool = False,
    ) -> None:
        """calls: parser of tool calls, if there are tools. reasons, is_open, is_closed: see `has_reasoning` etc."""
        self._calls = calls
        self._text, self._is_inside, self._is_first = "", is_open, reasons and not is_open
        self._start = Start(trims=True)
        """The beginning of reasoning or content."""
        self._reasons = reasons
        self._may_end = reasons and not is_closed
        """True while reasoning may end whose beginning the model left out."""

    @property
    def num_calls(self) -> int:
        """Calls of the message so far."""
        return self._calls.num_calls if self._calls else 0

    def push(self, text: str) -> Pieces:
        """Return what the next text adds to the message."""
        if not self._reasons:
            return self._content(text)
        self._text += text
        if self._is_first:
            start = self._text.lstrip()
            if BEGIN.startswith(start):
                return Pieces()
            self._is_first, self._is_inside = False, start.startswith(BEGIN)
            self._text = start.removeprefix(BEGIN) if self._is_inside else self._text
            self._may_end = self._may_end and not self._is_inside
            self._start = Start(trims=self._is_inside)
        out = Pieces()
        if self._is_inside:
            before, end, self._text = split_at(self._text, (END,))
            out.reasoning = self._start.trimmed(before)
            if not end:
                return out
            self._is_inside, self._start = False, Start(trims=True)
            self._may_end = False
        if self._may_end and not self.num_calls:
            self._read_to_end(out)
            if not out.ends_reasoning:
                return out
        text, self._text = self._start.trimmed(self._text), ""
        out.add(self._content(text))
        return out

    def _read_to_end(self, out: Pieces) -> None:
        """Add content up to the end of reasoning that had no beginning, if it comes: then the content was reasoning."""
        before, end, rest = split_at(self._text, (END,))
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
