"""The command tree: what its table says, and what starting the program and listing its commands import."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from foresay.cli.app import COMMANDS, _run
from foresay.cli.lazy import Entry

HEAVY = {"torch", "transformers", "numpy", "rich", "prompt_toolkit", "matplotlib"}


def entries(commands: Mapping[str, Entry] = COMMANDS, before: tuple[str, ...] = ()) -> Iterator[tuple[str, Entry]]:
    """Every command and group by its whole name."""
    for name, entry in commands.items():
        yield " ".join((*before, name)), entry
        yield from entries(entry.commands, (*before, name))


@pytest.mark.parametrize(("name", "entry"), [pytest.param(*pair, id=pair[0]) for pair in entries() if pair[1].function])
def test_a_summary_is_the_first_line_of_the_docstring(name: str, entry: Entry) -> None:
    assert entry.summary == inspect.cleandoc(entry.load().__doc__ or "").split("\n")[0]


def test_a_group_has_a_function_or_only_commands() -> None:
    assert {name for name, entry in entries() if not entry.function} == {"head", "ngram"}


def imported_by(*args: str) -> set[str]:
    """Modules that a fresh interpreter has after a command, whole names; without arguments, after `import foresay.cli`."""
    code = f"import sys, json, foresay.cli.app as app\nargs = {list(args)}\nargs and app._run(args)\n"
    code += "print(json.dumps(list(sys.modules)), file=sys.stderr)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(out.stderr))


@pytest.mark.parametrize("args", [(), ("--help",), ("version",), ("ngram", "--help"), ("ngram",)], ids=" ".join)
def test_what_needs_nothing_heavy_imports_nothing_heavy(args: tuple[str, ...]) -> None:
    loaded = imported_by(*args)
    assert "foresay.cli.app" in loaded and not loaded & HEAVY
    own = {name.removeprefix("foresay.cli.") for name in loaded if name.startswith("foresay.cli.")}
    assert own <= {"app", "lazy", "option_groups", *args}


def test_a_command_that_is_chosen_is_imported() -> None:
    """Negative control."""
    assert {"foresay.cli.methods", "torch"} <= imported_by("methods")


def test_nested_commands_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    for name, options in {"ngram build": "--max-entries", "ngram show": "--top", "profile shapes": "--depths"}.items():
        assert _run([*name.split(), "--help"]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"Usage: foresay {name} ") and options in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["genrate"], "No such command 'genrate'. Did you mean 'generate'?"),
        (["ngram", "biuld"], "No such command 'biuld'. Did you mean 'build'?"),
        (["profile", "shape"], "No such command 'shape'. Did you mean 'shapes'?"),
    ],
)
def test_an_unknown_command(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(args) == 2
    assert capsys.readouterr() == ("", f"foresay: {message}\n")


def test_what_the_system_refuses_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/a/b")

    monkeypatch.setattr("foresay.cli.app.app", refused)
    monkeypatch.setattr("foresay.cli.app._discard_stdout", lambda: None)
    assert _run([]) == 2 and capsys.readouterr().err == "foresay: '/a/b': No space left on device\n"
