"""Values and tensors of LFM2's, Qwen3-Next's, Qwen3.5's and Granite 4's GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import torch

LFM2, GRANITE = ("lfm2", "lfm2_moe"), "granitemoehybrid"
NEXT = "qwen3_next"
QWEN = ("qwen3_5_text", "qwen3_5_moe_text", NEXT)


def key_heads(config: Any) -> int | list[int]:
    """LFM2's and Granite's files list them by layer, 0 for one without attention."""
    if config.model_type not in (*LFM2, GRANITE):
        return int(config.num_key_value_heads)
    return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]


def eps(config: Any) -> float:
    return float(config.norm_eps if config.model_type in LFM2 else config.rms_norm_eps)


def add_values(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.model_type == GRANITE:
        add_granite(writer, config)
    elif config.model_type in LFM2:
        writer.add_shortconv_l_cache(config.conv_L_cache)
    elif config.model_type in QWEN:
        rotated = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(4)
        if config.model_type != NEXT:
            writer.add_rope_dimension_sections([rotated // 2, 0, 0, 0])


def add_granite(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if config.num_local_experts:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def of_granite(config: Any, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a parameter of a layer; none for one that other families have, too."""
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    shared = "_shexp" if config.num_local_experts else ""
    found: dict[str, torch.Tensor] = {}
    if part == "shared_mlp.input_linear.weight":
        found = dict(zip((f"ffn_gate{shared}.weight", f"ffn_up{shared}.weight"), weight.chunk(2), strict=True))
    elif part == "shared_mlp.output_linear.weight":
        found = {f"ffn_down{shared}.weight": weight}
    elif part == "block_sparse_moe.router.weight":
        found = {"ffn_gate_inp.weight": weight}
    elif part.startswith("block_sparse_moe.experts."):
        found = {f"ffn_{part.split('.')[2].removesuffix('_proj')}_exps.weight": weight}
    elif part == "mamba.A_log":
        found = {"ssm_a": -weight.exp()[:, None]}
    elif part == "mamba.D":
        found = {"ssm_d": weight[:, None]}
    elif part == "mamba.dt_bias":
        found = {"ssm_dt.bias": weight}
    elif part == "mamba.norm.weight":
        found = {"ssm_norm.weight": weight.view(config.mamba_n_groups, -1)}
    elif part == "mamba.conv1d.weight":
        found = {"ssm_conv1d.weight": weight.squeeze(1)}
    return {f"blk.{layer}.{one}": values for one, values in found.items()}


def by_kind(config: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights with Qwen3-Next's queries, keys and values of a layer, and its gates, as two tensors, each in order of heads."""
    keys, values, found = config.linear_num_key_heads, config.linear_num_value_heads, {}
    wide = values // keys * config.linear_value_head_dim
    for name, weight in weights.items():
        if not name.endswith("in_proj_qkvz.weight"):
            found[name] = weight
            continue
        heads = weight.view(keys, -1, weight.shape[-1])
        parts = [part.flatten(0, 1) for part in heads.split([config.linear_key_head_dim] * 2 + [wide] * 2, 1)]
        found[name.replace("qkvz", "qkv")], found[name.replace("qkvz", "z")] = torch.cat(parts[:3]), parts[3]
    return found


def converted(config: Any, name: str, weight: torch.Tensor) -> tuple[str | None, torch.Tensor] | None:
    """A tensor's name, None for the usual one, and its weights; None for a tensor that is stored as it is."""
    if config.model_type in LFM2:
        if name.endswith("expert_bias"):
            return f"blk.{name.split('.')[2]}.exp_probs_b.bias", weight
        return (None, weight.squeeze(1)) if "conv.conv" in name else None
    if config.model_type not in QWEN:
        return None
    if "shared_expert_gate" in name:
        return None, weight[0]
    stem, _, kind = name.rpartition(".linear_attn.")
    if not stem:
        return (None, weight + 1) if name.endswith("norm.weight") else None
    layer = f"blk.{stem.rpartition('.')[2]}"
    if config.model_type == NEXT:
        own = {"A_log": (f"{layer}.ssm_a", -weight.exp()), "dt_bias": (f"{layer}.ssm_dt.bias", weight)}
        return own.get(kind, (None, weight.squeeze(1) if kind.startswith("conv1d") else weight))
    keys, values, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    first = 2 * keys * config.linear_key_head_dim
    if kind in ("in_proj_qkv.weight", "conv1d.weight"):
        own = weight.squeeze(1) if kind.startswith("conv1d") else weight
        return None, torch.cat([own[:first], tiled(own[first:], keys, values, size)])
    if kind == "A_log":
        return f"{layer}.ssm_a", -tiled(weight, keys, values, 1).exp()
    if kind == "dt_bias":
        return f"{layer}.ssm_dt.bias", tiled(weight, keys, values, 1)
    if kind == "out_proj.weight":
        return None, tiled(weight.T, keys, values, size).T
    if kind == "norm.weight":
        return None, weight
    return None, tiled(weight, keys, values, size if kind == "in_proj_z.weight" else 1)


def tiled(weight: torch.Tensor, keys: int, values: int, size: int) -> torch.Tensor:
    """Rows of value heads, grouped by key heads, in tiles of one of each key head."""
    rest = weight.shape[1:]
    return weight.reshape(keys, values // keys, size, *rest).transpose(0, 1).reshape(values * size, *rest)
