"""Plain English: no word of the list in docstrings, comments, messages, help pages and documentation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.language import INSTEAD_OF, in_cpp, in_file, in_python, in_text

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".h", ".cpp", ".md", ".j2", ".js", ".html"}
PROMPTS = "src/foresay/lab/data/datasets.py"
"""Its prompts ask models to say something."""
COVERED = ("src", "docs", "examples", "packages", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def covered() -> Iterator[Path]:
    """Files whose prose is checked: sources, documentation (which has the help pages) and examples."""
    for name in COVERED:
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.suffix in SUFFIXES and not any(part.endswith(".egg-info") for part in file.parts):
                yield file


def test_no_file_has_a_word_of_the_list() -> None:
    findings = [
        f"{file.relative_to(ROOT)}:{one.line}: {one.words!r} in {one.text!r}"
        for file in covered()
        for one in in_file(file)
        if not (file == ROOT / PROMPTS and one.words in ("say", "says"))
    ]
    assert not findings, "\n".join(findings)


def test_the_list_covers_sources_documentation_and_help_pages() -> None:
    names = {str(file.relative_to(ROOT)) for file in covered()}
    assert {"src/foresay/decoding/step.py", "src/foresay/models/cpu/kernels.cpp", "README.md", "CHANGELOG.md"} <= names
    assert any("foresay generate" in file.read_text(encoding="utf-8") for file in covered() if "docs" in file.parts)


PLANTED = [
    ('"""What a drafter guessed."""', ["What", "guessed"]),
    ('"""Of a pass."""', ["Of"]),
    ("x = 1  # the law of the row beside it", ["law", "beside"]),
    ('raise ValueError(f"the model {name} says that nobody heard it")', ["says", "nobody", "heard"]),
    ('"""Return the index of the place."""', ["place"]),
]


@pytest.mark.parametrize(("source", "words"), PLANTED)
def test_a_planted_sentence_is_found(source: str, words: list[str]) -> None:
    assert [one.words for one in in_python(source)] == words


@pytest.mark.parametrize(
    "source",
    [
        '"""Sort in place; it takes place once. `place` and ``law`` are names."""',
        'law = {"place": guess}  # names are code',
        'raise ValueError(f"row {law}: not a number")',
    ],
)
def test_names_and_code_spans_are_not_words(source: str) -> None:
    assert not list(in_python(source))


def test_other_languages() -> None:
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
