"""Tables, and figures of a run as text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from foresay.cli.colours import console
from foresay.engine import Stats
from foresay.text.formatting import percent

_LEAST = 16
"""Narrowest width, in characters, to which the first column is folded."""


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    on: Console,
    *,
    short: Sequence[str] | None = None,
    drop: Sequence[str] = (),
) -> RenderableType:
    """Return rows under headings, at full width, or the first layout that fits a terminal or $COLUMNS of these:

    the table; with the `short` headings; with narrower gaps; with a folded first column; a paragraph for each row,
    if first cells identify the rows.

    drop: headings of columns that are left out if all their cells are equal.
    """
    kept = [i for i, name in enumerate(headings) if name not in drop or len({row[i] for row in rows}) > 1]
    rows = [[row[i] for i in kept] for row in rows]
    wide, less = ([names[i] for i in kept] for names in (headings, short or headings))
    bounded = on.is_terminal or "COLUMNS" in os.environ
    for names, gap in ((wide, 2), (less, 2), (less, 1)):
        width = _width(names, rows, gap)
        if not bounded or width <= on.width:
            return _grid(names, rows, gap, width)
    first = _width([""], [row[:1] for row in rows], 0)
    if width - max(0, first - _LEAST) <= on.width or len({row[0] for row in rows}) < len(rows):
        return _grid(less, rows, 1, on.width)
    return _by_row(wide, rows)


def show_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, drop: Sequence[str] = ()) -> None:
    """Print a table on stdout; see `table`."""
    out = console()
    out.print(table(headings, rows, out, drop=drop), soft_wrap=not out.is_terminal)


def _width(names: Sequence[str], rows: Sequence[Sequence[str]], gap: int) -> int:
    sizes = [max(map(cell_len, column)) for column in zip(names, *rows, strict=True)]
    return sum(sizes) + gap * (len(sizes) - 1)


def _grid(names: Sequence[str], rows: Sequence[Sequence[str]], gap: int, width: int) -> Table:
    grid = Table(box=None, padding=(0, gap), collapse_padding=True, pad_edge=False, header_style="bold", width=width)
    for i, name in enumerate(names):
        grid.add_column(name, justify="right" if i else "left", overflow="fold", no_wrap=i > 0)
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


def _by_row(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Text:
    cells = [", ".join(f"{name} {cell}" for name, cell in zip(names[1:], row[1:], strict=True) if cell) for row in rows]
    lines = [Text.assemble((row[0], "bold"), f"\n  {text}") for row, text in zip(rows, cells, strict=True)]
    return Text("\n").join(lines)


def gain(speed_up: float, low: float | None = None, high: float | None = None) -> str:
    """1.234, 1.2, 1.3 -> "1.23x 1.20-1.30"."""
    return f"{speed_up:.2f}x" + ("" if low is None or high is None else f" {low:.2f}-{high:.2f}")


def sum_up(stats: Stats, seconds: float, seed: int | None, *, exact: bool) -> str:
    """Figures of one output in a line."""
    rate = stats.num_tokens / seconds if seconds else 0.0
    return (
        f"{stats.num_tokens} tokens in {seconds:.2f} s, {rate:.1f} tokens/s, "
        f"{stats.block_efficiency or 0:.2f} tokens/pass, accepted {percent(stats.acceptance_rate)}"
        + ("" if seed is None else f", seed {seed}")
        + ("" if exact else ", not exact (lossy rule)")
    )


def first_difference(plain: Any, fast: Any, tokenizer: Any) -> str | None:
    """Describe the first difference of two outputs; None if they are equal."""
    a, b = plain.token_ids, fast.token_ids
    if a == b:
        return None
    index = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    words = [repr(tokenizer.decode(ids[index : index + 1])) if index < len(ids) else "the end" for ids in (a, b)]
    return f"token {index}: plain decoding has {words[0]}, speculation {words[1]}"
