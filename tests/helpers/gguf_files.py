"""Tiny models as GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from helpers import tiny


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary halves as llama.cpp keeps them."""
    return weight.view(heads, 2, len(weight) // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: PreTrainedModel, kinds: Mapping[str, str] | None = None) -> Path:
    """A tiny model of a family that foresay reads from GGUF files, and its tokenizer, as such a file.

    kinds: by the last word of a tensor's name ("attn_q", "output"), the type its weights are rounded to; float32 otherwise.
    """
    family = {"qwen3_moe": "qwen3moe"}.get(model.config.model_type, model.config.model_type.removesuffix("_text"))
    writer = gguf.GGUFWriter(path, family)
    _add_values(writer, model)
    for name, weight in _tensors(model, family).items():
        values = np.ascontiguousarray(weight.detach().float().numpy())
        kind = (kinds or {}).get(name.split(".")[-2]) if name.endswith("weight") else None
        if kind is None:
            writer.add_tensor(name, values)
        else:
            rounded = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(values, rounded), raw_dtype=rounded)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_values(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config, names = model.config, tiny.tokenizer()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if head_dim != config.hidden_size // heads:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "llama":
        writer.add_rope_dimension_count(head_dim)
    if config.model_type.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names.convert_ids_to_tokens(range(len(names))))
    writer.add_token_types([3] * len(tiny.SPECIALS) + [1] * (len(names) - len(tiny.SPECIALS)))
    writer.add_token_merges([" ".join(pair) for pair in tiny.MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)


def _tensors(model: PreTrainedModel, family: str) -> dict[str, torch.Tensor]:
    """The weights by llama.cpp's names, in its order of rows."""
    config = model.config
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[family], config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for name, weight in _split_experts(model.state_dict()).items():
        stem, _, suffix = name.rpartition(".")
        own = str(names.get_name(stem))
        if own == "output" and config.tie_word_embeddings:
            continue
        kind = own.rpartition(".")[2]
        if family == "llama" and kind in heads:
            weight = _interleaved(weight, heads[kind])
        if family.startswith("gemma") and "norm" in own:
            weight = weight + 1
        tensors[f"{own}.{suffix}"] = weight
    return tensors


def _split_experts(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A file has a tensor for each of the three parts of a layer's experts."""
    split = {}
    for name, weight in weights.items():
        stem, _, kind = name.rpartition(".")
        if kind == "gate_up_proj" and weight.dim() == 3:
            split[f"{stem}.gate_proj.weight"], split[f"{stem}.up_proj.weight"] = weight.chunk(2, 1)
        elif kind == "down_proj" and weight.dim() == 3:
            split[f"{stem}.down_proj.weight"] = weight
        else:
            split[name] = weight
    return split
