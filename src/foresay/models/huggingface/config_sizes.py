"""Allowed ranges of the sizes and factors in a transformers configuration, under the names that all families use.

An absurd size would otherwise allocate that many layers or modules, or reach kernels that index memory with it. Knows no files
and no weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from foresay.errors import UnsupportedModelError

_MAX_DEPTH = 32
"""Deepest allowed nesting of objects."""
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
    "top_k_experts": (0, 1 << 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "vocab_size"), _LENGTH),
    "sliding_window": (0, (1 << 31) - 1),
    "original_max_position_embeddings": _LENGTH,
}
"""Allowed ranges of integers. A list has one value per layer; null means the family's default."""
_EPSILON, _FACTOR = (1e-20, 1.0), (1e-6, 1e15)
_FACTORS = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), _EPSILON),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "factor", "rope_local_base_freq", "attention_factor"), _FACTOR),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), _FACTOR),
    **dict.fromkeys(("short_factor", "long_factor"), _FACTOR),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (1e-6, 1.0)),
    "llama_4_scaling_beta": (0.0, 1e3),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar"), (1e-3, 1e9)),
}
"""Allowed ranges of finite numbers."""


class InvalidValue(NamedTuple):
    """A value outside its allowed range."""

    name: str
    """Name of the field, prefixed with the names of the objects around it."""
    value: Any
    allowed: str


def find_invalid(values: Mapping[str, Any]) -> InvalidValue | None:
    """Return the first value of a configuration that is out of its range, or None."""
    for prefix, part in _objects(values):
        if part is None:
            return InvalidValue(prefix, "an object", f"at most {_MAX_DEPTH} nested objects")
        for key, value in part.items():
            for one in value if isinstance(value, list) else [value]:
                allowed = None if one is None else _allowed(key, one)
                if allowed is not None:
                    return InvalidValue(f"{prefix}{key}", one, allowed)
        heads, shared = part.get("num_attention_heads"), part.get("num_key_value_heads")
        if type(heads) is int and type(shared) is int and heads % shared:
            return InvalidValue(f"{prefix}num_key_value_heads", shared, f"a divisor of the {heads} heads")
    return None


def check_sizes(config: Any) -> None:
    """Raise UnsupportedModelError for a transformers configuration with a value outside its allowed range."""
    invalid = find_invalid(config.to_dict())
    if invalid is not None:
        raise UnsupportedModelError(
            f"the configuration has {invalid.name}={invalid.value!r}; allowed is {invalid.allowed}"
        )


def _allowed(key: str, value: object) -> str | None:
    """Describe the allowed values if this value is not one of them; None if it is allowed."""
    if key in _SIZES:
        low, high = _SIZES[key]
        valid = type(value) is int and low <= value <= high
        return None if valid else f"a whole number from {low} to {high}"
    if key in _FACTORS:
        lowest, highest = _FACTORS[key]
        valid = type(value) in (int, float) and lowest <= value <= highest  # type: ignore[operator]
        return None if valid else f"a finite number from {lowest:g} to {highest:g}"
    return "a number" if isinstance(value, float) and math.isnan(value) else None


def _objects(values: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """Yield (prefix of its field names, object) for the configuration and each object in it; None for one nested too deep."""
    pending: list[tuple[str, Any, int]] = [("", values, 0)]
    while pending:
        prefix, value, depth = pending.pop()
        if depth > _MAX_DEPTH:
            yield prefix, None
            return
        if isinstance(value, Mapping):
            yield prefix, value
            pending += [(f"{prefix}{name}.", one, depth + 1) for name, one in value.items()]
        elif isinstance(value, list):
            pending += [(prefix, one, depth + 1) for one in value]
