"""Tiny random models of every supported family, made on the spot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from foresay.models.huggingface.joined import Joined
from foresay.models.huggingface.linears import product_of

VOCAB = 97
_SPECIALS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
_SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256}
_BASE: dict[str, Any] = {**_SPECIALS, **_SIZES, "intermediate_size": 48, "num_key_value_heads": 2}


def _base(*parts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    found = dict(_BASE)
    for part in (*parts, changes):
        found |= part
    return found


_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_SLIDES, _FULL = "sliding_attention", "full_attention"
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}
_GEMMA4 = _base(
    {"num_hidden_layers": 6, "layer_types": [_SLIDES, _SLIDES, _FULL] * 2, "sliding_window": 8},
    {"head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB},
    {"final_logit_softcapping": 30.0, "tie_word_embeddings": False},
)
_GEMMA4_PLAIN = {"num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0}
_GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _base()),
    "mistral": ("mistral", _base(sliding_window=8)),
    "mixtral": ("mixtral", _base(num_local_experts=4, num_experts_per_tok=2)),
    "mixtral_sliding": ("mixtral", _base(num_local_experts=4, num_experts_per_tok=1, sliding_window=8)),
    "qwen3_moe": ("qwen3_moe", _base(_EXPERTS, head_dim=8, norm_topk_prob=True, mlp_only_layers=[1])),
    "qwen3_moe_unnormalized": ("qwen3_moe", _base(_EXPERTS, head_dim=8, norm_topk_prob=False)),
    "qwen2": ("qwen2", _base(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "qwen3": ("qwen3", _base(head_dim=8)),
    "gemma": ("gemma", _base(head_dim=8)),
    "gemma2": ("gemma2", _base(head_dim=8, sliding_window=8, query_pre_attn_scalar=8)),
    "gemma3": ("gemma3_text", _base(head_dim=8, sliding_window=8, num_hidden_layers=4, query_pre_attn_scalar=8)),
    "gemma4": ("gemma4_text", _GEMMA4),
    "gemma4_equal": (
        "gemma4_text",
        {**_GEMMA4, **_GEMMA4_PLAIN, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4_moe": (
        "gemma4_text",
        {**_GEMMA4, **_GEMMA4_PLAIN, **_GEMMA4_MOE, "num_hidden_layers": 3, "layer_types": [_SLIDES, _SLIDES, _FULL]},
    ),
    "phi": ("phi", _base(num_key_value_heads=4)),
    "phi3": ("phi3", _base(sliding_window=8)),
    "phi3_longrope": (
        "phi3",
        _base(
            {"max_position_embeddings": 512, "original_max_position_embeddings": 64},
            rope_parameters={**_LONGROPE, "original_max_position_embeddings": 64},
        ),
    ),
    "gpt_neox": ("gpt_neox", _base(num_key_value_heads=4)),
    "gpt2": ("gpt2", {**_SPECIALS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "opt": ("opt", {**_SPECIALS, **_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "falcon": ("falcon", _base(new_decoder_architecture=True, num_kv_heads=2)),
    "falcon_alibi": ("falcon", _base(alibi=True, new_decoder_architecture=False, multi_query=False)),
    "ministral": ("ministral", _base(head_dim=8, sliding_window=8, layer_types=[_SLIDES, _FULL, _SLIDES])),
    "ministral3": (
        "ministral3",
        _base(
            tie_word_embeddings=False,
            rope_parameters=_YARN
            | {"original_max_position_embeddings": 8, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
        ),
    ),
    "olmo2": ("olmo2", _base()),
    "olmo3": ("olmo3", _base(sliding_window=8, num_hidden_layers=4)),
    "exaone4": ("exaone4", _base(head_dim=8, sliding_window=8, num_hidden_layers=4)),
    "granite4": (
        "granitemoehybrid",
        _base(
            {"layer_types": ["attention"] * 3, "position_embedding_type": "rope", "num_local_experts": 0},
            {"shared_intermediate_size": 48, "mamba_n_heads": 8, "attention_multiplier": 0.3},
        ),
    ),
    "granite": ("granite", _base(logits_scaling=2.0, residual_multiplier=0.8, attention_multiplier=0.3)),
    "smollm3": ("smollm3", _base(no_rope_layers=[1, 0, 1], tie_word_embeddings=False)),
    "starcoder2": ("starcoder2", _base(sliding_window=8)),
    "gpt_oss": (
        "gpt_oss",
        _base(head_dim=8, sliding_window=8, num_local_experts=4, num_experts_per_tok=2, swiglu_limit=0.05),
    ),
    "glm4_moe": (
        "glm4_moe",
        _base(
            {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
            {"head_dim": 16, "moe_intermediate_size": 24, "routed_scaling_factor": 1.5, "use_qk_norm": True},
        ),
    ),
    "deepseek_v3": ("deepseek_v3", _base(_LATENT, _ROUTED, q_lora_rank=16, first_k_dense_replace=1)),
    "bloom": ("bloom", {**_SPECIALS, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
}

_MAMBA = {**_SPECIALS, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8}
_MAMBA2 = {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 2, "chunk_size": 16}
_MIXER = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_DELTA |= {"head_dim": 8, "num_hidden_layers": 4}
_FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MIXTURE = {**_FEW, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}
_CONVOLUTIONS = {"layer_types": ["conv", _FULL, "conv"]}

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", _MAMBA),
    "falcon_mamba": ("falcon_mamba", _MAMBA),
    "mamba2": ("mamba2", {**_MAMBA, **_MAMBA2}),
    "jamba": (
        "jamba",
        _base(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, num_experts=2),
    ),
    "falcon_h1": ("falcon_h1", _base(**_MIXER, mamba_d_ssm=64, head_dim=8)),
    "bamba": ("bamba", _base(**_MIXER, attn_layer_indices=[1], head_dim=8)),
    "granitemoehybrid": (
        "granitemoehybrid",
        _base(
            {**_MIXER, "layer_types": ["mamba", "attention", "mamba"]},
            {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
        ),
    ),
    "qwen3_next": ("qwen3_next", _base(**_DELTA, **_MIXTURE)),
    "qwen3_5": ("qwen3_5_text", _base(**_DELTA)),
    "qwen3_5_moe": ("qwen3_5_moe_text", _base(**_DELTA, **_MIXTURE)),
    "nemotron_h": (
        "nemotron_h",
        _base(
            {"head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2},
            {"chunk_size": 16, "layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
        ),
    ),
    "zamba": (
        "zamba",
        _base(num_hidden_layers=6, mamba_d_state=8, n_mamba_heads=2, attn_layer_period=2, attn_layer_offset=1),
    ),
    "zamba2": (
        "zamba2",
        _base(
            {"mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1, "chunk_size": 16},
            {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
        ),
    ),
    "olmo_hybrid": ("olmo_hybrid", _base(**_DELTA)),
    "lfm2": ("lfm2", _base(_CONVOLUTIONS)),
    "lfm2_moe": ("lfm2_moe", _base(_CONVOLUTIONS, _FEW)),
    "lfm3": ("lfm3", _base(_CONVOLUTIONS)),
    "kimi_linear": (
        "kimi_linear",
        _base(
            {
                "layer_types": ["linear_attention", _FULL, "linear_attention"],
                "linear_head_dim": 8,
                "linear_num_heads": 4,
            },
            {**_LATENT, **_ROUTED, "q_lora_rank": None},
        ),
    ),
    "zaya": ("zaya", _base()),
}
"""Families with states that cannot be truncated."""


_T5: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
_T5 |= {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4}
_T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
_PAIR: dict[str, Any] = {f"{part}_layers": 3 for part in ("encoder", "decoder")}
_PAIR |= {
    f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("ffn_dim", 48), ("attention_heads", 4))
}
_PAIR |= {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "decoder_start_token_id": 1}
_PAIR |= {"d_model": 32, "max_position_embeddings": 256, "forced_eos_token_id": None}

SEQ2SEQ: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", _T5),
    "t5_gated": ("t5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("bart", _PAIR),
    "marian": ("marian", {**_PAIR, "decoder_start_token_id": 0}),
    "mbart": ("mbart", _PAIR),
    "m2m_100": ("m2m_100", {**_PAIR, "scale_embedding": False}),
}
REFUSED_SEQ2SEQ: dict[str, tuple[str, dict[str, Any]]] = {
    "led": ("led", {**_PAIR, "attention_window": 8, "max_encoder_position_embeddings": 256}),
}
PROBED_SEQ2SEQ: dict[str, tuple[str, dict[str, Any]]] = {
    "mt5": ("mt5", _T5),
    "umt5": ("umt5", _T5),
    "pegasus": ("pegasus", _PAIR),
    "blenderbot": ("blenderbot", _PAIR),
    "plbart": ("plbart", _PAIR),
}
"""Encoder-decoders that the tests probe, but do not compare token for token; and one whose positions cannot be found out."""


def _round_robin(model: PreTrainedModel, seed: int) -> None:
    """Random weights large enough that greedy choices are far apart and depend on the context."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and weight.requires_grad:  # Marian's sinusoids stay as they are
                noise = torch.randn(weight.shape, generator=generator)
                scale = (
                    1.0
                    if any(part in name for part in ("embed", "wte", "lm_head", "shared.", "shared_expert."))
                    else weight.shape[-1] ** -0.5
                )
                weight.copy_(noise * scale)
            elif name.endswith(("router.scale", "router.per_expert_scale", "layernorm_1.weight", "layernorm_2.weight")):
                weight.copy_(0.5 + torch.rand(weight.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """PyTorch's generator on the CPU at `seed`, and afterwards where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def make(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny model of a family in float32."""
    kind, values = (FAMILIES | RECURRENT)[family]
    config = CONFIG_MAPPING[kind](**{**values, **changes})
    with seeded(seed):  # what `_round_robin` leaves alone is drawn too
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    _round_robin(model, seed)
    return model


def make_seq2seq(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny encoder-decoder model of a family in float32."""
    kind, values = (SEQ2SEQ | PROBED_SEQ2SEQ | REFUSED_SEQ2SEQ)[family]
    values = {**values, **changes}
    with seeded(seed):
        model = AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING[kind](**values), dtype=torch.float32).eval()
    if values.get("tie_word_embeddings") is False:  # transformers ties what a T5 config leaves untied
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    _round_robin(model, seed)
    with torch.no_grad():  # a decoder that follows its source alone, or its last token alone, repeats itself
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                gain = 3.0 if any(part in name for part in ("wi", "wo.", "fc1", "fc2")) else 1.0
                weight *= 0.5 if "encoder_attn.out" in name or "EncDecAttention.o" in name else gain
    return model


def joint_of(*layers: Any) -> Any:
    """The product of frozen layers, as on a GPU, where plain ones are not read by the kernels for CPUs."""
    return product_of(*layers) if hasattr(layers[0], "product") else whole_product(*layers)


def whole_product(*layers: Any) -> Joined:
    """As on a GPU, where layers that read the same input are joined."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    return Joined(torch.cat([layer.weight.detach() for layer in layers]), torch.cat(biases) if biases else None)
