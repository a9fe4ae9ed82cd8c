"""The table of published drafts: the package's own, and damaged ones."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import foresay
from foresay import ConfigError
from foresay.models.drafts.kinds import drafter_of
from foresay.models.sources.load_options import LoadKeywords, LoadOptions
from foresay.models.sources.published import PREFERRED, PublishedDraft, read_table, table

KNOWN = {*PREFERRED, "peagle", "dfly"}
ROW = {"repo": "org/draft", "kind": "eagle3"}


def target(**changes: Any) -> dict[str, Any]:
    return {"targets": [{"name": "org/target", "drafts": [ROW], **changes}]}


def stored(folder: Path, changes: dict[str, Any], draft: dict[str, Any] | None = None) -> Path:
    """A table with one target and one draft, with some values changed."""
    whole = {"format": "foresay-published-drafts", "version": 1, **target(drafts=[{**ROW, **(draft or {})}]), **changes}
    path = folder / "table.json"
    path.write_text(json.dumps(whole))
    return path


def test_the_table_of_the_package() -> None:
    targets = table()
    drafts = [draft for one in targets.values() for draft in one.drafts]
    assert len(targets) >= 60 and len(drafts) >= 130 and {one.kind for one in drafts} <= KNOWN
    assert all(one.name.casefold() == name for name, one in targets.items())
    assert sum(drafter_of(one.kind) is not None for one in drafts) > 100
    assert all(one.kind != "mtp" or one.repo in {target.name for target in targets.values()} for one in drafts)
    owners = "z-lab incoai deepseek-ai AngelSlim RedHatAI LiquidAI lmsys yuhuili Qwen google"
    assert {*owners.split()} <= {one.repo.partition("/")[0] for one in drafts}


def test_a_table_is_read(tmp_path: Path) -> None:
    found = read_table(stored(tmp_path, {}, {"parameters": 7, "license": "mit"}))["org/target"]
    assert found.active_parameters is None
    assert found.drafts == (PublishedDraft(repo="org/draft", kind="eagle3", parameters=7, license="mit"),)


NAMES = ("", "org", "a/b/c", "../b", "a/b\n", "a/\x1b[2J", "a/b;c", "a/é", "/b", "a" * 200 + "/b", 7, None)
DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"format": "other"}, "format"),
    ({"version": 2}, "version"),
    ({"more": 1}, "more"),
    ({"targets": {}}, "targets"),
    (target(drafts=[]), "drafts"),
    (target(drafts=[ROW, ROW]), "org/draft is listed twice for org/target"),
    ({"targets": [{"name": name, "drafts": [ROW]} for name in ("a/b", "A/b")]}, "a/b is listed twice"),
    (target(active_parameters=0), "active_parameters"),
    *((target(name=name), "name") for name in NAMES),
]
WRONG: dict[str, list[Any]] = {
    "repo": ["org/../x/y"], "kind": ["EAGLE 3", None], "parameters": [-1, 1.5, "7B", 2**60], "bytes": [True],
    "license": ["<b>", ""], "files": ["exe"], "tested": ["yes"], "downloads": [7],
}  # fmt: skip


def test_a_damaged_table_or_draft_is_refused(tmp_path: Path) -> None:
    drafts: list[Any] = [({}, name, {name: value}) for name, values in WRONG.items() for value in values]
    for changes, named, draft in (*((*one, None) for one in DAMAGED), *drafts):
        with pytest.raises(ConfigError, match=r"table\.json") as caught:
            read_table(stored(tmp_path, changes, draft))
        assert named in str(caught.value), (changes, draft)


def test_what_cannot_be_read_of_a_draft_is_named() -> None:
    def refusal(**changes: Any) -> str:
        return str(PublishedDraft(repo="a/b", **{"kind": "eagle3", **changes}).refusal)

    assert refusal() == "None" == refusal(kind="model") == refusal(files="unknown")
    assert "medusa" in refusal(kind="medusa")
    assert "pickled" in refusal(files="pickle") and "GGUF" in refusal(files="gguf")
    assert "GGUF" in refusal(kind="model", files="gguf")


def test_sizes_and_ranks() -> None:
    drafts = [PublishedDraft(repo="a/b", kind=kind, parameters=10) for kind in ("other", "mtp", "eagle3", "dspark")]
    assert [one.kind for one in sorted(drafts, key=lambda one: one.rank)] == ["dspark", "eagle3", "mtp", "other"]
    assert drafts[0].size == 20 and drafts[0].model_copy(update={"bytes": 7}).size == 7
    assert PublishedDraft(repo="a/b", kind="x").size is None


def test_the_keywords_of_load_are_its_options() -> None:
    """LoadKeywords, which types them, agrees with LoadOptions; each may be left out."""
    options = get_type_hints(LoadOptions)
    wanted = {field.name: options[field.name] for field in dataclasses.fields(LoadOptions)}
    assert get_type_hints(LoadKeywords) == wanted and LoadKeywords.__required_keys__ == frozenset()
    given = inspect.signature(foresay.load).parameters["options"]
    assert given.kind is inspect.Parameter.VAR_KEYWORD and str(given.annotation) == "Unpack[LoadKeywords]"
