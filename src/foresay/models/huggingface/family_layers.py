"""The layers of a transformers model of a supported family, read from their modules.

Owns the list of the families, and which module is which part of a layer. Computes nothing: fused.py runs the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foresay.models.cpu.product import NativeProduct
from foresay.models.families.family import FULL, SLIDING, Kinds
from foresay.models.families.table import FAMILIES, NORMS_FROM_ONE
from foresay.models.hardware import Hardware
from foresay.models.huggingface.experts import active_experts, stacked_weights
from foresay.models.huggingface.joined import Joined
from foresay.models.huggingface.linears import expert_products, product_of
from foresay.models.layer import (
    ClampedGate,
    ExpertNorms,
    Experts,
    Layer,
    LayerInput,
    Norm,
    Product,
    QueryScale,
    Sigmoids,
    StackedExperts,
)


class NotFusedError(Exception):
    """Fused layers do not support a model; the message is the reason."""


def layer_kinds(config: Any) -> list[str]:
    """Return the name of each layer's type. Raises NotFusedError for types that fused layers do not have."""
    known, count = FAMILIES[config.model_type].kinds, int(config.num_hidden_layers)
    if known is Kinds.MIXED:
        return list(config.layer_types)
    if known is Kinds.LISTED:
        kinds = list(config.layer_types)
        if set(kinds) - {FULL, SLIDING}:
            raise NotFusedError(
                f"it has layers of the kinds {', '.join(sorted(set(kinds)))}; fused layers have full or sliding attention"
            )
        return kinds
    slides = known is Kinds.WINDOWED and getattr(config, "sliding_window", None) is not None
    return [SLIDING if slides else FULL] * count


def read_layer(layer: Any, kind: str, config: Any) -> Layer:
    """Read a layer of a model. kind: name of its type. Raises AttributeError for a part that is missing, and NotFusedError."""
    family = FAMILIES[config.model_type]
    layer = family.names(layer, product_of)
    attn, mlp = layer.self_attn, layer.mlp
    both = bool(getattr(layer, "enable_moe_block", False))  # experts next to a feed-forward
    experts = _experts(layer if both else mlp, config)
    is_dense = both or experts is None
    four_norms = hasattr(layer, "pre_feedforward_layernorm")
    first = getattr(layer, "input_layernorm", None)
    after = four_norms or first is None  # norms after attention and feed-forward
    shares, parts = _shared_layer(attn, config), ["q_proj", "k_proj", "v_proj"]
    equal = shares is None and attn.v_proj is None if hasattr(attn, "v_proj") else False
    parts = parts[:1] if shares is not None else parts[:2] if equal else parts
    return Layer(
        kind=kind,
        before_attention=None if first is None else norm_of(first),
        qkv=_joint(attn, "qkv_proj", getattr(attn, "inputs", parts)),
        heads=_heads(attn, config),
        dim=int(attn.head_dim),
        q_norm=norm_of(attn.q_norm) if hasattr(attn, "q_norm") else None,
        k_norm=norm_of(attn.k_norm) if hasattr(attn, "k_norm") else None,
        wide_norm=family.wide_norms,
        rotates=bool(getattr(attn, "use_rope", family.rotates(attn, config))),
        window=config.sliding_window if kind == SLIDING else None,
        scaling=float(attn.scaling),
        softcap=getattr(attn, "attn_logit_softcapping", None),
        output=product_of(attn.o_proj),
        after_attention=norm_of(layer.post_attention_layernorm) if after else None,
        before_mlp=norm_of(layer.pre_feedforward_layernorm if four_norms else layer.post_attention_layernorm)
        if four_norms or not after
        else None,
        gate_up=None if not is_dense else _joint(mlp, "gate_up_proj", ("gate_proj", "up_proj")),
        activation=_activation(mlp),
        down=None if not is_dense else product_of(mlp.down_proj),
        after_mlp=norm_of(layer.post_feedforward_layernorm) if after else None,
        experts=experts,
        sinks=attn.sinks.detach() if hasattr(attn, "sinks") else None,
        gates_heads=family.gates_heads,
        mixer=getattr(attn, "mixer", None),
        shares=shares,
        equal_values=equal,
        unit_values=hasattr(attn, "v_norm"),
        input=_layer_input(layer),
        scale=float(getattr(layer, "layer_scalar", 1.0)),
        query_scale=_query_scale(config) if family.scales_queries else None,
    )


def _query_scale(config: Any) -> QueryScale | None:
    """Read how queries are scaled by their position; None if they are not."""
    rope = config.rope_parameters
    if not (rate := rope.get("llama_4_scaling_beta")):
        return None
    if not (length := rope.get("original_max_position_embeddings")):
        raise AttributeError("queries are scaled after a number of positions that its configuration does not state")
    return QueryScale(float(rate), int(length))


def _heads(attn: Any, config: Any) -> tuple[int, int]:
    """Return the number of query heads and of key heads."""
    heads, groups = int(config.num_attention_heads), getattr(attn, "num_key_value_groups", None)
    return heads, int(config.num_key_value_heads) if groups is None else heads // int(groups)


