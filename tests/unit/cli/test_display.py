"""Output on terminals and in pipes: tables of every width, progress during long work, and origins of tokens."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import click
import pytest
from rich.console import Console

from foresay.cli import tables
from foresay.cli.colours import coloured, legend
from foresay.cli.progress import advancing, loading, note
from foresay.decoding.outcome import Origin
from foresay.text.stream import Piece
from helpers import tiny
from helpers.waiting import wait_until

HEADINGS = ("method", "tokens", "tokens/s")
ROWS = [("plain", "24", "7.0"), ("suffix(scale=3, keep=true)", "24", "12.25")]
SHORT = ("method", "tok", "tok/s")


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Call with a width, None for no terminal, and rows: a table as it is printed there."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def show(width: int | None, rows: list[tuple[str, ...]] = ROWS, **more: object) -> str:
        out = io.StringIO()
        on = Console(file=out, width=width or 80, force_terminal=width is not None, color_system=None, soft_wrap=True)
        on.print(tables.table(HEADINGS, rows, on, **more), soft_wrap=width is None)  # type: ignore[arg-type]
        return out.getvalue()

    return show


def test_a_table_fits_its_terminal(printed: Callable[..., str]) -> None:
    """In full; with short headings; with a narrower gap; with a folded first column; as a paragraph for each row."""
    assert printed(44) == (
        "method                      tokens  tokens/s\n"
        "plain                           24       7.0\n"
        "suffix(scale=3, keep=true)      24     12.25\n"
    )
    for width, gap in ((43, 2), (38, 2), (37, 1), (36, 1)):
        first = printed(width, short=SHORT).splitlines()[0]
        assert first == (" " * gap).join(("method".ljust(26), "tok", "tok/s")), width
    assert printed(32) == (
        "method           tokens tokens/s\n"
        "plain                24      7.0\n"
        "suffix(scale=3,      24    12.25\n"
        "keep=true)                      \n"
    )
    words = " ".join(printed(31).split())
    assert words == "plain tokens 24, tokens/s 7.0 suffix(scale=3, keep=true) tokens 24, tokens/s 12.25"
    same = printed(20, [("plain", "24", "7.0"), ("plain", "24", "8.0")])
    assert max(map(len, same.splitlines())) <= 20 and "tokens 24" not in same, "rows of one name stay a table"


def test_cells_are_whole_and_no_markup(printed: Callable[..., str]) -> None:
    name = "x" * 200
    assert printed(None, [(name, "1", "2")]).split() == [*HEADINGS, name, "1", "2"], "elsewhere nothing is cut"
    assert printed(80, drop=("tokens", "tokens/s")).splitlines()[0].split() == ["method", "tokens/s"]
    cells = ["cascade(k=[[4]])", "[red]", "1"]
    assert printed(80, [tuple(cells)]).split()[3:] == cells
    assert (tables.gain(1.234), tables.gain(1.234, 1.2, 1.3)) == ("1.23x", "1.23x 1.20-1.30")


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
def test_brackets_stand_for_colours(colours: str | None, text: str, names: list[str]) -> None:
    on = Console(file=io.StringIO(), color_system=colours)  # type: ignore[arg-type]
    shown = coloured([Piece(*one) for one in PIECES], on)
    assert shown.plain == text
    assert [str(span.style) for span in shown.spans] == ["cyan", "green", "red", "cyan"]
    assert [line.split()[0] for line in legend(on).plain.splitlines()] == names


# -- progress --------------------------------------------------------------------------------------------------------

_CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def lines(written: list[bytes]) -> list[str]:
    text = _CODES.sub("", b"".join(written).decode(errors="replace"))
    return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.mark.parametrize("columns", [40, 80])
def test_a_bar_names_the_time_left(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    with tiny.terminal(monkeypatch, COLUMNS=str(columns)) as written, advancing("Recording") as advance:
        for done in range(4):
            advance(done, 4, "a note of about thirty columns")
    shown = lines(written)
    assert all(len(line) <= columns for line in shown)
    whole = [line for line in shown if "/4" in line]
    assert whole and all(re.search(r"^Recording \S+ +\d/4 [-:\d]+ left( a|$)", line) for line in whole), shown
    assert all(line.endswith("\u2026") == (columns == 40) for line in whole if " left a" in line)
    assert not any("left" in line for line in shown if "/?" in line), "nothing is known yet"


@pytest.mark.parametrize(
    ("write", "apart"), [(note, True), (lambda line: click.echo(line, err=True), False)], ids=["note", "click"]
)
def test_a_line_printed_meanwhile_is_a_line(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[str], None], apart: bool
) -> None:
    """click finds the terminal itself, past the display."""
    with tiny.terminal(monkeypatch, COLUMNS="80") as written, loading("Running 3 live"):
        wait_until(lambda: any("Running" in line for line in lines(written)), "the first display")
        write("live: suffix 1.20x")
    assert ("live: suffix 1.20x" in lines(written)) == apart, lines(written)


def test_a_pipe_gets_lines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with loading("Loading"), advancing("Recording") as advance:
        advance(1, 2)
        note("a line")
    assert capsys.readouterr().err == "a line\n"
