"""GGUF files of models with recurrent layers, LFM2 and Qwen3.5: their sizes, names and order of rows.

llama.cpp's converter stores the decays of a layer as -exp(A_log), convolutions without their middle dimension, and value heads
in tiles: the first of each key head, then the second ones. Owns these facts; configs.py and blocks.py apply them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foresay.models.gguf.header import INTEGERS, GgufHeader
from foresay.models.gguf.values import invalid_value

HYBRIDS = frozenset({"lfm2", "lfm2moe", "qwen35", "qwen35moe"})
"""Architectures with such layers."""
PRECISE = ("ssm_a", "ssm_dt", "ssm_conv1d", "ssm_norm", "shortconv")
"""Parts of a layer that stay in float32 whatever the model's dtype, as llama.cpp computes them."""
_LAYER_PARAMETERS = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "expert_bias": "exp_probs_b.bias"}
"""transformers' parameters without a module -> the last part of llama.cpp's name."""
_MOST_INTERVAL, _MOST_GROUPS, _MOST_INNER = 1024, 1 << 16, 1 << 24


def parameter_namer(name: Callable[[str], str]) -> Callable[[str], str]:
    """Return the mapping of transformers' names to llama.cpp's. name: that of modules and their parameters."""

    def of(parameter: str) -> str:
        words = parameter.split(".")  # model, layers, index, part, ...
        stored = _LAYER_PARAMETERS.get(words[-1])
        return name(parameter) if stored is None else f"blk.{words[2]}.{stored}"

    return of


def part_of(tensor_name: str) -> str:
    """Return the part of a layer that a tensor belongs to, such as "attn_q"; "" outside of layers."""
    words = tensor_name.split(".")
    return words[2] if words[0] == "blk" and len(words) > 2 else ""


def row_order(config: Any, tensor_name: str) -> torch.Tensor | None:
    """Return the file's row index of each of transformers' rows; None if they are in the same order."""
    keys, values = (getattr(config, f"linear_num_{kind}_heads", 0) for kind in ("key", "value"))
    if keys == values:
        return None
    part, size = part_of(tensor_name), config.linear_value_head_dim
    if part in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        return _rows(keys, values, 1)
    if part == "attn_gate":
        return _rows(keys, values, size)
    if part in ("attn_qkv", "ssm_conv1d"):  # queries and keys are in their order
        first = 2 * keys * config.linear_key_head_dim
        return torch.cat([torch.arange(first), first + _rows(keys, values, size)])
    return None


def column_order(config: Any) -> torch.Tensor | None:
    """Return transformers' column index of each of the file's columns of ssm_out; None if they are in the same order."""
    keys, values = (getattr(config, f"linear_num_{kind}_heads", 0) for kind in ("key", "value"))
    return None if keys == values else _rows(values // keys, values, config.linear_value_head_dim)


def _rows(groups: int, heads: int, size: int) -> torch.Tensor:
    """Return the indices of the rows of heads [heads / groups, groups] in the order [groups, heads / groups]."""
    order = torch.arange(heads).view(heads // groups, groups).T.reshape(-1)
    return (order[:, None] * size + torch.arange(size)).reshape(-1)


def lfm2_fields(header: GgufHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration that a list of key heads states, 0 for a layer of convolutions."""
    key = f"{header.architecture}.attention.head_count_kv"
    stored = header.lists.get(key)
    counts = [] if stored is None else [int(one) for one in stored.numbers()]  # checked by `check_values`
    heads = max(counts, default=0)
    if not heads or {*counts} - {0, heads} or fields["num_attention_heads"] % heads:
        raise invalid_value(header, key, "a list of one integer for each layer, 0 or the number of its key heads")
    return {
        "num_key_value_heads": heads,
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields.pop("rope_theta")},
    }


def qwen35_fields(header: GgufHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration that several values state together. MTP layers are counted with the others."""
    keys = _integer(header, "ssm.group_count", _MOST_GROUPS)
    prefix, size = header.architecture, fields["head_dim"]
    heads, inner = (int(header.values[f"{prefix}.ssm.{name}"]) for name in ("time_step_rank", "inner_size"))
    rotated = int(header.values[f"{prefix}.rope.dimension_count"])
    if "shared_expert_intermediate_size" in fields:
        _integer(header, "expert_shared_feed_forward_length", _MOST_INNER)
    if heads % keys:
        raise invalid_value(header, f"{prefix}.ssm.time_step_rank", f"a multiple of the {keys} groups")
    if inner % heads:
        raise invalid_value(header, f"{prefix}.ssm.inner_size", f"a multiple of the {heads} heads")
    if rotated > size:
        raise invalid_value(header, f"{prefix}.rope.dimension_count", f"at most the {size} numbers of a head")
    more = int(header.values.get(f"{prefix}.nextn_predict_layers", 0))
    layers = fields["num_hidden_layers"] - more
    of_mtp = {"num_mtp_layers": more, "mtp_layer_types": ["full_attention"] * more} if more else {}
    interval = _integer(header, "full_attention_interval", _MOST_INTERVAL)
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta"), "partial_rotary_factor": rotated / size}
    return {
        **of_mtp,
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)],
        "linear_value_head_dim": inner // heads,
        "rope_parameters": {**rope, "mrope_section": _sections(header, rotated // 2)},
    }


def _integer(header: GgufHeader, name: str, most: int) -> int:
    key = f"{header.architecture}.{name}"
    value = header.values.get(key)
    if type(value) is not int or not 1 <= value <= most:
        raise invalid_value(header, key, f"an integer from 1 to {most}")
    return value


def _sections(header: GgufHeader, half: int) -> list[int]:
    """Return the frequencies of the three kinds of positions, which are equal for texts."""
    key = f"{header.architecture}.rope.dimension_sections"
    stored = header.lists.get(key)
    sections = [] if stored is None or stored.kind not in INTEGERS else [int(one) for one in stored.numbers()[:4]]
    if len(sections) < 3 or min(sections) < 0 or sum(sections) != half:
        raise invalid_value(header, key, f"a list of at least 3 integers that add up to {half}")
    return sections[:3]
