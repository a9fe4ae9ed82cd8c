"""Text coloured by who wrote each token, and the tables that sum a run up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from foresay.core import Origin
from foresay.engine import Stats
from foresay.text import Piece

STYLES = {Origin.DRAFT: "green", Origin.RESIDUAL: "red", Origin.BONUS: "cyan"}
MEANINGS = {
    Origin.DRAFT: "guessed by the drafter and accepted",
    Origin.RESIDUAL: "the target's, where a guess was rejected",
    Origin.BONUS: "the target's, where every guess held or none was made",
}


def coloured(pieces: Iterable[Piece]) -> Text:
    """The pieces, each in its origin's colour."""
    text = Text()
    for piece in pieces:
        text.append(piece.text, style=STYLES[piece.origin])
    return text


def legend() -> Text:
    """What the colours mean, a line each."""
    lines = [Text.assemble((origin.value.ljust(9), STYLES[origin]), MEANINGS[origin]) for origin in Origin]
    return Text("\n").join(lines)


def percent(value: float | None) -> str:
    """A share as a percentage, "-" when there is none."""
    return "-" if value is None else f"{100 * value:.0f}%"


def comparison(plain_s: float, plain: Stats, seconds: float, stats: Stats) -> Table:
    """Plain decoding beside speculation."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", "tokens", "seconds", "tokens/s", "speed-up", "tokens/pass", "accepted"):
        table.add_column(name, justify="left" if not name else "right")
    for name, elapsed, one in (("plain", plain_s, plain), ("foresay", seconds, stats)):
        table.add_row(
            name,
            str(one.num_tokens),
            f"{elapsed:.2f}",
            f"{one.num_tokens / elapsed:.1f}",
            f"{plain_s / elapsed:.2f}x",
            f"{one.block_efficiency or 0:.2f}",
            percent(one.acceptance_rate),
        )
    return table


def first_difference(plain: Any, fast: Any, tokenizer: Any) -> str | None:
    """Where two outputs part, in words; None when they are the same."""
    a, b = plain.token_ids, fast.token_ids
    if a == b:
        return None
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    words = [repr(tokenizer.decode(ids[place : place + 1])) if place < len(ids) else "the end" for ids in (a, b)]
    return f"token {place}: plain wrote {words[0]}, speculation {words[1]}"


def console() -> Console:
    """Standard output, without wrapping or markup surprises."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
