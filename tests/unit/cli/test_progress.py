"""Displays on a terminal during long work: the time left by its name, and lines that are printed meanwhile."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
import pytest

from foresay.cli.progress import advancing, loading, note
from helpers.waiting import wait_until

_CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@contextmanager
def terminal(patch: pytest.MonkeyPatch, columns: int) -> Iterator[Callable[[], list[str]]]:
    """A terminal as standard error. Yield a function that returns the lines written so far; a redrawn line counts again."""
    ours, theirs = os.openpty()
    written: list[bytes] = []
    reader = threading.Thread(target=lambda: written.extend(iter(lambda: received(ours), b"")))
    reader.start()
    with patch.context() as during:
        during.setenv("COLUMNS", str(columns))
        during.setenv("TERM", "xterm")
        with os.fdopen(theirs, "w") as stream:
            during.setattr(sys, "stderr", stream)
            yield lambda: lines(written)
    reader.join()
    os.close(ours)


def received(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # closed on the other side
        return b""


def lines(written: list[bytes]) -> list[str]:
    text = _CODES.sub("", b"".join(written).decode(errors="replace"))
    return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.mark.parametrize("columns", [40, 80])
def test_a_bar_names_the_time_left(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    with terminal(monkeypatch, columns) as seen, advancing("Recording") as advance:
        for done in range(4):
            advance(done, 4, "a note of about thirty columns")
    shown = seen()
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
    with terminal(monkeypatch, 80) as seen, loading("Running 3 live"):
        wait_until(lambda: any("Running" in line for line in seen()), "the first display")
        write("live: suffix 1.20x")
    assert ("live: suffix 1.20x" in seen()) == apart, seen()


def test_a_pipe_gets_lines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with loading("Loading"), advancing("Recording") as advance:
        advance(1, 2)
        note("a line")
    assert capsys.readouterr().err == "a line\n"
