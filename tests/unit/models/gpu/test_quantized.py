"""Quantized weights on a GPU, of GGUF files, of MXFP4 and of other folders: they score as the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import modeling_utils

from foresay.errors import ModelLoadError
from foresay.models.gguf.blocks import model_of_file
from foresay.models.gguf.configs import config_of
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.values import checked_header
from foresay.models.gpu import blocks as gpu_blocks
from foresay.models.gpu.blocks import BlockProduct, StackedProduct
from foresay.models.hardware import Hardware
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.frozen import FrozenExperts
from foresay.models.huggingface.self_check import fused_difference
from foresay.models.layer import StackedExperts
from foresay.models.sources import mxfp4, quantized_layers
from foresay.models.sources.kept_weights import _Values
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from foresay.models.sources.quantized_forms import Matrix
from helpers.families import joint_of, make
from helpers.gguf_files import write_gguf
from helpers.paged import few_programs, loading
from helpers.passes import scores
from helpers.quantized import folder_of, mxfp4_folder

CPU, IDS = torch.device("cpu"), torch.tensor([[3, 5, 7, 11]])
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def read(folder: Path, model: Any, kinds: dict[str, str], kind: str) -> tuple[GgufHeader, torch.Tensor]:
    """A file of a model, and scores of its numbers."""
    header = checked_header(write_gguf(folder / "model.gguf", model, kinds, kind=kind))
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


@pytest.mark.parametrize(("tied", "value_type"), [(False, "Q8_0"), (True, "Q8_0"), (False, "Q5_0"), (False, "F32")])
@torch.inference_mode()
def test_scores_are_those_of_the_file_s_numbers(
    tied: bool, value_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two types in one product, one of which the kernels may not read; rows in Llama's order; tied embeddings."""
    model = make("llama", tie_word_embeddings=tied, num_hidden_layers=1, intermediate_size=64, vocab_size=264)
    header, expected = read(tmp_path, model, {"attn_v": value_type, "attn_norm": "F32"}, "Q4_0")
    found = on_gpu(header, monkeypatch)
    layer = found.fused._layers[0]
    assert isinstance(layer.qkv, StackedProduct) and isinstance(layer.down, BlockProduct)
    assert isinstance(found.fused._head, BlockProduct)
    torch.testing.assert_close(scores(found, IDS), expected, rtol=1e-3, atol=1e-4)


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
    return read(folder, model, {**kinds, "attn_norm": "F32"}, "Q8_0")


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
    assert (scores(on_gpu(header, monkeypatch), IDS) - expected).abs().max() > 0.1


@pytest.mark.parametrize("kinds", [{"ffn_up_exps": "Q8_0"}, {"ffn_down_exps": "F16"}])
def test_experts_of_other_types_are_numbers(kinds: dict[str, str], tmp_path: Path) -> None:
    """Gates and ups of two types, and types that are not quantized."""
    model = make("qwen3_moe", num_hidden_layers=1, vocab_size=264, moe_intermediate_size=32, mlp_only_layers=[])
    header = checked_header(write_gguf(tmp_path / "model.gguf", model, kinds, kind="Q4_0"))
    found: Any = model_of_file(header, config_of(header), torch.float32, in_blocks=False, gpu=CPU)
    assert not isinstance(found.model.layers[0].mlp.experts, FrozenExperts)


# -- folders -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def loads_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    loading(monkeypatch)


@pytest.mark.parametrize(("largest", "zero"), [(15, 8), (15, 16), (16, 16), (255, 128), (3, 0)])
def test_levels_of_any_size_are_kept(largest: int, zero: int) -> None:
    """16 is the first level that four bits do not hold, and a level that stands for 0 in four bits, too."""
    levels = torch.arange(largest + 1).clamp(max=255).repeat(300)[: 4 * 128].view(4, 128).to(torch.uint8)
    levels[0, 0] = largest
    matrix = Matrix(levels, torch.full((4, 4), 0.5), torch.full((4, 4), zero, dtype=torch.int16), 32)
    product = BlockProduct(quantized_layers._levels(matrix), torch.float32, CPU, None)
    assert torch.equal(product.dense(), matrix.dense())
    assert product.bits < (6 if largest < 16 else 10)


