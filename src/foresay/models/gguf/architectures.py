"""Architectures of GGUF files that are read here, as data: their families, and what their files store otherwise than others.

An architecture is an entry of ARCHITECTURES if huggingface/fused.py knows its family's layers. Knows no ranges of values
(values.py) and builds no configuration (configs.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from foresay.models.gguf.header import GgufHeader

COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""Keys without the architecture prefix -> fields of transformers' configuration, of every architecture."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family, and what its files store otherwise than those of the others."""

    model_type: str
    """transformers' name of the family."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Further keys -> fields of the configuration."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Fields of the configuration that no key states."""
    required: tuple[str, ...] = ()
    """Keys without a default, besides those of every architecture."""
    lacking: tuple[str, ...] = ()
    """Keys that files of every other architecture must have."""
    derived: tuple[str, ...] = ()
    """Keys from which configs.py derives fields."""
    by_layer: tuple[str, ...] = ()
    """Keys that may list an integer for each layer."""
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Allowed values of keys, instead of those in keys.NEUTRAL."""
    interleaved: bool = False
    """True if the rows of queries and keys are stored as pairs of a head's two halves."""
    norms_from_one: bool = False
    """True if the weights of norms are stored with the one that the family's norms add."""
    scaled_by_tensor: bool = False
    """True if divisors of rotary frequencies are a tensor of their own."""
    scaled_linearly: str | None = None
    """Prefix of the buffers of rotary frequencies that linear scaling divides; None if it is refused."""
    yarn: Mapping[str, object] | None = None
    """Parameters of YaRN scaling that no key states; None if it is refused."""
    variants: Mapping[str, Architecture] = field(default_factory=dict)
    """The families of files in which one of these keys has a value other than 0."""


