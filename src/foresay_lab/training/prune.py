"""Pruning: a smaller model of the same family, cut out of a model's weights.

Owns the choice of layers, dimensions, heads and neurons, and their axes in each weight of a Llama-like layer. Importance is
measured in importance.py. The result is a plain transformers model: a start for distillation, of little use without it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from foresay.errors import ConfigError, UnknownNameError, UnsupportedModelError
from foresay_lab.training.importance import Importance

LAYER_CHOICES = ("first", "even", "important")
"""How layers are chosen: the first, evenly spaced ones including both ends, or those that change their input most."""
_JOINT = {"qkv_proj": ("q", "kv", "kv"), "gate_up_proj": ("feed", "feed")}
_ROWS = {"q_proj": "q", "k_proj": "kv", "v_proj": "kv", "gate_proj": "feed", "up_proj": "feed"}
_COLUMNS = {"o_proj": "q", "down_proj": "feed"}
_NORMS = ("layernorm", "norm")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama-like model that pruning changes. The size of a head does not change."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int

    @staticmethod
    def of(config: Any) -> Shape:
        """Return a model's sizes. Raises UnsupportedModelError for a configuration without them."""
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
        values = [getattr(config, name, None) for name in names]
        if not all(isinstance(value, int) for value in values):
            text = f"models of the family {config.model_type!r} cannot be pruned: they lack one of {names}"
            raise UnsupportedModelError(text)
        return Shape(*values)  # type: ignore[arg-type]

    def smaller(self, **sizes: int | None) -> Shape:
        """Return the shape with some sizes changed, by field name. Raises ConfigError for a size that pruning cannot give."""
        out = replace(self, **{name: value for name, value in sizes.items() if value is not None})
        for field in fields(self):
            new, full = getattr(out, field.name), getattr(self, field.name)
            if not 1 <= new <= full:
                raise ConfigError(f"must be 1 to {full}, the size of the model", param=field.name, value=new)
        if out.heads % out.kv_heads:
            raise ConfigError("must be a multiple of {kv_heads}", param="heads", value=out.heads, kv_heads=out.kv_heads)
        group, most = (shape.heads // shape.kv_heads for shape in (out, self))
        if group > most:
            text = f"with {{kv_heads}} leaves {group} heads per group, and the model has {most}; keep more"
            raise ConfigError(text, param="heads", value=out.heads, kv_heads=out.kv_heads)
        return out


@dataclass(frozen=True, slots=True)
class Kept:
    """The kept parts of a model, in ascending order."""

    layers: tuple[int, ...]
    hidden: torch.Tensor
    """[H'] dimensions of the hidden state, the same for all layers."""
    heads: tuple[torch.Tensor, ...]
    """[Q'] query heads of each kept layer; those of a group are adjacent."""
    kv_heads: tuple[torch.Tensor, ...]
    feed_forward: tuple[torch.Tensor, ...]
    """[F'] neurons of each kept layer."""


def layers_to_keep(keep: str | Sequence[int], count: int, total: int, importance: Importance | None) -> tuple[int, ...]:
    """Return the kept layers, ascending. keep: one of LAYER_CHOICES, or layer indices. Raises ConfigError for an impossible
    choice."""
    if not isinstance(keep, str):
        chosen = tuple(sorted(set(keep)))
        if len(chosen) != count or chosen[0] < 0 or chosen[-1] >= total:
            raise ConfigError(f"must be {count} different ones of 0 to {total - 1}", param="layers", value=list(keep))
        return chosen
    if keep not in LAYER_CHOICES:
        raise UnknownNameError("keep", keep, LAYER_CHOICES)
    if keep == "first":
        return tuple(range(count))
    if keep == "even":
        return tuple(round(i * (total - 1) / max(1, count - 1)) for i in range(count))
    if importance is None:
        raise ConfigError("needs text to measure the layers' importance on", param="keep", value=keep)
    return tuple(sorted(torch.topk(importance.layers, count).indices.tolist()))


def choose_kept(full: Shape, shape: Shape, layers: Sequence[int], importance: Importance | None) -> Kept:
    """Choose the most important dimensions, groups of heads, heads of each group, and neurons.

    Raises ConfigError if a width is reduced without measured importance.
    """
    if importance is None:
        if replace(shape, layers=full.layers) != full:
            text = "is needed for a narrower model, to measure the importance of dimensions, heads and neurons on"
            raise ConfigError(text, param="text")
        return Kept(
            tuple(layers),
            torch.arange(full.hidden),
            (torch.arange(full.heads),) * len(layers),
            (torch.arange(full.kv_heads),) * len(layers),
            (torch.arange(full.feed_forward),) * len(layers),
        )
    heads, groups = [], []
    for layer in layers:
        by_group = importance.heads[layer].view(full.kv_heads, -1)
        group = _top(by_group.sum(1), shape.kv_heads)
        size, kept = by_group.shape[1], shape.heads // shape.kv_heads
        groups.append(group)
        heads.append(torch.cat([int(g) * size + _top(by_group[g], kept) for g in group]))
    feed_forward = tuple(_top(importance.feed_forward[layer], shape.feed_forward) for layer in layers)
    return Kept(tuple(layers), _top(importance.hidden, shape.hidden), tuple(heads), tuple(groups), feed_forward)


def _top(scores: torch.Tensor, count: int) -> torch.Tensor:
    return torch.topk(scores, count).indices.sort().values


def pruned(model: Any, shape: Shape, kept: Kept) -> Any:
    """Return a new transformers model of the shape with the kept weights, in the model's dtype and on the CPU.

    Raises UnsupportedModelError for a family with other weights than Llama's.
    """
    from transformers import AutoModelForCausalLM

    full = model.config
    out = AutoModelForCausalLM.from_config(smaller_config(full, shape, kept.layers), dtype=model.dtype)
    weights = sliced(model.state_dict(), Shape.of(full), kept, head_size(full))
    expected = out.state_dict()
    wrong = [n for n in expected if n not in weights or weights[n].shape != expected[n].shape]
    if wrong:
        text = f"models of the family {full.model_type!r} cannot be pruned: the kept parts do not give {wrong[0]}"
        raise UnsupportedModelError(text)
    out.load_state_dict({name: weights[name] for name in expected})
    out.generation_config = copy.deepcopy(model.generation_config)
    return out.eval()


def head_size(config: Any) -> int:
    """Return the dimensions of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def smaller_config(config: Any, shape: Shape, layers: Sequence[int]) -> Any:
    """Return the configuration of the pruned model."""
    out = copy.deepcopy(config)
    out.head_dim = head_size(config)
    out.num_hidden_layers, out.hidden_size, out.intermediate_size = shape.layers, shape.hidden, shape.feed_forward
    out.num_attention_heads, out.num_key_value_heads = shape.heads, shape.kv_heads
    if getattr(config, "layer_types", None):
        out.layer_types = [config.layer_types[layer] for layer in layers]
    return out


def sliced(weights: Mapping[str, torch.Tensor], full: Shape, kept: Kept, dim: int) -> dict[str, torch.Tensor]:
    """Return the kept parts of a model's weights by their new names. Raises UnsupportedModelError for an unknown weight."""
    out, new_indices = {}, {layer: new_index for new_index, layer in enumerate(kept.layers)}
    for name, weight in weights.items():
        parts = name.split(".")
        layer_part = parts.index("layers") + 1 if "layers" in parts else None
        if layer_part is not None and int(parts[layer_part]) not in new_indices:
            continue
        new_index = None if layer_part is None else new_indices[int(parts[layer_part])]
        if layer_part is not None:
            parts[layer_part] = str(new_index)
        out[".".join(parts)] = _cut(name, parts[-2], weight, _axes(full, kept, new_index, dim)).contiguous()
    return out


def _axes(full: Shape, kept: Kept, new_index: int | None, dim: int) -> dict[str, tuple[int, torch.Tensor]]:
    """Return a dict from the kind of an axis to (its full size, the kept indices)."""
    out = {"hidden": (full.hidden, kept.hidden)}
    if new_index is not None:
        within = torch.arange(dim)
        out["q"] = (full.heads * dim, (kept.heads[new_index][:, None] * dim + within).flatten())
        out["kv"] = (full.kv_heads * dim, (kept.kv_heads[new_index][:, None] * dim + within).flatten())
        out["feed"] = (full.feed_forward, kept.feed_forward[new_index])
    return out


def _cut(name: str, kind: str, weight: torch.Tensor, axes: Mapping[str, tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Return the kept part of one weight. kind: the name of its module."""
    rows: tuple[str, ...] = _JOINT.get(kind, (_ROWS[kind],) if kind in _ROWS else ())
    if kind in ("q_norm", "k_norm"):  # shared by all heads, or over all heads
        size, indices = axes["q" if kind == "q_norm" else "kv"]
        return weight[indices] if len(weight) == size else weight
    if kind.endswith(_NORMS) or kind in _COLUMNS:
        rows = ("hidden",)
    if kind not in (*_ROWS, *_JOINT, *_COLUMNS, "embed_tokens", "lm_head") and not kind.endswith(_NORMS):
        raise UnsupportedModelError(f"a model with the weight {name!r} cannot be pruned: its axes are not known")
    if rows:
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + axes[row][0])
        if starts[-1] != len(weight):
            text = f"a model whose {name!r} has {len(weight)} rows cannot be pruned: {starts[-1]} expected"
            raise UnsupportedModelError(text)
        weight = weight[torch.cat([start + axes[row][1] for start, row in zip(starts, rows, strict=False)])]
    if weight.dim() == 2:
        weight = weight[:, axes[_COLUMNS.get(kind, "hidden")][1]]
    return weight
