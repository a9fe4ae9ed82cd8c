"""Keys of GGUF files by namespace: those that are read, those that need not be, and those that have one supported value.

A key outside these tables is logged: a newer converter may have written something that changes what a model computes. Knows no
ranges of values that are read (values.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping

from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.values import FACTORS, SIZES, invalid_value

logger = logging.getLogger("foresay")

READ = {
    "general": frozenset({"architecture", "alignment", "name"}),
    "tokenizer": frozenset(
        {
            *("chat_template", "chat_templates"),
            *(
                f"ggml.{name}"
                for name in (
                    "model",
                    "pre",
                    "tokens",
                    "token_type",
                    "scores",
                    "merges",
                    "add_space_prefix",
                    "suppress_tokens",
                )
            ),
            *(f"ggml.add_{role}_token" for role in ("bos", "eos")),
            *(f"ggml.{role}_token_id" for role in ("bos", "eos", "eot", "eom", "unknown", "padding")),
            *(f"ggml.fim_{role}_token_id" for role in ("pad", "rep", "sep")),
        }
    ),
    "model": frozenset({*SIZES, *FACTORS, "rope.scaling.type", "attention.sliding_window_pattern", "attention.scale"}),
}
"""Keys without their prefix; "model" stands for the name of the architecture."""
IRRELEVANT = {
    "general": {
        r"quantization_version|file_type": "each tensor states its own type",
        r"(author|version|organization|finetune|basename|description|quantized_by|size_label|license|url|doi|uuid|repo_url"
        r"|source|base_model|dataset|tags|languages)(\..*)?": "provenance",
        r"sampling\..*": "defaults of llama.cpp's own programs; requests state how they sample",
    },
    "tokenizer": {
        r"ggml\.(seperator|cls|mask)_token_id|ggml\.token_type_count|ggml\.add_sep_token": "for pairs of texts",
        r"ggml\.(fim_(pre|suf|mid)|prefix|suffix|middle)_token_id": "who completes between two texts writes these tokens",
        r"huggingface\.json|rwkv\.world": "another form of the vocabulary that is read",
        r"chat_template\..+": "read if there is a chat template without a name",
    },
    "model": {
        r"rope\.scaling\.(finetuned|yarn_(ext_factor|attn_factor|log_multiplier))": "for kinds of scaling that are refused",
        r"pooling_type|classifier\..*|dense_\d_feat_.*|embedding_length_out|features_length": "for embeddings and classes",
        r"tensor_data_layout": "llama.cpp reads the same layout whatever it states",
        r"decoder_.*|attention\.relative_buckets_count": "for encoders with decoders",
    },
}
"""Pattern of keys -> the reason why nothing is lost if they are not read."""
NEUTRAL: dict[str, dict[str, tuple[object, ...]]] = {
    "general": {"type": ("model", "vocab")},
    "tokenizer": {
        "ggml.remove_extra_whitespaces": (False,),
        "ggml.normalizer.lowercase": (False,),
        "ggml.normalizer.strip_accents": (False,),
        "ggml.precompiled_charsmap": (),
    },
    "model": {
        **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"), (0, 1)),
        **dict.fromkeys(("attention.output_scale", "attention.value_scale", "rope.scaling.attn_factor"), (0, 1)),
        "rope.scaling.alpha": (0, 1),
        **dict.fromkeys(("attention.causal", "expert_weights_norm"), (True,)),
        **dict.fromkeys(("use_parallel_residual", "swin_norm", "norm_before_residual"), (False,)),
        **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.shared_kv_layers"), (0,)),
        **dict.fromkeys(
            ("attention.temperature_length", "attention.temperature_scale", "router_logit_softcapping"), (0,)
        ),
        **dict.fromkeys(("attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length_mla"), (0,)),
        **dict.fromkeys(("attention.value_length_mla", "attention.key_length_swa", "attention.value_length_swa"), (0,)),
        **dict.fromkeys(
            ("attention.group_norm_epsilon", "attention.group_norm_groups", "rope.dimension_sections"), (0,)
        ),
        **dict.fromkeys(
            ("rope.dimension_count_swa", "swiglu_clamp_exp", "swiglu_clamp_shexp", "moe_latent_size"), (0,)
        ),
        **dict.fromkeys(("expert_shared_count", "expert_shared_feed_forward_length", "expert_group_count"), (0,)),
        **dict.fromkeys(("expert_group_used_count", "expert_group_scale", "experts_per_group"), (0,)),
        **dict.fromkeys(("leading_dense_block_count", "nextn_predict_layers", "n_deepstack_layers"), (0,)),
        **dict.fromkeys(("rescale_every_n_layers", "token_shift_count", "embedding_length_per_layer_input"), (0,)),
        "expert_gating_func": (0, 1),
        "moe_every_n_layers": (0, 1),
        "interleave_moe_layer_step": (0, 1),
        "full_attention_interval": (0, 1),
    },
}
"""Values of a key with which a model or tokenizer is the same as without it; any other is refused. A list must be empty."""


_LISTS = ("rope.dimension_sections", "attention.sliding_window_pattern", "attention.recurrent_layers")
"""Keys that configs.py reads as lists."""


def check_keys(header: GgufHeader, namespaces: Iterable[str]) -> None:
    """Raise ModelLoadError for a value that would change a result and is not supported; log unknown keys in one line.

    namespaces: among "general", "tokenizer" and "model". The last one is checked for files that are read here only; transformers
    reads other keys for other families.
    """
    unknown = []
    for namespace in namespaces:
        prefix = header.architecture if namespace == "model" else namespace
        one = header.entry if namespace == "model" else None
        if namespace == "model" and one is None:
            continue
        read, neutral = READ[namespace], dict[str, tuple[object, ...] | None](NEUTRAL[namespace])
        if one is not None:
            read = read | one.fields.keys() | set(one.derived)
            neutral = {**neutral, **dict.fromkeys((*one.fields, *one.derived)), **one.neutral}
        for key in (*header.values, *header.lists):
            name = key.removeprefix(f"{prefix}.")
            if name == key:
                continue
            if one is not None and key in header.lists and name in one.derived and name not in (*_LISTS, *one.by_layer):
                raise invalid_value(header, key, "one value")
            if (values := neutral.get(name)) is not None:
                _check(header, key, values)
            elif name not in read and not _is_irrelevant(name, IRRELEVANT[namespace]):
                unknown.append(key)
    if unknown:
        logger.warning("%s has keys that are not known and not read: %s", header.path, ", ".join(sorted(unknown)))


def _check(header: GgufHeader, key: str, neutral: tuple[object, ...]) -> None:
    stored = header.lists.get(key)
    if header.values[key] not in neutral if stored is None else stored.count > 0:
        allowed = " or ".join(map(repr, neutral)) or "an empty list"
        raise invalid_value(header, key, f"{allowed}; no other value is supported")


def _is_irrelevant(name: str, reasons: Mapping[str, str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in reasons)
