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


def coloured(pieces: Iterable[Piece]) -> Text:
    """The pieces, each in its origin's colour."""
    text = Text()
    for origin, run in groupby(pieces, key=lambda piece: piece.origin):
        text.append("".join(piece.text for piece in run), style=STYLES[origin])
    return text


def legend() -> Text:
    """Meaning of the colours, a line each."""
    lines = [Text.assemble((origin.value.ljust(9), STYLES[origin]), MEANINGS[origin]) for origin in Origin]
    return Text("\n").join(lines)


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
