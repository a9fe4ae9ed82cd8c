"""The comparisons of a check, on hand-made results: what fails, what is only reported, and what cannot be compared."""

from __future__ import annotations

import json
from dataclasses import replace

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

SETTINGS = {
    "model": "tiny",
    "drafter": "suffix",
    "length": "12",
    "rule": "speculative",
    "dtype": "float32",
    "foresay": "0.1.0",
    "prompts": "abc",
}
RECORDS = (Record("a", (1,), (5, 6, 7), category="chat"), Record("b/2", (2,), (8, 9), category="code"))


def result(**categories: tuple[int, int]) -> CheckResult:
    """A result by (tokens, passes) of each category."""
    return CheckResult(**SETTINGS, categories={name: Counts(2, *pair) for name, pair in categories.items()})


WAS = result(chat=(1000, 500), code=(1000, 400), small=(MIN_TOKENS - 1, 200))


# -- texts -------------------------------------------------------------------------------------------------------------


def test_equal_outputs_have_no_difference() -> None:
    assert text_differences(RECORDS, [[5, 6, 7], (8, 9)]) == ()


@pytest.mark.parametrize(
    ("output", "position", "recorded", "decoded"),
    [
        ([5, 4, 7], 1, 6, 4),
        ([4, 4, 4], 0, 5, 4),
        ([5, 6], 2, 7, None),
        ([5, 6, 7, 3], 3, None, 3),
        ([], 0, 5, None),
    ],
)
def test_the_first_difference(output: list[int], position: int, recorded: int | None, decoded: int | None) -> None:
    assert text_differences(RECORDS, [output, [8, 9]]) == (Difference("a", "chat", position, recorded, decoded),)


def test_differences_are_in_the_order_of_the_records() -> None:
    assert [one.id for one in text_differences(RECORDS, [[0], [0]])] == ["a", "b/2"]


# -- tokens per pass ---------------------------------------------------------------------------------------------------


def test_a_result_is_equal_to_itself() -> None:
    found = changes(WAS, WAS)
    assert [one.category for one in found] == [None, "chat", "code"], "a small category is not compared on its own"
    assert all(one.relative == 0 and not one.fell and not one.rose for one in found)
    assert found[0].now == pytest.approx((2000 + MIN_TOKENS - 1) / 1100)


def test_a_category_that_fell_fails() -> None:
    """Negative control: the total and the other categories are within the tolerance."""
    found = changes(result(chat=(1000, 500), code=(1000, 440), small=(MIN_TOKENS - 1, 200)), WAS)
    assert {one.category: (one.fell, one.rose) for one in found} == {
        None: (False, False),
        "chat": (False, False),
        "code": (True, False),
    }
    assert found[2].relative == pytest.approx(-1 / 11)
    assert not Check(WAS, (), changes=found).passed
    assert Check(WAS, (), changes=changes(WAS, WAS)).passed


def test_a_total_that_fell_fails_however_few_its_tokens() -> None:
    assert [one.fell for one in changes(result(chat=(10, 8)), result(chat=(10, 5)))] == [True]


def test_a_small_category_does_not_fail_alone() -> None:
    now = result(chat=(1000, 500), code=(1000, 400), small=(MIN_TOKENS - 1, 210))
    assert 210 > 200 * 1.04 and not any(one.fell for one in changes(now, WAS, 0.04))


def test_a_rise_is_reported_and_passes() -> None:
    found = changes(result(chat=(1000, 400), code=(1000, 300), small=(MIN_TOKENS - 1, 200)), WAS)
    assert all(one.rose and not one.fell for one in found)
    assert Check(WAS, (), changes=found).passed


@pytest.mark.parametrize(("tolerance", "fell"), [(0.0, True), (0.0499, True), (0.05, False), (0.2, False)])
def test_a_loss_of_exactly_the_tolerance_is_accepted(tolerance: float, fell: bool) -> None:
    assert Change(None, 1.9, 2.0, tolerance).fell is fell


def test_any_loss_fails_without_tolerance() -> None:
    assert not Change(None, 2.0, 2.0, 0.0).fell
    assert Change(None, 2.0 * 9999 / 10000, 2.0, 0.0).fell


@pytest.mark.parametrize("name", ["model", "drafter", "length", "rule"])
def test_other_settings_are_an_error_with_both_values(name: str) -> None:
    check_comparable(SETTINGS, WAS)
    with pytest.raises(
        ConfigError, match=f"the earlier result has {name} '{SETTINGS[name]}', and this run has 'other'"
    ):
        check_comparable(SETTINGS | {name: "other"}, WAS)


def test_other_prompts_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"of other prompts \(digest 'abc', and this run has 'x'\)"):
        check_comparable(SETTINGS | {"prompts": "x"}, WAS)


def test_another_version_or_format_is_a_note() -> None:
    check_comparable(SETTINGS | {"dtype": "bfloat16", "foresay": "9"}, WAS)
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


# -- the outcome -------------------------------------------------------------------------------------------------------


def test_a_changed_token_fails() -> None:
    found = Check(WAS, text_differences(RECORDS, [[5, 6, 7], [8, 1]]))
    assert not found.passed
    line = json.loads(json.dumps(found.as_record()))
    assert line["passed"] is False and line["texts"] == {"same": 5, "prompts": 6}
    assert line["differences"] == [{"id": "b/2", "category": "code", "position": 1, "recorded": 9, "decoded": 1}]


def test_the_record_of_a_check_without_texts() -> None:
    line = json.loads(json.dumps(Check(WAS, (), "rule 'typical' is lossy", changes(WAS, WAS), ("a note",)).as_record()))
    assert line["passed"] is True and line["texts"] is None and line["not_compared"] == "rule 'typical' is lossy"
    assert line["categories"] == {"chat": 2.0, "code": 2.5, "small": (MIN_TOKENS - 1) / 200}
    assert [one["category"] for one in line["changes"]] == [None, "chat", "code"] and line["notes"] == ["a note"]
