"""Positions that several families state: windows of layers, kinds of scaling, and the sections of positions of images."""

from __future__ import annotations

from typing import Any

from foresay.models.families.family import FULL, SLIDING
from foresay.models.families.stated import Stated

YARN = "yarn"
"""llama.cpp's name of YaRN, and transformers'."""
THETA = 10_000.0
"""Base of rotary positions of files that do not state it, as in llama.cpp."""
USUAL_YARN: dict[str, tuple[object, ...]] = {
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}
"""Values of YaRN's factors with which it is the usual one."""
WINDOW = {"attention.sliding_window": "sliding_window"}
SECTIONS = "rope.dimension_sections"
"""Key of the numbers of frequencies of the three kinds of positions of an image."""
_PATTERN = "attention.sliding_window_pattern"
_USUAL_PERIOD, _MOST_PERIOD = 4, 1024
"""Period of layers without a window: of files that do not state it, as in llama.cpp, and the longest."""


def kinds_of(slides: list[bool]) -> list[str]:
    """Return transformers' names of layers with a sliding window, and of those without."""
    return [SLIDING if one else FULL for one in slides]


def windows(stated: Stated, fields: dict[str, Any]) -> dict[str, Any]:
    """Types of the layers of a family in which each fourth one has no window, unless a file states another period or a list."""
    layers = int(fields["num_hidden_layers"])
    if "sliding_window" not in fields:
        return {"sliding_window": None, "layer_types": kinds_of([False] * layers)}
    slides, period = stated.flags(_PATTERN), stated.get(_PATTERN, _USUAL_PERIOD)
    if _PATTERN not in stated or type(stated.get(_PATTERN)) is int:
        is_valid = type(period) is int and 0 < period <= _MOST_PERIOD
        slides = [bool((i + 1) % period) for i in range(layers)] if is_valid else None
    if slides is None or len(slides) != layers:
        raise stated.invalid(_PATTERN, f"an integer from 1 to {_MOST_PERIOD}, or a list of {layers} flags")
    return {"layer_types": kinds_of(slides)}


def sections(stated: Stated, half: int) -> list[int]:
    """Return the frequencies of the three kinds of positions, which are equal for texts. half: number of frequencies."""
    found = (stated.numbers(SECTIONS) or [])[:4]
    if (
        len(found) < 3
        or any(type(one) is not int or one < 0 for one in found)
        or sum(found[:3]) != half
        or any(found[3:])
    ):
        raise stated.invalid(SECTIONS, f"a list of at least 3 integers, of which the first 3 add up to {half}, then 0")
    return found[:3]


def key_heads(stated: Stated, fields: dict[str, Any], other: str) -> dict[str, Any]:
    """Return the fields that a list of key heads states, 0 for a layer without attention. other: name of such a layer."""
    counts = [int(one) for one in stated.numbers("attention.head_count_kv") or ()]
    heads = max(counts, default=0)
    if not heads or {*counts} - {0, heads} or fields["num_attention_heads"] % heads:
        raise stated.invalid(
            "attention.head_count_kv", "a list of one integer for each layer, 0 or the number of its key heads"
        )
    return {
        "num_key_value_heads": heads,
        "layer_types": [FULL if count else other for count in counts],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields.pop("rope_theta")},
    }
