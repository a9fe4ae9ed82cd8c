"""The drafts for a model: their order, costs and refusals, and the choice of the best. Nothing leaves the machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from foresay import ModelNotFoundError
from foresay.models.drafts.block_config import BlockConfig, Sight
from foresay.models.drafts.config import HeadConfig
from foresay.models.sources import catalogue as module
from foresay.models.sources import packaged
from foresay.models.sources.catalogue import Found, catalogue, published_drafter, suggestion
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.published import PublishedTarget
from helpers.fake_hub import FakeHub, entry
from helpers.gguf_image import Image

LAYER = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 24, "head_dim": 8}
COMMON: dict[str, Any] = {"layer": LAYER, "vocab_size": 99, "draft_vocab_size": 99, "hidden_layers": (1, 2)}
HEAD = HeadConfig(**COMMON, target_hidden_size=32, norm_before_residual=True, target="org/target").as_speculators()
BLOCK = BlockConfig(**COMMON, sights=(Sight(), Sight()), block_size=5, mask_token_id=98, from_anchor=False).as_plain()
OPTIONS = LoadOptions()
LLAMA_CPP = LoadOptions(backend="llama.cpp")
HEAD_FILES: Mapping[str, Any] = {"config.json": HEAD, "model.safetensors": b"h" * 40}
BLOCK_FILES: Mapping[str, Any] = {"config.json": BLOCK, "model.safetensors": b"b" * 60}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    return FakeHub(monkeypatch, tmp_path / "hub")


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target with a draft of each kind, a mixture of experts, and one that has only its own MTP layers."""
    drafts = [
        {"repo": "a/eagle", "kind": "eagle3", "parameters": 50},
        {"repo": "a/small", "kind": "model", "bytes": 30},
        {"repo": "a/medusa", "kind": "medusa"},
        {"repo": "a/pickled", "kind": "dflash", "files": "pickle"},
        {"repo": "org/target", "kind": "mtp"},
        {"repo": "a/block", "kind": "dflash"},
    ]
    targets = [
        {"name": "org/target", "active_parameters": 200, "drafts": drafts},
        {"name": "org/own", "drafts": [{"repo": "org/own", "kind": "mtp"}]},
        {"name": "org/large", "drafts": [{"repo": "a/draft", "kind": "model"}]},
    ]
    known = {one["name"]: PublishedTarget.model_validate(one) for one in targets}
    monkeypatch.setattr(module, "table", lambda: known)


def named(found: tuple[Found, ...]) -> list[str]:
    return [one.draft.repo for one in found]


def test_the_decoded_ones_come_first_by_kind_and_the_reasons_of_the_others_are_kept(fake: FakeHub) -> None:
    whole = catalogue("org/target", search_hub=False)
    assert named(whole.found) == ["a/block", "a/eagle", "a/small", "org/target", "a/pickled", "a/medusa"]
    assert [one.refusal is None for one in whole.found] == [True] * 4 + [False] * 2
    assert whole.best is whole.found[0] and whole.hub is None and fake.requests == []
    assert {one.source for one in whole.found} == {"table"} and {one.target for one in whole.found} == {"org/target"}
    assert [one.drafter for one in whole.found[:4]] == [
        "hybrid(suffix, block(a/block))",
        "hybrid(suffix, head(a/eagle))",
        "hybrid(suffix, model(a/small))",
        "hybrid(suffix, mtp)",
    ]
    assert [one.per for one in whole.found[:3]] == ["block", "token", "token"]


def test_costs_are_bytes_of_the_draft_over_bytes_of_the_target(fake: FakeHub, tmp_path: Path) -> None:
    def costs(model: str) -> dict[str, float | None]:
        return {one.draft.repo: one.cost for one in catalogue(model, search_hub=False).found}

    parameters = {"a/block": None, "a/eagle": 100 / 400, "a/small": 30 / 400, "org/target": None}
    assert costs("org/target") == parameters | {"a/medusa": None, "a/pickled": None}
    fake.store("a/block", BLOCK_FILES)
    assert costs("org/target")["a/block"] == 60 / 400, "the size of the files that are here"
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x" * 120)
    for config, bytes_read in (({}, 120), ({"num_experts": 8}, 400), ({"text_config": {"num_local_experts": 8}}, 400)):
        values = f'{{"_name_or_path": "org/target", {str(config)[1:-1]}}}'.replace("'", '"').replace(", }", "}")
        (folder / "config.json").write_text(values)
        assert costs(str(folder))["a/small"] == 30 / bytes_read, config
    url = {"general.base_model.0.repo_url": "https://huggingface.co/org/target"}
    for experts in (0, 8):
        image = Image([], []).changed({"general.architecture": "qwen3moe", **url, "expert_count": experts})
        path = image.write(tmp_path / "t.gguf")
        assert costs(str(path))["a/small"] == 30 / (400 if experts else path.stat().st_size)


