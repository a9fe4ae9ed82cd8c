"""GGUF files whose weights stay in their blocks: what is unpacked, what is written, what is left to transformers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import foresay
from foresay.errors import ModelLoadError
from foresay.models.huggingface.products import Int4Product, Int8Product
from foresay.models.sources import catalog
from foresay.models.sources.catalog import LoadedModel, load_model
from foresay.models.sources.gguf_blocks import Blocks, Numbers, load_blocks, unpacked
from foresay.models.sources.load_options import LoadOptions
from helpers import tiny
from helpers.families import make
from helpers.gguf_files import write_gguf

LAYERS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def llama(*, tied: bool = False) -> PreTrainedModel:
    """Rows of whole groups, and weights large enough that texts vary."""
    model = make(
        "llama", 4, vocab_size=len(tiny.tokenizer()), hidden_size=64, intermediate_size=96, tie_word_embeddings=tied
    )
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data *= 0.2 / weight.std()
    return model


@pytest.mark.parametrize(("kind", "size", "halves"), [("Q4_0", 18, 1), ("Q4_1", 20, 2), ("Q4_K", 144, 2)])
def test_blocks_are_unpacked_as_llama_cpp_unpacks_them(kind: str, size: int, halves: int) -> None:
    dice = np.random.default_rng(0)
    data = dice.integers(0, 256, (5, 3 * size), dtype=np.uint8)
    scales = (dice.normal(size=(5, 3, halves)) * 0.1).astype(np.float16)
    data.reshape(5, 3, size)[..., : 2 * halves] = scales.view(np.uint8)
    found = unpacked(data, kind)
    assert isinstance(found, Blocks)
    levels = found.levels.float().view(5, -1, 32)
    values = ((levels - 8) * found.scales[..., None] + found.offsets[..., None]).flatten(1)
    np.testing.assert_allclose(
        values.numpy(), gguf.dequantize(data, gguf.GGMLQuantizationType[kind]), rtol=1e-5, atol=1e-5
    )


def test_other_types_become_numbers() -> None:
    values = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    eight = unpacked(gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0), "Q8_0")
    assert isinstance(eight, Numbers)
    assert eight.rounded
    plain = unpacked(values, "F32")
    assert isinstance(plain, Numbers)
    assert not plain.rounded


def logits(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    model = loaded.model.model  # type: ignore[attr-defined]
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=torch.tensor([ids])).logits.float()
    return out


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "kinds", [dict.fromkeys(LAYERS, "Q4_1"), dict.fromkeys(LAYERS, "Q4_0"), dict.fromkeys(LAYERS, "Q8_0")]
)
def test_the_scores_are_those_of_the_dequantised_model(tmp_path: Path, kinds: dict[str, str], tied: bool) -> None:
    """But for the rounding of scales to bf16, and of 8 bits in groups to 8 bits a row."""
    path = write_gguf(tmp_path / "tiny.gguf", llama(tied=tied), {**kinds, "token_embd": "Q8_0", "output": "Q8_0"})
    kept, whole = load_model(path), load_model(path, LoadOptions(weights="bf16", dtype="bf16"))
    assert kept.weights == "GGUF"
    ids = tiny.tokenizer()("hello world, hello").input_ids
    a, b = logits(kept, ids), logits(whole, ids)
    assert float((a - b).square().mean().sqrt() / b.std()) < 0.08
    other = write_gguf(tmp_path / "other.gguf", tiny.llama())
    assert float((logits(load_model(other), ids) - b).square().mean().sqrt() / b.std()) > 0.5, (
        "the bound tells models apart"
    )


def test_what_the_layers_hold(tmp_path: Path) -> None:
    kinds = {**dict.fromkeys(LAYERS, "Q4_1"), "attn_v": "Q8_0", "ffn_down": "Q8_0", "output": "Q8_0"}
    del kinds["ffn_gate"]
    model = load_blocks(write_gguf(tmp_path / "tiny.gguf", llama(), kinds), torch.bfloat16)
    layer = model.model.layers[0]
    assert isinstance(layer.self_attn.q_proj.product, Int4Product)
    assert layer.self_attn.q_proj.product is not layer.self_attn.k_proj.product, "the three are of two kinds"
    assert isinstance(layer.self_attn.v_proj.product, Int8Product)
    assert isinstance(layer.mlp.up_proj.product, Int4Product)
    assert not isinstance(layer.mlp.gate_proj, type(layer.mlp.up_proj)) or layer.mlp.gate_proj.product.bits > 8
    assert isinstance(model.lm_head.product, Int8Product)


def test_any_draft_and_any_batch_write_the_same(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama(), dict.fromkeys(LAYERS, "Q4_1"))
    prompts = ["hello world", "you and I", "hello hello hello"]
    plain = foresay.load(path, drafter="none")
    alone = [plain.generate(p, max_new_tokens=24, ignore_eos=True).token_ids for p in prompts]
    assert len(set(map(tuple, alone))) > 1
    drafted = foresay.load(path, drafter="suffix", max_batch_size=2)
    assert [r.token_ids for r in drafted.generate(prompts, max_new_tokens=24, ignore_eos=True)] == alone


def test_an_architecture_that_is_not_read_is_left_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama(), dict.fromkeys(LAYERS, "Q4_1"))
    monkeypatch.setattr(catalog, "supports", lambda path: False)
    assert load_model(path).weights == ""


@pytest.mark.parametrize("options", [{"weights": "bf16"}, {"dtype": "fp32"}, {"device_map": "cpu"}])
def test_whoever_asks_for_something_else_gets_it(tmp_path: Path, options: dict[str, str]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama(), dict.fromkeys(LAYERS, "Q4_1"))
    assert load_model(path, LoadOptions(**options)).weights == ""  # type: ignore[arg-type]


def test_a_file_that_lacks_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = gguf.GGUFWriter.add_tensor

    def without(self: gguf.GGUFWriter, name: str, *args: object, **more: object) -> None:
        if name != "blk.1.ffn_norm.weight":
            add(self, name, *args, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", without)
    path = write_gguf(tmp_path / "tiny.gguf", llama())
    with pytest.raises(
        ModelLoadError, match=r"lacks 1 of the model's tensors \(model.layers.1.post_attention_layernorm"
    ):
        load_model(path)
