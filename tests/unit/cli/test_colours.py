"""Origins of tokens on consoles with and without colours."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from foresay.cli.colours import coloured, legend
from foresay.decoding.outcome import Origin
from foresay.text.stream import Piece

PIECES = [
    ("The", Origin.BONUS),
    (" sea", Origin.DRAFT),
    (" is", Origin.DRAFT),
    (" blue", Origin.RESIDUAL),
    (".", Origin.BONUS),
]


@pytest.mark.parametrize(
    ("colours", "text", "names"),
    [
        (None, "The[ sea is]{ blue}.", ["[draft]", "{residual}", "bonus"]),
        ("standard", "The sea is blue.", ["draft", "residual", "bonus"]),
    ],
)
def test_brackets_take_the_place_of_colours(colours: str | None, text: str, names: list[str]) -> None:
    on = Console(file=io.StringIO(), color_system=colours)  # type: ignore[arg-type]
    shown = coloured([Piece(*one) for one in PIECES], on)
    assert shown.plain == text
    assert [str(span.style) for span in shown.spans] == ["cyan", "green", "red", "cyan"]
    assert [line.split()[0] for line in legend(on).plain.splitlines()] == names
