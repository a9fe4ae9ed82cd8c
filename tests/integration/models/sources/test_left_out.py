"""Tensors of checkpoints that no layer reads: left out where they are known to have no effect, refused elsewhere by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foresay.errors import ModelLoadError
from foresay.models.huggingface import left_out
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers import tiny
from helpers.families import make, make_seq2seq
from helpers.quantized import VOCAB, edit, folder_of

FP32 = LoadOptions(dtype="fp32")


def add(folder: Path, **tensors: torch.Tensor) -> Path:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
    return folder


WITHOUT_EFFECT = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    "model.layers.0.attn.masked_bias": torch.tensor(-1e9),
    "model.layers.0.self_attn.k_scale": torch.tensor(0.1),
    "model.layers.0.self_attn.v_proj.v_scale": torch.tensor(0.1),
    "model.layers.0.self_attn.k_proj.output_scale": torch.tensor(0.1),
    "mtp.layers.0.mlp.up_proj.weight": torch.ones(4, 4),
    "model.layers.3.mlp.up_proj.weight": torch.ones(4, 4),
    "v_head.summary.weight": torch.ones(1, 4),
}
UNREAD = (
    "model.layers.0.mlp.up_proj.weight_scale",
    "model.layers.0.mlp.up_proj.pre_quant_scale",
    "model.layers.0.mlp.up_proj.weight.absmax",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.4.mlp.up_proj.weight",
    "model.vision_tower.patch.weight",
    "adapter.weight",
)


def test_tensors_that_are_known_to_have_no_effect_are_left_out(tmp_path: Path) -> None:
    """A layer after the last one is left out if the configuration names it as one that predicts further tokens."""
    folder = add(tiny.save(tmp_path / "tiny"), **WITHOUT_EFFECT)
    edit(folder, lambda values: values.update(num_nextn_predict_layers=1, num_hidden_layers=3))
    load_model(folder, FP32)
    edit(folder, lambda values: values.pop("num_nextn_predict_layers"))
    with pytest.raises(ModelLoadError, match=r"\(model\.layers\.3\.mlp\.up_proj\.weight\)"):
        load_model(folder, FP32)


def test_other_tensors_and_adapters_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.save(tmp_path / "tiny")
    sound = (folder / "model.safetensors").read_bytes()
    for name in UNREAD:
        (folder / "model.safetensors").write_bytes(sound)
        add(folder, **{name: torch.ones(4)})
        with pytest.raises(ModelLoadError, match=rf"has 1 tensors that no layer of a llama model reads \({name}\)"):
            load_model(folder, FP32)
    monkeypatch.setattr(left_out, "WITHOUT_EFFECT", {"": "control: everything is left out"})
    load_model(folder, FP32)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ModelLoadError, match=r"has an adapter .* which would not be applied"):
        load_model(folder, FP32)


def test_tensors_of_experts_and_of_pairs_are_refused_too(tmp_path: Path) -> None:
    mixture = tiny.save(tmp_path / "mixture", make("mixtral", 0, vocab_size=264))
    pair = tmp_path / "pair"
    make_seq2seq("t5").save_pretrained(pair)
    tiny.tokenizer().save_pretrained(pair)
    for folder in (mixture, pair):
        load_model(folder, FP32)
        with pytest.raises(ModelLoadError, match=r"reads \(.*w1\.weight_scale\)"):
            load_model(add(folder, **{"model.layers.0.mlp.w1.weight_scale": torch.ones(4)}), FP32)


@torch.inference_mode()
def test_a_bias_that_the_configuration_does_not_state_is_read(tmp_path: Path) -> None:
    """Some writers of GPTQ store one for every layer."""
    name = "model.layers.0.mlp.up_proj"
    bias = torch.randn(192, generator=torch.Generator().manual_seed(2)).bfloat16()
    change: Any = lambda tensors: tensors.update({f"{name}.bias": bias})  # noqa: E731
    folder, shared = folder_of(tmp_path / "tiny", "GPTQ", change, layers=1)
    ids, reference = torch.arange(24)[None] % VOCAB, copy.deepcopy(shared)
    reference.get_submodule(name).bias = torch.nn.Parameter(bias.float())
    loaded: Any = load_model(folder, FP32).model
    with_bias = reference(ids).logits
    torch.testing.assert_close(loaded.model(ids).logits, with_bias, rtol=1e-3, atol=1e-3)
    assert (with_bias - shared(ids).logits).abs().max() > 0.01


@torch.inference_mode()
def test_an_output_layer_that_is_stated_to_be_the_embedding_is_read_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers uses it; only its log, which is silenced, mentions that."""
    folder = tiny.save(tmp_path / "tiny", make("llama", 0, vocab_size=264))
    untied: Any = load_model(folder, FP32).model
    edit(folder, lambda values: values.update(tie_word_embeddings=True))
    found: Any = load_model(folder, FP32).model
    assert "states tie_word_embeddings, but stores an output layer of other numbers" in caplog.text
    ids = torch.arange(24)[None]
    assert torch.equal(found.model(ids).logits, untied.model(ids).logits)
    tied = tiny.save(tmp_path / "tied", make("llama", 0, vocab_size=264, tie_word_embeddings=True))
    caplog.clear()
    load_model(tied, FP32)
    assert not caplog.text
