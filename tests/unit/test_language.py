"""Plain English: no word of the list in docstrings, comments, messages, help pages and documentation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.language import INSTEAD_OF, Finding, in_cpp, in_file, in_python, in_text

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".h", ".cpp", ".md", ".j2", ".js", ".html"}
PROMPTS = (
    "src/foresay_lab/data/datasets.py",
    "tests/unit/foresay_lab/data/test_datasets.py",
    "tests/helpers/chat_prompts.py",
)
"""Their prompts request a text of models in everyday words."""
VENDORED = "src/foresay/server/page/vendor/marked.umd.js"
LISTS = ("tests/helpers/language.py", "tests/unit/test_language.py", VENDORED)
"""The list of words, its test, and a file of others."""
COVERED = (
    *("src", "docs", "examples", "packages", "benchmarks", "scripts", "tests"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
)
PYTHON, BASH = "#!/usr/bin/env python3\n", "#!/usr/bin/env bash\n"
"""First lines of scripts whose names have no suffix."""


def first_line(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline()


def findings_of(path: Path) -> list[Finding]:
    """Words in one file. Of a bash script, the comments that fill a line are checked."""
    if path.suffix:
        return in_file(path)
    text = path.read_text(encoding="utf-8")
    if text.startswith(PYTHON):
        return list(in_python(text))
    return list(in_text("\n".join(line if line.lstrip().startswith("#") else "" for line in text.splitlines())))


def covered() -> Iterator[Path]:
    """Files whose prose is checked: sources, documentation (which has the help pages), tests, examples and scripts."""
    for name in COVERED:
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            inside = file.relative_to(ROOT).as_posix()
            if ".egg-info/" in inside or not file.is_file() or inside in LISTS:
                continue
            script = file.parent == ROOT / "scripts" and not file.suffix and first_line(file) in (PYTHON, BASH)
            if script or file.suffix in SUFFIXES:
                yield file


def test_no_file_has_a_word_of_the_list() -> None:
    findings = [
        f"{file.relative_to(ROOT)}:{one.line}: {one.words!r} in {one.text!r}"
        for file in covered()
        for one in findings_of(file)
        if file.relative_to(ROOT).as_posix() not in PROMPTS or one.words not in ("say", "says", "asking")
    ]
    assert not findings, "\n".join(findings)


def test_the_list_covers_sources_documentation_help_pages_benchmarks_and_scripts() -> None:
    names = {str(file.relative_to(ROOT)) for file in covered()}
    assert {"src/foresay/decoding/step.py", "src/foresay/models/cpu/kernels.cpp", "README.md", "CHANGELOG.md"} <= names
    assert {"benchmarks/LOG.md", "benchmarks/common.py", "scripts/pins", "scripts/check"} <= names
    assert any("foresay generate" in file.read_text(encoding="utf-8") for file in covered() if "docs" in file.parts)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('"""What a drafter guessed."""', ["What", "guessed"]),
        ('"""Of a pass."""', ["Of"]),
        ("x = 1  # the law of the row beside it", ["law", "beside"]),
        ('raise ValueError(f"the model {name} says that nobody heard it")', ["says", "nobody", "heard"]),
        ('"""Return the index of the place."""', ["place"]),
        ('"""Sort in place; it takes place once. `place` and ``law`` are names."""', []),
        ('law = {"place": guess}  # names are code', []),
        ('raise ValueError(f"row {law}: not a number")', []),
    ],
)
def test_a_planted_sentence_is_found(source: str, words: list[str]) -> None:
    """Names and code spans are not words."""
    assert [one.words for one in in_python(source)] == words


def test_scripts_without_a_suffix_and_other_languages(tmp_path: Path) -> None:
    for source, lines in (
        (f'{PYTHON}"""What a script is told."""\nlaw = 1\n', [2, 2]),
        (f"{BASH}# The law.\nlaw=1\n  # behind it\n", [2, 4]),
    ):
        (tmp_path / "script").write_text(source, encoding="utf-8")
        assert [one.line for one in findings_of(tmp_path / "script")] == lines
    assert [one.words for one in in_text("The law holds.\n\n`law`, [law](law.md)\n\n```\nlaw\n```\n")] == ["law", "law"]
    assert [one.words for one in in_cpp("int law = 1;  // what is behind it\n")] == ["behind"]
    assert [one.line for one in in_text("one\n\ntwo guesses\n")] == [3]


def test_every_pattern_finds_its_word() -> None:
    examples = (
        "law guess look-up judge verdict told says hears asks foresee beside behind dear price lean promise place "
        "lately nobody beforehand thereof"
    )
    found = {one.words for one in in_text(examples)}
    assert found == set(examples.split())
    assert len(INSTEAD_OF) >= len(found) - 1
