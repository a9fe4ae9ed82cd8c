"""GGUF files on a GPU: linear layers multiply by the file's blocks, over pages, as the file's numbers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foresay.decoding.protocols import ModelInput
from foresay.models.gguf.blocks import model_of_file
from foresay.models.gguf.configs import config_of
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.values import checked_header
from foresay.models.gpu import attention, passes
from foresay.models.gpu import blocks as gpu_blocks
from foresay.models.gpu.blocks import BlockProduct, StackedProduct
from foresay.models.hardware import Hardware
from foresay.models.huggingface import family_layers, fused
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.frozen import FrozenExperts
from foresay.models.huggingface.self_check import fused_difference
from foresay.models.layer import StackedExperts
from helpers.families import joint_of, make
from helpers.gguf_files import write_gguf
from helpers.paged import few_programs

CPU, IDS = torch.device("cpu"), torch.tensor([[3, 5, 7, 11]])
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


@pytest.mark.parametrize(("tied", "value_type"), [(False, "Q8_0"), (True, "Q8_0"), (False, "Q5_0"), (False, "F32")])
@torch.inference_mode()
def test_scores_are_those_of_the_file_s_numbers(
    tied: bool, value_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two types in one product, one of which the kernels may not read; rows in Llama's order; tied embeddings."""
    monkeypatch.setattr(attention, "SPLITS", 1)
    monkeypatch.setattr(passes, "MAX_ROWS", 2)
    model = make("llama", tie_word_embeddings=tied, num_hidden_layers=1, intermediate_size=64, vocab_size=264)
    path = write_gguf(tmp_path / "model.gguf", model, {"attn_v": value_type, "attn_norm": "F32"}, kind="Q4_0")
    header = checked_header(path)
    numbers: Any = CausalModel(model_of_file(header, config_of(header), torch.float32, in_blocks=False))
    ids = torch.tensor([[3, 5, 7, 11]])
    expected = numbers.uncached(ids)
    with monkeypatch.context() as patch:
        for module in (family_layers, fused):
            patch.setattr(module, "product_of", joint_of)
        patch.setattr(Hardware, "gpu_kernels", True)
        found = CausalModel(model_of_file(header, config_of(header), torch.float32, in_blocks=False, gpu=CPU))
        found.use_fused()
    assert found.paged is not None and found.fused is not None
    layer = found.fused._layers[0]
    assert isinstance(layer.qkv, StackedProduct) and isinstance(layer.down, BlockProduct)
    assert isinstance(found.fused._head, BlockProduct)
    cache = found.new_cache()
    cache.add_rows(1)
    scores = found.forward(ModelInput(ids, [4]), cache).scores()
    torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-4)


MIXTURES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "qwen3moe": (
        "qwen3_moe",
        {"mlp_only_layers": [], "moe_intermediate_size": 64},
        {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q4_0", "ffn_down_exps": "Q8_0"},
    ),
    "gpt-oss": (
        "gpt_oss",
        {"head_dim": 16, "intermediate_size": 32, "swiglu_limit": 0.5},
        dict.fromkeys(EXPERTS, "MXFP4"),
    ),
}
"""Families, changes of their configurations, and types of experts."""


def mixture(name: str, folder: Path) -> tuple[GgufHeader, torch.Tensor]:
    """A file, and scores of its numbers."""
    family, changes, kinds = MIXTURES[name]
    model = make(family, num_hidden_layers=1, vocab_size=264, hidden_size=64, **changes)
    header = checked_header(write_gguf(folder / "model.gguf", model, {**kinds, "attn_norm": "F32"}, kind="Q8_0"))
    numbers: Any = CausalModel(model_of_file(header, config_of(header), torch.float32, in_blocks=False))
    return header, numbers.uncached(IDS)


def on_gpu(header: GgufHeader, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model over pages, of the file's blocks."""
    few_programs(monkeypatch, joint_of)
    monkeypatch.setattr(Hardware, "gpu_kernels", True)
    found: Any = CausalModel(model_of_file(header, config_of(header), torch.float32, in_blocks=False, gpu=CPU))
    found.use_fused()
    assert found.paged is not None
    return found


def scores(model: Any) -> torch.Tensor:
    cache = model.new_cache()
    cache.add_rows(1)
    found: torch.Tensor = model.forward(ModelInput(IDS, [IDS.shape[1]]), cache).scores()
    return found


@pytest.mark.parametrize("name", MIXTURES)
@torch.inference_mode()
def test_experts_score_as_the_file_s_numbers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over pages in two pieces, and by the family's own code, with which a loaded model is compared."""
    header, expected = mixture(name, tmp_path)
    found = on_gpu(header, monkeypatch)
    experts = found.fused._layers[0].experts
    assert isinstance(experts.stacked.gate_up, BlockProduct) and isinstance(experts.stacked.down, BlockProduct)
    module = found.model.model.layers[0].mlp.experts
    assert isinstance(module, FrozenExperts) and module.stacked is experts.stacked
    own, whole = [*module.gate_up, *module.down], [experts.stacked.gate_up, experts.stacked.down]
    assert sum(one.product.nbytes for one in own) == sum(one.nbytes for one in whole)
    assert fused_difference(found) < 1e-4
    torch.testing.assert_close(found.uncached(IDS), expected, rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def test_biases_of_another_order_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: biases of gates and ups in turn."""
    header, expected = mixture("gpt-oss", tmp_path)
    known = gpu_blocks.stacked_experts

    def alternating(gate_up: BlockProduct, down: BlockProduct, count: int) -> StackedExperts:
        assert gate_up.bias is not None
        gate_up.bias = gate_up.bias.view(count, 2, -1).transpose(1, 2).flatten()
        return known(gate_up, down, count)

    monkeypatch.setattr(gpu_blocks, "stacked_experts", alternating)
    assert (scores(on_gpu(header, monkeypatch)) - expected).abs().max() > 0.1


@pytest.mark.parametrize("kinds", [{"ffn_up_exps": "Q8_0"}, {"ffn_down_exps": "F16"}])
def test_experts_of_other_types_are_numbers(kinds: dict[str, str], tmp_path: Path) -> None:
    """Gates and ups of two types, and types that are not quantized."""
    model = make("qwen3_moe", num_hidden_layers=1, vocab_size=264, moe_intermediate_size=32, mlp_only_layers=[])
    header = checked_header(write_gguf(tmp_path / "model.gguf", model, kinds, kind="Q4_0"))
    found: Any = model_of_file(header, config_of(header), torch.float32, in_blocks=False, gpu=CPU)
    assert not isinstance(found.model.layers[0].mlp.experts, FrozenExperts)
