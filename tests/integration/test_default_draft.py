"""The head that ships for SmolLM2: what it is, where it comes from, and that it drafts as its note reports."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import foresay
from foresay import ModelNotFoundError
from foresay.models.drafts.files import read_draft
from foresay.models.sources import packaged
from foresay.models.sources.drafts import load_draft
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.packaged import default_drafter, packaged_head
from foresay_lab.data.datasets import load_items, subset
from foresay_lab.data.requests import RequestBuilder
from foresay_lab.measure.live_run import run_live

ALIAS = "smollm2-135m"


@pytest.fixture(scope="module")
def folder() -> Path:
    found = packaged_head(ALIAS)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def note(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "foresay.json").read_text())  # type: ignore[no-any-return]


def test_it_is_small_and_its_note_has_what_made_it(folder: Path, note: dict[str, Any]) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) < 20e6
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    package = Path(foresay.__file__).parent
    assert (package.parents[1] / note["command"].split()[0]).is_file()
    assert note["target"] == ALIAS and note["minutes"] > 1 and note["provenance"]["versions"]["torch"]
    assert all(len(one["sha256"]) == 64 and one["outputs"] > 100 for one in note["outputs"].values())
    measured = re.compile("mt_bench|humaneval|hellaswag|mmlu|test", re.IGNORECASE)
    assert note["prompts"] and not any(map(measured.search, note["prompts"])), "learned from what is measured on"
    head = read_draft(folder)
    assert head.config.vocab_size == 49152 and head.module.lm_head is None
    files = [path for path in package.rglob("*") if "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files if path.is_file()) < 4e6, "foresay itself is small"


@pytest.fixture(scope="module")
def model() -> foresay.Generator:
    return foresay.load(ALIAS)


def test_it_drafts_by_the_targets_name(model: foresay.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default: its likeliest tokens, so that a seed keeps its text."""
    own = default_drafter(ALIAS, LoadOptions())
    assert f"head({ALIAS}, sample=false)" in own
    assert {default_drafter(name, LoadOptions()) for name in ("org/name", object())} == {"suffix"}
    assert default_drafter(ALIAS, LoadOptions(backend="llama.cpp")) == "suffix"
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(torch.cuda, "is_available", lambda: True)
        assert default_drafter(ALIAS, LoadOptions()) == "suffix"
        assert default_drafter(ALIAS, LoadOptions(device="cpu")) == own
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert default_drafter(ALIAS, LoadOptions(tp_plan="auto")) == "suffix"
    monkeypatch.delenv("WORLD_SIZE")
    assert model.drafter_name == own
    given = foresay.change(model, drafter="suffix")
    assert given.drafter_name == "suffix" and foresay.change(given, drafter="auto").drafter_name == own


def test_without_its_package_the_model_has_its_default_without_a_head(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packaged, "find_spec", lambda name: None)
    packaged._warn_without_head.cache_clear()
    assert packaged_head(ALIAS) is None
    assert [default_drafter(ALIAS, LoadOptions()) for _ in range(2)] == ["suffix", "suffix"]
    assert caplog.messages == [
        "the draft head for smollm2-135m is not installed, so drafter='suffix' is used; "
        "install foresay-smollm2, which is in foresay's repository: pip install packages/foresay-smollm2"
    ], "once"
    with pytest.raises(ModelNotFoundError, match=r"head for 'smollm2-135m' is not installed; install foresay-smollm2"):
        load_draft(ALIAS)
    assert default_drafter("org/name", LoadOptions()) == "suffix" and len(caplog.messages) == 1


def test_the_head_is_found_without_importing_its_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "foresay_smollm2", raising=False)
    assert packaged_head(ALIAS) == folder and "foresay_smollm2" not in sys.modules


@pytest.mark.slow
def test_what_drafts_by_default_changes_no_text(model: foresay.Generator) -> None:
    """Greedy or by a seed, alone or in a batch, under the length that adapts to a clock."""
    texts = ("Why is the sea salt?", "Name three birds.", "Count to ten.")
    prompts = [[{"role": "user", "content": text}] for text in texts]
    params = [foresay.SamplingParams(max_new_tokens=20, temperature=t, seed=5) for t in (0.0, 0.8, 0.0)]

    def outputs(generator: foresay.Generator) -> tuple[list[list[int]], int]:
        done = generator.generate(prompts, params)
        return [one.token_ids for one in done], sum(one.stats.num_drafted for one in done)

    wanted, _ = outputs(model.plain())
    assert outputs(model)[0] == wanted
    assert [model.generate(*one).token_ids for one in zip(prompts, params, strict=True)] == wanted
    (with_head, drafted), (without, fewer) = (  # at a constant length, which no clock decides
        outputs(foresay.change(model, drafter=drafter, length=4)) for drafter in (model.drafter_name, "suffix")
    )
    assert with_head == without == wanted and drafted > 2 * fewer, "the head takes part"


@pytest.mark.long
def test_it_drafts_as_its_note_says(note: dict[str, Any]) -> None:
    """On shipped prompts, greedy and exact; other processors round otherwise, and texts drift apart."""
    said = note["shipped_prompts"]
    generator = foresay.load(ALIAS, drafter=f"head({ALIAS})", num_draft_tokens=said["num_draft_tokens"])
    asks = RequestBuilder(generator).first(subset(load_items(), said["prompts"]))
    params = foresay.SamplingParams(max_new_tokens=said["new_tokens"])
    live = run_live(generator, asks, params)
    assert live.outputs == run_live(generator.plain(), asks, params).outputs
    assert live.stats.block_efficiency == pytest.approx(said["tokens_per_pass"], rel=0.1)
    assert live.stats.block_efficiency > 1.15
