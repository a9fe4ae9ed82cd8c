"""Mixtures of experts in GGUF files: each expert's blocks as in the file, mapped by later loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from foresay.errors import ModelLoadError
from foresay.models.gguf import blocks, packed
from foresay.models.huggingface.frozen import FrozenExperts
from foresay.models.sources.loading import load_model
from helpers import tiny
from helpers.families import make
from helpers.gguf_files import write_gguf

LAYERS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def qwen3_moe() -> Any:
    sizes = {"vocab_size": len(tiny.tokenizer()), "hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    model = make("qwen3_moe", 4, **sizes, moe_intermediate_size=32, mlp_only_layers=[])
    for weight in model.parameters():
        if weight.dim() >= 2:
            weight.data *= 0.2 / weight.std()
    return model


def scores(model: Any) -> torch.Tensor:
    from foresay.decoding.protocols import ModelInput

    ids, cache = torch.arange(5, 30)[None], model.new_cache()
    cache.add_rows(1)
    return model.forward(ModelInput(ids, [25]), cache).scores()[0]


@pytest.mark.parametrize(
    "kinds", [("Q4_0", "Q4_0", "Q8_0"), ("Q5_1", "Q8_0", "Q4_1"), ("F16", "F16", "F16"), ("Q8_0", "F16", "Q8_0")]
)
def test_experts_are_those_of_the_file(tmp_path: Path, kinds: tuple[str, str, str]) -> None:
    """Gate and up projections of the same type, of two types, unquantized, and mixed."""
    types = dict.fromkeys(LAYERS, "Q8_0") | dict(zip(EXPERTS, kinds, strict=True))
    path = write_gguf(tmp_path / "tiny.gguf", qwen3_moe(), types)
    tensors = {one.name: one for one in gguf.GGUFReader(path).tensors}
    loaded: Any = load_model(path).model
    assert loaded.fused is not None and loaded.fused.is_native
    for n, layer in enumerate(loaded.model.model.layers):
        own = layer.mlp.experts
        assert isinstance(own, FrozenExperts)
        for short, stack in (("gate", own.gate_up), ("up", own.gate_up), ("down", own.down)):
            one = tensors[f"blk.{n}.ffn_{short}_exps.weight"]
            wanted = (
                torch.from_numpy(gguf.dequantize(one.data, one.tensor_type)).float().view(8, -1, stack[0].in_features)
            )
            found = torch.stack([part.product.dense() for part in stack])
            found = {"gate": found[:, :32], "up": found[:, 32:], "down": found}[short].float()
            torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3 if "F16" not in kinds else 5e-3)
    loaded.fused = None  # the family's own code over the same weights
    own_scores = scores(loaded)
    ours = scores(load_model(path).model).float()
    errors = (ours - own_scores.float()).square().mean(-1).sqrt() / own_scores.float().std()
    assert float(errors.median()) < 0.05


def test_a_later_load_maps_every_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORESAY_PACKED_GB", raising=False)
    monkeypatch.setattr(packed, "cache_dir", lambda: tmp_path)
    path = write_gguf(tmp_path / "tiny.gguf", qwen3_moe(), dict.fromkeys((*LAYERS, *EXPERTS), "Q4_1"))
    first = scores(load_model(path).model)
    packed.settle()
    read, kinds = blocks.read_weight, set()

    def counted(tensor: Any) -> Any:
        kinds.add(tensor.kind)
        return read(tensor)

    monkeypatch.setattr(blocks, "read_weight", counted)
    assert torch.equal(scores(load_model(path).model), first) and kinds == {"F32"}


@pytest.mark.parametrize("name", ["expert_count", "expert_used_count", "expert_feed_forward_length"])
def test_sizes_of_experts_are_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(gguf.GGUFWriter, f"add_{name}", lambda *_: None)
    path = write_gguf(tmp_path / "tiny.gguf", qwen3_moe(), dict.fromkeys(EXPERTS, "Q4_1"))
    with pytest.raises(ModelLoadError, match=f"qwen3moe.{name}|has shape|not among|lacks"):
        load_model(path)


def test_experts_of_another_shape_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = gguf.GGUFWriter.add_tensor

    def fewer(self: gguf.GGUFWriter, name: str, values: Any, **more: Any) -> None:
        add(self, name, values[:4] if name == "blk.1.ffn_up_exps.weight" else values, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", fewer)
    path = write_gguf(tmp_path / "tiny.gguf", qwen3_moe())
    with pytest.raises(ModelLoadError, match=r"blk.1.ffn_up_exps.weight.* has shape \[4, 32, 64\], but"):
        load_model(path)
