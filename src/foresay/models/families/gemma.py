"""Gemma 1 to 4: norms that add one to their weight, windows, and in Gemma 4 shared keys, inputs of layers and experts apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foresay.models.families.family import FULL, SLIDING, Architecture, Family, Kinds
from foresay.models.families.positions import THETA, WINDOW, kinds_of
from foresay.models.families.stated import Stated

PREFIX = "gemma"
"""Beginning of llama.cpp's names of these architectures, and of others that are not read here."""
_LARGEST_MODEL_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Number of layers of each family's 27-billion-parameter model, whose queries are not scaled by the attention head size."""
_MOE = {
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SIZES = (
    "attention.key_length",
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "attention.sliding_window_pattern",
    "rope.dimension_count",
    "rope.dimension_count_swa",
    "rope.freq_base_swa",
    "embedding_length_per_layer_input",
)
"""Keys of Gemma 4's sizes, of layers with windows ("swa") and of those without."""


def _scaled_queries(stated: Stated, fields: dict[str, Any]) -> dict[str, Any]:
    """No key stores the scale: like llama.cpp, recognize the largest model of a family by its number of layers."""
    largest = fields["num_hidden_layers"] == _LARGEST_MODEL_LAYERS[stated.architecture]
    whole = fields["hidden_size"] // fields["num_attention_heads"]
    return {"query_pre_attn_scalar": whole if largest else fields["head_dim"]}


def _gemma4(stated: Stated, fields: dict[str, Any]) -> dict[str, Any]:
    """Sizes of layers with windows and of those without; see Gemma 4's description in transformers for the names."""
    layers, sizes = int(fields["num_hidden_layers"]), {}
    for suffix in ("", "_swa"):
        sizes[suffix] = stated.get(f"attention.key_length{suffix}")
        for name in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
            if stated.get(name, sizes[suffix]) != sizes[suffix]:
                raise stated.invalid(name, f"{sizes[suffix]}, the length of keys")
    slides = stated.flags("attention.sliding_window_pattern")
    if slides is None or len(slides) != layers or slides[-1]:
        raise stated.invalid(
            "attention.sliding_window_pattern", f"a list of {layers} flags, of which the last is false"
        )
    first_shared, full = layers - int(fields.get("num_kv_shared_layers", 0)), slides.index(False)
    widths, heads = (stated.by_layer(one, layers) for one in ("feed_forward_length", "attention.head_count_kv"))
    doubled = widths != [widths[0]] * layers
    if doubled and widths != [widths[0] * (1 + (i >= first_shared)) for i in range(layers)]:
        raise stated.invalid("feed_forward_length", "the same in all layers, or twice that where keys are shared")
    if any(heads[i] != heads[slides.index(one)] for i, one in enumerate(slides)):
        raise stated.invalid("attention.head_count_kv", "the same in all layers of a kind")
    table = stated.shapes.get("per_layer_token_embd.weight", (fields["vocab_size"],))
    local = {"rope_type": "default", "rope_theta": float(stated.get("rope.freq_base_swa", THETA))}
    whole = {"rope_type": "proportional", "partial_rotary_factor": fields.pop("partial_rotary_factor")}
    return {
        "layer_types": kinds_of(slides),
        "head_dim": sizes["_swa"],
        "global_head_dim": sizes[""],
        "num_key_value_heads": heads[slides.index(True)] if True in slides else heads[0],
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in stated.shapes,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": doubled,
        "hidden_size_per_layer_input": int(stated.get("embedding_length_per_layer_input", 0)),
        "vocab_size_per_layer_input": table[0],
        "rope_parameters": {SLIDING: local, FULL: {**whole, "rope_theta": fields.pop("rope_theta")}},
    }


FAMILIES = (
    Family("gemma", norms_from_one="GemmaR"),
    Family("gemma2", Kinds.LISTED, norms_from_one="Gemma2R"),
    Family("gemma3_text", Kinds.LISTED, norms_from_one="Gemma3R"),
    Family("gemma4_text", Kinds.LISTED, kernels_only=True, shares_keys=True),
)
_GEMMA4 = Architecture(
    "gemma4_text",
    {
        **WINDOW,
        "attention.shared_kv_layers": "num_kv_shared_layers",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    required=(*_SIZES[:5], "attention.sliding_window"),
    derive=_gemma4,
    derived=_SIZES,
    by_layer=("feed_forward_length", "attention.head_count_kv"),
    proportional=True,
)
_GEMMA4_MOE = replace(
    _GEMMA4, fields={**_GEMMA4.fields, **_MOE}, fixed={"enable_moe_block": True}, required=(*_GEMMA4.required, *_MOE)
)
_USUAL = Architecture("gemma", norms_from_one=True)
ARCHITECTURES = {
    "gemma": _USUAL,
    "gemma2": replace(_USUAL, model_type="gemma2", fields=WINDOW, derive=_scaled_queries),
    "gemma3": replace(
        _USUAL, model_type="gemma3_text", fields=WINDOW, derive=_scaled_queries, scaled_linearly="full_attention_"
    ),
    "gemma4": replace(
        _GEMMA4, neutral={"expert_count": (0,), "expert_used_count": (0,)}, variants={"expert_count": _GEMMA4_MOE}
    ),
}
