"""A smaller model of a model's family, cut out of its weights.

Owns which layers, dimensions, heads and neurons are kept, and where each weight of a Llama-like layer has them. What was measured
of their importance is given (importance.py). The result is a plain transformers model: a start for distilling, of little
use as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from foresay.errors import ConfigError, UnknownNameError, UnsupportedModelError
from foresay.training.importance import Importance

KEEP = ("first", "even", "important")
"""How layers are chosen: the first ones, evenly spaced ones with both ends, or those that change their input most."""
_JOINT = {"qkv_proj": ("q", "kv", "kv"), "gate_up_proj": ("feed", "feed")}
_ROWS = {"q_proj": "q", "k_proj": "kv", "v_proj": "kv", "gate_proj": "feed", "up_proj": "feed"}
_COLUMNS = {"o_proj": "q", "down_proj": "feed"}
_NORMS = ("layernorm", "norm")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama-like model that pruning changes; the size of a head stays."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int

    @staticmethod
    def of(config: Any) -> Shape:
        """A model's. Raises UnsupportedModelError where its configuration has other words for them."""
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
        values = [getattr(config, name, None) for name in names]
        if not all(isinstance(value, int) for value in values):
            raise UnsupportedModelError(
                f"models of the family {config.model_type!r} cannot be pruned: they lack one of {names}"
            )
        return Shape(*values)  # type: ignore[arg-type]

    def smaller(self, **sizes: int | None) -> Shape:
        """With some sizes changed, by the names of the fields. Raises ConfigError for one that cannot be cut out of this."""
        out = replace(self, **{name: value for name, value in sizes.items() if value is not None})
        for field in fields(self):
            given, whole = getattr(out, field.name), getattr(self, field.name)
            if not 1 <= given <= whole:
                raise ConfigError(f"{field.name}={given} must be 1 to {whole}, what the model has")
        if out.heads % out.kv_heads:
            raise ConfigError(f"heads={out.heads} must be a multiple of kv_heads={out.kv_heads}")
        if out.heads // out.kv_heads > self.heads // self.kv_heads:
            raise ConfigError(
                f"heads={out.heads} over kv_heads={out.kv_heads} needs {out.heads // out.kv_heads} heads a group, and the model "
                f"has {self.heads // self.kv_heads}; keep more kv_heads"
            )
        return out


@dataclass(frozen=True, slots=True)
class Kept:
    """What of a model is kept, in ascending order."""

    layers: tuple[int, ...]
    hidden: torch.Tensor
    """[H'] dimensions of the hidden state, of all layers alike."""
    heads: tuple[torch.Tensor, ...]
    """[Q'] query heads of each kept layer; those of one group lie together."""
    kv_heads: tuple[torch.Tensor, ...]
    feed_forward: tuple[torch.Tensor, ...]
    """[F'] neurons of each kept layer."""


def layers_to_keep(keep: str | Sequence[int], count: int, total: int, importance: Importance | None) -> tuple[int, ...]:
    """The layers, ascending. keep: one of KEEP, or the layers themselves. Raises ConfigError for what cannot be."""
    if not isinstance(keep, str):
        chosen = tuple(sorted(set(keep)))
        if len(chosen) != count or chosen[0] < 0 or chosen[-1] >= total:
            raise ConfigError(f"layers {list(keep)} must be {count} different ones of 0 to {total - 1}")
        return chosen
    if keep not in KEEP:
        raise UnknownNameError("way to keep layers", keep, KEEP)
    if keep == "first":
        return tuple(range(count))
    if keep == "even":
        return tuple(round(i * (total - 1) / max(1, count - 1)) for i in range(count))
    if importance is None:
        raise ConfigError("keep='important' needs text to measure the layers on")
    return tuple(sorted(torch.topk(importance.layers, count).indices.tolist()))


def what_to_keep(whole: Shape, shape: Shape, layers: Sequence[int], importance: Importance | None) -> Kept:
    """The most important dimensions, groups of heads, heads of each group, and neurons.

    Raises ConfigError where a width is cut and nothing was measured.
    """
    if importance is None:
        if replace(shape, layers=whole.layers) != whole:
            raise ConfigError("a narrower model needs text to measure its dimensions, heads and neurons on")
        return Kept(
            tuple(layers),
            torch.arange(whole.hidden),
            (torch.arange(whole.heads),) * len(layers),
            (torch.arange(whole.kv_heads),) * len(layers),
            (torch.arange(whole.feed_forward),) * len(layers),
        )
    heads, groups = [], []
    for layer in layers:
        by_group = importance.heads[layer].view(whole.kv_heads, -1)
        group = _most(by_group.sum(1), shape.kv_heads)
        size, kept = by_group.shape[1], shape.heads // shape.kv_heads
        groups.append(group)
        heads.append(torch.cat([int(g) * size + _most(by_group[g], kept) for g in group]))
    model_input = tuple(_most(importance.feed_forward[layer], shape.feed_forward) for layer in layers)
    return Kept(tuple(layers), _most(importance.hidden, shape.hidden), tuple(heads), tuple(groups), model_input)


