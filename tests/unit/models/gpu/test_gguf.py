"""GGUF files on a GPU: linear layers multiply by the file's blocks, over pages, as the file's numbers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foresay.decoding.protocols import ModelInput
from foresay.models.gguf.blocks import model_of_file
from foresay.models.gguf.configs import config_of
from foresay.models.gguf.values import checked_header
from foresay.models.gpu import attention, passes
from foresay.models.gpu.blocks import BlockProduct, StackedProduct
from foresay.models.huggingface import causal, family_layers, fused
from foresay.models.huggingface.causal import CausalModel
from helpers.families import joint_of, make
from helpers.gguf_files import write_gguf

CPU = torch.device("cpu")


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
        patch.setattr(causal, "uses_kernels", lambda device: True)
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
