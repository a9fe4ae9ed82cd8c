"""Folders of gpt-oss in MXFP4 on a GPU: experts over their levels, over pages, as the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import modeling_utils

from foresay.decoding.protocols import ModelInput
from foresay.errors import ModelLoadError
from foresay.models.gpu.blocks import BlockProduct
from foresay.models.hardware import Hardware
from foresay.models.huggingface.frozen import FrozenExperts
from foresay.models.sources import mxfp4, reading, wrapping
from foresay.models.sources.kept_weights import _Values
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers.families import joint_of, make
from helpers.mxfp4 import folder_of
from helpers.paged import few_programs

IDS = torch.tensor([[3, 5, 7, 11]])


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a GPU with kernels, which compute in float32."""
    few_programs(monkeypatch, joint_of)
    monkeypatch.setattr(Hardware, "gpu_kernels", True)
    monkeypatch.setattr(reading, "_keeps_blocks", lambda options: False)
    monkeypatch.setattr(Hardware, "native_dtype", torch.float32)
    monkeypatch.setattr(wrapping, "_arrange", lambda weights, options: None)


def scores(model: Any) -> torch.Tensor:
    cache = model.new_cache()
    cache.add_rows(1)
    found: torch.Tensor = model.forward(ModelInput(IDS, [4]), cache).scores()
    return found


@torch.inference_mode()
def test_scores_are_those_of_the_numbers(tmp_path: Path) -> None:
    """Each number is the stored one, gates before ups."""
    path, reference = folder_of(tmp_path / "tiny", layers=1)
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
    torch.testing.assert_close(scores(model), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(model.uncached(IDS), expected, rtol=1e-3, atol=1e-3)


def test_memory_is_reserved_for_the_stored_bits() -> None:
    """transformers allocates that of all parameters of a GPU at once; numbers in bf16 may not fit."""
    model = make("gpt_oss", num_hidden_layers=1)
    read = mxfp4._Blocks(_Values("foresay_mxfp4", device="cpu"))
    places = {name: torch.device("cuda") for name, _ in model.named_parameters()}
    experts = sum(one.numel() for name, one in model.named_parameters() if name.endswith("_proj"))
    plain, kept = (modeling_utils.get_total_byte_count(model, places, one) for one in (None, read))
    assert sum(plain.values()) - sum(kept.values()) == experts * (4 - 17 / 32) > 0


def test_a_part_that_is_missing_is_refused(tmp_path: Path) -> None:
    last = "model.layers.0.mlp.experts.down_proj_scales"
    path, _ = folder_of(tmp_path / "tiny", lambda weights: weights.pop(last), layers=1)
    with pytest.raises(ModelLoadError, match=r"experts\.down_proj are missing"):
        load_model(path)


def test_other_formats_are_made_of_the_numbers(tmp_path: Path) -> None:
    path, _ = folder_of(tmp_path / "tiny", layers=1)
    loaded: Any = load_model(path, LoadOptions(dtype="fp32"))
    assert not isinstance(loaded.model.model.model.layers[0].mlp.experts, FrozenExperts) and loaded.weights == ""
