"""Text coloured by who wrote each token, and the tables that sum a run up."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from foresay.decoding.outcome import Origin
from foresay.engine import Stats
from foresay.text.stream import Piece

STYLES = {Origin.DRAFT: "green", Origin.RESIDUAL: "red", Origin.BONUS: "cyan"}
MEANINGS = {
    Origin.DRAFT: "guessed by the drafter and accepted",
    Origin.RESIDUAL: "the target's, where a guess was rejected",
    Origin.BONUS: "the target's, where every guess held or none was made",
}


def coloured(pieces: Iterable[Piece]) -> Text:
    """The pieces, each in its origin's colour."""
    text = Text()
    for origin, run in groupby(pieces, key=lambda piece: piece.origin):
        text.append("".join(piece.text for piece in run), style=STYLES[origin])
    return text


def legend() -> Text:
    """What the colours mean, a line each."""
    lines = [Text.assemble((origin.value.ljust(9), STYLES[origin]), MEANINGS[origin]) for origin in Origin]
    return Text("\n").join(lines)


def percent(value: float | None) -> str:
    """A share as a percentage, "-" when there is none."""
    return "-" if value is None else f"{100 * value:.0f}%"


def comparison(plain_s: float, plain: Stats, seconds: float, stats: Stats, width: int = 80) -> Text:
    """Plain decoding beside speculation: a table, or a line per figure where the terminal is narrow."""
    rows = [("plain", *_figures(plain_s, plain_s, plain)), ("foresay", *_figures(plain_s, seconds, stats))]
    names = ("", "tokens", "seconds", "tokens/s", "speed-up", "tokens/pass", "accepted")
    if width < 62:
        lines = [f"{name}: {a} plain, {b} foresay" for name, a, b in list(zip(names, *rows, strict=True))[1:]]
        return Text("\n".join(lines))
    sizes = [max(len(row[i]) for row in (names, *rows)) for i in range(len(names))]
    text = Text()
    for row in (names, *rows):
        cells = [
            cell.ljust(size) if i == 0 else cell.rjust(size)
            for i, (cell, size) in enumerate(zip(row, sizes, strict=True))
        ]
        text.append("  ".join(cells) + "\n", style="bold" if row is names else "")
    text.rstrip()
    return text


def _figures(plain_s: float, seconds: float, stats: Stats) -> tuple[str, ...]:
    return (
        str(stats.num_tokens),
        f"{seconds:.2f}",
        f"{stats.num_tokens / seconds:.1f}",
        f"{plain_s / seconds:.2f}x",
        f"{stats.block_efficiency or 0:.2f}",
        percent(stats.acceptance_rate),
    )


def sum_up(stats: Stats, seconds: float, seed: int | None, *, exact: bool) -> str:
    """One output's figures in a line."""
    rate = stats.num_tokens / seconds if seconds else 0.0
    return (
        f"{stats.num_tokens} tokens in {seconds:.2f} s, {rate:.1f} tokens/s, "
        f"{stats.block_efficiency or 0:.2f} tokens/pass, accepted {percent(stats.acceptance_rate)}"
        + ("" if seed is None else f", seed {seed}")
        + ("" if exact else ", not exact (lossy rule)")
    )


def first_difference(plain: Any, fast: Any, tokenizer: Any) -> str | None:
    """Where two outputs part, in words; None when they are the same."""
    a, b = plain.token_ids, fast.token_ids
    if a == b:
        return None
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    words = [repr(tokenizer.decode(ids[place : place + 1])) if place < len(ids) else "the end" for ids in (a, b)]
    return f"token {place}: plain wrote {words[0]}, speculation {words[1]}"


class _Console(Console):
    """A console whose closed pipe is an error like any other stream's, not an exit of rich's own."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """Standard output, without wrapping or markup surprises."""
    return _plain(stderr=False)


def notes() -> Console:
    """Standard error, the same way."""
    return _plain(stderr=True)


def _plain(*, stderr: bool) -> Console:
    colours: Any = None if os.environ.get("NO_COLOR") else "auto"
    return _Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True, color_system=colours)
