"""The command tree: its table, its help pages, commands of other packages, and what starting the program and listing imports."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from foresay import __version__
from foresay.cli import dialects
from foresay.cli.app import _run, app
from foresay.cli.commands import OWN, REMOVED, commands, feature, find, named
from foresay.cli.options import numbers
from foresay.models.drafts.files import LAYOUTS
from foresay.spec.settings_file import FILE
from foresay_lab.check.compare import TOLERANCE
from foresay_lab.commands.distill import KINDS
from foresay_lab.training.prune import LAYER_CHOICES
from helpers.refusals import refused

HEAVY = {"torch", "transformers", "numpy", "rich", "prompt_toolkit", "matplotlib"}
BY_NAME, OUR_OWN = named(), named(OWN)
MODULES = {
    name: f"{'foresay.cli' if name in OUR_OWN else 'foresay_lab.commands'}.{name.replace('-', '_')}" for name in BY_NAME
}
"""The module that each command runs."""
LIGHT = ("", "--help", "--version", "ngram", "genrate", "serve --porrt 1", *(f"{name} -h" for name in BY_NAME))
FRESH = f"""
import json, sys
import foresay.cli.app as app

def show():
    print(json.dumps(list(sys.modules)), file=sys.stderr)

for line in {LIGHT}:
    app._run(line.split())
    show()
import numpy
show()
"""


def test_a_fresh_interpreter_imports_nothing_heavy_where_nothing_needs_it() -> None:
    """Control: what is imported is seen. What runs the commands exists."""
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    *loaded, control = (set(json.loads(line)) for line in done.stderr.splitlines() if line.startswith("["))
    for line, modules in zip(LIGHT, loaded, strict=True):
        assert "foresay.cli.app" in modules and not modules & {*HEAVY, *MODULES.values()}, line
    assert control & HEAVY == {"numpy"}
    errors = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert len(errors) == 3 and all(line.startswith("foresay: ") for line in errors), "ngram, genrate, --porrt"
    assert done.stdout.count("\nExamples:\n") == len(BY_NAME)
    assert all(callable(import_module(name).run) for name in MODULES.values())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["genrate"], "No such command 'genrate'. Did you mean 'generate'?"),
        (["generate", "--xyzzy"], "No such option '--xyzzy'."),
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


def test_what_the_system_refuses_is_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def refusing(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/a/b")

    monkeypatch.setattr("foresay.cli.app.app", refusing)
    assert _run([]) == 2 and capfd.readouterr().err == "foresay: '/a/b': No space left on device\n"


def test_numbers() -> None:
    assert numbers("1,4,4,8", "--batch") == [1, 4, 8] and numbers("0,2", "--batch", 0) == [0, 2]
    for text in ("1,x", "0"):
        with refused("--batch", text):
            numbers(text, "--batch")


# -- help pages ----------------------------------------------------------------------------------------------------------


def page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, *args: str) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert _run([*args, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.isascii() and "\x1b" not in out, "readable in a pipe and on a plain terminal"
    assert [line for line in out.splitlines() if len(line) > columns] == []
    assert not re.search(r"[a-z]\.\.\.$", out, re.MULTILINE), "nothing is cut short"
    return out


def headings(out: str) -> list[str]:
    return [line[:-1] for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]


def test_the_help_of_the_program_and_options_are_grouped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = page(capsys, monkeypatch, 80)
    assert headings(out) == [*commands(), "Options"]
    for name, command in BY_NAME.items():
        assert command.summary and f"  {name.ljust(11)}  {command.summary}" in out.splitlines(), "complete, in one line"
    out = page(capsys, monkeypatch, 100, "generate")
    panels = ["Arguments", "Options", "Drafting", "Sampling", "Workers", "Machine", "Examples"]
    assert headings(out) == panels
    at = [out.index(f"\n{title}:\n") for title in panels]
    assert at[1] < out.index("--json") < at[2] < out.index("--length") < at[3] < out.index("--top-p") < at[4]


@pytest.mark.parametrize("name", BY_NAME)
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


def test_one_word_has_one_meaning_and_the_model_one_name() -> None:
    """An option has one type in all commands but for some that are several numbers in some; -m everywhere, or the argument."""
    kinds: dict[str, set[str]] = {}
    for command in BY_NAME.values():
        for parameter in command.params:
            for flag in parameter.opts:
                kinds.setdefault(flag, set()).add(parameter.type.name)
    several = {flag for flag, some in kinds.items() if flag.startswith("--") and len(some) > 1}
    assert several == {"--against", "--batch-size", "--context", "--trace"} and "--rate" in kinds
    params = {name: command.params for name, command in BY_NAME.items()}
    flags = {name: {flag for one in some for flag in one.opts} for name, some in params.items()}
    assert {name for name in flags if not {"-m", "--model"} <= flags[name]} == {"report", "memory"}
    arguments = {name: [one.name for one in some if isinstance(one, click.Argument)] for name, some in params.items()}
    first = {name for name, some in arguments.items() if some in (["model_argument"], ["subject"])}
    assert first == {"chat", "serve", "demo", "drafts", "profile", "worth", "tune", "info", "prepare", "vllm-config"}


def test_there_are_few_commands_and_options() -> None:
    """A new one states what it replaces."""
    options = sum(isinstance(one, click.Option) for command in BY_NAME.values() for one in command.params)
    assert len(BY_NAME) <= 20 and options <= 355


def test_version_and_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["--version"]) == 0
    assert capsys.readouterr() == (f"foresay {__version__}\n", "")
    complete = ShellComplete(app, {}, "foresay", "_FORESAY_COMPLETE").get_completions
    assert [one.value for one in complete([], "pr")] == ["profile", "prepare"]
    assert [one.value for one in complete(["distill"], "--attention")] == ["--attention-heads"]
    for shell in ("bash", "zsh", "fish"):
        assert _run(["--show-completion", shell]) == 0 and "_FORESAY_COMPLETE" in capsys.readouterr().out


def test_defaults_on_help_pages_are_those_of_the_code() -> None:
    """Help pages are written without the modules that need PyTorch."""
    pages = {name: " ".join(str(getattr(one, "help", "")) for one in one.params) for name, one in BY_NAME.items()}
    assert f"[default: {TOLERANCE}]" in pages["check"]
    assert ", ".join(LAYER_CHOICES) in pages["distill"] and all(kind in pages["distill"] for kind in KINDS)
    assert set(LAYOUTS) == {"speculators", "plain"} and "speculators or plain" in pages["export"]
    assert {one.default for one in BY_NAME["tune"].params if one.name == "output"} == {FILE}


# -- commands of other packages --------------------------------------------------------------------------------------

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
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "others" / "work").mkdir(parents=True)
    (tmp_path / "others" / "table.py").write_text(MODULE)
    (tmp_path / "others" / "work" / "greet.py").write_text("def run(given):\n    print('hello')\n    return 3\n")
    (tmp_path / "others" / "wrong.py").write_text("TEXTS = ('a',)\nNOTHING = ()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    commands.cache_clear()
    yield tmp_path
    commands.cache_clear()


def test_a_command_of_another_package_is_listed_and_runs(others: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(others, "others", "[foresay.commands]\nRun = others.table:COMMANDS\nMore = others.wrong:NOTHING\n")
    assert _run(["greet"]) == 3 and capsys.readouterr() == ("hello\n", "")
    assert [one.name for one in commands()["Run"]] == [*(one.name for one in OWN["Run"]), "greet"]
    assert [*commands()] == [*OWN, "More"]
    assert feature("compare").__name__ == "foresay_lab.commands.comparison"
    with refused("feature", "swim"):
        feature("swim")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("others.gone:COMMANDS", "cannot be loaded: ModuleNotFoundError: "),
        ("others.table:GONE", "cannot be loaded: AttributeError: "),
        ("others.wrong:TEXTS", "are left out: 'a' is no foresay.cli.command.Command"),
        ("foresay.cli.commands.run:COMMANDS", "are left out: 'generate' exists"),
    ],
)
def test_a_broken_entry_point_is_one_line(
    others: Path, capsys: pytest.CaptureFixture[str], value: str, problem: str
) -> None:
    """It names the package, comes once, and all other commands are there; a command of foresay's own reads no entry point."""
    every = [*named()]
    commands.cache_clear()
    install(others, "broken-one", f"[foresay.commands]\nX = {value}\n")
    install(others, "others", "[foresay.commands]\nOther = others.table:COMMANDS\n")
    assert find("generate") is not None and capsys.readouterr().err == ""
    assert _run(["greet"]) == 3 and _run(["--help"]) == 0
    line = capsys.readouterr().err
    assert line.startswith(f"foresay: commands 'X' of broken-one 1.2 ({value}) {problem}") and line.count("\n") == 1
    assert [*named()] == [*every, "greet"]


