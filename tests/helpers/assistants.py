"""Tiny assistants of Gemma 4, as transformers builds them, and as they are read from files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import Gemma4TextConfig
from transformers.models.gemma4_assistant.configuration_gemma4_assistant import Gemma4AssistantConfig
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantForCausalLM
from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedTextConfig
from transformers.models.gemma4_unified_assistant.configuration_gemma4_unified_assistant import (
    Gemma4UnifiedAssistantConfig,
)
from transformers.models.gemma4_unified_assistant.modeling_gemma4_unified_assistant import (
    Gemma4UnifiedAssistantForCausalLM,
)

from foresay.models.drafts.assistant import AssistantModule
from foresay.models.sources.assistants import load_assistant
from helpers.families import FAMILIES

_CLASSES: dict[str, tuple[Any, Any, Any]] = {
    "gemma4": (Gemma4TextConfig, Gemma4AssistantConfig, Gemma4AssistantForCausalLM),
    "gemma4_unified": (Gemma4UnifiedTextConfig, Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM),
}


def assistant_model(
    kind: str = "gemma4", *, ordered: bool = False, vocab_size: int = 7, gain: float = 4.0, **changes: Any
) -> Any:
    """An assistant for the tiny target of the family gemma4. gain: of its weights, so that draft tokens differ."""
    own = {
        **FAMILIES["gemma4"][1],
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "tie_word_embeddings": True,
        "vocab_size": vocab_size,
        **changes,
    }
    text, whole, built = _CLASSES[kind]
    with pytest.MonkeyPatch.context() as patch:
        # transformers 5.23 refuses a configuration in which all layers share keys, which is every assistant's
        patch.setattr(text, "kv_sharing_modes", property(lambda self: ["reuse"] * self.num_hidden_layers))
        config = whole(
            text_config=text(**own),
            backbone_hidden_size=FAMILIES["gemma4"][1]["hidden_size"],
            use_ordered_embeddings=ordered,
            num_centroids=vocab_size,
            centroid_intermediate_top_k=3,
        )
        torch.manual_seed(5)
        model = built(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight *= gain
        if ordered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(vocab_size))
    return model


def write_gguf(
    path: Path,
    arch: str,
    values: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kinds: Mapping[str, str] | None = None,
) -> Path:
    """A GGUF file. values: without the architecture's prefix, except those of other prefixes. kinds: of quantized tensors."""
    writer = gguf.GGUFWriter(path, arch)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in values.items():
        key = name if name.startswith(("adapter.", "general.", "tokenizer.")) else f"{arch}.{name}"
        (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    for name, tensor in tensors.items():
        data, kind = np.ascontiguousarray(tensor), (kinds or {}).get(name.split(".")[-2] if "." in name else "")
        if kind is None:
            writer.add_tensor(name, data)
        else:
            of = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(data, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def written(
    theirs: Any, path: Path, *, centres: bool = False, kinds: Mapping[str, str] | None = None, **changes: Any
) -> Path:
    """An assistant as llama.cpp's converter writes it. See `write_gguf`.

    centres: True to write the groups of tokens, too, which the converter leaves out.
    """
    text = theirs.config.text_config
    slides = [one == "sliding_attention" for one in text.layer_types]
    layers = [text.per_layer_config[i] for i in range(text.num_hidden_layers)]
    full, near = layers[slides.index(False)].head_dim, layers[slides.index(True)].head_dim
    rope = text.rope_parameters
    values: dict[str, Any] = {
        "block_count": text.num_hidden_layers,
        "context_length": text.max_position_embeddings,
        "embedding_length": text.hidden_size,
        "feed_forward_length": text.intermediate_size,
        "attention.head_count": text.num_attention_heads,
        "attention.head_count_kv": [one.num_key_value_heads for one in layers],
        "attention.layer_norm_rms_epsilon": text.rms_norm_eps,
        **{f"attention.{one}_length": full for one in ("key", "value")},
        **{f"attention.{one}_length_swa": near for one in ("key", "value")},
        "attention.sliding_window": text.sliding_window,
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": text.num_kv_shared_layers,
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": near,
        "rope.freq_base": float(rope["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        "final_logit_softcapping": float(text.final_logit_softcapping),
        "embedding_length_out": theirs.config.backbone_hidden_size,
        "nextn_predict_layers": text.num_hidden_layers,
        **changes,
    }
    used = int(full * rope["full_attention"].get("partial_rotary_factor", 1.0) / 2)
    tensors = {"rope_freqs.weight": np.array([1.0] * used + [1e30] * (full // 2 - used), np.float32)}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, text.num_hidden_layers)
    own = {f"{side}_projection.weight": f"nextn.{side}_projection.weight" for side in ("pre", "post")}
    if centres:
        own["masked_embedding.centroids.weight"] = "masked_embd_centroids.weight"
        own["masked_embedding.token_ordering"] = "masked_embd_ordering"
    for name, weight in theirs.state_dict().items():
        if (name.startswith("masked_embedding") and not centres) or name == "lm_head.weight":
            continue
        stem, _, suffix = name.rpartition(".")
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        short = own.get(name) or (
            f"blk.{layer}.layer_output_scale.weight" if suffix == "layer_scalar" else f"{names.get_name(stem)}.{suffix}"
        )
        tensors[short] = weight.numpy() if weight.is_floating_point() else weight.numpy().astype(np.int32)
    return write_gguf(path, "gemma4-assistant", values, tensors, kinds)


def read(theirs: Any) -> AssistantModule:
    """The assistant by way of files."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        found: AssistantModule = load_assistant(Path(folder), json.loads((Path(folder) / "config.json").read_text()))
    return found
