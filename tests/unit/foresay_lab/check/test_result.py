"""The file of a check: it comes back as it was, and one from elsewhere is read or refused in one line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from foresay.errors import ConfigError
from foresay_lab.check.compare import changes
from foresay_lab.check.result import CheckResult, Counts
from helpers.fuzz_mutators import mutate_bytes, mutate_json

RESULT = CheckResult(
    *("tiny", "hybrid(suffix, model(draft))", "heuristic", "block", "float32", "0.1.0", "0123456789abcdef"),
    {"": Counts(1, 20, 10), "chät": Counts(2, 600, 300)},
)


def test_a_result_comes_back(tmp_path: Path) -> None:
    RESULT.save(tmp_path / "c.json")
    assert CheckResult.load(tmp_path / "c.json") == RESULT
    values = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert (values["format"], values["version"]) == ("foresay-check", 1)
    assert values["categories"]["chät"] == {"prompts": 2, "tokens": 600, "passes": 300}
    assert RESULT.total == Counts(3, 620, 310) and RESULT.total.tokens_per_pass == 2
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "foresay-profile"}, "not a foresay-check of version 1"),
        ({"version": 2}, "not a foresay-check of version 1"),
        ({"categories": {}}, "categories should have at least 1 item"),
        ({"categories": {"a": {"prompts": 1, "tokens": 5, "passes": 0}}}, "categories.a.passes should be greater than"),
        (
            {"categories": {"a": {"prompts": 1, "tokens": 2.5, "passes": 1}}},
            "categories.a.tokens should be a valid int",
        ),
        ({"rule": None}, "rule should be a valid string, not null"),
        ({"more": 1}, "more: "),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "c.json"
    RESULT.save(path)
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change))
    with pytest.raises(ConfigError) as error:
        CheckResult.load(path)
    assert str(error.value).startswith(repr(str(path))) and message in str(error.value) and "\n" not in str(error.value)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    RESULT.save(path)
    values = json.loads(path.read_text(encoding="utf-8"))
    del values["drafter"]
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="drafter: field required"):
        CheckResult.load(path)


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    path, rng, outcomes = tmp_path / "c.json", random.Random(0), {True: 0, False: 0}
    RESULT.save(path)
    raw, values = path.read_bytes(), json.loads(path.read_text(encoding="utf-8"))
    for i in range(400):
        path.write_bytes(mutate_bytes(raw, rng) if i % 2 else mutate_json(values, rng))
        try:
            read = CheckResult.load(path)
        except ConfigError:
            outcomes[False] += 1
        else:
            changes(read, RESULT)
            outcomes[True] += 1
    assert outcomes[True] and outcomes[False] > 100, outcomes


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read '.*none\.json': No such file or directory"):
        CheckResult.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot write"):
        RESULT.save(tmp_path / "none" / "c.json")
