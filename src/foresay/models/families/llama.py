"""Llama, and families with its layers: Mistral, Mixtral, SmolLM3, Phi-3. Files of all but Phi interleave the halves of heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foresay.models.families.family import Architecture, Family, Kinds
from foresay.models.families.positions import USUAL_YARN, WINDOW, YARN
from foresay.models.families.stated import Stated

MIXTRAL = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_DENSE: dict[str, tuple[object, ...]] = {"expert_count": (0,), "expert_used_count": (0,)}
_MOST_RATE = 1e3
"""Greatest rate of the scale of queries by their position."""
_TEMPERATURE = ("attention.temperature_scale", "attention.temperature_length", "rope.scaling.yarn_log_multiplier")
"""Keys of the scale of Ministral 3's queries by their position, and of YaRN's factor next to it."""


def _ministral3(stated: Stated, fields: dict[str, Any]) -> dict[str, Any]:
    """Queries are scaled by their position; YaRN's factor of the attention is the usual one, or 1."""
    rope, (scale, length, log) = dict(fields["rope_parameters"]), _TEMPERATURE
    if rope["rope_type"] != YARN:
        raise stated.invalid("rope.scaling.type", f"{YARN!r}")
    rate = stated.get(scale)
    if type(rate) is not float or not 0 < rate <= _MOST_RATE:
        raise stated.invalid(scale, f"a number above 0, at most {_MOST_RATE:g}")
    original = rope["original_max_position_embeddings"]
    if stated.get(length, original) not in (0, original):
        raise stated.invalid(length, f"{original}, the original length of the context")
    usual = stated.get(log, 0.0)
    if usual not in (0.0, 1.0):
        raise stated.invalid(log, "0 or 1")
    factors = {"mscale": 1.0, "mscale_all_dim": 1.0} if usual else {}
    return {"rope_parameters": {**rope, **factors, "llama_4_scaling_beta": rate}}


FAMILIES = (
    Family("llama"),
    Family("mistral", Kinds.WINDOWED),
    Family("ministral", Kinds.LISTED),
    Family("ministral3", Kinds.WINDOWED, scales_queries=True),
    Family("mixtral", Kinds.WINDOWED, has_experts=True),
    Family("phi3", Kinds.WINDOWED),
    Family("smollm3", Kinds.LISTED),
)
LLAMA = Architecture("llama", interleaved=True, scaled_by_tensor=True, scaled_linearly="")
_OF_MINISTRAL3 = Architecture(
    "ministral3",
    derive=_ministral3,
    derived=_TEMPERATURE,
    neutral={**_DENSE, **{name: one for name, one in USUAL_YARN.items() if name not in _TEMPERATURE}},
    interleaved=True,
    yarn={},
)
ARCHITECTURES = {
    "llama": replace(
        LLAMA, variants={"expert_count": replace(LLAMA, model_type="mixtral", fields=MIXTRAL, required=tuple(MIXTRAL))}
    ),
    "mistral3": replace(
        LLAMA,
        model_type="mistral",
        fixed={"sliding_window": None},
        neutral=_DENSE,
        variants={_TEMPERATURE[0]: _OF_MINISTRAL3},
    ),
    "phi3": Architecture("phi3", WINDOW),
    "smollm3": replace(LLAMA, model_type="smollm3"),
}
