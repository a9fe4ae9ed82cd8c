"""The console's parts by themselves: joining lines, finding commands, completing words, showing settings."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from foresay.cli import methods
from foresay.cli.common import model_expression
from foresay.cli.console import input as entering
from foresay.cli.console.commands import COMMANDS, SYNONYMS, _usage, resolve, words
from foresay.cli.console.input import Entry, completions, entry, history_file, is_open
from foresay.decoding.acceptance import RULES
from foresay.lengths import LENGTHS
from foresay.spec.expressions import Call, parse
from foresay.spec.recipes import DRAFTERS
from helpers.refusals import refused

OPEN = ("hello \\", '"""', '"""one', '"""\none\n')
WHOLE = (
    "hello",
    "hello \\\nyou",
    "a line of LaTeX \\\\",
    '"""one"""',
    '"""\none\n"""',
    '  """\none"""  ',
    'a """ here',
    "",
)


def test_which_lines_belong_together() -> None:
    assert [text for text in (*OPEN, *WHOLE) if is_open(text)] == [*OPEN]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", Entry("hello")),
        ("a\\\nb\\\nc", Entry("a\nb\nc")),
        ("a\\\\\nb", Entry("a\\\\\nb")),
        ("left open\\", Entry("left open")),
        ('"""one"""', Entry("one", block=True)),
        ('"""\n/two\n\n  three\\\n"""', Entry("/two\n\n  three\\", block=True)),
        ('"""\nleft open', Entry("left open", block=True)),
        ('""""quoted" words"""', Entry('"quoted" words', block=True)),
    ],
)
def test_joining_lines(text: str, expected: Entry) -> None:
    assert entry(text) == expected


SHORT = {
    "temp": "temperature", "tempe": "temperature", "gamma": "length", "hi": "history", "draft": "draft",
    "drafte": "drafter", "sa": "save", "save!": "save!", "exit": "quit",
}  # fmt: skip


def test_commands_may_be_cut_short_and_document_themselves() -> None:
    assert {name: resolve(name) for name in SHORT} == SHORT
    for name in ("dra", "tem", "s", "histroy", ""):
        with refused(f"/{name}", None):
            resolve(name)
    for name, command in COMMANDS.items():
        assert command.purpose.endswith(".") and len(_usage(name)) <= 20
    assert not SYNONYMS.keys() & COMMANDS.keys() and set(SYNONYMS.values()) <= COMMANDS.keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/dra", ["/drafter", "/draft"]),
        ("/drafter s", ["suffix", "suffix_tree", "self"]),
        ("/drafter cascade(max_gram, suf", ["suffix", "suffix_tree"]),
        ("/rule le", ["lenience"]),
        ("/length h", ["heuristic"]),
        ("/trace o", ["on", "off"]),
        ("/help leng", ["length"]),
        ("/undo x", []),
        ("/nothing x", []),
        ("//dra", []),
        ("dra", []),
        ("/system a\n/dra", []),
    ],
)
def test_completion(text: str, expected: list[str]) -> None:
    found = completions(text, words())
    assert [word for word, _ in found] == expected
    assert all(word.startswith(text[len(text) - typed :]) for word, typed in found)


def test_the_history_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = history_file()
    assert path == tmp_path / "state" / "foresay" / "history"
    entering._history(path).store_string("a secret")
    assert "a secret" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert history_file() == Path.home() / ".local" / "state" / "foresay" / "history"
    (tmp_path / "file").touch()
    for unkept in (tmp_path / "file" / "history", None):
        assert type(entering._history(unkept)).__name__ == "InMemoryHistory"


def test_methods_describes_every_name() -> None:
    listed = {title: dict(entries) for title, _, entries in methods.catalogue()}
    for title, known in (("Drafters", DRAFTERS), ("Rules", RULES), ("Lengths", LENGTHS)):
        assert [signature.split("(")[0] for signature in listed[title]] == list(known)
        assert all(purpose.strip().endswith(".") for purpose in listed[title].values())
    assert methods.DRAFTERS.keys() == DRAFTERS.keys()
    assert "prompt_lookup(max_ngram=4, min_ngram=2)" in listed["Drafters"]
    assert [s for s, p in listed["Rules"].items() if "Lossy" in p] == [
        "lenience(lenience=2.0)",
        "typical(eps=0.3, delta=0.09)",
    ]


@pytest.mark.parametrize("name", ["smollm2-135m", "org/name", "./a folder", "a,b", "123", "true", "x=y", os.sep])
def test_a_draft_model_as_an_expression(name: str) -> None:
    assert parse(model_expression(name)) == Call("model", ((None, name),))
