"""The comparisons of a check, on hand-made results: what fails, what is only reported, what cannot be compared; and its file."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foresay.errors import ConfigError
from foresay.records.recording import Record, Recording
from foresay_lab.check.compare import (
    MIN_TOKENS,
    Change,
    Check,
    CheckResult,
    Counts,
    Difference,
    changes,
    check_comparable,
    notes,
    text_differences,
)
from helpers.fuzz_mutators import mutate_bytes, mutate_json
from helpers.refusals import refused, refuses

SETTINGS = {"model": "tiny", "drafter": "suffix", "length": "12", "rule": "speculative", "prompts": "abc"}
VERSIONS = {"dtype": "float32", "foresay": "0.1.0"}
RECORDS = (Record("a", (1,), (5, 6, 7), category="chat"), Record("b/2", (2,), (8, 9), category="code"))


def result(**categories: tuple[int, int]) -> CheckResult:
    """A result by (tokens, passes) of each category."""
    counts = {name: Counts(2, *pair) for name, pair in categories.items()}
    return CheckResult(**SETTINGS, **VERSIONS, categories=counts)


WAS = result(chat=(1000, 500), code=(1000, 400), small=(MIN_TOKENS - 1, 200))


def test_the_first_difference_of_each_text() -> None:
    cases: list[tuple[list[Sequence[int]], list[tuple[Any, ...]]]] = [
        ([[5, 6, 7], (8, 9)], []),
        ([[5, 4, 7], [8, 9]], [("a", "chat", 1, 6, 4)]),
        ([[5, 6], [8, 9]], [("a", "chat", 2, 7, None)]),
        ([[5, 6, 7, 3], [8, 9]], [("a", "chat", 3, None, 3)]),
        ([[], [0]], [("a", "chat", 0, 5, None), ("b/2", "code", 0, 8, 0)]),
    ]
    for outputs, found in cases:
        assert text_differences(RECORDS, outputs) == tuple(Difference(*one) for one in found)


@pytest.mark.parametrize(
    ("chat", "code", "small", "tolerance", "fell"),
    [
        (500, 400, 200, 0.05, []),
        (500, 440, 200, 0.05, ["code"]),  # the total and the other categories are within the tolerance
        (500, 400, 210, 0.04, []),  # a small category does not fail alone
        (400, 300, 200, 0.05, []),
    ],
)
def test_a_category_that_fell_fails(chat: int, code: int, small: int, tolerance: float, fell: list[str]) -> None:
    now = result(chat=(1000, chat), code=(1000, code), small=(MIN_TOKENS - 1, small))
    found = changes(now, WAS, tolerance)
    assert [one.category for one in found] == [None, "chat", "code"], "a small category is not compared on its own"
    assert [one.category for one in found if one.fell] == fell
    assert Check(WAS, (), changes=found).passed == (not fell)
    rises = now.total.tokens_per_pass > 1.05 * WAS.total.tokens_per_pass
    assert [one.rose for one in found] == [rises] * 3, "a rise is reported"
    assert found[2].relative == pytest.approx(400 / code - 1)


def test_a_loss_above_the_tolerance_fails_however_few_the_tokens() -> None:
    assert [one.fell for one in changes(result(chat=(10, 8)), result(chat=(10, 5)))] == [True]
    cases = [(1.9, 0.0499, True), (1.9, 0.05, False), (1.9, 0.2, False), (2.0, 0.0, False), (1.9998, 0.0, True)]
    for now, tolerance, fell in cases:
        assert Change(None, now, 2.0, tolerance).fell is fell


def test_another_version_or_format_is_a_note() -> None:
    check_comparable({**SETTINGS, "dtype": "bfloat16", "foresay": "9"}, WAS)
    settings, versions = {"dtype": "bfloat16"}, {"versions": {"foresay": "0.0.1"}}
    recording = Recording(RECORDS, 10, model="tiny", settings=settings, provenance=versions)
    assert notes(recording, WAS, replace(WAS, dtype="int8")) == (
        "the recording was decoded in 'bfloat16', this run 'float32'",
        "the recording was made by foresay '0.0.1', this run '0.1.0'",
        "the earlier result was decoded in 'int8', this run 'float32'",
    )
    other = replace(recording, model="other", settings={}, provenance={"versions": 3})
    assert notes(other, WAS, None) == ("the recording is of model 'other', this run 'tiny'",)
    assert notes(Recording(RECORDS, 10, settings={"dtype": 5}), WAS, WAS) == ()


def test_a_result_comes_back(tmp_path: Path) -> None:
    path, saved = tmp_path / "c.json", replace(WAS, categories={"": Counts(1, 20, 10), "chät": Counts(2, 600, 300)})
    saved.save(path)
    assert CheckResult.load(path) == saved and list(tmp_path.iterdir()) == [path]
    values = json.loads(path.read_text(encoding="utf-8"))
    assert (values["format"], values["version"]) == ("foresay-check", 1)
    assert values["categories"]["chät"] == {"prompts": 2, "tokens": 600, "passes": 300}
    assert saved.total == Counts(3, 620, 310) and saved.total.tokens_per_pass == 2
    refuses(lambda: saved.save(tmp_path / "none" / "c.json"), "path")
    refuses(lambda: CheckResult.load(tmp_path / "none.json"), "path", tmp_path / "none.json")


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    path, counts = tmp_path / "c.json", {"prompts": 1, "tokens": 5, "passes": 1}
    WAS.save(path)
    values = json.loads(path.read_text(encoding="utf-8"))
    changed: list[tuple[dict[str, Any], str]] = [
        ({"format": "foresay-profile"}, "must be 'foresay-check'"),
        ({"version": 2}, "version=2"),
        ({"categories": {}}, "categories"),
        ({"categories": {"a": counts | {"passes": 0}}}, "categories.a.passes=0"),
        ({"categories": {"a": counts | {"tokens": 2.5}}}, "categories.a.tokens=2.5"),
        ({"rule": None}, "rule=None"),
        ({"more": 1}, "more: "),
        ({"drafter": ...}, "drafter"),
    ]
    for change, field in changed:
        path.write_text(json.dumps({name: value for name, value in (values | change).items() if value is not ...}))
        with refused("path", path) as caught:
            CheckResult.load(path)
        assert field in str(caught.value)


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    path, rng, outcomes = tmp_path / "c.json", random.Random(0), {True: 0, False: 0}
    WAS.save(path)
    raw, values = path.read_bytes(), json.loads(path.read_text(encoding="utf-8"))
    for i in range(400):
        path.write_bytes(mutate_bytes(raw, rng) if i % 2 else mutate_json(values, rng))
        try:
            changes(CheckResult.load(path), WAS)
        except ConfigError:
            outcomes[False] += 1
        else:
            outcomes[True] += 1
    assert outcomes[True] and outcomes[False] > 100, outcomes
