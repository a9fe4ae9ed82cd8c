"""Weights on the disk: what transformers decodes with a device_map, max_memory and an offload folder, foresay decodes too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import foresay
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers import tiny
from helpers.families import make, make_seq2seq

PROMPT = [9, 5, 6, 7, 5, 6]
NEW = 16


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny.one_thread()


def saved(family: str, folder: Path) -> dict[str, Any]:
    """A tiny model in many shards, and settings under which a tenth or two thirds of it stay in memory."""
    model: Any = make_seq2seq(family) if family == "t5" else make(family, vocab_size=len(tiny.tokenizer()))
    model.save_pretrained(folder / "model", max_shard_size="20KB")
    tiny.tokenizer().save_pretrained(folder / "model")
    weighs = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return {"device_map": "auto", "offload_folder": str(folder / "offload"), "weighs": weighs}


@pytest.mark.parametrize(("family", "share"), [("bloom", 0.1), ("gemma", 0.66), ("llama", 0.1), ("t5", 0.66)])
def test_the_tokens_of_transformers(family: str, share: float, tmp_path: Path) -> None:
    settings = saved(family, tmp_path)
    settings["max_memory"] = {"cpu": int(settings.pop("weighs") * share)}
    kind: Any = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    theirs = kind.from_pretrained(tmp_path / "model", dtype=torch.float32, **settings)
    assert "disk" in theirs.hf_device_map.values()
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)
    out = theirs.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0]
    expected = out[1 if family == "t5" else len(PROMPT) :].tolist()
    for drafter in ("none", "suffix") if family == "t5" else ("none", "suffix", "self(2)"):
        ours = foresay.load(tmp_path / "model", dtype="fp32", drafter=drafter, **settings)
        made = ours.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True)
        assert made.token_ids == expected and made.draft_error is None, drafter
        assert str(ours.target.model.device) == "cpu"


def test_the_first_layers_of_an_offloaded_model_are_those_of_a_whole_one(tmp_path: Path) -> None:
    settings = saved("llama", tmp_path)
    settings["max_memory"] = {"cpu": int(settings.pop("weighs") * 0.1)}
    counts = []
    for more in ({}, settings):
        model = foresay.load(tmp_path / "model", dtype="fp32", drafter="self(2)", num_draft_tokens=3, **more)
        steps = model.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True).steps
        counts.append([(step.num_drafted, step.num_accepted) for step in steps])
    assert counts[0] == counts[1] and any(a < d for d, a in counts[0]), "not all of the target's layers"


def test_a_head_that_is_offloaded_cannot_be_trimmed(tmp_path: Path) -> None:
    from foresay.models.huggingface.early_exit import trimmed_head

    settings = saved("llama", tmp_path)
    settings["max_memory"] = {"cpu": int(settings.pop("weighs") * 0.1)}
    model: Any = load_model(tmp_path / "model", LoadOptions(dtype="fp32", **settings)).model
    with pytest.raises(UnsupportedModelError, match="the model's output layer is offloaded by its device_map"):
        trimmed_head(model, [1, 2, 3])


def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell, folder = tiny.Shell(monkeypatch, capsys), tiny.save(tmp_path / "m")
    command = ["generate", "hello hello", "--model", str(folder), "--dtype", "fp32", "-n", "8", "--json"]
    spread = ["--device-map", "auto", "--max-memory", "cpu=60KB", "--offload-folder", str(tmp_path / "off")]
    code, out, _ = shell(*command, *spread)
    assert code == 0 and (tmp_path / "off").is_dir()
    assert json.loads(out)["token_ids"] == json.loads(shell(*command)[1])["token_ids"]
    for bad in ("60KB", "cpu=60", "cpu=lots", "cpu=1GB;0=2GB", ""):
        assert shell.refused(*command, "--device-map", "auto", "--max-memory", bad).startswith("--max-memory ")
    assert "only has an effect with --device-map auto" in shell.refused(*command, "--max-memory", "cpu=1GB")
    assert "contradict; give one of them" in shell.refused(*command, "--device", "cpu", "--device-map", "auto")


def test_devices_may_be_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's number comes as a text from the command line and from JSON, and accelerate knows it as a number."""
    seen: dict[str, Any] = {}

    def capture(source: str, **kwargs: Any) -> None:
        seen.update(kwargs)
        raise ConfigError("enough")

    folder = tiny.save(tmp_path / "m")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", capture)
    with pytest.raises(ConfigError, match="enough"):
        load_model(folder, LoadOptions(device_map="auto", max_memory={"0": "9GB", "cpu": "1GB"}))
    assert seen["max_memory"] == {0: "9GB", "cpu": "1GB"}
