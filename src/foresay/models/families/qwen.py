"""Qwen2 and Qwen3, their mixtures of experts, and the language models of those that read images."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from foresay.models.families.family import Architecture, Family, Kinds
from foresay.models.families.positions import SECTIONS, sections
from foresay.models.families.stated import Stated

logger = logging.getLogger("foresay")

EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_VISION = (SECTIONS, "n_deepstack_layers")
"""Keys of the positions of images, which are equal numbers in texts, and of the layers that read images."""


def _text_alone(stated: Stated, fields: dict[str, Any]) -> dict[str, Any]:
    """The three positions of a token are equal in texts, whatever frequencies belong to each."""
    sections(stated, fields["head_dim"] // 2)
    logger.warning("%s also reads images in other programs: it is loaded for text only", stated.path)
    return {}


FAMILIES = (
    Family("qwen2", Kinds.LISTED, texts_of=("qwen2_vl_text", "qwen2_5_vl_text")),
    Family("qwen3", Kinds.LISTED, texts_of=("qwen3_vl_text",)),
    Family("qwen3_moe", Kinds.WINDOWED, has_experts=True),
)
_MOE = Architecture("qwen3_moe", EXPERTS, {"norm_topk_prob": True}, required=tuple(EXPERTS), scaled_linearly="")
ARCHITECTURES = {
    "qwen2": Architecture("qwen2", scaled_linearly=""),
    "qwen3": Architecture("qwen3", scaled_linearly=""),
    "qwen3moe": _MOE,
    "qwen2vl": Architecture("qwen2", derive=_text_alone, derived=_VISION[:1]),
    "qwen3vl": Architecture("qwen3", derive=_text_alone, derived=_VISION),
    "qwen3vlmoe": replace(_MOE, derive=_text_alone, derived=_VISION, scaled_linearly=None),
}