_QWEN3_MOE = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_OF_QWEN3_MOE = Architecture(
    "qwen3_moe", _QWEN3_MOE, {"norm_topk_prob": True}, required=tuple(_QWEN3_MOE), scaled_linearly=""
)
_VISION = ("rope.dimension_sections", "n_deepstack_layers")
"""Keys of the positions of images, which are equal numbers in texts, and of the layers that read images."""
_MIXTRAL = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attention.scale": "attention_multiplier",
}
_GPT_OSS = {**_MIXTRAL, "expert_feed_forward_length": "intermediate_size", "attention.sliding_window": "sliding_window"}
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
_GEMMA4_MOE = {
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_OF_GEMMA4 = (
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
_DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_OF_GRANITE = ("expert_shared_feed_forward_length", "rope.scaling.finetuned")
_STATE_SPACE = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
_LFM2 = {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}
_REQUIRED_OF_LFM2 = ("shortconv.l_cache", "attention.head_count_kv", "rope.freq_base")
_QWEN35 = ("ssm.inner_size", "attention.key_length", "rope.dimension_count", "rope.freq_base")
_WINDOW = {"attention.sliding_window": "sliding_window"}
_DENSE: dict[str, tuple[object, ...]] = {"expert_count": (0,), "expert_used_count": (0,)}
_USUAL_YARN: dict[str, tuple[object, ...]] = {
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}
_GEMMA4 = Architecture(
    "gemma4_text",
    {
        **_WINDOW,
        "attention.shared_kv_layers": "num_kv_shared_layers",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    required=(*_OF_GEMMA4[:5], "attention.sliding_window"),
    derived=_OF_GEMMA4,
    by_layer=("feed_forward_length", "attention.head_count_kv"),
)
YARN_FACTORS = ("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor")
"""Keys under which converters have stored OLMo-3's factor of the attention."""
_YARN_OF_OLMO3 = {name: one for name, one in _USUAL_YARN.items() if name not in YARN_FACTORS}
_OF_DELTA = ("full_attention_interval", "attention.recurrent_layers", "nextn_predict_layers")
_DELTA_MOE = Architecture(
    "qwen3_next",
    {**_DELTA, **_QWEN3_MOE, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    required=(*_DELTA, *_QWEN3_MOE, *_QWEN35, "expert_shared_feed_forward_length"),
    lacking=("feed_forward_length",),
    derived=_OF_DELTA,
    norms_from_one=True,
)
_TEMPERATURE = ("attention.temperature_scale", "attention.temperature_length", "rope.scaling.yarn_log_multiplier")
"""Keys of the scale of Ministral 3's queries by their position, and of YaRN's factor next to it."""
_LLAMA = Architecture("llama", interleaved=True, scaled_by_tensor=True, scaled_linearly="")
ARCHITECTURES = {
    "llama": replace(
        _LLAMA,
        variants={"expert_count": replace(_LLAMA, model_type="mixtral", fields=_MIXTRAL, required=tuple(_MIXTRAL))},
    ),
    "mistral3": replace(
        _LLAMA,
        model_type="mistral",
        fixed={"sliding_window": None},
        neutral=_DENSE,
        variants={
            _TEMPERATURE[0]: Architecture(
                "ministral3",
                derived=_TEMPERATURE,
                neutral={**_DENSE, **{name: one for name, one in _USUAL_YARN.items() if name not in _TEMPERATURE}},
                interleaved=True,
                yarn={},
            )
        },
    ),
    "qwen2": Architecture("qwen2", scaled_linearly=""),
    "qwen3": Architecture("qwen3", scaled_linearly=""),
    "qwen3moe": _OF_QWEN3_MOE,
    "qwen2vl": Architecture("qwen2", derived=_VISION[:1]),
    "qwen3vl": Architecture("qwen3", derived=_VISION),
    "qwen3vlmoe": replace(_OF_QWEN3_MOE, derived=_VISION, scaled_linearly=None),
    "gemma": Architecture("gemma", norms_from_one=True),
    "gemma2": Architecture("gemma2", _WINDOW, norms_from_one=True),
    "gemma3": Architecture("gemma3_text", _WINDOW, norms_from_one=True, scaled_linearly="full_attention_"),
    "gemma4": replace(
        _GEMMA4,
        neutral=_DENSE,
        variants={
            "expert_count": replace(
                _GEMMA4,
                fields={**_GEMMA4.fields, **_GEMMA4_MOE},
                fixed={"enable_moe_block": True},
                required=(*_GEMMA4.required, *_GEMMA4_MOE),
            )
        },
    ),
    "phi3": Architecture("phi3", _WINDOW),
    "olmo2": Architecture(
        "olmo2",
        variants={
            "attention.sliding_window": Architecture(
                "olmo3", _WINDOW, neutral=_YARN_OF_OLMO3, derived=YARN_FACTORS, yarn={}
            )
        },
    ),
    "exaone4": Architecture("exaone4", _WINDOW, scaled_by_tensor=True),
    "granite": replace(
        _LLAMA,
        model_type="granite",
        fields=_GRANITE,
        derived=(*_OF_GRANITE, "ssm.group_count"),  # files of Granite 4 without recurrent layers state their sizes
        by_layer=("attention.head_count_kv",),
    ),
    "granitehybrid": replace(
        _LLAMA,
        model_type="granitemoehybrid",
        fields={**_GRANITE, **_MIXTRAL, **_STATE_SPACE},
        required=(*_STATE_SPACE, "ssm.inner_size", "attention.head_count_kv"),
        derived=_OF_GRANITE,
        by_layer=("attention.head_count_kv",),
        scaled_by_tensor=False,
        scaled_linearly=None,
    ),
    "smollm3": replace(_LLAMA, model_type="smollm3"),
    "glm4moe": Architecture(
        "glm4_moe",
        _GLM4_MOE,
        required=(*[*_GLM4_MOE][:6], "rope.dimension_count"),
        derived=("nextn_predict_layers",),
        neutral={"expert_gating_func": (0, 2)},
    ),
    "lfm2": Architecture(
        "lfm2",
        _LFM2,
        {"block_auto_adjust_ff_dim": False},
        required=_REQUIRED_OF_LFM2,
        by_layer=("attention.head_count_kv",),
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        {**_LFM2, **_QWEN3_MOE, "leading_dense_block_count": "num_dense_layers"},
        {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True},
        required=(*_REQUIRED_OF_LFM2, *_QWEN3_MOE, "leading_dense_block_count", "expert_gating_func"),
        by_layer=("attention.head_count_kv",),
        neutral={"expert_gating_func": (2,)},
    ),
    "qwen3next": _DELTA_MOE,
    "qwen35": Architecture(
        "qwen3_5_text",
        _DELTA,
        required=(*_DELTA, *_QWEN35),
        derived=(*_OF_DELTA, "rope.dimension_sections"),
        norms_from_one=True,
    ),
    "qwen35moe": replace(_DELTA_MOE, model_type="qwen3_5_moe_text", derived=(*_OF_DELTA, "rope.dimension_sections")),
    "gpt-oss": Architecture(
        "gpt_oss", _GPT_OSS, required=tuple(_GPT_OSS), neutral=_USUAL_YARN, yarn={"truncate": False}
    ),
}
"""By llama.cpp's names. transformers dequantizes files of others, where a size of 0 means unused."""


def architecture_of(header: GgufHeader) -> Architecture:
    """Return the entry of a file, whose architecture must be one of ARCHITECTURES."""
    one = ARCHITECTURES[header.architecture]
    stated = (other for key, other in one.variants.items() if header.values.get(f"{header.architecture}.{key}"))
    return next(stated, one)
