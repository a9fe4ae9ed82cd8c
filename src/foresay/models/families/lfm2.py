"""LFM2: short convolutions in place of attention in some layers, and names of its own for the parts of a layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F

from foresay.models.families.family import Architecture, Family, Kinds, ProductOf
from foresay.models.families.orders import as_attention
from foresay.models.families.positions import key_heads
from foresay.models.families.qwen import EXPERTS
from foresay.models.families.stated import Stated
from foresay.models.layer import ShortConvolution

_ATTENTION = {"q_norm": "q_layernorm", "k_norm": "k_layernorm", "o_proj": "out_proj"}
_KEPT = ("q_proj", "k_proj", "v_proj", "head_dim", "scaling")
_FIELDS = {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}
_REQUIRED = ("shortconv.l_cache", "attention.head_count_kv", "rope.freq_base")


def _names(layer: Any, product_of: ProductOf) -> Any:
    mlp = one = layer.feed_forward
    if not hasattr(one, "experts"):
        mlp = SimpleNamespace(gate_proj=one.w1, up_proj=one.w3, down_proj=one.w2, act_fn=F.silu)
    mixing = _convolution(layer.conv) if hasattr(layer, "conv") else _attention(layer.self_attn)
    norms = {"input_layernorm": layer.operator_norm, "post_attention_layernorm": layer.ffn_norm}
    return SimpleNamespace(self_attn=mixing, mlp=mlp, **norms)


def _attention(module: Any) -> SimpleNamespace:
    own = {name: getattr(module, name) for name in _KEPT}
    return SimpleNamespace(**own, **{name: getattr(module, theirs) for name, theirs in _ATTENTION.items()})


def _convolution(module: Any) -> SimpleNamespace:
    bias = None if module.conv.bias is None else module.conv.bias.detach()
    mixer = ShortConvolution(module.conv.weight.detach(), bias)
    return SimpleNamespace(**as_attention({"in_proj": module.in_proj}, module.out_proj, mixer))


def _derived(stated: Stated, fields: dict[str, Any]) -> dict[str, Any]:
    return key_heads(stated, fields, "conv")


FAMILIES = (Family("lfm2", Kinds.MIXED, names=_names), Family("lfm2_moe", Kinds.MIXED, names=_names))
ARCHITECTURES = {
    "lfm2": Architecture(
        "lfm2",
        _FIELDS,
        {"block_auto_adjust_ff_dim": False},
        required=_REQUIRED,
        derive=_derived,
        by_layer=("attention.head_count_kv",),
        mixed=True,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        {**_FIELDS, **EXPERTS, "leading_dense_block_count": "num_dense_layers"},
        {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True},
        required=(*_REQUIRED, *EXPERTS, "leading_dense_block_count", "expert_gating_func"),
        derive=_derived,
        by_layer=("attention.head_count_kv",),
        neutral={"expert_gating_func": (2,)},
        mixed=True,
    ),
}
