"""Multimodal checkpoints: their language model alone is loaded, and continues a text as the whole model does."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from foresay.errors import ModelLoadError
from foresay.generation.load import load
from foresay.models.huggingface.left_out import is_of_images
from helpers import tiny
from helpers.families import FAMILIES, RECURRENT, seeded
from helpers.quantized import CASES, EXPANDED, quantize, save_tensors

ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", {}),
    "gemma4": ("gemma4", {"tie_word_embeddings": True}),
    "gemma4, experts": ("gemma4_moe", {"tie_word_embeddings": True}),
    "internvl": ("qwen2", {}),
    "lfm2_vl": ("lfm2", {}),
    "llava": ("llama", {}),
    "mistral3": ("mistral", {}),
    "qwen2_vl": ("qwen2", ROTARY),
    "qwen2_5_vl": ("qwen2", ROTARY),
    "qwen3_vl": ("qwen3", ROTARY),
    "qwen3_5": ("qwen3_5", {}),
    "smolvlm": ("llama", {}),
}
"""model_type, and what is special about it -> the family of its text, and fields that differ there."""
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 8, "global_head_dim": 8, "depth": 1, "num_heads": 4, "out_hidden_size": 32,
}  # fmt: skip


def whole(kind: str) -> Any:
    """A tiny multimodal model."""
    family, changes = WHOLE[kind]
    fields = {**(FAMILIES | RECURRENT)[family][1], **changes, "vocab_size": len(tiny.tokenizer())}
    if "vocab_size_per_layer_input" in fields:
        fields["vocab_size_per_layer_input"] = fields["vocab_size"]
    cls = CONFIG_MAPPING[kind.partition(",")[0]]
    parts = cls.sub_configs
    text = CONFIG_MAPPING[cls().text_config.model_type](**fields)
    seen = getattr(cls(), "vision_config", None)
    see = type(seen) if seen is not None else parts["vision_config"]
    small = {key: value for key, value in SIZES.items() if hasattr(see(), key)}
    with seeded(1):
        config = cls(text_config=text.to_dict(), vision_config=see(**small).to_dict())
        return AutoModelForImageTextToText.from_config(config).eval()


def saved(kind: str, folder: Path) -> Any:
    model = whole(kind)
    tiny.save(folder, model)
    return model


def continued(model: Any, text: str, count: int) -> list[int]:
    ids = torch.tensor([tiny.tokenizer()(text)["input_ids"]])
    found = ids
    with torch.inference_mode():
        for _ in range(count):
            scores = model(input_ids=found, use_cache=False).logits[:, -1:]
            found = torch.cat([found, scores.argmax(-1)], 1)
    tokens: list[int] = found[0, ids.shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize("kind", WHOLE)
def test_its_text_is_that_of_the_whole_model(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = saved(kind, tmp_path)
    with caplog.at_level(logging.WARNING, logger="foresay"):
        ours = load(str(tmp_path), drafter="suffix", dtype="float32")
    assert sum("for text only" in record.message for record in caplog.records) == 1
    found = ours.generate("hello hello hello", max_new_tokens=12, ignore_eos=True)
    assert list(found.token_ids) == continued(model, "hello hello hello", 12)


def test_either_order_of_names_is_read_and_a_missing_weight_refused(tmp_path: Path) -> None:
    model, path = saved("llava", tmp_path), tmp_path / "model.safetensors"
    stored, wanted = load_file(path), continued(model, "hello", 6)
    for prefix in ("model.language_model.", "language_model.model."):
        named = {}
        for name, weight in stored.items():
            bare = name.split("language_model.")[-1].removeprefix("model.")
            is_text = "language_model" in name and not bare.startswith("lm_head")
            named[f"{prefix}{bare}" if is_text else name] = weight
        save_file(named, path, metadata={"format": "pt"})
        found = load(str(tmp_path), dtype="float32").generate("hello", max_new_tokens=6, ignore_eos=True)
        assert list(found.token_ids) == wanted
    lost = next(name for name in named if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file({name: one for name, one in named.items() if name != lost}, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"1 weights are missing.*layers\.1\.mlp\.up_proj"):
        load(str(tmp_path))


QUANTIZED = [("mistral3", "FP8 of a matrix"), ("gemma3", "GPTQ"), ("qwen2_vl", "AWQ")]
QUANTIZED += [("smolvlm", "compressed-tensors int8"), ("internvl", "ModelOpt FP8")]


@pytest.mark.parametrize(("kind", "case"), QUANTIZED)
def test_a_quantized_language_model_is_read(
    kind: str, case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the same numbers are; the configuration of the quantization is that of the checkpoint, or of its language model."""
    saved(kind, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    chosen = [name for name in tensors if re.search(r"layers\.\d+\..*_proj\.weight$", name) and not is_of_images(name)]
    stored = dict(tensors)
    numbers = quantize(stored, chosen, case)
    save_tensors(tmp_path, tensors | numbers)
    options: dict[str, Any] = {"drafter": "none", "dtype": "float32"}
    prompt, limit = "hello hello hello", {"max_new_tokens": 12, "ignore_eos": True}
    wanted = load(str(tmp_path), **options).generate(prompt, **limit)
    stated = {"quantization_config": (CASES | EXPANDED)[case][2]}
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    inner = {"quantization_config": None, "text_config": text | stated}
    save_tensors(tmp_path, stored, **(inner if kind in ("gemma3", "smolvlm") else stated))
    with caplog.at_level(logging.INFO, logger="foresay"):
        found = load(str(tmp_path), **options)
    assert f"{len(chosen)} quantized layers of" in caplog.text
    assert found.generate(prompt, **limit).token_ids == wanted.token_ids
    lost = next(name for name in stored if name.endswith(("scale", "scales", "scale_inv")))
    save_tensors(tmp_path, {name: one for name, one in stored.items() if name != lost})
    with pytest.raises(ModelLoadError, match="scale"):
        load(str(tmp_path), **options)
