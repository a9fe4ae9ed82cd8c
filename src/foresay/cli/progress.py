"""Progress on stderr during long work; nothing if stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text


def note(line: str) -> None:
    """Print a line on stderr. A live display takes it from `sys.stderr` and shows it above itself, which click circumvents."""
    sys.stderr.write(f"{line}\n")


class _Left(TimeRemainingColumn):
    """The time left, which is named, so that it is not taken for the elapsed time; nothing before it is known."""

    def render(self, task: Task) -> Text:
        """Return the time of a task."""
        text = super().render(task)
        return text.append(" left") if text and task.total is not None else Text()


class _Note(TextColumn):
    """A text that is cut where the terminal is narrow, before anything else of the bar is."""

    def __init__(self) -> None:
        super().__init__("{task.fields[note]}", table_column=Column())

    def render(self, task: Task) -> Text:
        """Return the text of a task, for one line."""
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


@contextmanager
def loading(message: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner; yield a function that changes its message."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(message) as status:
        yield status.update


class Advance(Protocol):
    """Updates a progress bar."""

    def __call__(self, done: float, total: float | None, note: str = "") -> None:
        """Show the progress."""
        ...


@contextmanager
def advancing(title: str, count: ProgressColumn | None = None, *, hidden: bool = False) -> Iterator[Advance]:
    """Show a title, a bar, a count (what is done of the total, if None), the time left and a note."""
    console = Console(file=sys.stderr)
    whole = Column(no_wrap=True)  # not cut before the note and the bar
    columns = (
        BarColumn(bar_width=20),
        count or MofNCompleteColumn(table_column=whole),
        _Left(table_column=whole.copy()),
    )
    with Progress(
        TextColumn(title),
        *columns,
        _Note(),
        console=console,
        transient=True,
        disable=hidden or not console.is_terminal,
        redirect_stdout=False,
    ) as bar:
        task = bar.add_task("", total=None, note="")
        yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note)
