"""Folders of quantized layers on a GPU: products over the stored levels, over pages, as the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foresay.decoding.protocols import ModelInput
from foresay.models.gpu.blocks import BlockProduct
from foresay.models.hardware import Hardware
from foresay.models.sources import quantized_layers, reading, wrapping
from foresay.models.sources.loading import load_model
from foresay.models.sources.quantized_forms import Matrix
from helpers.families import joint_of
from helpers.paged import few_programs
from helpers.quantized import CASES, EXPANDED, folder_of


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a GPU with kernels, which compute in float32."""
    few_programs(monkeypatch, joint_of)
    monkeypatch.setattr(Hardware, "gpu_kernels", True)
    monkeypatch.setattr(reading, "_keeps_blocks", lambda options: False)
    monkeypatch.setattr(Hardware, "native_dtype", torch.float32)
    monkeypatch.setattr(wrapping, "_arrange", lambda weights, options: None)


@pytest.mark.parametrize(("largest", "zero"), [(15, 8), (15, 16), (16, 16), (255, 128), (3, 0)])
def test_levels_of_any_size_are_kept(largest: int, zero: int) -> None:
    """16 is the first level that four bits do not hold, and a level that stands for 0 in four bits, too."""
    levels = torch.arange(largest + 1).clamp(max=255).repeat(300)[: 4 * 128].view(4, 128).to(torch.uint8)
    levels[0, 0] = largest
    matrix = Matrix(levels, torch.full((4, 4), 0.5), torch.full((4, 4), zero, dtype=torch.int16), 32)
    product = BlockProduct(quantized_layers._levels(matrix), torch.float32, torch.device("cpu"), None)
    assert torch.equal(product.dense(), matrix.dense())
    assert product.bits < (6 if largest < 16 else 10)


@pytest.mark.parametrize("case", ["AWQ", "GPTQ, 8 bits", "FP8"])
@torch.inference_mode()
def test_scores_are_those_of_the_numbers(case: str, tmp_path: Path, gpu: None) -> None:
    assert case in CASES | EXPANDED
    path, reference = folder_of(tmp_path / "tiny", case, layers=1)
    loaded: Any = load_model(path)
    model = loaded.model
    assert loaded.precision.startswith("float32, ") and model.paged is not None
    layer = model.fused._layers[0]
    assert isinstance(layer.qkv, BlockProduct) and isinstance(layer.down, BlockProduct) and layer.qkv.bits < 9.1
    weight = torch.cat([getattr(reference.model.layers[0].self_attn, f"{name}_proj").weight for name in "qkv"])
    torch.testing.assert_close(layer.qkv.dense(), weight, rtol=1e-6, atol=1e-7)
    cache, ids = model.new_cache(), torch.tensor([[3, 5, 7, 11]])
    cache.add_rows(1)
    scores = model.forward(ModelInput(ids, [4]), cache).scores()
    torch.testing.assert_close(scores, reference(ids).logits, rtol=1e-3, atol=1e-3)
