"""Published drafts in use: the list, the choice, the note that one exists, and publishing one. The hub is a fake."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import metadata_load

import foresay
from foresay import ConfigError, ModelNotFoundError
from foresay.models.drafts.files import write_draft
from foresay.models.huggingface.causal import CausalModel
from foresay.models.sources import base_models, catalogue
from foresay.models.sources.loading import load_model
from foresay.models.sources.published import PublishedTarget
from helpers import tiny
from helpers.blocks import random_block
from helpers.fake_hub import FakeHub, entry
from helpers.heads import random_head

BASE = "org/target"


@pytest.fixture(scope="module")
def target(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, whose card names its base model."""
    path = tmp_path_factory.mktemp("named") / "target"
    shutil.copytree(folder, path)
    (path / "README.md").write_text(f"---\nbase_model: {BASE}\n---\n")
    return path


@pytest.fixture(scope="module")
def drafts(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a head and of a block drafter for it."""
    model = load_model(target).model
    assert isinstance(model, CausalModel)
    made = {"head": random_head(model, ids=range(10, 90)), "block": random_block(model)}
    out = {}
    for name, draft in made.items():
        out[name] = tmp_path_factory.mktemp(name)
        write_draft(draft, out[name])
    return out


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    """A hub with the table of one target: a head, a block drafter, and something that is not decoded."""
    listed = [
        {"repo": "a/head", "kind": "eagle3", "parameters": 1000, "license": "mit"},
        {"repo": "a/block", "kind": "dspark"},
        {"repo": "a/medusa", "kind": "medusa"},
    ]
    known = {BASE: PublishedTarget.model_validate({"name": BASE, "drafts": listed})}
    for module in (catalogue, base_models):
        monkeypatch.setattr(module, "table", lambda: known)
    return FakeHub(monkeypatch, tmp_path / "hub")


def content(folder: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- the list


def test_the_list(fake: FakeHub, target: Path, drafts: dict[str, Path], shell: tiny.Shell) -> None:
    fake.store("a/head", content(drafts["head"]))
    fake.listed = lambda filters: [entry("c/new", "eagle3", "safetensors", "license:mit", total=10**9)]
    code, out, err = shell("drafts", str(target))
    assert (code, err) == (0, "")
    title, heading, *rows = out.splitlines()
    assert title == f"{target} (made from {BASE}): 4 drafts"
    assert heading.split() == ["draft", "kind", "size", "licence", "here", "decoded", "cost"]
    assert [row.split()[0] for row in rows[:4]] == ["a/head", "a/block", "c/new", "a/medusa"]
    assert rows[0].split()[1:2] == ["eagle3"] and rows[0].split()[-6:-4] == ["mit", "yes"] and "a token" in rows[0]
    assert "2.00 GB" in rows[2] and rows[3].split()[-2:] == ["no", "?"]
    assert rows[4] == "not decoded: no drafter decodes medusa (a/medusa)"
    assert rows[5:] == ["draft with the first: --drafter published, or --drafter 'hybrid(suffix, head(a/head))'"]


def test_the_list_as_json_and_without_a_network(
    fake: FakeHub, target: Path, drafts: dict[str, Path], shell: tiny.Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.store("a/block", content(drafts["block"]))
    FakeHub(monkeypatch, fake.cache, online=False)
    code, out, _ = shell("drafts", "-m", str(target), "--json")
    found = json.loads(out)
    assert code == 0 and found["model"] == str(target) and found["targets"] == [BASE]
    assert found["hub"] == "offline (HF_HUB_OFFLINE)"
    best, other, refused = found["drafts"]
    assert best["repo"] == "a/block" and best["drafter"] == "hybrid(suffix, block(a/block))" and best["folder"]
    size = (drafts["block"] / "model.safetensors").stat().st_size
    assert best["cost"] == size / (target / "model.safetensors").stat().st_size and best["cost_per"] == "block"
    assert (other["repo"], other["folder"], other["license"], other["source"]) == ("a/head", None, "mit", "table")
    assert refused["drafter"] is None and not refused["decoded"] and "medusa" in refused["refusal"]
    lines = shell("drafts", str(target))[1].splitlines()
    assert (
        "the hub's list is missing: offline (HF_HUB_OFFLINE); this is the table of this version and the cache" in lines
    )


def test_a_model_of_which_nothing_is_known(fake: FakeHub, folder: Path, shell: tiny.Shell) -> None:
    code, out, _ = shell("drafts", str(folder))
    assert code == 0 and "it names no model of the hub" in out and fake.requests == []
    assert shell("drafts", "org/unknown")[1] == "org/unknown: no drafts\n"
    assert "'./missing'" in shell.refused("drafts", "./missing")
    assert "two models" in shell.refused("drafts", "a/b", "-m", "c/d")


# -- the choice


def test_the_cached_draft_is_chosen_and_changes_no_token(
    fake: FakeHub, target: Path, drafts: dict[str, Path], shell: tiny.Shell
) -> None:
    fake.store("a/block", content(drafts["block"]))
    plain = ("generate", "the number 7", "-m", str(target), "-n", "24", "--json")
    text = json.loads(shell(*plain, "--drafter", "none")[1])["text"]
    code, out, err = shell(*plain, "--drafter", "published", "--length", "3")
    assert out, err
    found = json.loads(out)
    assert (code, err, found["text"]) == (0, "", text) and found["stats"]["num_drafted"] > 0
    assert set(fake.requests) == {"download a/block"}, "as for any hub id, its files are compared with the hub's"
    compared = shell(*plain, "--compare", "--drafter", "published")
    assert compared[0] == 0 and "block(a/block)" in compared[1]
    model = foresay.load(target, drafter="published")
    assert model.drafter_name == "hybrid(suffix, block(a/block))" and not model.has_default_drafter
    fake.store("a/head", content(drafts["head"]))
    changed = foresay.change(foresay.load(target, drafter="none"), drafter="published")
    assert changed.drafter_name == "hybrid(suffix, block(a/block))"
    (toml := fake.cache.parent / "s.toml").write_text(f'target = "{target}"\ndrafter = "published"\n')
    assert foresay.load(toml).drafter_name == "hybrid(suffix, block(a/block))"


def test_a_draft_is_downloaded(fake: FakeHub, target: Path, drafts: dict[str, Path]) -> None:
    fake.downloads["a/block"] = content(drafts["block"])
    assert foresay.load(target, drafter="published").drafter_name == "hybrid(suffix, block(a/block))"
    assert set(fake.requests) == {"download a/block"}


def test_a_draft_whose_configuration_is_refused_is_passed_over(
    fake: FakeHub, target: Path, drafts: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Its configuration is read before its weights are downloaded; the next draft is taken."""
    files = content(drafts["block"])
    values = {**json.loads(files["config.json"]), "model_type": "gemma4_text"}
    fake.downloads["a/block"] = {"config.json": json.dumps(values).encode()}
    fake.downloads["a/head"] = content(drafts["head"])
    assert foresay.load(target, drafter="published").drafter_name == "hybrid(suffix, head(a/head))"
    assert fake.requests[0] == "download a/block" and fake.requests.count("download a/block") == 1
    assert "the published draft a/block is not used: model_type='gemma4_text'" in caplog.text


def test_no_draft_and_wrong_uses_are_refused(fake: FakeHub, target: Path, folder: Path, shell: tiny.Shell) -> None:
    given = ("generate", "x", "--drafter", "published")
    assert str(target) in shell.refused(*given, "-m", str(target)), "it cannot be reached"
    assert str(folder) in shell.refused(*given, "-m", str(folder))
    assert "--draft a/b" in shell.refused(*given, "-m", str(target), "--draft", "a/b")
    assert "foresay drafts MODEL" in shell.refused("replay", "r.jsonl", "--drafter", "published(3)")
    with pytest.raises(ModelNotFoundError, match="the published draft of"):
        foresay.load(target, drafter="published")
    fake.requests.clear()
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (load_model(folder), {}, "needs a target that is loaded by name, not a LoadedModel"),
        (target, {"draft": "a/b"}, "draft="),
        (target, {"rule": "coin"}, "rule='coin'"),
        (target, {"max_batch_size": 0}, "max_batch_size"),
    ]
    for model, options, problem in wrong:
        with pytest.raises(ConfigError, match=problem):
            foresay.load(model, drafter="published", **options)
    assert fake.requests == [], "other arguments are checked before a request"


