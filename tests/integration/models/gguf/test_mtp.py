"""Multi-token-prediction layers in a GGUF file: they draft the tokens of the folder that the file was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import HeadDrafter
from foresay.errors import ModelLoadError, UnsupportedModelError
from foresay.models.gguf import mtp, packed
from foresay.models.huggingface.frozen import FrozenExperts, FrozenLinear
from helpers import tiny
from helpers.drafting import watched
from helpers.families import make
from helpers.gguf_files import write_gguf
from helpers.mtp import layers_of_gguf, save_with_mtp
from helpers.support import run

VOCAB = len(tiny.tokenizer())
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96}
QWEN = {"head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 3}
MODELS: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 32, "moe_intermediate_size": 32, "num_nextn_predict_layers": 2},
    "qwen3_5": QWEN,
    "qwen3_next": {**QWEN, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3_5_moe": {**QWEN, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
}
PROMPTS = [[5, 6, 1, 2, 3, 4, 5], [2, 9, 40], [6] * 9]
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)
TEXT = "hello world hello"


def file_of(family: str, path: Path, kind: str | None = None, **layers: torch.Tensor) -> Path:
    """kind: of all matrices. layers: tensors that replace others."""
    model = make(family, 3, **SIZES, **MODELS[family])
    return write_gguf(path, model, kind=kind, mtp={**layers_of_gguf(model, family), **layers})


def drafts_of(path: Path) -> list[list[list[int]]]:
    found = foresay.load(str(path), drafter="mtp", dtype="fp32")
    drafts: list[list[list[int]]] = []
    head = HeadDrafter(found.resources.mtp(), VOCAB)
    drafter = watched(head, lambda _, proposal: drafts.append(proposal.token_ids.tolist()))
    _, _, engine = run(found.target.model, PROMPTS, PARAMS, drafter=drafter, gamma=3)
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert len(drafts) >= 7 and all(len(rows[0]) == 3 for rows in drafts[:3])
    return drafts


COPIES = dict.fromkeys(("embed_tokens.weight", "shared_head.head.weight"), torch.zeros(VOCAB, 64))
"""Copies of the embedding, which are not read."""


@pytest.mark.parametrize("family", MODELS)
def test_drafts_are_those_of_the_folder(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = drafts_of(save_with_mtp(tmp_path / "folder", family, **SIZES, **MODELS[family]))
    copies = {f"model.layers.3.{name}": one for name, one in COPIES.items()} if family == "glm4_moe" else {}
    path = file_of(family, tmp_path / "tiny.gguf", **copies)
    assert drafts_of(path) == wanted
    if copies:
        fill = mtp.fill

        def exchanged(layers: Any, weights: Any) -> None:
            fill(layers, weights)
            for one in layers:
                one.enorm, one.hnorm = one.hnorm, one.enorm

        monkeypatch.setattr(mtp, "fill", exchanged)
        assert drafts_of(path) != wanted, "control"


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5"])
def test_the_default_of_a_file_in_its_own_blocks(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers stay in their blocks, next to the packed weights of the others, unless an option rounds drafts."""
    monkeypatch.setattr(packed, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setenv(packed.LIMIT, "1")
    path = str(file_of(family, tmp_path / "tiny.gguf", "Q8_0"))
    plain = foresay.load(path, drafter="none").generate(TEXT, max_new_tokens=16, ignore_eos=True).token_ids
    for _ in range(2):  # the second time from the packed weights
        found = foresay.load(path, num_draft_tokens=3)
        assert found.drafter_name == "hybrid(suffix, mtp)"
        assert found.generate(TEXT, max_new_tokens=16, ignore_eos=True).token_ids == plain
        packed.settle()
        assert len([*(tmp_path / "cache").rglob("*.weights")]) == 2
        layers = found.resources.mtp()._layers.layers
        bits = [one.product.bits for one in layers.modules() if isinstance(one, FrozenLinear)]
        assert len(bits) >= 3 * len(layers) and set(bits) == {8.5}
        assert any(isinstance(one, FrozenExperts) for one in layers.modules()) == (family == "glm4_moe")
    rounded = foresay.load(path, drafter="mtp", draft_weights="int4")
    bits = [one.product.bits for one in rounded.resources.mtp()._layers.modules() if isinstance(one, FrozenLinear)]
    assert min(bits) < 8
    assert rounded.generate(TEXT, max_new_tokens=16, ignore_eos=True).token_ids == plain


WRONG = [
    ("model.layers.4.eh_proj.weight", (64, 64), r"blk.4.nextn.eh_proj.weight'? has shape \[64, 64\]"),
    ("model.layers.3.embed_tokens.weight", (8, 64), "nextn.embed_tokens.weight'? has shape"),
    ("model.layers.3.self_attn.o_proj.bias", (64, 2), "attn_output.bias'? has shape"),
    ("model.layers.4.mlp.gate_proj.weight", (96, 64), "blk.4.ffn_gate.weight'? is not among"),
]


def test_what_is_refused(tmp_path: Path) -> None:
    """Tensors of other shapes, half of them, and none; without "mtp" such files are loaded."""
    for name, shape, problem in WRONG:
        path = str(file_of("glm4_moe", tmp_path / f"{name}.gguf", **{name: torch.ones(shape)}))
        with pytest.raises(ModelLoadError, match=problem):
            foresay.load(path, drafter="mtp", dtype="fp32")
    model = make("qwen3_5", 3, **SIZES, **QWEN)
    with pytest.raises(UnsupportedModelError, match=r"states no qwen35.nextn_predict_layers"):
        foresay.load(str(write_gguf(tmp_path / "none.gguf", model)), drafter="mtp")
    some = {name: one for name, one in layers_of_gguf(model, "qwen3_5").items() if "hnorm" not in name}
    half = str(write_gguf(tmp_path / "half.gguf", model, mtp=some))
    with pytest.raises(ModelLoadError, match=r"lacks 1 of the model's tensors \(0.hnorm.weight"):
        foresay.load(half, drafter="mtp")
    for found, dtype in ((path, "fp32"), (half, "auto")):
        assert foresay.load(found, dtype=dtype).drafter_name == "suffix"
