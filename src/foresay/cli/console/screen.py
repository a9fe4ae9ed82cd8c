"""Where the console writes: answers and tables to standard output, notes and errors to standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from foresay.cli.colours import coloured, console, notes
from foresay.text.stream import Piece

_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_TWO_COLUMNS = 62


class Screen:
    """A pair of consoles that wrap at words on a terminal and nowhere else."""

    def __init__(self) -> None:
        self.out, self.notes = console(), notes()

    def written(self, pieces: Iterable[Piece], *, trace: bool) -> None:
        """Some of an answer, at once; what would steer the terminal is shown as U+FFFD there."""
        pieces = list(pieces)
        if self.out.is_terminal:
            pieces = [piece._replace(text=piece.text.translate(_CONTROLS)) for piece in pieces]
        if trace:
            self.out.print(coloured(pieces), end="")
        else:
            sys.stdout.write("".join(piece.text for piece in pieces))
        sys.stdout.flush()

    def line(self, text: RenderableType = "") -> None:
        """A line of a command's output."""
        self.out.print(text, soft_wrap=not self.out.is_terminal)
        sys.stdout.flush()

    def pairs(self, rows: Iterable[tuple[str, str]]) -> None:
        """Names and the first line of what they mean: two columns, or one under the other where that is narrow."""
        rows = [(name, meaning.split("\n")[0]) for name, meaning in rows]
        if self.out.is_terminal and self.out.width >= _TWO_COLUMNS:
            grid = Table.grid(padding=(0, 2))
            for name, meaning in rows:
                grid.add_row(Text(name, style="bold"), meaning)
            self.out.print(grid, soft_wrap=False)
        else:
            for name, meaning in rows:
                self.line(Text.assemble((name, "bold"), f": {meaning}"))

    def note(self, text: str) -> None:
        """An aside."""
        self.notes.print(text, style="dim", soft_wrap=not self.notes.is_terminal)

    def error(self, message: str) -> None:
        """Why something was not done, in one line."""
        self.notes.print(" ".join(message.split()), style="red", soft_wrap=not self.notes.is_terminal)


@contextmanager
def unechoed(typed: bool) -> Iterator[None]:
    """Keys pressed within are not shown among what is written; the next prompt has them. typed: standard input is typed."""
    try:
        import termios
    except ImportError:  # no such terminals here
        typed = False
    if not typed:
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    termios.tcsetattr(descriptor, termios.TCSANOW, [*before[:3], before[3] & ~termios.ECHO, *before[4:]])
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
