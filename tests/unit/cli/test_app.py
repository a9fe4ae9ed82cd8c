"""The command tree: its table, its help pages, and what starting the program and listing its commands import."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from foresay import __version__
from foresay.cli.app import _run
from foresay.cli.commands import COMMANDS, MEASURE, OTHER, RUN, TRAIN
from foresay.cli.lazy import Entry, build

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
    assert {name for name, entry in entries() if not entry.function} == {"acceptance-head", "memory", "ngram"}


def imported_by(*args: str) -> set[str]:
    """Modules that a fresh interpreter has after a command, whole names; without arguments, after `import foresay.cli`."""
    code = f"import sys, json, foresay.cli.app as app\nargs = {list(args)}\nargs and app._run(args)\n"
    code += "print(json.dumps(list(sys.modules)), file=sys.stderr)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(out.stderr))


@pytest.mark.parametrize("args", [(), ("--help",), ("--version",), ("ngram", "--help"), ("ngram",)], ids=" ".join)
def test_what_needs_nothing_heavy_imports_nothing_heavy(args: tuple[str, ...]) -> None:
    loaded = imported_by(*args)
    assert "foresay.cli.app" in loaded and not loaded & HEAVY
    own = {name.removeprefix("foresay.cli.") for name in loaded if name.startswith("foresay.cli.")}
    assert own <= {"app", "commands", "help_pages", "lazy", "option_groups", "typed_errors", *args}


def test_a_command_that_is_chosen_is_imported() -> None:
    """Negative control."""
    assert {"foresay.cli.methods", "torch"} <= imported_by("methods")


def test_nested_commands_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    for name, options in {"ngram build": "--max-entries", "acceptance-head eval": "FOLDER"}.items():
        assert _run([*name.split(), "--help"]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"Usage: foresay {name} ") and options in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["genrate"], "No such command 'genrate'. Did you mean 'generate'?"),
        (["ngram", "biuld"], "No such command 'biuld'. Did you mean 'build'?"),
        (["acceptance-head", "evla"], "No such command 'evla'. Did you mean 'eval'?"),
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


# -- help pages ----------------------------------------------------------------------------------------------------------


def page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, *args: str) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert _run([*args, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.isascii() and "\x1b" not in out, "readable in a pipe and on a plain terminal"
    assert all(len(line) <= columns for line in out.splitlines()), [
        one for one in out.splitlines() if len(one) > columns
    ]
    return out


def test_the_help_of_the_program_is_grouped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = page(capsys, monkeypatch, 80).splitlines()
    headings = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == [RUN, MEASURE, TRAIN, OTHER, "Options"]
    for name, entry in COMMANDS.items():
        assert f"  {name.ljust(15)}  {entry.summary}" in lines, "complete, in one line"


@pytest.mark.parametrize("name", [name for name, entry in entries() if entry.function or entry.commands])
@pytest.mark.parametrize("columns", [60, 80])
def test_every_page_fits(
    name: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = page(capsys, monkeypatch, columns, *name.split())
    assert not re.search(r"[a-z]\.\.\.$", out, re.MULTILINE), "nothing is cut short"


@pytest.mark.parametrize(("name", "entry"), [pytest.param(*pair, id=pair[0]) for pair in entries() if pair[1].function])
def test_the_examples_of_a_page_are_understood(
    name: str, entry: Entry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert entry.examples
    out = page(capsys, monkeypatch, 100, *name.split()).replace(" \\\n      ", " ")
    command = build(name, entry)
    for example in entry.examples:
        assert example in out
        line = example.partition(" < ")[0]
        words = shlex.split(line)
        assert words[: 1 + len(name.split())] == ["foresay", *name.split()]
        command.make_context(name, words[1 + len(name.split()) :])  # raises for an option or a value it does not know


def test_options_are_in_panels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = page(capsys, monkeypatch, 100, "generate")
    order = [
        out.index(f"\n{title}:\n") for title in ("Arguments", "Options", "Drafting", "Sampling", "Workers", "Machine")
    ]
    assert order == sorted(order)
    assert order[2] < out.index("--num-draft-tokens") < order[3] < out.index("--top-p") < order[4]
    assert order[1] < out.index("--json") < order[2], "an option of one command is under Options"


def test_one_word_has_one_meaning() -> None:
    """The same option is described alike wherever it appears, but for those whose values differ by command."""
    kinds: dict[str, set[str]] = {}
    for name, entry in entries():
        if not entry.function:
            continue
        for parameter in build(name, entry).params:
            for flag in parameter.opts:
                if flag.startswith("--"):
                    kinds.setdefault(flag, set()).add(str(parameter.type_descriptor.annotation))
    assert "--rate" in kinds and "--learning-rate" in kinds
    assert not {"--batch", "--steps", "--layers-read", "--heads", "--columns", "--no-template", "--confirm"} & set(
        kinds
    )
    assert kinds["--rate"] == {"<class 'str'>"} and kinds["--learning-rate"] == {"<class 'float'>"}
    assert kinds["--model"] == {"<class 'str'>"} and kinds["--batch-size"] <= {"<class 'int'>", "<class 'str'>"}


def test_every_command_with_a_model_takes_dash_m() -> None:
    flags = {
        name: {flag for p in build(name, entry).params for flag in p.opts}
        for name, entry in entries()
        if entry.function
    }
    without = {name for name, some in flags.items() if not {"-m", "--model"} <= some}
    assert without == {
        "report",
        "methods",
        "memory show",
        "memory merge",
        "acceptance-head train",
        "acceptance-head eval",
    }


def test_the_model_is_the_argument_unless_that_is_something_else() -> None:
    arguments = {
        name: [p.name for p in build(name, entry).params if p.param_type_name == "argument"]
        for name, entry in entries()
        if entry.function
    }
    first = {name for name, some in arguments.items() if some == ["model_argument"]}
    assert first == {"chat", "serve", "demo", "profile", "tune", "info", "prepare", "vllm-config"}


# -- version and completion ----------------------------------------------------------------------------------------------


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["--version"]) == 0
    assert capsys.readouterr() == (f"foresay {__version__}\n", "")


def completed(words: str, shell: str = "bash") -> list[str]:
    """Completions of the last word of a command line."""
    environment = {
        **os.environ,
        "_FORESAY_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "foresay"], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_the_shell_completes_commands_and_options() -> None:
    assert completed("foresay pr") == ["profile", "prune", "prepare"]
    assert completed("foresay ngram b") == ["build"]
    assert completed("foresay prune --attention") == ["--attention-heads"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_shown(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: shell)
    with pytest.raises(SystemExit) as ended:
        _run(["--show-completion"])
    assert ended.value.code == 0 and "_FORESAY_COMPLETE" in capsys.readouterr().out


def test_every_command_starts_in_a_fresh_interpreter() -> None:
    """Smoke test outside of pytest's process: each command is imported and prints its page."""
    names = [name.split() for name, entry in entries() if entry.function]
    code = f"import sys\nfrom foresay.cli.app import _run\nsys.exit(sum(_run([*name, '-h']) for name in {names}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\nExamples:\n") == len(names) == 27