# -- the note


def test_a_note_names_the_draft_that_exists(
    fake: FakeHub,
    target: Path,
    folder: Path,
    drafts: dict[str, Path],
    shell: tiny.Shell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server has it too."""
    note = "foresay: a draft is published for org/target: {} ({}, {}); use it with --drafter published\n"
    given = ("generate", "the number 7", "-n", "4", "-m")
    code, text, err = shell(*given, str(target))
    assert (code, err) == (0, note.format("a/block", "dspark", "to be downloaded"))
    fake.store("a/head", content(drafts["head"]))
    assert shell(*given, str(target)) == (0, text, note.format("a/head", "eagle3", "in the cache"))
    for more in (["--json"], ["--drafter", "suffix"], ["--drafter", "none"]):
        assert shell(*given, str(target), *more)[2] == "", more
    assert shell(*given, str(folder))[2] == "", "nothing is known of it"

    def serve(service: Any, sockets: list[socket.socket], **more: Any) -> None:
        for one in sockets:
            one.close()

    monkeypatch.setattr("foresay.server.running.serve", serve)
    for options, noted in (([], True), (["--drafter", "suffix"], False)):
        code, _, err = shell("serve", str(target), "--port", "0", *options)
        assert code == 0 and ("foresay: a draft is published for org/target: a/head" in err) == noted
    assert fake.requests == []
    assert shell(*given, str(target), "--drafter", "published")[2] == ""


# -- publishing


def test_a_draft_is_published_with_a_card(
    fake: FakeHub, target: Path, drafts: dict[str, Path], shell: tiny.Shell, tmp_path: Path
) -> None:
    note = {"texts": 12, "tokens": 3456, "held_out": {"loss": 1.25}, "provenance": {"arguments": ["--secret", "x"]}}
    head = tmp_path / "head"
    shutil.copytree(drafts["head"], head)
    (head / "foresay.json").write_text(json.dumps(note))
    out = tmp_path / "out"
    export = ("export", str(head), str(out), "-m", str(target), "--push", "me/my-head")
    results = str(tmp_path / "r.jsonl")
    methods = ("--drafter", f"head({head})", "--count", "1", "-n", "4", "--batch-size", "1")
    assert shell("bench", results, "-m", str(target), *methods)[0] == 0
    code, text, err = shell(*export, "--results", results, "--license", "apache-2.0")
    assert (code, err) == (0, "") and "published for org/target: https://huggingface.co/me/my-head" in text
    assert fake.requests == ["create me/my-head", "upload me/my-head"]
    assert fake.uploaded.keys() == {"README.md", "config.json", "model.safetensors"}
    card = metadata_load(out / "README.md")
    assert card == {
        "base_model": BASE,
        "base_model_relation": "adapter",
        "library_name": "foresay",
        "license": "apache-2.0",
        "tags": ["foresay", "speculative-decoding", "draft-model", "eagle3"],
    }
    shown = (out / "README.md").read_text()
    assert "tokens: 3,456" in shown and "loss 1.25" in shown and "secret" not in shown and str(tmp_path) not in shown
    assert "head(me/my-head)" in shown and "| plain |" in shown
    assert '--drafter "hybrid(suffix, head(me/my-head))"' in shown
    fake.uploaded.clear()
    assert shell("export", str(drafts["block"]), str(tmp_path / "b"), "-m", str(target), "--push", "me/block")[0] == 0
    card = metadata_load(tmp_path / "b" / "README.md")
    assert "license" not in card and card["tags"][-1] == "dspark"
    assert "No note about the training was given." in (tmp_path / "b" / "README.md").read_text()


def test_what_cannot_be_published_is_refused(
    fake: FakeHub,
    target: Path,
    folder: Path,
    drafts: dict[str, Path],
    shell: tiny.Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a model is loaded, but for what the hub itself refuses."""
    head, out = str(drafts["head"]), tmp_path / "out"
    damaged = shutil.copytree(drafts["head"], tmp_path / "damaged")
    (damaged / "foresay.json").write_text("[")
    for source, model, more, named in (
        (head, target, ["--push", "name"], "--push name "),
        (head, target, ["--push", "a/b/c"], "--push a/b/c "),
        (head, target, ["--push", "a/b", "--license", "<b>"], "--license '<b>'"),
        (head, target, ["--license", "mit"], "--license is for the card of --push"),
        (head, target, ["--results", "x"], "--results is for the card of --push"),
        (head, target, ["--push", "a/b", "--results", str(tmp_path / "missing")], "missing"),
        (head, folder, ["--push", "a/b"], "the target's hub id"),
        (str(damaged), target, ["--push", "a/b"], "foresay.json"),
    ):
        assert named in shell.refused("export", source, str(out), "-m", str(model), *more)
    offline = FakeHub(monkeypatch, fake.cache, online=False)
    given = ("export", head, str(out), "-m", str(target), "--push", "me/x")
    assert "HF_HUB_OFFLINE" in shell.refused(*given)
    assert fake.requests == offline.requests == [] and not out.exists()

    def refuses(self: Any, repo: str, **more: Any) -> None:
        raise OSError("401 Unauthorized")

    FakeHub(monkeypatch, fake.cache)
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuses)
    code, _, err = shell(*given)
    assert code == 2 and "--push me/x " in err and "401" in err and (out / "model.safetensors").is_file()
