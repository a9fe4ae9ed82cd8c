"""What the lab's commands share: prompts, methods, progress, numbers as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from foresay.errors import ConfigError

if TYPE_CHECKING:
    from foresay.lab.data.items import PromptItem


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Which prompts."""

    prompts: Annotated[
        str, typer.Option(help="shipped, a .jsonl, .json, .csv or .txt file (also .gz), or a data set of the hub.")
    ] = "shipped"
    format: Annotated[
        str | None, typer.Option(help="gsm8k, mmlu, humaneval, mt_bench, hellaswag or alpaca; else by its fields.")
    ] = None
    field: Annotated[str | None, typer.Option(help="Where records have their text or messages.")] = None
    split: Annotated[str | None, typer.Option(help="Which split of a data set of the hub.")] = None
    category: Annotated[str | None, typer.Option(help="Prompts of this category only.")] = None
    count: Annotated[int | None, typer.Option(help="So many prompts, balanced over categories.")] = None
    subset_seed: Annotated[int, typer.Option(help="Which ones, with --count.")] = 0
    no_template: Annotated[bool, typer.Option("--no-template", help="Texts as they are, without chat template.")] = (
        False
    )

    def items(self) -> list[PromptItem]:
        """The prompts."""
        from foresay.lab.data.datasets import load_items

        return load_items(
            self.prompts,
            format=self.format,
            field=self.field,
            split=self.split,
            category=self.category,
            count=self.count,
            seed=self.subset_seed,
        )

    @property
    def name(self) -> str:
        """What results call these prompts."""
        whole = Path(self.prompts).name if self.prompts != "shipped" else "shipped"
        return f"{whole}:{self.category}" if self.category else whole


class Advance(Protocol):
    """Tells a bar how far it is."""

    def __call__(self, done: float, total: float, note: str = "") -> None:
        """Show it."""
        ...


@contextmanager
def advancing(what: str) -> Iterator[Advance]:
    """A bar on stderr with elapsed time, time left and a note; nothing where stderr is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from foresay.cli.common import progress_bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with progress_bar(*columns) as bar:
        task = bar.add_task(what, total=None, note="")

        def advance(done: float, total: float, note: str = "") -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield advance


def numbers(text: str, name: str) -> list[int]:
    """Integers of at least 1, separated by commas."""
    try:
        out = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} {text!r} must be numbers separated by commas, as 1,4,8") from None
    if min(out) < 1:
        raise ConfigError(f"{name} {text!r} must be numbers of at least 1")
    return list(dict.fromkeys(out))


def show_table(headings: Sequence[str], lines: Sequence[Sequence[str]], *, drop: Sequence[str] = ()) -> None:
    """A table on stdout: aligned on a terminal, narrow ones too, and without cuts elsewhere.

    drop: headings of columns that are left out where they say the same on every line.
    """
    from rich import box
    from rich.table import Table

    from foresay.cli.trace import console

    out = console()
    kept = [i for i, name in enumerate(headings) if name not in drop or len({line[i] for line in lines}) > 1]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i in kept:
        table.add_column(
            headings[i], justify="left" if i == 0 else "right", overflow="fold", no_wrap=i > 0, min_width=0 if i else 16
        )
    for line in lines:
        table.add_row(*(line[i] for i in kept))
    out.print(table, soft_wrap=not out.is_terminal)


def gain(speed_up: float, low: float | None = None, high: float | None = None) -> str:
    """1.234, 1.2, 1.3 -> "1.23x 1.20-1.30"."""
    return f"{speed_up:.2f}x" + ("" if low is None or high is None else f" {low:.2f}-{high:.2f}")


def per_cent(value: float | None) -> str:
    """0.123 -> "12%"."""
    return "" if value is None else f"{100 * value:.0f}%"
