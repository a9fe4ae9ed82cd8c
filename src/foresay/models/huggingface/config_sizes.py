"""The sizes and factors of a transformers configuration: the range of each, whatever families call it.

A size that no model has would become a list of layers or a module for each, or reach kernels that read memory by it. Knows no
files and no weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from foresay.errors import UnsupportedModelError

_DEEPEST = 32
"""Objects within objects."""
_LAYERS, _WIDTH, _HEADS, _LENGTH = (1, 1024), (1, 1 << 24), (1, 1 << 16), (1, (1 << 31) - 1)
_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), (0, 1024)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size", "moe_intermediate_size"), _WIDTH),
    **dict.fromkeys(
        ("d_ff", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "word_embed_proj_dim"), _WIDTH
    ),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "num_kv_heads"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "head_dim", "d_kv"), _HEADS),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok"), (0, 1 << 16)),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "vocab_size"), _LENGTH),
    "sliding_window": (0, (1 << 31) - 1),
}
"""The range of whole numbers; a list gives one for each layer, null is the family's own."""
_EPSILON, _FACTOR = (1e-20, 1.0), (1e-6, 1e15)
_FACTORS = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), _EPSILON),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "factor", "rope_local_base_freq", "attention_factor"), _FACTOR),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), _FACTOR),
    **dict.fromkeys(("short_factor", "long_factor"), _FACTOR),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (1e-6, 1.0)),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar"), (1e-3, 1e9)),
}
"""The range of numbers, which are finite."""


class Wrong(NamedTuple):
    """A value that no model has."""

    name: str
    """Its field; fields of objects within have the objects' names before them."""
    value: Any
    allowed: str


def wrong_value(values: Mapping[str, Any]) -> Wrong | None:
    """The first value of a configuration that is out of range; None if all are in theirs."""
    for where, part in _objects(values):
        if part is None:
            return Wrong(where, "an object", f"{_DEEPEST} objects within each other")
        for key, value in part.items():
            for one in value if isinstance(value, list) else [value]:
                allowed = None if one is None else _allowed(key, one)
                if allowed is not None:
                    return Wrong(f"{where}{key}", one, allowed)
        heads, shared = part.get("num_attention_heads"), part.get("num_key_value_heads")
        if type(heads) is int and type(shared) is int and heads % shared:
            return Wrong(f"{where}num_key_value_heads", shared, f"a divisor of the {heads} heads")
    return None


def check_sizes(config: Any) -> None:
    """Raise UnsupportedModelError for a transformers configuration with a value that no model has."""
    wrong = wrong_value(config.to_dict())
    if wrong is not None:
        raise UnsupportedModelError(f"the configuration has {wrong.name}={wrong.value!r}; allowed is {wrong.allowed}")


def _allowed(key: str, value: object) -> str | None:
    """The values that are allowed, where this is none of them."""
    if key in _SIZES:
        low, high = _SIZES[key]
        fits = type(value) is int and low <= value <= high
        return None if fits else f"a whole number from {low} to {high}"
    if key in _FACTORS:
        smallest, largest = _FACTORS[key]
        fits = type(value) in (int, float) and smallest <= value <= largest  # type: ignore[operator]
        return None if fits else f"a finite number from {smallest:g} to {largest:g}"
    return "a number" if isinstance(value, float) and math.isnan(value) else None


def _objects(values: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """(the beginning of its fields' names, the object) for the whole and each object in it; None for one that is too deep."""
    waiting: list[tuple[str, Any, int]] = [("", values, 0)]
    while waiting:
        where, value, depth = waiting.pop()
        if depth > _DEEPEST:
            yield where, None
            return
        if isinstance(value, Mapping):
            yield where, value
            waiting += [(f"{where}{name}.", one, depth + 1) for name, one in value.items()]
        elif isinstance(value, list):
            waiting += [(where, one, depth + 1) for one in value]
