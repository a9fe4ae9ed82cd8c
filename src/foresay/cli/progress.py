"""Progress on stderr during long work; nothing if stderr is not a terminal."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@contextmanager
def loading(message: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner; yield a function that changes its message."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(message) as status:
        yield status.update


@contextmanager
def progress_bar(*columns: ProgressColumn, total: float | None = None, **fields: Any) -> Iterator[Callable[..., None]]:
    """Show a bar; yield a function that moves it by `advance`, `completed`, `total` and the fields of its columns."""
    console = Console(file=sys.stderr)
    # standard output is not redirected into the bar
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, redirect_stdout=False
    ) as bar:
        yield functools.partial(bar.update, bar.add_task("", total=total, **fields))


class Advance(Protocol):
    """Updates a progress bar."""

    def __call__(self, done: float, total: float, note: str = "") -> None:
        """Show the progress."""
        ...


@contextmanager
def advancing(title: str) -> Iterator[Advance]:
    """Show a bar with elapsed time, time left and a note."""
    columns = (
        TextColumn(title),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with progress_bar(*columns, note="") as update:

        def advance(done: float, total: float, note: str = "") -> None:
            update(completed=done, total=total, note=note)

        yield advance
