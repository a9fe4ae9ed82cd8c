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
    """A tiny Llama and its tokenizer as a GGUF file.

    kinds: by the last word of a tensor's name ("attn_q", "output"), the type its weights are rounded to; float32 otherwise.
    """
    config, names = model.config, tiny.tokenizer()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names.convert_ids_to_tokens(range(len(names))))
    writer.add_token_types([3] * len(tiny.SPECIALS) + [1] * (len(names) - len(tiny.SPECIALS)))
    writer.add_token_merges([" ".join(pair) for pair in tiny.MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    places = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    weights = model.state_dict()
    tensors = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        tensors["output.weight"] = weights["lm_head.weight"]
    for i in range(config.num_hidden_layers):
        for theirs, ours in places.items():
            for kind in ("weight", "bias"):
                weight = weights.get(f"model.layers.{i}.{theirs}.{kind}")
                if weight is None:
                    continue
                if ours == "attn_q":
                    weight = _interleaved(weight, config.num_attention_heads)
                if ours == "attn_k":
                    weight = _interleaved(weight, config.num_key_value_heads)
                tensors[f"blk.{i}.{ours}.{kind}"] = weight
    for name, weight in tensors.items():
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
