"""The families and architectures by name: those of the files of this folder."""

from __future__ import annotations

from typing import Any

from foresay.models.families import delta, experts, gemma, granite, lfm2, llama, olmo, qwen
from foresay.models.families.family import Architecture, Family
from foresay.models.families.stated import Stated

_FILES = (llama, qwen, gemma, olmo, experts, granite, lfm2, delta)
FAMILIES: dict[str, Family] = {one.model_type: one for file in _FILES for one in file.FAMILIES}
"""Families whose layers are read, by transformers' model_type; the tests compare each with its own code."""
ARCHITECTURES: dict[str, Architecture] = {name: one for file in _FILES for name, one in file.ARCHITECTURES.items()}
"""Architectures of GGUF files that are read here, by llama.cpp's names; transformers dequantizes files of others."""
NORMS_FROM_ONE = tuple({one.norms_from_one for one in FAMILIES.values() if one.norms_from_one})
"""Beginnings of the names of norms that multiply by one plus their weight."""
TEXTS_OF = {theirs: one.model_type for one in FAMILIES.values() for theirs in one.texts_of}
"""model_type of language models without a class of their own -> the family whose layers they have."""
_BY_OWN_CODE = (
    "gemma3 phi gpt_neox gpt2 opt falcon starcoder2 deepseek_v3 bloom mamba falcon_mamba mamba2 jamba falcon_h1 bamba "
    "qwen3_5 qwen3_5_moe nemotron_h zamba zamba2 olmo_hybrid lfm3 kimi_linear zaya"
)
VERIFIED = FAMILIES.keys() | frozenset(_BY_OWN_CODE.split())
"""model_type of the decoder-only families whose greedy output the tests compare with transformers'."""


def family_of(config: Any) -> Family | None:
    """Return the family of a configuration; None if its layers are not read."""
    return FAMILIES.get(config.model_type)


def architecture_of(stated: Stated) -> Architecture | None:
    """Return the entry of a file; None for an architecture that is not one of ARCHITECTURES."""
    one = ARCHITECTURES.get(stated.architecture)
    return one and next((other for name, other in one.variants.items() if stated.get(name)), one)
