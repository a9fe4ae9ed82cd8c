"""The command tree: its table, its help pages, and what starting the program and listing its commands import."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import click
import pytest

from foresay import __version__
from foresay.cli.app import _run
from foresay.cli.commands import OWN, REMOVED, commands, named
from foresay.cli.options import numbers
from foresay.errors import ConfigError
from foresay.models.drafts.files import LAYOUTS
from foresay.spec.settings_file import FILE
from foresay_lab.check.compare import TOLERANCE
from foresay_lab.commands.distill import KINDS
from foresay_lab.training.prune import LAYER_CHOICES

HEAVY = {"torch", "transformers", "numpy", "rich", "prompt_toolkit", "matplotlib"}
BY_NAME, OUR_OWN = named(), named(OWN)
MODULES = {
    name: f"{'foresay.cli' if name in OUR_OWN else 'foresay_lab.commands'}.{name.replace('-', '_')}" for name in BY_NAME
}
"""The module that each command runs."""
each_command = pytest.mark.parametrize("name", BY_NAME)


def imported_by(*args: str) -> set[str]:
    """Modules that a fresh interpreter has after a command, whole names; without arguments, after `import foresay.cli`."""
    code = f"import sys, json, foresay.cli.app as app\nargs = {list(args)}\nargs and app._run(args)\n"
    code += "print(json.dumps(list(sys.modules)), file=sys.stderr)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(out.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--help",),
        ("--version",),
        ("ngram",),
        ("genrate",),
        ("generate", "-h"),
        ("distill", "-h"),
        ("serve", "--porrt", "1"),
    ],
    ids=" ".join,
)
def test_what_needs_nothing_heavy_imports_nothing_heavy(args: tuple[str, ...]) -> None:
    loaded = imported_by(*args)
    assert "foresay.cli.app" in loaded and not loaded & HEAVY
    assert not {*MODULES.values()} & loaded


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["genrate"], "No such command 'genrate'. Did you mean 'generate'?"),
        (["generate", "--prommpt"], "No such option '--prommpt'."),
        (["chat", "a", "b"], "unexpected argument 'b'; see foresay chat -h"),
        (["bench"], "OUTPUT is missing; see foresay bench -h"),
        (["simulate", "x"], "--profile is missing; see foresay simulate -h"),
        (["demo", "-n", "x"], "-n 'x' is not a valid integer."),
        (["tune", "--latency", "x"], "--latency 'x' is not a valid float."),
        *(([name], f"{name} is now part of another command: foresay {now}") for name, now in REMOVED.items()),
    ],
)
def test_wrong_usage(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(args) == 2
    assert capsys.readouterr() == ("", f"foresay: {message}\n")


def test_what_the_system_refuses_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/a/b")

    monkeypatch.setattr("foresay.cli.app.app", refused)
    monkeypatch.setattr("foresay.cli.app._discard_stdout", lambda: None)
    assert _run([]) == 2 and capsys.readouterr().err == "foresay: '/a/b': No space left on device\n"


def test_numbers() -> None:
    assert numbers("1,4,4,8", "--batch") == [1, 4, 8] and numbers("0,2", "--batch", 0) == [0, 2]
    for text, message in (("1,x", "integers separated by commas, such as 1,4,8"), ("0", "integers of at least 1")):
        with pytest.raises(ConfigError, match=f"--batch '{text}' must be {message}"):
            numbers(text, "--batch")


# -- help pages ----------------------------------------------------------------------------------------------------------


def page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, *args: str) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert _run([*args, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.isascii() and "\x1b" not in out, "readable in a pipe and on a plain terminal"
    assert all(len(line) <= columns for line in out.splitlines()), [
        one for one in out.splitlines() if len(one) > columns
    ]
    assert not re.search(r"[a-z]\.\.\.$", out, re.MULTILINE), "nothing is cut short"
    return out


def headings(out: str) -> list[str]:
    return [line[:-1] for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]


def test_the_help_of_the_program_is_grouped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = page(capsys, monkeypatch, 80)
    assert headings(out) == [*commands(), "Options"]
    for name, command in BY_NAME.items():
        assert command.summary and f"  {name.ljust(11)}  {command.summary}" in out.splitlines(), "complete, in one line"


@each_command
def test_a_page(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It fits, opens with the summary, names every option once under a heading, and its examples are understood."""
    command, out = BY_NAME[name], page(capsys, monkeypatch, 100, name)
    assert command.name == name and out.startswith(f"Usage: foresay {name} ")
    for one in command.params:
        assert isinstance(one, click.Argument) or len(re.findall(rf"^  .*{one.opts[-1]}\b(?!-)", out, re.M)) >= 1
    out = out.replace(" \\\n      ", " ")
    for example in (command.epilog or "").splitlines():
        assert example in out
        first, second, *words = shlex.split(example.partition(" < ")[0])
        assert (first, second) == ("foresay", name)
        command.make_context(name, words)  # raises for an option or a value it does not know
    page(capsys, monkeypatch, 60, name)


