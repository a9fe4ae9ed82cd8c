"""Inputs of the command line: how errors name them, texts that an editor wrote, and environment variables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from foresay.cli import app, commands
from foresay.cli.common import read_prompt
from foresay.cli.environment import OTHERS, READ, idle, of_options
from foresay.cli.generate import split_lines
from foresay.cli.typed_errors import as_typed
from foresay.errors import ConfigError, PromptError
from foresay.server.settings import read_keys
from foresay.spec.settings_file import read_settings
from foresay_lab.replay.arrivals import from_trace
from helpers.refusals import refused

NAMES = ("top_k", "length", "device_map", "draft", "batch_size", "greedy", "output", "texts")
FLAGS = {name: "--" + name.replace("_", "-") for name in NAMES} | {"model": "MODEL", "port": "FORESAY_SERVE_PORT"}
GIVEN = {"output": Path("a.json"), "texts": ("b.txt", "c d.txt"), "length": 3, "draft": None}


@pytest.mark.parametrize(
    ("param", "value", "wanted"),
    [
        ("top_k", -1, "--top-k -1"),
        ("length", "confidence(x=0.5)", "--length 'confidence(x=0.5)'"),
        ("draft", "a/b", "--draft a/b"),
        ("draft", "\x1b[2J", "--draft '\\x1b[2J'"),
        ("draft", "x" * 300, f"--draft '{'x' * 199}..."),
        ("max_batch_size", 0, "--batch-size 0"),
        ("--output", Path("a b"), "--output 'a b'"),
        ("greedy", False, "--greedy"),
        ("model", "gpt2", "MODEL gpt2"),
        ("port", 0, "FORESAY_SERVE_PORT=0"),
        ("path", "a.json", "--output a.json"),
        ("folder", Path("c d.txt"), "--texts 'c d.txt'"),
        ("path", "other.json", "other.json"),
        ("foresay.toml: length", 0, "foresay.toml: length=0"),
        ("scale", 1.5, "scale=1.5"),
    ],
)
def test_parameters_are_named_as_they_are_typed(param: str, value: Any, wanted: str) -> None:
    assert ConfigError("is wrong", param=param, value=value).worded(as_typed(FLAGS, GIVEN)) == f"{wanted} is wrong"


def test_other_parameters_too_but_not_settings_of_an_expression() -> None:
    text = "and {device_map} contradict; drop {draft}"
    error = ConfigError(text, param="top_k", value=3, device_map="auto", draft=...)
    assert error.worded(as_typed(FLAGS, {})) == "--top-k 3 and --device-map auto contradict; drop --draft"
    assert str(error) == "top_k=3 and device_map='auto' contradict; drop draft"
    error = ConfigError("is wrong", param="top_k", value=3)
    assert error.about("f(top_k=3)", owned=True).worded(as_typed(FLAGS, {})) == "f(top_k=3): top_k=3 is wrong"
    assert error.about("prompt 'a'").worded(as_typed(FLAGS, {})) == "prompt 'a': --top-k 3 is wrong"


# -- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_byte_order_mark_is_no_part_of_a_text(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORESAY_API_KEYS", raising=False)
    file = tmp_path / "file"
    for text, read, wanted in (
        ("one\r\ntwo\n", lambda path: read_prompt(None, path), "one\r\ntwo\n"),
        ("0.0\n1.5\n", from_trace, [0.0, 1.5]),
        ("one\ntwo\n", read_keys, frozenset({"one", "two"})),
        ('target = "t"\n', lambda path: read_settings(path).target, "t"),
    ):
        file.write_bytes((mark + text).encode())
        assert read(file) == wanted


def test_only_newlines_end_a_prompt() -> None:
    for other in "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r":
        assert split_lines(f"a{other}b\r\nc\n\n \t\nd") == [f"a{other}b", "c", "d"]
    with refused("lines", kind=PromptError):
        split_lines("\n \r\n")


# -- environment variables -------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "src/foresay/cli/environment.py"
TREES = ("src", "tests", "benchmarks", "examples", "scripts", "packages")
SUFFIXES = (".py", ".sh", ".toml", "")
QUOTED = re.compile(
    r"""(?:["'$]|environ: |export |\b(?:env|ENV) |^[ \t]*)\{?(FORESAY_[A-Z_]*[A-Z])\b(?:["'}=/]|$)""", re.MULTILINE
)


def sources() -> list[Path]:
    own = [ROOT / name for name in ("setup.py", "pyproject.toml", "Makefile", "Dockerfile")]
    found = [one for tree in TREES for one in sorted((ROOT / tree).rglob("*")) if one.is_file()]
    return own + [one for one in found if one.suffix in SUFFIXES and one not in (Path(__file__), TABLE)]


def test_every_variable_of_the_sources_is_in_the_table() -> None:
    """Variables that a source reads or sets."""
    found = {name for one in sources() for name in QUOTED.findall(one.read_text(encoding="utf-8", errors="replace"))}
    prefixes = {str(one.context_settings.get("auto_envvar_prefix")) for one in commands.named().values()}
    found -= prefixes | of_options(commands.named().values())
    assert found - {*READ, *OTHERS} == set()
    assert {*READ, *OTHERS} - found == set(), "each is read, and the search finds it"
    assert QUOTED.findall('os.environ.get("FORESAY_FORGOTTEN")') == ["FORESAY_FORGOTTEN"]


IGNORED = {
    ("FORESAY_SERVE_PROT", "9999"): "'FORESAY_SERVE_PROT' is ignored. Did you mean FORESAY_SERVE_PORT?",
    ("FORESAY_API_KEY", "secret"): "'FORESAY_API_KEY' is ignored. Did you mean FORESAY_API_KEYS?",
    ("FORESAY_ZZZZZZZZ", "1"): "'FORESAY_ZZZZZZZZ' is ignored.",
    ("FORESAY_NATIVE", "off"): "FORESAY_NATIVE='off' is ignored; it must be 0 or 1",
}
USED = [
    ("FORESAY_SERVE_PORT", "9999"),
    ("FORESAY_SERVE_BATCH_SIZE", "2"),
    ("FORESAY_NATIVE", "0"),
    ("FORESAY_NATIVE", ""),
    ("FORESAY_VLLM", "python"),
    ("FORESAYER", "1"),
]


def test_what_has_no_effect_gets_a_line_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for (name, value), text in IGNORED.items():
        [line] = idle({name: value, "PATH": "/"}, lambda: commands.named().values())
        assert line.endswith(text) and "secret" not in line
    for name, value in USED:
        assert list(idle({name: value}, lambda: commands.named().values())) == []
    monkeypatch.setenv("FORESAY_SERVE_PROT", "9999")
    assert app._run(["info", "--methods"]) == 0
    assert re.fullmatch(r"foresay: .*'FORESAY_SERVE_PROT' is ignored.*\n", capsys.readouterr().err)
    assert app._run(["--help"]) == 0 and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("FORESAY_SERVE_PORT", "abc", "FORESAY_SERVE_PORT 'abc' is not a valid integer."),
        ("FORESAY_SERVE_PORT", "99999", "FORESAY_SERVE_PORT=99999 "),
        ("FORESAY_SERVE_WARMUP", "maybe", "FORESAY_SERVE_WARMUP 'maybe' is not a valid boolean."),
        ("FORESAY_SERVE_SHARE_PREFIXES", "x", "FORESAY_SERVE_SHARE_PREFIXES=x "),
    ],
)
def test_a_wrong_value_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, line: str
) -> None:
    monkeypatch.setenv(name, value)
    assert app._run(["serve"]) == 2 and capsys.readouterr().err.startswith(f"foresay: {line}")
