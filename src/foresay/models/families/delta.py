"""Qwen3-Next and Qwen3.5: gated delta rules in place of attention in most layers, and a gate of each head's output in the others.

llama.cpp's converter stores Qwen3.5's value heads in tiles, the first of each key head, then the second ones; and Qwen3-Next's
queries, keys, values and gates one after the other, where transformers has those of each key head together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from foresay.models.families.family import FULL, Architecture, Family, Kinds, ProductOf
from foresay.models.families.orders import ReorderedInput, ReorderedOutput, as_attention
from foresay.models.families.positions import SECTIONS, sections
from foresay.models.families.qwen import EXPERTS
from foresay.models.families.stated import MOST_GROUPS, MOST_INNER, Stated
from foresay.models.layer import GatedDelta, Norm

_SHARED, _INTERVAL, _RECURRENT = (
    "expert_shared_feed_forward_length", "full_attention_interval", "attention.recurrent_layers",
)  # fmt: skip
_USUAL_INTERVAL, _MOST_INTERVAL = 4, 1024
"""Interval of layers with attention: of Qwen3-Next's files that do not state it, as in llama.cpp, and the longest."""
_FIELDS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_REQUIRED = ("ssm.inner_size", "attention.key_length", "rope.dimension_count", "rope.freq_base")


def _names(layer: Any, product_of: ProductOf) -> Any:
    if not hasattr(layer, "linear_attn"):
        return layer
    norms = {name: getattr(layer, name) for name in ("input_layernorm", "post_attention_layernorm")}
    return SimpleNamespace(self_attn=_mixer(layer.linear_attn, product_of), mlp=layer.mlp, **norms)


def _mixer(module: Any, product_of: ProductOf) -> SimpleNamespace:
    if module.activation not in ("silu", "swish") or module.conv1d.bias is not None:
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
    return SimpleNamespace(**as_attention(inputs, module.out_proj, mixer))


