"""Tiny models as GGUF files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from foresay.models.families.family import Architecture
from foresay.models.families.table import ARCHITECTURES
from helpers import gguf_hybrids, tiny

_NAMES = {one.model_type: name for name, one in reversed(ARCHITECTURES.items())} | {
    "mixtral": "llama",
    "olmo3": "olmo2",
    "ministral3": "mistral3",
}
_SCALES = {
    "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    "attention_scale": "attention_multiplier",
}  # fmt: skip
_COUNTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
_SHARED = {**_COUNTS, **_WIDTH, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_WINDOW = {"sliding_window": "sliding_window"}
_VALUES: dict[str, dict[str, str]] = {
    "qwen3_next": _SHARED,
    "qwen3_5_moe_text": _SHARED,
    "qwen3_moe": {**_COUNTS, **_WIDTH},
    "lfm2_moe": {**_COUNTS, **_WIDTH, "leading_dense_block_count": "num_dense_layers"},
    "mixtral": {**_COUNTS, "expert_count": "num_local_experts"},
    "granite": _SCALES,
    "granitemoehybrid": _SCALES,
    "glm4_moe": {
        **_COUNTS, **_WIDTH, "expert_count": "n_routed_experts", "expert_shared_count": "n_shared_experts",
        "leading_dense_block_count": "first_k_dense_replace", "expert_weights_norm": "norm_topk_prob",
        "expert_weights_scale": "routed_scaling_factor", "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
    },
    "gpt_oss": {**_COUNTS, **_WINDOW, "expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"},
    "gemma4_text": {
        **_WINDOW, "shared_kv_layers": "num_kv_shared_layers", "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    **dict.fromkeys(("olmo3", "exaone4", "gemma2", "gemma3_text"), _WINDOW),
}  # fmt: skip
"""Methods of the writer without "add_" -> fields of the configuration, by family."""
_GEMMA4_MOE = {**_COUNTS, **_WIDTH, "expert_used_count": "top_k_experts"}
_NUMBERS = ("bias", "_inp.weight", "conv.weight", "conv1d.weight", "ssm_a", "ssm_d", "ssm_norm.weight")
"""Ends of the names of tensors that no file quantizes."""
_GEMMA4_SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


def architecture_of(model: PreTrainedModel) -> tuple[str, Architecture]:
    """llama.cpp's name of a model's architecture, and how its files are stored."""
    name = _NAMES[model.config.model_type]
    one = ARCHITECTURES[name]
    family, has_experts = model.config.model_type, getattr(model.config, "enable_moe_block", False)
    return name, next((other for other in one.variants.values() if has_experts or other.model_type == family), one)


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary halves as llama.cpp keeps them."""
    return weight.view(heads, 2, len(weight) // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def random_blocks(kind: str, rows: int, depth: int, seed: int = 0) -> tuple[Any, torch.Tensor]:
    """Random blocks of a quantized type with scales that are numbers, [rows, bytes], and their weights [rows, depth]."""
    rng = np.random.default_rng(seed)
    size, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (rows, depth // size, width), dtype=np.uint8)
    scales = rng.uniform(-0.02, 0.02, (rows, depth // size, 2)).astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        data[..., 0] = rng.integers(118, 125, data.shape[:2])
    elif kind == "Q6_K":
        data[..., 208:] = scales[..., :2]
    elif kind in ("Q4_K", "Q5_K", "Q4_1", "Q5_1"):
        data[..., :4] = scales
    else:
        data[..., :2] = scales[..., :2]
    data = data.reshape(rows, -1)
    return data, torch.from_numpy(np.array(gguf.dequantize(data, gguf.GGMLQuantizationType[kind])))


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kinds: Mapping[str, str] | None = None,
    *,
    kind: str | None = None,
    mtp: Mapping[str, torch.Tensor] | None = None,
    joint: Collection[str] = (),
) -> Path:
    """A tiny model of a family that foresay reads from GGUF files, and its tokenizer, as such a file.

    kinds: by the last word of a tensor's name ("attn_q", "output"), the type its weights are rounded to; otherwise `kind`
    for matrices, or float32 without it. mtp: weights of multi-token-prediction layers, as layers that follow the model's.
    joint: tensors that join several: "gate_up_exps" of experts; "ssm_in" of Qwen3-Next's layers, by key heads.
    """
    writer = gguf.GGUFWriter(path, architecture_of(model)[0])
    depth = model.config.num_hidden_layers
    more = len({name.split(".")[2] for name in mtp or ()})
    if more:
        writer.add_nextn_predict_layers(more)
    _add_values(writer, model, depth + more)
    for name, weight in _tensors(model, mtp or {}, depth + more, joint).items():
        values = np.ascontiguousarray(weight.detach().float().numpy())
        own = (kinds or {}).get(name.split(".")[-2]) if name.endswith("weight") else None
        if own is None and values.ndim > 1 and not name.endswith(_NUMBERS):
            own = kind
        if own is None:
            writer.add_tensor(name, values)
        else:
            rounded = gguf.GGMLQuantizationType[own]
            writer.add_tensor(name, gguf.quantize(values, rounded), raw_dtype=rounded)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_values(writer: gguf.GGUFWriter, model: PreTrainedModel, blocks: int) -> None:
    config, names = model.config, tiny.tokenizer()
    heads = config.num_attention_heads
    head_dim = 0 if config.model_type == "gemma4_text" else getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(blocks)
    unused = config.model_type == "gpt_oss"  # all its layers consist of experts, whose width is another key
    if config.model_type == "gemma4_text":
        head_dim = _add_layers(writer, config)
    else:
        dense_granite = config.model_type == gguf_hybrids.GRANITE and not config.num_local_experts
        width = config.shared_intermediate_size if dense_granite else config.intermediate_size
        if config.model_type != "qwen3_5_moe_text":
            writer.add_feed_forward_length(width * (1 + unused))
        writer.add_head_count_kv(gguf_hybrids.key_heads(config))
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(gguf_hybrids.eps(config))
    gguf_hybrids.add_values(writer, config)
    if head_dim != config.hidden_size // heads or config.model_type in ("gemma4_text", *gguf_hybrids.QWEN):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    mixture = _GEMMA4_MOE if getattr(config, "enable_moe_block", False) else {}
    for name, field in {**_VALUES.get(config.model_type, {}), **mixture}.items():
        if (value := getattr(config, field)) is not None:
            getattr(writer, f"add_{name}")(value)
    if config.model_type == "llama":
        writer.add_rope_dimension_count(head_dim)
    if config.model_type in ("glm4_moe", "lfm2_moe"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type in ("olmo3", "exaone4") and config.sliding_window is not None:
        writer.add_sliding_window_pattern([one == "sliding_attention" for one in config.layer_types])
    rope = config.rope_parameters
    if (share := rope.get("partial_rotary_factor")) is not None:
        writer.add_rope_dimension_count(int(share * head_dim))
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if "llama_4_scaling_beta" in rope:
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
            writer.add_rope_scaling_yarn_log_mul(rope.get("mscale_all_dim", 0.0))
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names.convert_ids_to_tokens(range(len(names))))
    writer.add_token_types([3] * len(tiny.SPECIALS) + [1] * (len(names) - len(tiny.SPECIALS)))
    writer.add_token_merges([" ".join(pair) for pair in tiny.MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)


def _add_layers(writer: gguf.GGUFWriter, config: Any) -> int:
    """Add the values of layers with windows and of others. Returns the size of a head of the others."""
    layers, slides = config.num_hidden_layers, [one == "sliding_attention" for one in config.layer_types]
    own = [config.per_layer_config[i] for i in range(layers)]
    first_shared = layers - config.num_kv_shared_layers
    full, sliding = own[slides.index(False)].head_dim, own[slides.index(True)].head_dim
    doubled = [
        config.intermediate_size * (1 + (config.use_double_wide_mlp and i >= first_shared)) for i in range(layers)
    ]
    writer.add_feed_forward_length(doubled if len(set(doubled)) > 1 else doubled[0])
    heads = [one.num_key_value_heads for one in own]
    writer.add_head_count_kv(heads if len(set(heads)) > 1 else heads[0])
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length_swa(sliding)
    writer.add_value_length_swa(sliding)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(sliding)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    share = config.rope_parameters["full_attention"]["partial_rotary_factor"]
    used = int(full * share / 2)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * used + [1e30] * (full // 2 - used), np.float32))
    return int(full)


def _tensors(
    model: PreTrainedModel, mtp: Mapping[str, torch.Tensor], blocks: int, joint: Collection[str]
) -> dict[str, torch.Tensor]:
    """The weights by llama.cpp's names, in its order of rows."""
    config, (family, one) = model.config, architecture_of(model)
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[family], blocks)
    of_mtp = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, blocks)  # older packages know the names in these alone
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads} if one.interleaved else {}
    tensors = {}
    weights = {**model.state_dict(), **mtp}
    if config.model_type == gguf_hybrids.NEXT and "ssm_in" not in joint:
        weights = gguf_hybrids.by_kind(config, weights)
    if "gate_up_exps" not in joint and config.model_type != "gemma4_text":  # whose experts are always joint
        weights = _split_experts(weights, alternate=config.model_type == "gpt_oss")
    for name, weight in weights.items():
        if config.model_type == gguf_hybrids.GRANITE and (found := gguf_hybrids.of_granite(config, name, weight)):
            tensors |= found
            continue
        layer, _, short = name.removeprefix("model.layers.").partition(".")
        if (scale := _GEMMA4_SCALES.get(short)) is not None:
            tensors[f"blk.{layer}.{scale}"] = weight
            continue
        stem, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, suffix = (name[:-5], "bias") if name.endswith("_bias") else (name, "weight")
        own = str(names.get_name(stem) or of_mtp.get_name(stem))
        if (converted := gguf_hybrids.converted(config, name, weight)) is not None:
            tensors[converted[0] or f"{own}.{suffix}"] = converted[1]
            continue
        if own == "output" and config.tie_word_embeddings:
            continue
        kind = own.rpartition(".")[2]
        if kind in heads:
            weight = _interleaved(weight, heads[kind])
        if one.norms_from_one and "norm" in own:
            weight = weight + 1
        tensors[f"{own}.{suffix}"] = weight
    return tensors


def _split_experts(weights: Mapping[str, torch.Tensor], *, alternate: bool) -> dict[str, torch.Tensor]:
    """A file has a tensor for each of the three parts of a layer's experts.

    alternate: as in gpt-oss, whose weights are [in, out], and whose outputs and biases are those of gate and up in turn.
    """
    split = {}
    for name, weight in weights.items():
        stem, _, kind = name.rpartition(".")
        suffix = "bias" if kind.endswith("_bias") else "weight"
        rows = weight.transpose(1, 2) if alternate and weight.dim() == 3 else weight
        if not (alternate or weight.dim() == 3) or not kind.startswith(("gate_up_proj", "down_proj")):
            split[name] = weight
        elif kind.startswith("gate_up_proj"):
            gate, up = (rows[:, ::2], rows[:, 1::2]) if alternate else rows.chunk(2, 1)
            split |= {f"{stem}.gate_proj.{suffix}": gate, f"{stem}.up_proj.{suffix}": up}
        else:
            split[f"{stem}.down_proj.{suffix}"] = rows
    return split
