"""The table of environment variables: complete, and a line for what is set and has no effect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foresay.cli import app, commands
from foresay.cli.environment import OTHERS, READ, idle, of_options

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "src/foresay/cli/environment.py"
TREES = ("src", "tests", "benchmarks", "examples", "scripts", "packages")
SUFFIXES = (".py", ".sh", ".toml", "")
QUOTED = re.compile(
    r"""(?:["'$]|environ: |export |\b(?:env|ENV) |^[ \t]*)\{?(FORESAY_[A-Z_]*[A-Z])\b(?:["'}=/]|$)""", re.MULTILINE
)


def named(text: str) -> set[str]:
    """Variables that a source reads or sets."""
    return set(QUOTED.findall(text))


def sources() -> list[Path]:
    own = [ROOT / name for name in ("setup.py", "pyproject.toml", "Makefile", "Dockerfile")]
    found = [one for tree in TREES for one in sorted((ROOT / tree).rglob("*")) if one.is_file()]
    return own + [one for one in found if one.suffix in SUFFIXES and one not in (Path(__file__), TABLE)]


def test_every_variable_of_the_sources_is_in_the_table() -> None:
    found = set().union(*(named(one.read_text(encoding="utf-8", errors="replace")) for one in sources()))
    prefixes = {str(one.context_settings.get("auto_envvar_prefix")) for one in commands.named().values()}
    found -= prefixes | of_options(commands.named().values())
    assert found - {*READ, *OTHERS} == set()
    assert {*READ, *OTHERS} - found == set(), "each is read, and the search finds it"
    assert named('os.environ.get("FORESAY_FORGOTTEN")') - {*READ, *OTHERS} == {"FORESAY_FORGOTTEN"}


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "FORESAY_SERVE_PROT",
            "9999",
            "unknown environment variable 'FORESAY_SERVE_PROT' is ignored. Did you mean FORESAY_SERVE_PORT?",
        ),
        (
            "FORESAY_API_KEY",
            "secret",
            "unknown environment variable 'FORESAY_API_KEY' is ignored. Did you mean FORESAY_API_KEYS?",
        ),
        ("FORESAY_ZZZZZZZZ", "1", "unknown environment variable 'FORESAY_ZZZZZZZZ' is ignored."),
        ("FORESAY_NATIVE", "off", "FORESAY_NATIVE='off' is ignored; it must be 0 or 1"),
        ("FORESAY_SERVE_PORT", "9999", None),
        ("FORESAY_SERVE_BATCH_SIZE", "2", None),
        ("FORESAY_NATIVE", "0", None),
        ("FORESAY_NATIVE", "", None),
        ("FORESAY_VLLM", "python", None),
        ("FORESAYER", "1", None),
    ],
)
def test_what_has_no_effect_gets_a_line(name: str, value: str, line: str | None) -> None:
    assert list(idle({name: value, "PATH": "/"}, lambda: commands.named().values())) == ([] if line is None else [line])


def test_a_command_prints_the_line_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORESAY_SERVE_PROT", "9999")
    assert app._run(["info", "--methods"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "foresay: unknown environment variable 'FORESAY_SERVE_PROT' is ignored. Did you mean FORESAY_SERVE_PORT?"
    ]
    assert app._run(["--help"]) == 0 and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("FORESAY_SERVE_PORT", "abc", "FORESAY_SERVE_PORT 'abc' is not a valid integer."),
        ("FORESAY_SERVE_PORT", "99999", "FORESAY_SERVE_PORT 99999 must be an integer in [0, 65535]"),
        ("FORESAY_SERVE_WARMUP", "maybe", "FORESAY_SERVE_WARMUP 'maybe' is not a valid boolean."),
        ("FORESAY_SERVE_SHARE_PREFIXES", "x", "FORESAY_SERVE_SHARE_PREFIXES 'x' must be one of"),
    ],
)
def test_a_wrong_value_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, line: str
) -> None:
    monkeypatch.setenv(name, value)
    assert app._run(["serve"]) == 2 and capsys.readouterr().err.startswith(f"foresay: {line}")
