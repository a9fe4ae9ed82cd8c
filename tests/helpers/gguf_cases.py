"""Every architecture that is read from GGUF files: tiny models, their files, and what transformers writes with them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from helpers import tiny
from helpers.comparing import plain, prompts
from helpers.families import make
from helpers.gguf_files import write_gguf

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 128,
}  # fmt: skip
OLMO3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {**YARN, "truncate": True, "factor": 8.0, "attention_factor": 1.2079441541679836},
}
GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 264}
GRANITE = {
    "mamba_n_heads": 16, "mamba_d_conv": 3, "mamba_n_groups": 2, "shared_intermediate_size": 64, "embedding_multiplier": 3.0,
    "residual_multiplier": 0.8, "logits_scaling": 2.0, "attention_multiplier": 0.3,
}  # fmt: skip
DENSE_GRANITE = {"num_local_experts": 0, "mamba_conv_bias": False, "position_embedding_type": "rope"}
SMALL = {"moe_intermediate_size": 32}
LFM2 = {"norm_eps": 0.3, "conv_L_cache": 4}
QWEN = {"head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 3}
SHARED = {**SMALL, "shared_expert_intermediate_size": 64}
GLM = {"head_dim": 32, "first_k_dense_replace": 2, "n_shared_experts": 2, "norm_topk_prob": False, **SMALL}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mixtral": ("mixtral", {"num_experts_per_tok": 1}),
    "mistral3": ("mistral", {"sliding_window": None}),
    "ministral3": ("ministral3", {}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3_moe", {"mlp_only_layers": [], **SMALL}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {"num_hidden_layers": 6}),
    "gemma4": ("gemma4", GEMMA4),
    "gemma4-equal": ("gemma4_equal", {**GEMMA4, "hidden_size_per_layer_input": 0}),
    "gemma4-moe": ("gemma4_moe", {**GEMMA4, "hidden_size_per_layer_input": 0, **SMALL}),
    "phi3": ("phi3", {"sliding_window": None}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"max_position_embeddings": 4096, "rope_parameters": OLMO3}),
    "exaone4": ("exaone4", {"head_dim": 16}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "granite": ("granite", {"embedding_multiplier": 3.0}),
    "granitehybrid": ("granitemoehybrid", {**GRANITE, "num_experts_per_tok": 3}),
    "granitehybrid-dense": ("granitemoehybrid", {**GRANITE, **DENSE_GRANITE}),
    "gpt-oss": ("gpt_oss", {"swiglu_limit": 7.0, "max_position_embeddings": 4096, "rope_parameters": YARN}),
    "glm4moe": ("glm4_moe", GLM),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False, **LFM2}),
    "lfm2moe": ("lfm2_moe", {**LFM2, **SMALL, "num_dense_layers": 1, "num_experts_per_tok": 3}),
    "qwen35": ("qwen3_5", QWEN),
    "qwen35moe": ("qwen3_5_moe", {**QWEN, **SHARED}),
    "qwen3next": ("qwen3_next", {**QWEN, **SHARED}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": None}),
}
"""Families of helpers/families.py by the name of a case."""
VOCAB = len(tiny.tokenizer())


def made(case: str, **more: Any) -> PreTrainedModel:
    """A model of a case with further changes."""
    family, changes = MODELS[case]
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, **changes}
    model = make(family, 3, **{**sizes, **more})
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight") or weight.dim() == 1:
            weight.data += torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.linspace(1, -1, len(buffer)))
    return model


model_of = cache(made)


@cache
def outputs_of(case: str) -> list[list[int]]:
    return [plain(model_of(case), prompt) for prompt in prompts()]


def file_of(case: str, folder: Path, kind: str | None = None) -> Path:
    """kind: the type of all matrices."""
    return write_gguf(folder / f"{case}.gguf", model_of(case), kind=kind)


def scores(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model.uncached(torch.tensor([prompts()[3]]))[0].float()
    return out


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of a token's differences as a share of the wanted scores' deviation; the median over the tokens."""
    return float((found - wanted).square().mean(-1).sqrt().median() / wanted.std())


def logits(model: Any) -> torch.Tensor:
    """By the family's own code."""
    with torch.inference_mode():
        out: torch.Tensor = model(torch.tensor([prompts()[3]])).logits[0]
    return out