def test_a_draft_in_the_cache_is_first_and_its_configuration_decides(fake: FakeHub) -> None:
    eagle = fake.store("a/eagle", HEAD_FILES)
    whole = catalogue("org/target", search_hub=False)
    assert named(whole.found)[:2] == ["a/eagle", "a/block"] and whole.found[0].folder == eagle
    assert whole.found[0].draft.size == 40
    fake.store("a/block", BLOCK_FILES | {"config.json": BLOCK | {"attention_bias": True}})
    found = {one.draft.repo: one for one in catalogue("org/target", search_hub=False).found}
    assert "attention_bias" in str(found["a/block"].refusal)
    fake.store("a/small", {"config.json": {}})
    assert catalogue("org/target", search_hub=False).found[1].folder is None, "a configuration without weights"


def test_a_gguf_file_in_the_cache_is_named_by_its_path(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = {"repo": "a/gguf", "kind": "dspark", "files": "gguf"}
    known = {"org/target": PublishedTarget.model_validate({"name": "org/target", "drafts": [draft]})}
    monkeypatch.setattr(module, "table", lambda: known)
    [found] = catalogue("org/target", search_hub=False).found
    assert "GGUF" in str(found.refusal) and found.name == "a/gguf"
    folder = fake.store("a/gguf", {"d-Q4.gguf": b"12", "d-Q8 (1).gguf": b"1234", "d-Q6.gguf": b"123"})
    [found] = catalogue("org/target", search_hub=False).found
    assert found.refusal is None and found.draft.size == 4
    assert found.drafter == f'hybrid(suffix, block("{folder}/d-Q8 (1).gguf"))'
    assert published_drafter("org/target", OPTIONS) == found.drafter
    (folder / "d-Q8 (1).gguf").rename(folder / "d.gguf")
    assert published_drafter("org/target", OPTIONS) == f"hybrid(suffix, block({folder}/d.gguf))"


def test_the_cache_is_searched_for_drafts_that_name_the_target(fake: FakeHub) -> None:
    card = b"---\nbase_model: ORG/Target\n---\n"
    fake.store("b/by-config", HEAD_FILES)
    fake.store("b/by-card", {**BLOCK_FILES, "README.md": card})
    fake.store("b/of-another", BLOCK_FILES)
    fake.store("b/finetune", {"config.json": {"architectures": ["LlamaForCausalLM"]}, "README.md": card})
    fake.store("b/odd", {"config.json": {"speculators_model_type": "é\n", "speculators_config": 7}, "README.md": card})
    whole = catalogue("org/target", search_hub=False)
    assert {one.draft.repo for one in whole.found if one.source == "cache"} == {"b/by-config", "b/by-card"}
    assert named(whole.found)[:2] == ["b/by-card", "b/by-config"]


def test_the_hubs_list_adds_what_is_not_known(fake: FakeHub) -> None:
    fake.listed = lambda filters: [
        entry("a/eagle", "eagle3", "safetensors", "license:mit"),
        entry("c/new", "eagle3", "safetensors", total=10),
        entry("c/gguf", "dflash", "gguf"),
    ]
    whole = catalogue("org/target", search_hub=True)
    sources = {one.draft.repo: one.source for one in whole.found}
    assert sources["a/eagle"] == "table" and sources["c/new"] == sources["c/gguf"] == "hub"
    assert named(whole.found)[:3] == ["a/block", "a/eagle", "c/new"] and whole.hub is None
    assert "GGUF" in str(next(one.refusal for one in whole.found if one.draft.repo == "c/gguf"))


def test_a_model_without_a_name_on_the_hub_is_not_requested(fake: FakeHub, tmp_path: Path) -> None:
    whole = catalogue(str(tmp_path), search_hub=True)
    assert (whole.targets, whole.found, whole.best, fake.requests) == ((), (), None, [])


def test_an_alias_has_its_packaged_head(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = catalogue("smollm2-135m", search_hub=False)
    best = whole.best
    assert best is not None and best.source == "package" and best.draft.tested and best.folder is not None
    assert best.drafter == packaged.DEFAULT_DRAFTERS["smollm2-135m"] and 0 < (best.cost or 0) < 1
    monkeypatch.delitem(packaged.DEFAULT_DRAFTERS, "smollm2-135m")
    assert best.drafter == "hybrid(suffix, head(smollm2-135m))"
    assert published_drafter("smollm2-135m", OPTIONS) == best.drafter


# -- the choice


def test_what_is_in_the_cache_is_chosen_without_a_request_and_else_the_best_is_downloaded(fake: FakeHub) -> None:
    fake.downloads["a/block"] = BLOCK_FILES
    for _ in range(2):  # the second time from the cache
        assert published_drafter("org/target", OPTIONS) == "hybrid(suffix, block(a/block))"
        assert fake.requests == ["download a/block"] * 2, "its configuration, then its weights"


def test_the_hub_is_searched_if_nothing_is_known(fake: FakeHub) -> None:
    fake.listed = lambda filters: [entry("c/new", "eagle3", "safetensors")]
    fake.downloads["c/new"] = HEAD_FILES
    assert published_drafter("org/unknown", OPTIONS) == "hybrid(suffix, head(c/new))"
    assert fake.requests[0].startswith("list base_model:org/unknown") and fake.requests[-1] == "download c/new"


@pytest.mark.parametrize("online", [True, False])
def test_no_draft_is_an_error_that_names_the_target(
    online: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As is one that cannot be reached."""
    fake = FakeHub(monkeypatch, tmp_path, online=online)
    with pytest.raises(ModelNotFoundError) as caught:
        published_drafter("org/unknown", OPTIONS)
    assert "'org/unknown'" in str(caught.value) and ("HF_HUB_OFFLINE" in str(caught.value)) == (not online)
    assert bool(fake.requests) == online
    if not online:
        with pytest.raises(ModelNotFoundError, match=r"a/draft \(not in the cache\)"):
            published_drafter("org/large", OPTIONS)
        return
    for options, tried in ((OPTIONS, "a/block"), (LLAMA_CPP, "a/small")):
        with pytest.raises(ModelNotFoundError, match=f"the published draft of 'org/target'.*{tried}"):
            published_drafter("org/target", options)


def test_mtp_layers_are_the_last_choice_and_llama_cpp_reads_models_only(fake: FakeHub) -> None:
    fake.store("a/eagle", HEAD_FILES)
    assert published_drafter("org/target", OPTIONS) == "hybrid(suffix, head(a/eagle))"
    fake.store("a/small", {"config.json": {}, "model.safetensors": b"1"})
    assert published_drafter("org/target", LLAMA_CPP) == "hybrid(suffix, model(a/small))" and fake.requests == []
    assert published_drafter("org/own", OPTIONS) == "hybrid(suffix, mtp)"
    with pytest.raises(ModelNotFoundError, match="org/own"):
        published_drafter("org/own", LLAMA_CPP)


def test_a_suggestion_makes_no_request(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = suggestion("org/target", OPTIONS)
    assert found is not None and found.draft.repo == "a/block" and fake.requests == []
    for name in ("org/own", "org/unknown", "LlamaForCausalLM"):
        assert suggestion(name, OPTIONS) is None
    assert suggestion("smollm2-135m", OPTIONS) is None, "its packaged head is a default, not a published draft"
    offline = FakeHub(monkeypatch, fake.cache, online=False)
    assert suggestion("org/target", OPTIONS) is None, "it could not be loaded"
    offline.store("a/eagle", HEAD_FILES)
    found = suggestion("org/target", OPTIONS)
    assert found is not None and found.draft.repo == "a/eagle"
