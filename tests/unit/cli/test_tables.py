"""Tables on wide and narrow consoles, and figures in words."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from foresay.cli import tables

HEADINGS = ("method", "tokens", "tokens/s")
ROWS = [("plain", "24", "7.0"), ("suffix(scale=3, keep=true)", "24", "12.25")]


def printed(
    width: int | None, monkeypatch: pytest.MonkeyPatch, rows: list[tuple[str, ...]] = ROWS, **more: object
) -> str:
    """Output on a terminal of this width; None for no terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)
    out = io.StringIO()
    on = Console(file=out, width=width or 80, force_terminal=width is not None, color_system=None, soft_wrap=True)
    on.print(tables.table(HEADINGS, rows, on, **more), soft_wrap=width is None)  # type: ignore[arg-type]
    return out.getvalue()


def test_a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(44, monkeypatch) == (
        "method                      tokens  tokens/s\n"
        "plain                           24       7.0\n"
        "suffix(scale=3, keep=true)      24     12.25\n"
    )


def test_short_headings_and_then_a_narrower_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    short = ("method", "tok", "tok/s")
    assert printed(43, monkeypatch, short=short).startswith("method                      tok  tok/s\n")
    assert printed(38, monkeypatch, short=short).startswith("method                      tok  tok/s\n")
    assert printed(37, monkeypatch, short=short).startswith("method                     tok tok/s\n")
    assert printed(36, monkeypatch, short=short).startswith("method                     tok tok/s\n")


def test_a_folded_first_column(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(32, monkeypatch) == (
        "method           tokens tokens/s\n"
        "plain                24      7.0\n"
        "suffix(scale=3,      24    12.25\n"
        "keep=true)                      \n"
    )


def test_a_paragraph_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    words = " ".join(printed(31, monkeypatch).split())
    assert words == "plain tokens 24, tokens/s 7.0 suffix(scale=3, keep=true) tokens 24, tokens/s 12.25"


def test_rows_of_one_name_stay_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    out = printed(20, monkeypatch, [("plain", "24", "7.0"), ("plain", "24", "8.0")])
    assert max(map(len, out.splitlines())) <= 20
    assert "tokens 24" not in out


def test_elsewhere_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "x" * 200
    assert [line.split() for line in printed(None, monkeypatch, [(name, "1", "2")]).splitlines()] == [
        list(HEADINGS),
        [name, "1", "2"],
    ]


def test_columns_that_say_nothing_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(80, monkeypatch, drop=("tokens", "tokens/s")).splitlines()[0].split() == ["method", "tokens/s"]


def test_brackets_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(80, monkeypatch, [("cascade(k=[[4]])", "[red]", "1")]).split()[3:] == [
        "cascade(k=[[4]])",
        "[red]",
        "1",
    ]


@pytest.mark.parametrize(("given", "text"), [((1.234,), "1.23x"), ((1.234, 1.2, 1.3), "1.23x 1.20-1.30")])
def test_a_gain(given: tuple[float, ...], text: str) -> None:
    assert tables.gain(*given) == text