@pytest.mark.parametrize("case", ["AWQ", "GPTQ, 8 bits", "FP8"])
@torch.inference_mode()
def test_scores_are_those_of_the_numbers(case: str, tmp_path: Path, loads_on_gpu: None) -> None:
    path, reference = folder_of(tmp_path / "tiny", case, layers=1)
    loaded: Any = load_model(path)
    model = loaded.model
    assert loaded.precision.startswith("float32, ") and model.paged is not None
    layer = model.fused._layers[0]
    assert isinstance(layer.qkv, BlockProduct) and isinstance(layer.down, BlockProduct) and layer.qkv.bits < 9.1
    weight = torch.cat([getattr(reference.model.layers[0].self_attn, f"{name}_proj").weight for name in "qkv"])
    torch.testing.assert_close(layer.qkv.dense(), weight, rtol=1e-6, atol=1e-7)
    if case != "AWQ":  # products over levels of other forms are tested in test_blocks.py
        return
    torch.testing.assert_close(scores(model, IDS), reference(IDS).logits, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_scores_of_mxfp4_are_those_of_the_numbers(tmp_path: Path, loads_on_gpu: None) -> None:
    """Each number is the stored one, gates before ups."""
    path, reference = mxfp4_folder(tmp_path / "tiny", layers=1)
    expected = reference(IDS).logits
    loaded: Any = load_model(path)
    model, experts = loaded.model, loaded.model.model.model.layers[0].mlp.experts
    assert loaded.precision == "float32, MXFP4 weights" and model.paged is not None
    assert isinstance(experts, FrozenExperts) and experts.stacked is model.fused._layers[0].experts.stacked
    own = reference.model.layers[0].mlp.experts
    for product, weight in ((experts.stacked.gate_up, own.gate_up_proj), (experts.stacked.down, own.down_proj)):
        assert isinstance(product, BlockProduct) and product.constants["BITS"] == 4
        rows = weight.transpose(1, 2)
        rows = torch.cat([rows[:, ::2], rows[:, 1::2]], 1) if weight is own.gate_up_proj else rows
        assert torch.equal(product.dense().view(rows.shape), rows)
    torch.testing.assert_close(scores(model, IDS), expected, rtol=1e-3, atol=1e-3)


def test_memory_is_reserved_for_the_stored_bits() -> None:
    """transformers allocates that of all parameters of a GPU at once; numbers in bf16 may not fit."""
    model = make("gpt_oss", num_hidden_layers=1)
    read = mxfp4._Blocks(_Values("foresay_mxfp4", device="cpu"))
    places = {name: torch.device("cuda") for name, _ in model.named_parameters()}
    experts = sum(one.numel() for name, one in model.named_parameters() if name.endswith("_proj"))
    plain, kept = (modeling_utils.get_total_byte_count(model, places, one) for one in (None, read))
    assert sum(plain.values()) - sum(kept.values()) == experts * (4 - 17 / 32) > 0


def test_a_part_that_is_missing_is_refused(tmp_path: Path, loads_on_gpu: None) -> None:
    last = "model.layers.0.mlp.experts.down_proj_scales"
    path, _ = mxfp4_folder(tmp_path / "tiny", lambda weights: weights.pop(last), layers=1)
    with pytest.raises(ModelLoadError, match=r"experts\.down_proj are missing"):
        load_model(path)


def test_other_formats_are_made_of_the_numbers(tmp_path: Path, loads_on_gpu: None) -> None:
    path, _ = mxfp4_folder(tmp_path / "tiny", layers=1)
    loaded: Any = load_model(path, LoadOptions(dtype="fp32"))
    assert not isinstance(loaded.model.model.model.layers[0].mlp.experts, FrozenExperts) and loaded.weights == ""