def test_options_and_commands_of_other_engines_name_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """Every option that an answer names is one of a command, and every entry is on the page for converts."""
    page = (Path(__file__).parents[3] / dialects.PAGE).read_text(encoding="utf-8")
    flags = {flag for one in BY_NAME.values() for param in one.params for flag in param.opts}
    for theirs, ours in (dialects.OPTIONS | dialects.COMMANDS | dialects.VARIABLES).items():
        assert f"`{theirs}" in page or f" {theirs}" in page, theirs
        assert flags >= set(re.findall(r"--[a-z-]+", ours)), ours
        assert {*re.findall(r"foresay (\w+)", ours)} <= {*BY_NAME}
    for line, wanted in (
        ("run llama3", "No such command 'run'. In foresay it is foresay chat MODEL"),
        ("serve --max-num-seqs=4", "No such option '--max-num-seqs'. In foresay --max-num-seqs is --batch-size"),
        ("generate -ngl 99 x", "In foresay -ngl is --device cuda"),
        ("serve m -t 4 --prt 1", "No such option '-t'. In foresay -t is --threads"),
    ):
        assert _run(shlex.split(line)) == 2
        assert wanted in capsys.readouterr().err
    assert _run(["serve", "--porrt", "1"]) == 2
    assert "In foresay" not in capsys.readouterr().err
    assert list(dialects.unread({"OLLAMA_HOST": "::", "VLLM_API_KEY": ""})) == [
        "OLLAMA_HOST is not read; in foresay it is --host and --port"
    ]
