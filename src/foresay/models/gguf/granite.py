"""Configurations of Granite's GGUF files: Granite 3, and Granite 4 with recurrent layers (Mamba-2) and without.

Granite 4's converter states the key heads of each layer, and in files without experts one width twice.
"""

from __future__ import annotations

from typing import Any

from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.hybrids import MOST_GROUPS, MOST_INNER, lfm2_fields, positive_integer
from foresay.models.gguf.values import invalid_value

_SHARED = "expert_shared_feed_forward_length"


def granite_fields(header: GgufHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a file without recurrent layers, all of whose layers have as many key heads, and positions."""
    key = f"{header.architecture}.attention.head_count_kv"
    listed = header.lists.get(key)
    heads = [] if listed is None else [int(one) for one in listed.numbers()]  # checked by `check_values`
    if len(set(heads)) > 1:
        raise invalid_value(header, key, "one integer for all layers")
    _width(header, fields)
    if not _has_positions(header):
        raise invalid_value(
            header,
            f"{header.architecture}.rope.scaling.finetuned",
            "true: each layer of this architecture has positions",
        )
    own = {"num_key_value_heads": heads[0]} if heads else {}
    return {**own, "attention_multiplier": _scale(fields)}


def granite_hybrid_fields(header: GgufHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a file with recurrent layers."""
    prefix, hidden = header.architecture, fields["hidden_size"]
    groups = positive_integer(header, "ssm.group_count", MOST_GROUPS)
    heads, inner = (int(header.values[f"{prefix}.ssm.{name}"]) for name in ("time_step_rank", "inner_size"))
    if heads % groups:
        raise invalid_value(header, f"{prefix}.ssm.time_step_rank", f"a multiple of the {groups} groups")
    if inner % heads or inner % hidden:
        raise invalid_value(header, f"{prefix}.ssm.inner_size", f"a multiple of the {heads} heads and of {hidden}")
    experts = fields.get("num_local_experts", 0)
    if experts:
        positive_integer(header, "expert_used_count", experts)
    return {
        **lfm2_fields(header, fields, "linear_attention"),
        "attention_multiplier": _scale(fields),
        "num_local_experts": experts,
        "shared_intermediate_size": positive_integer(header, _SHARED, MOST_INNER)
        if experts
        else _width(header, fields),
        "position_embedding_type": "rope" if _has_positions(header) else None,
        "mamba_expand": inner // hidden,
        "mamba_d_head": inner // heads,
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in header.tensors),
    }


def _width(header: GgufHeader, fields: dict[str, Any]) -> int:
    """Return the width of feed-forwards without experts."""
    width = int(fields["intermediate_size"])
    if header.values.get(key := f"{header.architecture}.{_SHARED}", width) not in (0, width):
        raise invalid_value(header, key, f"{width}, as feed_forward_length")
    return width


def _has_positions(header: GgufHeader) -> bool:
    """Return whether attention has positions, as it does in llama.cpp unless a file denies it."""
    stated = header.values.get(key := f"{header.architecture}.rope.scaling.finetuned", True)
    if type(stated) is not bool:
        raise invalid_value(header, key, "true or false")
    return stated


def _scale(fields: dict[str, Any]) -> float:
    """Return the scale of the scores; a missing one is the usual one."""
    return float(fields.get("attention_multiplier", fields["head_dim"] ** -0.5))