def _shared_layer(attn: Any, config: Any) -> int | None:
    """Return the index of the layer whose keys and values an attention module reads, if it has none: the last one of its kind."""
    if not getattr(attn, "is_kv_shared_layer", False):
        return None
    modes = enumerate(zip(config.kv_sharing_modes, config.layer_types, strict=True))
    return max(i for i, (mode, kind) in modes if mode != "reuse" and kind == attn.layer_type)


def _layer_input(layer: Any) -> LayerInput | None:
    """Read the input that a layer has besides its hidden state; None if it has none."""
    if not getattr(layer, "hidden_size_per_layer_input", 0):
        return None
    gate, projection = product_of(layer.per_layer_input_gate), product_of(layer.per_layer_projection)
    return LayerInput(gate, projection, norm_of(layer.post_per_layer_input_norm), int(layer.layer_idx))


def _activation(mlp: Any) -> Any:
    return None if hasattr(mlp, "experts") else getattr(mlp, "act_fn", None) or mlp.activation_fn


def _experts(mlp: Any, config: Any) -> Experts | None:
    """Read a mixture-of-experts layer; None for a gated feed-forward."""
    if not hasattr(mlp, "experts"):
        return None
    router = getattr(mlp, "router", None) or mlp.gate
    is_apart = hasattr(router, "proj")  # Gemma 4's
    gate_up, down, gate, stacked = _expert_parts(mlp.experts)
    try:
        if is_apart:
            scores: Product = product_of(router.proj)
        elif stacked is not None:
            scores = Joined(router.weight.detach(), _detached(getattr(router, "bias", None)))
        else:
            scores = NativeProduct.in_place([router.weight], [getattr(router, "bias", None)])
    except LookupError as error:
        raise NotFusedError(str(error)) from None
    # Mixtral and gpt-oss always normalize the weights
    normalizes = bool(getattr(config, "norm_topk_prob", True))
    clamped = gate if isinstance(gate, ClampedGate) else None
    common = getattr(mlp, "shared_experts", None) or getattr(mlp, "shared_expert", None)
    shared = None
    if common is not None:
        shared = _joint(common, "gate_up_proj", ("gate_proj", "up_proj")), product_of(common.down_proj)
    active = active_experts(config)
    gated = product_of(mlp.shared_expert_gate) if hasattr(mlp, "shared_expert_gate") else None
    norms = _expert_norms(mlp, router) if is_apart else None
    by = _sigmoids(mlp, router)
    return Experts(scores, gate_up, down, active, normalizes, clamped, by, shared, gated, norms, stacked)


def _expert_parts(experts: Any) -> tuple[Sequence[Product], Sequence[Product], Any, StackedExperts | None]:
    """Return the two products of each expert and the gate, or the stacked weights of all on a GPU with kernels."""
    weight, frozen = getattr(experts, "down_proj", None), getattr(experts, "stacked", None)
    if frozen is not None or (isinstance(weight, torch.Tensor) and Hardware(weight.device).gpu_kernels):
        if (own := stacked_weights(experts)) is not None:
            return (), (), own[1], own[0]
    elif (parts := expert_products(experts)) is not None:
        return *parts, None
    raise NotFusedError(f"the kernels do not read {type(experts).__name__} in their current layout")


def _detached(weight: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight is None else weight.detach()


def _expert_norms(layer: Any, router: Any) -> ExpertNorms:
    """Read the norms of experts next to a feed-forward, and of their router."""
    return ExpertNorms(
        before=norm_of(layer.pre_feedforward_layernorm_2),
        router=Norm(router.scale.detach(), float(router.eps)),
        after=norm_of(layer.post_feedforward_layernorm_2),
        dense=norm_of(layer.post_feedforward_layernorm_1),
        scales=router.per_expert_scale.detach(),
        factor=float(router.scalar_root_size),
    )


def _sigmoids(mlp: Any, router: Any) -> Sigmoids | None:
    """Read how a router selects experts; None if it does so by a softmax."""
    correction = getattr(router, "e_score_correction_bias", None)
    if hasattr(router, "use_expert_bias"):  # LFM2's
        none = torch.zeros(len(router.weight))
        return Sigmoids(getattr(mlp, "expert_bias", none), 1, 1, float(router.routed_scaling_factor))
    if correction is None:
        return None
    return Sigmoids(correction, int(router.num_group), int(router.topk_group), float(router.routed_scaling_factor))


def _joint(parent: Any, whole: str, parts: Sequence[str]) -> Product:
    """Return one product for layers that read the same input."""
    return product_of(
        *([getattr(parent, whole)] if whole and hasattr(parent, whole) else [getattr(parent, n) for n in parts])
    )


def norm_of(module: Any) -> Norm:
    """Read a root-mean-square norm."""
    eps = getattr(module, "variance_epsilon", None)
    return Norm(
        module.weight.detach(),
        float(module.eps if eps is None else eps),
        type(module).__name__.startswith(NORMS_FROM_ONE),
    )
