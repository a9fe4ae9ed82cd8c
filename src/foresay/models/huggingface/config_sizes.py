"""Sizes of a model's configuration that no attention can have: refused by name before anything is made of them.

Owns which fields are compared. Whether weights and configuration fit each other is for whoever loads the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from foresay.errors import UnsupportedModelError

_POSITIVE = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_FACTORS = ("partial_rotary_factor", "rotary_pct")


def check_sizes(config: Any) -> None:
    """Raise UnsupportedModelError for a transformers configuration whose heads or rotary positions cannot be."""
    text = config.get_text_config(decoder=True)
    for name in _POSITIVE:
        value = getattr(text, name, None)
        if isinstance(value, int) and value < 1:
            raise UnsupportedModelError(f"the configuration has {name}={value}; it must be at least 1")
    heads, keys = (getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(keys, int) and heads % keys:
        raise UnsupportedModelError(
            f"the configuration has num_attention_heads={heads} and num_key_value_heads={keys}; "
            "the first must be a multiple of the second"
        )
    for name, value in _factors(text):
        if isinstance(value, int | float) and not 0 < value <= 1:
            raise UnsupportedModelError(f"the configuration has {name}={value}; it must be above 0 and at most 1")


def _factors(config: Any) -> Iterator[tuple[str, Any]]:
    """The shares of a head that rotary positions turn, by the names of their fields."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [one for one in rope.values() if isinstance(one, dict)] if isinstance(rope, dict) else []
    for name in _FACTORS:
        yield name, getattr(config, name, None)
        for part in (rope, *kinds) if isinstance(rope, dict) else ():
            yield f"rope_parameters.{name}", part.get(name)