def _most(scores: torch.Tensor, count: int) -> torch.Tensor:
    return torch.topk(scores, count).indices.sort().values


def pruned(model: Any, shape: Shape, kept: Kept) -> Any:
    """A new transformers model of the shape, with the kept weights in the model's dtype, on the CPU.

    Raises UnsupportedModelError for a family with weights of other kinds than Llama's.
    """
    from transformers import AutoModelForCausalLM

    config = smaller_config(model.config, shape, kept.layers)
    out = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    weights = sliced(model.state_dict(), Shape.of(model.config), kept, head_size(model.config))
    wanted = out.state_dict()
    wrong = [n for n in wanted if n not in weights or weights[n].shape != wanted[n].shape]
    if wrong:
        raise UnsupportedModelError(
            f"models of the family {model.config.model_type!r} cannot be pruned: {wrong[0]} is not made of what is kept"
        )
    out.load_state_dict({name: weights[name] for name in wanted})
    out.generation_config = copy.deepcopy(model.generation_config)
    return out.eval()


def head_size(config: Any) -> int:
    """Dimensions of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def smaller_config(config: Any, shape: Shape, layers: Sequence[int]) -> Any:
    """The configuration of the pruned model."""
    out = copy.deepcopy(config)
    out.head_dim = head_size(config)
    out.num_hidden_layers, out.hidden_size, out.intermediate_size = shape.layers, shape.hidden, shape.feed_forward
    out.num_attention_heads, out.num_key_value_heads = shape.heads, shape.kv_heads
    if getattr(config, "layer_types", None):
        out.layer_types = [config.layer_types[layer] for layer in layers]
    return out


def sliced(weights: Mapping[str, torch.Tensor], whole: Shape, kept: Kept, dim: int) -> dict[str, torch.Tensor]:
    """The kept parts of a model's weights by their new names. Raises UnsupportedModelError for a weight of another kind."""
    out, places = {}, {layer: place for place, layer in enumerate(kept.layers)}
    for name, weight in weights.items():
        parts = name.split(".")
        at = parts.index("layers") + 1 if "layers" in parts else None
        if at is not None and int(parts[at]) not in places:
            continue
        place = None if at is None else places[int(parts[at])]
        if at is not None:
            parts[at] = str(place)
        out[".".join(parts)] = _cut(name, parts[-2], weight, _axes(whole, kept, place, dim)).contiguous()
    return out


def _axes(whole: Shape, kept: Kept, place: int | None, dim: int) -> dict[str, tuple[int, torch.Tensor]]:
    """Kind of axis -> (its whole size, the indices kept)."""
    out = {"hidden": (whole.hidden, kept.hidden)}
    if place is not None:
        within = torch.arange(dim)
        out["q"] = (whole.heads * dim, (kept.heads[place][:, None] * dim + within).flatten())
        out["kv"] = (whole.kv_heads * dim, (kept.kv_heads[place][:, None] * dim + within).flatten())
        out["feed"] = (whole.feed_forward, kept.feed_forward[place])
    return out


def _cut(name: str, kind: str, weight: torch.Tensor, axes: Mapping[str, tuple[int, torch.Tensor]]) -> torch.Tensor:
    """The kept part of one weight. kind: the name of its module."""
    rows: tuple[str, ...] = _JOINT.get(kind, (_ROWS[kind],) if kind in _ROWS else ())
    if kind in ("q_norm", "k_norm"):  # of each head alike, or of all heads together
        size, indices = axes["q" if kind == "q_norm" else "kv"]
        return weight[indices] if len(weight) == size else weight
    if kind.endswith(_NORMS) or kind in _COLUMNS:
        rows = ("hidden",)
    if kind not in (*_ROWS, *_JOINT, *_COLUMNS, "embed_tokens", "lm_head") and not kind.endswith(_NORMS):
        raise UnsupportedModelError(
            f"a model with the weight {name!r} cannot be pruned: what it is made of is not known"
        )
    if rows:
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + axes[row][0])
        if starts[-1] != len(weight):
            raise UnsupportedModelError(
                f"a model whose {name!r} has {len(weight)} rows cannot be pruned: {starts[-1]} expected"
            )
        weight = weight[torch.cat([start + axes[row][1] for start, row in zip(starts, rows, strict=False)])]
    if weight.dim() == 2:
        weight = weight[:, axes[_COLUMNS.get(kind, "hidden")][1]]
    return weight
