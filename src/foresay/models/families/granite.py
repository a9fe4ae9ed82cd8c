"""Granite 3, and Granite 4 with recurrent layers (Mamba-2) and without.

Granite 4's converter states the key heads of each layer, and in files without experts one width twice. Gates and ups are apart in
files, and joint in the family's own code.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from foresay.models.families.family import Family, Kinds, ProductOf
from foresay.models.families.llama import LLAMA, MIXTRAL
from foresay.models.families.orders import ReorderedOutput, as_attention
from foresay.models.families.positions import key_heads
from foresay.models.families.stated import MOST_GROUPS, MOST_INNER, Stated
from foresay.models.layer import Norm, StateSpace

_SHARED, _FINETUNED = "expert_shared_feed_forward_length", "rope.scaling.finetuned"
_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attention.scale": "attention_multiplier",
}
_STATE_SPACE = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}


def _names(layer: Any, product_of: ProductOf) -> Any:
    mixing = layer.self_attn if layer.mamba is None else _state_space(layer.mamba)
    norms = {name: getattr(layer, name) for name in ("input_layernorm", "post_attention_layernorm")}
    return SimpleNamespace(self_attn=mixing, mlp=_mlp(layer), **norms)


def _mlp(layer: Any) -> SimpleNamespace:
    """Read Granite 4's feed-forward, which each token passes next to its experts, or in place of them."""
    own, experts = layer.shared_mlp, layer.block_sparse_moe
    parts = {"gate_up_proj": own.input_linear}
    if isinstance(own.input_linear, ReorderedOutput):  # of a GGUF file
        parts = dict(own.input_linear.named_children())
    usual = SimpleNamespace(**parts, down_proj=own.output_linear, act_fn=own.activation)
    if experts is None:
        return usual
    return SimpleNamespace(gate=experts.router, experts=experts.experts, shared_experts=usual)


def _state_space(module: Any) -> SimpleNamespace:
    low, high = module.time_step_limit
    if module.activation not in ("silu", "swish") or low > 0 or not math.isinf(high):
        raise AttributeError(
            f"a state space has SiLU and no limit of its steps, not {module.activation!r}, {low:g} and {high:g}"
        )
    bias = module.conv1d.bias
    mixer = StateSpace(
        heads=(int(module.n_groups), int(module.num_heads)),
        dims=(int(module.ssm_state_size), int(module.head_dim)),
        convolution=module.conv1d.weight.detach(),
        bias=None if bias is None else bias.detach(),
        decays=module.A_log.detach(),
        steps=module.dt_bias.detach(),
        skips=module.D.detach(),
        norm=Norm(module.norm.weight.detach(), float(module.norm.variance_epsilon)),
    )
    return SimpleNamespace(**as_attention({"in_proj": module.in_proj}, module.out_proj, mixer))


def _rotates(attention: Any, config: Any) -> bool:
    return bool(config.position_embedding_type == "rope")


def _split(model: Any, tensors: Collection[str]) -> None:
    """Replace the joint layers of feed-forwards, in order of kind."""
    for mlp in [layer.shared_mlp for layer in model.model.layers]:
        sizes, names = (mlp.input_size, mlp.hidden_size), ("gate_proj", "up_proj")
        halves = {name: nn.Linear(*sizes, bias=False, device="meta") for name in names}
        mlp.input_linear = ReorderedOutput(halves, torch.arange(2 * mlp.hidden_size))


def _granite(stated: Stated, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a file without recurrent layers, all of whose layers have as many key heads, and positions."""
    heads = [int(one) for one in stated.numbers("attention.head_count_kv") or ()]
    if len(set(heads)) > 1:
        raise stated.invalid("attention.head_count_kv", "one integer for all layers")
    _width(stated, fields)
    if not _has_positions(stated):
        raise stated.invalid(_FINETUNED, "true: each layer of this architecture has positions")
    own = {"num_key_value_heads": heads[0]} if heads else {}
    return {**own, "attention_multiplier": _scale(fields)}


def _hybrid(stated: Stated, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a file with recurrent layers."""
    hidden, groups = fields["hidden_size"], stated.positive("ssm.group_count", MOST_GROUPS)
    heads, inner = int(stated.get("ssm.time_step_rank")), int(stated.get("ssm.inner_size"))
    if heads % groups:
        raise stated.invalid("ssm.time_step_rank", f"a multiple of the {groups} groups")
    if inner % heads or inner % hidden:
        raise stated.invalid("ssm.inner_size", f"a multiple of the {heads} heads and of {hidden}")
    if experts := fields.get("num_local_experts", 0):
        stated.positive("expert_used_count", experts)
    return {
        **key_heads(stated, fields, "linear_attention"),
        "attention_multiplier": _scale(fields),
        "num_local_experts": experts,
        "shared_intermediate_size": stated.positive(_SHARED, MOST_INNER) if experts else _width(stated, fields),
        "position_embedding_type": "rope" if _has_positions(stated) else None,
        "mamba_expand": inner // hidden,
        "mamba_d_head": inner // heads,
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in stated.shapes),
    }


def _width(stated: Stated, fields: dict[str, Any]) -> int:
    """Return the width of feed-forwards without experts."""
    width = int(fields["intermediate_size"])
    if stated.get(_SHARED, width) not in (0, width):
        raise stated.invalid(_SHARED, f"{width}, as feed_forward_length")
    return width


def _has_positions(stated: Stated) -> bool:
    """Return whether attention has positions, as it does in llama.cpp unless a file denies it."""
    found = stated.get(_FINETUNED, True)
    if type(found) is not bool:
        raise stated.invalid(_FINETUNED, "true or false")
    return found


def _scale(fields: dict[str, Any]) -> float:
    """Return the scale of the scores; a missing one is the usual one."""
    return float(fields.get("attention_multiplier", fields["head_dim"] ** -0.5))


FAMILIES = (
    Family("granite"),
    Family("granitemoehybrid", Kinds.MIXED, names=_names, rotates=_rotates, partly_recurrent=True),
)
_GRANITE = replace(LLAMA, fields=_SCALES, by_layer=("attention.head_count_kv",))
ARCHITECTURES = {
    "granite": replace(
        _GRANITE,
        model_type="granite",
        derive=_granite,
        derived=(
            _SHARED,
            _FINETUNED,
            "ssm.group_count",
        ),  # files of Granite 4 without recurrent layers state their sizes
    ),
    "granitehybrid": replace(
        _GRANITE,
        model_type="granitemoehybrid",
        fields={**_SCALES, **MIXTRAL, **_STATE_SPACE},
        required=(*_STATE_SPACE, "ssm.inner_size", "attention.head_count_kv"),
        derive=_hybrid,
        derived=(_SHARED, _FINETUNED),
        scaled_by_tensor=False,
        scaled_linearly=None,
        mixed=True,
        split=_split,
    ),
}
