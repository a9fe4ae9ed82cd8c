"""Layers of hybrid families under the names that Llama's have: gated delta rules, state spaces and convolutions as attention.

Owns the list of these families, and the reading of their modules. fused.py reads everything that they share with others.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F

from foresay.models.huggingface.frozen import ReorderedInput, ReorderedOutput
from foresay.models.huggingface.linears import product_of
from foresay.models.layer import GatedDelta, Norm, ShortConvolution, StateSpace

HYBRID = frozenset({"lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid"})
"""model_type of the families, which the compiled kernels alone compute."""
GATED_HEADS = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Families whose query projection gives a gate of each head's output."""
MIXING = frozenset({"conv", "linear_attention"})
"""Their names of layers without attention."""
ZERO_CENTRED = ("GemmaR", "Gemma2R", "Gemma3R", "Qwen3Next", "Qwen3_5")
"""Beginnings of the names of norms that multiply by one plus their weight."""
_SILU = ("silu", "swish")
_LFM2 = {"q_norm": "q_layernorm", "k_norm": "k_layernorm", "o_proj": "out_proj"}
_KEPT = ("q_proj", "k_proj", "v_proj", "head_dim", "scaling")


def usual_names(layer: Any) -> Any:
    """Return a layer with Llama's names of its parts. Raises AttributeError if it has other parts."""
    if hasattr(layer, "operator_norm"):
        mlp = one = layer.feed_forward
        if not hasattr(one, "experts"):
            mlp = SimpleNamespace(gate_proj=one.w1, up_proj=one.w3, down_proj=one.w2, act_fn=F.silu)
        mixing = _short(layer.conv) if hasattr(layer, "conv") else _attention(layer.self_attn)
        return _layer(mixing, mlp, layer.operator_norm, layer.ffn_norm)
    if hasattr(layer, "shared_mlp"):
        mixing = layer.self_attn if layer.mamba is None else _state_space(layer.mamba)
        return _layer(mixing, _granite_mlp(layer), layer.input_layernorm, layer.post_attention_layernorm)
    if hasattr(layer, "linear_attn"):
        return _layer(_delta(layer.linear_attn), layer.mlp, layer.input_layernorm, layer.post_attention_layernorm)
    return layer


def _layer(mixing: Any, mlp: Any, first: Any, second: Any) -> SimpleNamespace:
    return SimpleNamespace(self_attn=mixing, mlp=mlp, input_layernorm=first, post_attention_layernorm=second)


def _attention(module: Any) -> SimpleNamespace:
    """Read LFM2's attention."""
    own = {name: getattr(module, name) for name in _KEPT}
    return SimpleNamespace(**own, **{name: getattr(module, theirs) for name, theirs in _LFM2.items()})


def _mixing(module: Any, layers: dict[str, Any], mixer: GatedDelta | StateSpace | ShortConvolution) -> SimpleNamespace:
    """Return a mixer under the names of attention. layers: those that read its input, in the kernels' order."""
    out = module.out_proj.inner if isinstance(module.out_proj, ReorderedInput) else module.out_proj
    own = {"inputs": tuple(layers), "o_proj": out, "head_dim": 0, "scaling": 1.0, "use_rope": False, "mixer": mixer}
    return SimpleNamespace(**layers, **own)


def _short(module: Any) -> SimpleNamespace:
    bias = None if module.conv.bias is None else module.conv.bias.detach()
    return _mixing(module, {"in_proj": module.in_proj}, ShortConvolution(module.conv.weight.detach(), bias))


def _granite_mlp(layer: Any) -> SimpleNamespace:
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
    if module.activation not in _SILU or low > 0 or not math.isinf(high):
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
    return _mixing(module, {"in_proj": module.in_proj}, mixer)


def _delta(module: Any) -> SimpleNamespace:
    if module.activation not in _SILU or module.conv1d.bias is not None:
        raise AttributeError(f"a gated delta rule has SiLU and no bias, not {module.activation!r}")
    joint = getattr(module, "in_proj_qkvz", None)
    by_key_head = joint is not None and not isinstance(joint, ReorderedOutput)
    inputs: dict[str, Any]
    side: tuple[Any, ...]
    if by_key_head:
        inputs, side = {"in_proj_qkvz": joint}, (module.in_proj_ba,)
    elif joint is not None:  # of a GGUF file
        inputs, side = dict(joint.named_children()), tuple(module.in_proj_ba.children())
    else:
        inputs = {"in_proj_qkv": module.in_proj_qkv, "in_proj_z": module.in_proj_z}
        side = (module.in_proj_b, module.in_proj_a)
    mixer = GatedDelta(
        heads=(int(module.num_k_heads), int(module.num_v_heads)),
        dims=(int(module.head_k_dim), int(module.head_v_dim)),
        convolution=module.conv1d.weight.detach(),
        decays=module.A_log.detach(),
        steps=module.dt_bias.detach(),
        norm=Norm(module.norm.weight.detach(), float(module.norm.variance_epsilon)),
        side=product_of(*side),
        by_key_head=by_key_head,
        tiled=isinstance(module.out_proj, ReorderedInput),
    )
    return _mixing(module, inputs, mixer)
