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
    Difference,
    changes,
    check_comparable,
    notes,
    text_differences,
)
from foresay_lab.check.result import CheckResult, Counts
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


@pytest.mark.parametrize(
    ("outputs", "found"),
    [
        ([[5, 6, 7], (8, 9)], []),
        ([[5, 4, 7], [8, 9]], [("a", "chat", 1, 6, 4)]),
        ([[4, 4, 4], [8, 9]], [("a", "chat", 0, 5, 4)]),
        ([[5, 6], [8, 9]], [("a", "chat", 2, 7, None)]),
        ([[5, 6, 7, 3], [8, 9]], [("a", "chat", 3, None, 3)]),
        ([[], [0]], [("a", "chat", 0, 5, None), ("b/2", "code", 0, 8, 0)]),
    ],
)
def test_the_first_difference_of_each_text(outputs: list[Sequence[int]], found: list[tuple[Any, ...]]) -> None:
    assert text_differences(RECORDS, outputs) == tuple(Difference(*one) for one in found)


@pytest.mark.parametrize(
    ("now", "tolerance", "fell"),
    [
        (WAS, None, []),
        # the total and the other categories are within the tolerance
        (result(chat=(1000, 500), code=(1000, 440), small=(MIN_TOKENS - 1, 200)), None, ["code"]),
        # a small category does not fail alone
        (result(chat=(1000, 500), code=(1000, 400), small=(MIN_TOKENS - 1, 210)), 0.04, []),
        (result(chat=(1000, 400), code=(1000, 300), small=(MIN_TOKENS - 1, 200)), None, []),
    ],
)
def test_a_category_that_fell_fails(now: CheckResult, tolerance: float | None, fell: list[str]) -> None:
    found = changes(now, WAS) if tolerance is None else changes(now, WAS, tolerance)
    assert [one.category for one in found] == [None, "chat", "code"], "a small category is not compared on its own"
    assert [one.category for one in found if one.fell] == fell
    assert Check(WAS, (), changes=found).passed == (not fell)
    rises = now.total.tokens_per_pass > 1.05 * WAS.total.tokens_per_pass
    assert [one.rose for one in found] == [rises] * 3, "a rise is reported"
    assert found[2].relative == pytest.approx(now.categories["code"].tokens_per_pass / 2.5 - 1)


def test_a_total_that_fell_fails_however_few_its_tokens() -> None:
    assert [one.fell for one in changes(result(chat=(10, 8)), result(chat=(10, 5)))] == [True]


@pytest.mark.parametrize(
    ("now", "tolerance", "fell"),
    [(1.9, 0.0, True), (1.9, 0.0499, True), (1.9, 0.05, False), (1.9, 0.2, False), (2.0, 0.0, False), (1.9998, 0.0, True)],
)  # fmt: skip
def test_a_loss_of_exactly_the_tolerance_is_accepted(now: float, tolerance: float, fell: bool) -> None:
    assert Change(None, now, 2.0, tolerance).fell is fell


@pytest.mark.parametrize("name", SETTINGS)
def test_other_settings_are_an_error_with_their_value(name: str) -> None:
    check_comparable({**SETTINGS, "dtype": "bfloat16", "foresay": "9"}, WAS)
    refuses(lambda: check_comparable({**SETTINGS, **VERSIONS, name: "other"}, WAS), name, "other")


def test_another_version_or_format_is_a_note() -> None:
    recording = Recording(
        RECORDS, 10, model="tiny", settings={"dtype": "bfloat16"}, provenance={"versions": {"foresay": "0.0.1"}}
    )
    assert notes(recording, WAS, replace(WAS, dtype="int8")) == (
        "the recording was decoded in 'bfloat16', this run 'float32'",
        "the recording was made by foresay '0.0.1', this run '0.1.0'",
        "the earlier result was decoded in 'int8', this run 'float32'",
    )
    assert notes(replace(recording, model="other", settings={}, provenance={"versions": 3}), WAS, None) == (
        "the recording is of model 'other', this run 'tiny'",
    )
    assert notes(Recording(RECORDS, 10, settings={"dtype": 5}), WAS, WAS) == ()


def test_the_record_of_a_check() -> None:
    found = Check(WAS, text_differences(RECORDS, [[5, 6, 7], [8, 1]]))
    line = json.loads(json.dumps(found.as_record()))
    assert line["passed"] is found.passed is False and line["texts"] == {"same": 5, "prompts": 6}
    assert line["differences"] == [{"id": "b/2", "category": "code", "position": 1, "recorded": 9, "decoded": 1}]
    line = json.loads(json.dumps(Check(WAS, (), "rule 'typical' is lossy", changes(WAS, WAS), ("a note",)).as_record()))
    assert line["passed"] is True and line["texts"] is None and line["not_compared"] == "rule 'typical' is lossy"
    assert line["categories"] == {"chat": 2.0, "code": 2.5, "small": (MIN_TOKENS - 1) / 200}
    assert [one["category"] for one in line["changes"]] == [None, "chat", "code"] and line["notes"] == ["a note"]


# -- the file ------------------------------------------------------------------------------------------------------------


def test_a_result_comes_back(tmp_path: Path) -> None:
    saved = replace(WAS, categories={"": Counts(1, 20, 10), "chät": Counts(2, 600, 300)})
    saved.save(tmp_path / "c.json")
    assert CheckResult.load(tmp_path / "c.json") == saved
    values = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert (values["format"], values["version"]) == ("foresay-check", 1)
    assert values["categories"]["chät"] == {"prompts": 2, "tokens": 600, "passes": 300}
    assert saved.total == Counts(3, 620, 310) and saved.total.tokens_per_pass == 2
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]
    with refused("path"):
        saved.save(tmp_path / "none" / "c.json")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"format": "foresay-profile"}, "version 1"),
        ({"version": 2}, "version 1"),
        ({"categories": {}}, "categories"),
        ({"categories": {"a": {"prompts": 1, "tokens": 5, "passes": 0}}}, "categories.a.passes=0"),
        ({"categories": {"a": {"prompts": 1, "tokens": 2.5, "passes": 1}}}, "categories.a.tokens=2.5"),
        ({"rule": None}, "rule=None"),
        ({"more": 1}, "more: "),
        ({"drafter": ...}, "drafter"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: dict[str, object], field: str) -> None:
    path = tmp_path / "c.json"
    refuses(lambda: CheckResult.load(path), "path", path)
    WAS.save(path)
    values = json.loads(path.read_text(encoding="utf-8")) | change
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
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