def test_options_are_in_panels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = page(capsys, monkeypatch, 100, "generate")
    panels = ["Arguments", "Options", "Drafting", "Sampling", "Workers", "Machine", "Examples"]
    assert headings(out) == panels
    at = [out.index(f"\n{title}:\n") for title in panels]
    assert at[1] < out.index("--json") < at[2] < out.index("--length") < at[3] < out.index("--top-p") < at[4]


def test_one_word_has_one_meaning() -> None:
    """An option has one type wherever it appears, but for those that are several numbers in some commands."""
    kinds: dict[str, set[str]] = {}
    for command in BY_NAME.values():
        for parameter in command.params:
            for flag in parameter.opts:
                kinds.setdefault(flag, set()).add(parameter.type.name)
    several = {flag for flag, some in kinds.items() if flag.startswith("--") and len(some) > 1}
    assert several == {"--against", "--batch-size", "--context", "--trace"} and "--rate" in kinds


def test_there_is_one_way_to_name_the_model() -> None:
    """-m everywhere, and the argument unless that is something else."""
    params = {name: command.params for name, command in BY_NAME.items()}
    flags = {name: {flag for one in some for flag in one.opts} for name, some in params.items()}
    assert {name for name in flags if not {"-m", "--model"} <= flags[name]} == {"report", "memory"}
    arguments = {name: [one.name for one in some if isinstance(one, click.Argument)] for name, some in params.items()}
    first = {name for name, some in arguments.items() if some in (["model_argument"], ["subject"])}
    assert first == {"chat", "serve", "demo", "drafts", "profile", "tune", "info", "prepare", "vllm-config"}


def test_there_are_few_commands_and_options() -> None:
    """A new one states what it replaces."""
    options = sum(isinstance(one, click.Option) for command in BY_NAME.values() for one in command.params)
    assert len(BY_NAME) <= 20 and options <= 338


# -- version and completion ----------------------------------------------------------------------------------------------


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["--version"]) == 0
    assert capsys.readouterr() == (f"foresay {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "found"), [("foresay pr", ["profile", "prepare"]), ("foresay distill --attention", ["--attention-heads"])]
)
def test_the_shell_completes_commands_and_options(words: str, found: list[str]) -> None:
    count = str(len(words.split(" ")) - 1)
    environment = {**os.environ, "_FORESAY_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": count}
    done = subprocess.run(
        [sys.executable, "-m", "foresay"], env=environment, capture_output=True, text=True, check=True
    )
    assert [line.removeprefix("plain,") for line in done.stdout.split()] == found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_shown(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["--show-completion", shell]) == 0 and "_FORESAY_COMPLETE" in capsys.readouterr().out


def test_every_command_starts_in_a_fresh_interpreter() -> None:
    """Smoke test outside of pytest's process: help pages of all commands, then what runs them."""
    code = (
        "import sys\nfrom importlib import import_module\nfrom foresay.cli.app import _run\n"
        f"codes = [_run([name, '-h']) for name in {[*BY_NAME]}]\n"
        f"ready = [callable(import_module(name).run) for name in {[*MODULES.values()]}]\n"
        "sys.exit(sum(codes) + ready.count(False))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\nExamples:\n") == len(BY_NAME)
    loaded = imported_by("report", "missing.jsonl")
    assert {"foresay_lab.commands.report", "numpy"} <= loaded, "negative control: a command that runs is imported"


def test_defaults_on_help_pages_are_those_of_the_code() -> None:
    """Help pages are written without the modules that need PyTorch."""
    pages = {
        name: " ".join(str(getattr(one, "help", "")) for one in command.params) for name, command in BY_NAME.items()
    }
    assert f"[default: {TOLERANCE}]" in pages["check"]
    assert ", ".join(LAYER_CHOICES) in pages["distill"] and all(kind in pages["distill"] for kind in KINDS)
    assert set(LAYOUTS) == {"speculators", "plain"} and "speculators or plain" in pages["export"]
    assert {one.default for one in BY_NAME["tune"].params if one.name == "output"} == {FILE}
