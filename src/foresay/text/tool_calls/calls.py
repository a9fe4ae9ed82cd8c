"""Tools that a client offers, and calls of them in a growing output.

Owns the types that formats, parsers and the server share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, an object."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call."""

    index: int
    """Number of the call in the output."""
    name: str | None
    """The function, in the first piece of a call; else None."""
    arguments: str
    """The next part of the arguments, a JSON object as text."""
    identity: str = ""
    """Id in an API, in the first piece of a call."""


@dataclass(slots=True)
class Pieces:
    """The parts that a piece of text adds to an output."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    ends_reasoning: bool = False
    """True if the earlier content was reasoning: its end came without its beginning."""

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.ends_reasoning)

    def add(self, other: Pieces) -> None:
        """Add what follows. Pieces of one call become one piece: some clients read only the first of an event."""
        if other.ends_reasoning:
            self.reasoning, self.content, self.ends_reasoning = self.reasoning + self.content, "", True
        self.content += other.content
        self.reasoning += other.reasoning
        for one in other.calls:
            last = self.calls[-1] if self.calls else None
            if last is not None and last.index == one.index and one.name is None:
                self.calls[-1] = replace(last, arguments=last.arguments + one.arguments)
            else:
                self.calls.append(one)


class Start:
    """The beginning of a text that arrives in pieces."""

    def __init__(self, *, trims: bool) -> None:
        """trims: True if white space at the beginning is dropped."""
        self._trims = trims

    def trimmed(self, text: str) -> str:
        """Return the next piece, without white space at the beginning of the text."""
        text = text.lstrip() if self._trims else text
        self._trims = self._trims and not text
        return text


class Parser(Protocol):
    """A parser of one output: of calls, or of a whole message with reasoning, content and calls."""

    def push(self, text: str) -> Pieces:
        """Return what the next text adds; text that may belong to a call is withheld until it is clear."""
        ...

    def finish(self) -> Pieces:
        """Return what is left at the end of the output. Text of a call that cannot be read becomes content."""
        ...


class CallParser(Parser, Protocol):
    """A parser of calls, whose other text is content."""

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        ...


class Limited:
    """A parser of messages with a limited number of calls, or with nothing but calls and reasoning."""

    def __init__(self, parser: Parser, most: int | None, *, only_calls: bool) -> None:
        """most: number of calls after which further ones are dropped; None for no limit.

        only_calls: True if the output has no content, so that the beginning of a call that is cut is none.
        """
        self._parser, self._most, self._only_calls = parser, most, only_calls

    def push(self, text: str) -> Pieces:
        """See Parser."""
        return self._limited(self._parser.push(text))

    def finish(self) -> Pieces:
        """See Parser."""
        return self._limited(self._parser.finish())

    def _limited(self, pieces: Pieces) -> Pieces:
        if self._only_calls:
            pieces.content = ""
            pieces.reasoning = "" if pieces.ends_reasoning else pieces.reasoning  # which was content
        if self._most is not None:
            pieces.calls = [one for one in pieces.calls if one.index < self._most]
        return pieces
