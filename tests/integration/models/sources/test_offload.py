"""Weights on the disk: what transformers decodes with a device_map, max_memory and an offload folder, foresay decodes too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import foresay
from foresay.errors import UnsupportedModelError
from foresay.models.huggingface.early_exit import trimmed_head
from helpers import tiny
from helpers.families import make, make_seq2seq

PROMPT = [9, 5, 6, 7, 5, 6]
NEW = 8


def saved(family: str, folder: Path, share: float = 0.1) -> dict[str, Any]:
    """A tiny model in many shards, and settings under which a share of it stays in memory."""
    model: Any = make_seq2seq(family) if family == "t5" else make(family, vocab_size=len(tiny.tokenizer()))
    model.save_pretrained(folder / "model", max_shard_size="20KB")
    tiny.tokenizer().save_pretrained(folder / "model")
    memory = {"cpu": int(sum(weight.numel() * weight.element_size() for weight in model.parameters()) * share)}
    return {"device_map": "auto", "offload_folder": str(folder / "offload"), "max_memory": memory}


@pytest.mark.parametrize(("family", "share"), [("bloom", 0.1), ("gemma", 0.66), ("llama", 0.1), ("t5", 0.66)])
def test_the_tokens_of_transformers(family: str, share: float, tmp_path: Path) -> None:
    """The first layers of an offloaded model draft as those of a whole one; its output layer cannot be trimmed."""
    settings = saved(family, tmp_path, share)
    kind: Any = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    theirs = kind.from_pretrained(tmp_path / "model", dtype=torch.float32, **settings)
    assert "disk" in theirs.hf_device_map.values()
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)
    out = theirs.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0]
    expected = out[1 if family == "t5" else len(PROMPT) :].tolist()
    drafter = "self(2)" if family in ("bloom", "llama") else "suffix"
    ours = foresay.load(tmp_path / "model", dtype="fp32", drafter=drafter, num_draft_tokens=3, **settings)
    made = ours.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True)
    assert made.token_ids == expected and made.draft_error is None
    model: Any = ours.target.model
    assert str(model.device) == "cpu"
    if family == "llama":
        whole = foresay.load(tmp_path / "model", dtype="fp32", drafter=drafter, num_draft_tokens=3)
        steps = (one.generate(PROMPT, max_new_tokens=16, ignore_eos=True).steps for one in (whole, ours))
        counts = [[(step.num_drafted, step.num_accepted) for step in one] for one in steps]
        assert counts[0] == counts[1] and any(a < d for d, a in counts[0]), "not all of the target's layers"
        with pytest.raises(UnsupportedModelError, match="the model's output layer is offloaded by its device_map"):
            trimmed_head(model, [1, 2, 3])


def test_on_the_command_line(tmp_path: Path, folder: Path, shell: tiny.Shell) -> None:
    command = ["generate", "hello hello", "--model", str(folder), "--dtype", "fp32", "-n", "8", "--json"]
    spread = ["--device-map", "auto", "--max-memory", "cpu=60KB", "--offload-folder", str(tmp_path / "off")]
    code, out, _ = shell(*command, *spread)
    assert code == 0 and (tmp_path / "off").is_dir()
    assert json.loads(out)["token_ids"] == json.loads(shell(*command)[1])["token_ids"]
    for bad in ("60KB", "cpu=60", "cpu=lots", "cpu=1GB;0=2GB", ""):
        assert shell.refused(*command, "--device-map", "auto", "--max-memory", bad).startswith("--max-memory ")
    assert "only has an effect with --device-map auto" in shell.refused(*command, "--max-memory", "cpu=1GB")
    assert "contradict; give one of them" in shell.refused(*command, "--device", "cpu", "--device-map", "auto")
