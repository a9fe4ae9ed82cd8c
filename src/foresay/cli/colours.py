"""Text coloured by the origin of each token, and the consoles that print it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from foresay.decoding.outcome import Origin
from foresay.text.formatting import MEANINGS
from foresay.text.stream import Piece

STYLES = {Origin.DRAFT: "green", Origin.RESIDUAL: "red", Origin.BONUS: "cyan"}


_BRACKETS = {Origin.DRAFT: "[]", Origin.RESIDUAL: "{}"}
"""Brackets of an origin on a console without colours; the target's own tokens have none."""


def coloured(pieces: Iterable[Piece], on: Console) -> Text:
    """The pieces, each in its origin's colour, or in its brackets where the console has no colours."""
    text = Text()
    for origin, run in groupby(pieces, key=lambda piece: piece.origin):
        text.append(_marked("".join(piece.text for piece in run), origin, on), style=STYLES[origin])
    return text


def legend(on: Console) -> Text:
    """Meaning of the colours, or of the brackets, a line each."""
    lines = [
        Text.assemble((_marked(origin.value, origin, on).ljust(11), STYLES[origin]), MEANINGS[origin])
        for origin in Origin
    ]
    return Text("\n").join(lines)


def _marked(text: str, origin: Origin, on: Console) -> str:
    brackets = _BRACKETS.get(origin)
    return text if brackets is None or on.color_system is not None else f"{brackets[0]}{text}{brackets[1]}"


class _Console(Console):
    """A console that raises BrokenPipeError for a closed pipe, as other streams do; rich would exit."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """Standard output, without wrapping and markup."""
    return _plain(stderr=False)


def notes() -> Console:
    """Standard error, without wrapping and markup."""
    return _plain(stderr=True)


def _plain(*, stderr: bool) -> Console:
    colours: Any = None if os.environ.get("NO_COLOR") else "auto"
    return _Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True, color_system=colours)
