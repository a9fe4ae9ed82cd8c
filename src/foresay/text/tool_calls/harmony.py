"""Messages of gpt-oss (the harmony format): each has a header, which names its channel and recipient, and a body.

The channel "analysis" is reasoning; a message to a function is a call if its body is empty or an object, even in code;
other text is content. What follows a fault in the object is lost, because the call was sent. Owns the split of an output.
"""

from __future__ import annotations

import re

from foresay.text.tool_calls.calls import CallPiece, Pieces
from foresay.text.tool_calls.loose_json import LooseJson
from foresay.text.tool_calls.parsers import has_surrogates, split_at

CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (CHANNEL, MESSAGE, START, CONSTRAIN, END, CALL, RETURN)
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_ROLE = re.compile(r"\s*(assistant\b.*|to=\S+\s*)?", re.DOTALL)
"""The header before a channel; other text there is content."""
_BEFORE = re.compile(r"\s*(`{0,2}|```[a-z]*\s*)")
"""The beginning of a call's body before its object."""


class HarmonyParser:
    """Splits an output into reasoning, content and calls; see MessageParser."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._text = ""
        self._header: str | None = ""
        """Text of the header so far; None in a body."""
        self._is_call = self._is_reasoning = False
        self._name: str | None = None
        """The called function, until its first piece is sent."""
        self._object: LooseJson | None = None
        """The arguments of a call, once it was sent."""
        self._body = ""
        """The body before the object, then after it."""

    def push(self, text: str) -> Pieces:
        """Return what the next text adds to the message."""
        self._text += text
        out = Pieces()
        while self._text:
            before, marker, self._text = split_at(self._text, MARKERS)
            self._take(before, out)
            if not marker:
                break
            self._marked(marker, out)
        return out

    def finish(self) -> Pieces:
        """Return what is left at the end of the output."""
        out, text = Pieces(), self._text
        self._text = ""
        self._take(text, out)
        self._end_call(out)
        if self._header and not self._header.lstrip().startswith(
            ("to=", "assistant", "analysis", "commentary", "final")
        ):
            out.content += self._header  # no header at all: a model that writes plain text
        return out

    def _marked(self, marker: str, out: Pieces) -> None:
        if marker == MESSAGE:
            self._begin(self._header or "", out)
        elif marker in (END, CALL, RETURN, START):
            self._end_call(out)
            self._header, self._is_call, self._is_reasoning = "", False, False
        elif self._header is not None:
            if marker == CHANNEL and not _ROLE.fullmatch(self._header):
                out.content += self._header
                self._header = ""
            self._header += " "

    def _begin(self, header: str, out: Pieces) -> None:
        """Begin the body after a header such as "analysis" or "commentary to=functions.f json"."""
        self._end_call(out)
        self._header = None
        recipient = _RECIPIENT.search(header)
        self._is_call = recipient is not None and not has_surrogates(recipient[1])
        self._is_reasoning = not self._is_call and "analysis" in header
        self._name = recipient[1] if recipient is not None and self._is_call else None
        self._object, self._body = None, ""

    def _take(self, text: str, out: Pieces) -> None:
        """Add a piece of a header or body."""
        if not text:
            return
        if self._header is not None:
            self._header += text
        elif self._is_call:
            self._add_arguments(text, out)
        elif self._is_reasoning:
            out.reasoning += text
        else:
            out.content += text

    def _add_arguments(self, text: str, out: Pieces) -> None:
        if self._object is None:
            self._body += text
            head, brace, rest = self._body.partition("{")
            if not _BEFORE.fullmatch(head):
                self._is_call = False
                out.content += self._body
            if not brace or not self._is_call:
                return
            self._object, text, self._body = LooseJson(), brace + rest, ""
            self.num_calls += 1
        found, before = self._object, len(self._object.json)
        rest = text if found.done else found.push(text)
        if found.broken:
            found.close()
        else:
            self._body += rest
        self._add_piece(found.json[before:], out)

    def _end_call(self, out: Pieces) -> None:
        """Close the arguments; none are an empty object."""
        if self._is_call and self._object is not None:
            before = len(self._object.json)
            self._object.close()
            self._add_piece(self._object.json[before:], out)
            out.content += self._body if self._body.strip("`]}) \t\r\n") else ""
        elif self._is_call and not self._body.strip():
            self.num_calls += 1
            self._add_piece("{}", out)
        elif self._is_call:
            out.content += self._body
        self._is_call = False

    def _add_piece(self, text: str, out: Pieces) -> None:
        if text or self._name is not None:
            out.calls.append(CallPiece(self.num_calls - 1, self._name, text))
        self._name = None
