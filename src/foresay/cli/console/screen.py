"""Output of the console: answers and tables on standard output, notes and errors on standard error."""

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
    """Two consoles that wrap at words on a terminal, and only there."""

    def __init__(self) -> None:
        self.out, self.notes = console(), notes()

    def stream(self, pieces: Iterable[Piece], *, trace: bool) -> None:
        """Print a part of an answer at once; on a terminal, control characters are shown as U+FFFD."""
        pieces = list(pieces)
        if self.out.is_terminal:
            pieces = [piece._replace(text=piece.text.translate(_CONTROLS)) for piece in pieces]
        if trace:
            self.out.print(coloured(pieces, self.out), end="")
        else:
            sys.stdout.write("".join(piece.text for piece in pieces))
        sys.stdout.flush()

    def line(self, text: RenderableType = "") -> None:
        """Print a line of a command's output."""
        self.out.print(text, soft_wrap=not self.out.is_terminal)
        sys.stdout.flush()

    def pairs(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print names with the first line of their meanings: in two columns, or a line each on a narrow screen."""
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
        """Print a note."""
        self.notes.print(text, style="dim", soft_wrap=not self.notes.is_terminal)

    def error(self, message: str) -> None:
        """Print an error in one line."""
        self.notes.print(" ".join(message.split()), style="red", soft_wrap=not self.notes.is_terminal)


@contextmanager
def unechoed(typed: bool) -> Iterator[None]:
    """Do not echo keys pressed meanwhile; the next prompt gets them. typed: True if standard input is a terminal."""
    try:
        import termios
    except ImportError:  # not a POSIX system
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