def _derived(stated: Stated, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that several values state together. MTP layers are counted with the others."""
    size, keys = fields["head_dim"], stated.positive("ssm.group_count", MOST_GROUPS)
    heads, inner = int(stated.get("ssm.time_step_rank")), int(stated.get("ssm.inner_size"))
    rotated, more = int(stated.get("rope.dimension_count")), int(stated.get("nextn_predict_layers", 0))
    if "shared_expert_intermediate_size" in fields:
        stated.positive(_SHARED, MOST_INNER)
    if heads % keys:
        raise stated.invalid("ssm.time_step_rank", f"a multiple of the {keys} groups")
    if inner % heads:
        raise stated.invalid("ssm.inner_size", f"a multiple of the {heads} heads")
    if rotated > size:
        raise stated.invalid("rope.dimension_count", f"at most the {size} numbers of a head")
    layers = fields["num_hidden_layers"] - more
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta"), "partial_rotary_factor": rotated / size}
    if stated.architecture != "qwen3next":
        rope["mrope_section"] = sections(stated, rotated // 2)
    recurrent = _are_recurrent(stated, layers, more)
    return {
        **({"num_mtp_layers": more, "mtp_layer_types": [FULL] * more} if more else {}),
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if one else FULL for one in recurrent],
        "linear_value_head_dim": inner // heads,
        "rope_parameters": rope,
    }


def _are_recurrent(stated: Stated, layers: int, more: int) -> list[bool]:
    """Return which layers have no attention: those of a list of all layers, or all but those of an interval.

    more: MTP layers, which the list includes.
    """
    if _RECURRENT not in stated:
        known = stated.architecture != "qwen3next" or _INTERVAL in stated
        interval = stated.positive(_INTERVAL, _MOST_INTERVAL) if known else _USUAL_INTERVAL
        return [bool((i + 1) % interval) for i in range(layers)]
    found = stated.flags(_RECURRENT) or []
    if len(found) != layers + more or all(found[:layers]) or any(found[layers:]):
        raise stated.invalid(_RECURRENT, f"a list of {layers + more} flags, some of them false, and the last {more}")
    return found[:layers]


def _split(model: Any, tensors: Collection[str]) -> None:
    """Replace the joint inputs of Qwen3-Next's mixers by layers in order of kind: the kernels read their outputs as they are.

    transformers reads them by key heads. Older files have one tensor for all kinds.
    """
    config = model.config
    for i, layer in enumerate(model.model.layers):
        if (mixer := getattr(layer, "linear_attn", None)) is None:
            continue
        rows = {"in_proj_qkv": int(mixer.conv_dim), "in_proj_z": int(mixer.value_dim)}
        if f"blk.{i}.ssm_in.weight" in tensors:
            rows = {"in_proj_qkvz": sum(rows.values())}
        parts = {name: nn.Linear(config.hidden_size, n, bias=False, device="meta") for name, n in rows.items()}
        mixer.in_proj_qkvz = ReorderedOutput(parts, torch.argsort(_by_kind(config, "ssm_in")))
        mixer.in_proj_ba = ReorderedOutput({"in_proj_ba": mixer.in_proj_ba}, torch.argsort(_by_kind(config, "ssm_ba")))


def _by_kind(config: Any, part: str) -> torch.Tensor:
    """Return the index among rows by key heads of each row by kind. part: ssm_in, or ssm_ba for betas and alphas."""
    keys = config.linear_num_key_heads
    own = config.linear_num_value_heads // keys
    sizes = [own] * 2
    if part == "ssm_in":
        sizes = [config.linear_key_head_dim] * 2 + [own * config.linear_value_head_dim] * 2
    kinds = torch.split(torch.arange(keys * sum(sizes)).view(keys, -1), sizes, 1)
    return torch.cat([one.reshape(-1) for one in kinds])


def _rows_by_kind(config: Any, part: str) -> torch.Tensor | None:
    return _by_kind(config, part) if part in ("ssm_in", "ssm_ba") else None


def _rows_in_tiles(config: Any, part: str) -> torch.Tensor | None:
    keys, values, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    if keys == values:
        return None
    if part in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        return _tiles(keys, values, 1)
    if part == "attn_gate":
        return _tiles(keys, values, size)
    if part in ("attn_qkv", "ssm_conv1d"):  # queries and keys are in their order
        first = 2 * keys * config.linear_key_head_dim
        return torch.cat([torch.arange(first), first + _tiles(keys, values, size)])
    return None


def _columns_in_tiles(config: Any) -> torch.Tensor | None:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    return None if keys == values else _tiles(values // keys, values, config.linear_value_head_dim)


def _tiles(groups: int, heads: int, size: int) -> torch.Tensor:
    """Return the indices of the rows of heads [heads / groups, groups] in the order [groups, heads / groups]."""
    order = torch.arange(heads).view(heads // groups, groups).T.reshape(-1)
    return (order[:, None] * size + torch.arange(size)).reshape(-1)


FAMILIES = tuple(
    Family(name, Kinds.MIXED, names=_names, norms_from_one=norms, gates_heads=True)
    for name, norms in (("qwen3_next", "Qwen3Next"), ("qwen3_5_text", "Qwen3_5"), ("qwen3_5_moe_text", "Qwen3_5"))
)
_DENSE = Architecture(
    "qwen3_5_text",
    _FIELDS,
    required=(*_FIELDS, *_REQUIRED),
    derive=_derived,
    derived=(_INTERVAL, _RECURRENT, "nextn_predict_layers", SECTIONS),
    norms_from_one=True,
    mixed=True,
    row_order=_rows_in_tiles,
    column_order=_columns_in_tiles,
)
_MOE = replace(
    _DENSE,
    model_type="qwen3_5_moe_text",
    fields={**_FIELDS, **EXPERTS, _SHARED: "shared_expert_intermediate_size"},
    required=(*_FIELDS, *EXPERTS, *_REQUIRED, _SHARED),
    lacking=("feed_forward_length",),
)
ARCHITECTURES = {
    "qwen35": _DENSE,
    "qwen35moe": _MOE,
    "qwen3next": replace(
        _MOE,
        model_type="qwen3_next",
        derived=_DENSE.derived[:-1],
        split=_split,
        row_order=_rows_by_kind,
        column_order=None,
    ),
}
