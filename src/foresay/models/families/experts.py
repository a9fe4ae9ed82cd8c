"""gpt-oss and GLM-4.5: mixtures of experts whose attention has sinks, or rotates a part of a head."""

from __future__ import annotations

from typing import Any

from foresay.models.families.family import Architecture, Family, Kinds
from foresay.models.families.llama import MIXTRAL
from foresay.models.families.positions import USUAL_YARN, WINDOW
from foresay.models.families.stated import Stated

_GPT_OSS = {**MIXTRAL, "expert_feed_forward_length": "intermediate_size", **WINDOW}
_GLM4_MOE = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}


def _glm4_moe(stated: Stated, fields: dict[str, Any]) -> dict[str, Any]:
    """MTP layers are counted with the others; biases and norms of heads are there if their tensors are."""
    more = int(stated.get("nextn_predict_layers", 0))
    return {
        "num_hidden_layers": fields["num_hidden_layers"] - more,
        "num_mtp_layers": more,
        "partial_rotary_factor": stated.get("rope.dimension_count") / fields["head_dim"],
        "attention_bias": "blk.0.attn_q.bias" in stated.shapes,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in stated.shapes,
    }


FAMILIES = (
    Family("gpt_oss", Kinds.LISTED, has_experts=True, half_turns=True, stores_mxfp4=True),
    Family("glm4_moe", has_experts=True),
)
ARCHITECTURES = {
    "gpt-oss": Architecture(
        "gpt_oss", _GPT_OSS, required=tuple(_GPT_OSS), neutral=USUAL_YARN, yarn={"truncate": False}
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        _GLM4_MOE,
        required=(*[*_GLM4_MOE][:6], "rope.dimension_count"),
        derive=_glm4_moe,
        derived=("nextn_predict_layers",),
        neutral={"expert_gating_func": (0, 2)},
    ),
}
