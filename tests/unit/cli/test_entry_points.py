"""Commands of other packages: distributions on sys.path with entry points of the group foresay.commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from foresay.cli.app import _run
from foresay.cli.commands import OWN, commands, feature, find, named
from foresay.errors import ConfigError

MODULE = """
from foresay.cli.command import command
COMMANDS = (command("greet", "Print a greeting.", examples="foresay greet", package="others.work"),)
"""


def install(folder: Path, name: str, points: str) -> None:
    """A distribution without modules, as pip would have installed it."""
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(points)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "others" / "work").mkdir(parents=True)
    (tmp_path / "others" / "table.py").write_text(MODULE)
    (tmp_path / "others" / "work" / "greet.py").write_text("def run(given):\n    print('hello')\n    return 3\n")
    (tmp_path / "others" / "wrong.py").write_text("TEXTS = ('a',)\nFAILS = 1 // 0 if False else ()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    commands.cache_clear()
    yield tmp_path
    commands.cache_clear()


def test_a_command_of_another_package_is_listed_and_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(folder, "others", "[foresay.commands]\nRun = others.table:COMMANDS\nMore = others.wrong:FAILS\n")
    assert _run(["greet"]) == 3 and capsys.readouterr() == ("hello\n", "")
    assert [one.name for one in commands()["Run"]] == [*(one.name for one in OWN["Run"]), "greet"]
    assert [*commands()] == [*OWN, "More"]


@pytest.mark.parametrize(
    ("point", "line"),
    [
        ("X = others.gone:COMMANDS", "cannot be loaded: ModuleNotFoundError: No module named 'others.gone'"),
        ("X = others.table:GONE", "cannot be loaded: AttributeError: module 'others.table' has no attribute 'GONE'"),
        ("X = others.wrong:TEXTS", "are left out: 'a' is no foresay.cli.command.Command"),
        ("X = foresay.cli.commands.run:COMMANDS", "are left out: 'generate' exists"),
    ],
)
def test_a_broken_entry_point_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], point: str, line: str
) -> None:
    """It names the package, comes once, and all other commands are there; a command of foresay's own reads no entry point."""
    every = [*named()]
    commands.cache_clear()
    install(folder, "broken-one", f"[foresay.commands]\n{point}\n")
    install(folder, "others", "[foresay.commands]\nOther = others.table:COMMANDS\n")
    assert find("generate") is not None and capsys.readouterr().err == ""
    assert _run(["greet"]) == 3 and _run(["--help"]) == 0
    value = point.removeprefix("X = ")
    assert capsys.readouterr().err == f"foresay: commands 'X' of broken-one 1.2 ({value}) {line}\n"
    assert [*named()] == [*every, "greet"]


def test_a_missing_feature_is_named() -> None:
    assert feature("compare").__name__ == "foresay_lab.commands.comparison"
    with pytest.raises(ConfigError, match="feature 'swim' is in no installed package"):
        feature("swim")
