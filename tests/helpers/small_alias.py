"""A small random model instead of the packaged one: SmolLM2's tokenizer and layers, a tenth of its width."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, LlamaForCausalLM

from foresay.files import cache_dir
from foresay.models.sources.packaged import conversion_folder

ALIAS = "smollm2-135m"
_NEVER = 20
"""The first ids are special tokens; the model never generates them, so that texts have the length that was requested."""


def cache_with_small_model(folder: Path, original: Path) -> Path:
    """Fill a folder for FORESAY_CACHE: under the alias lies a small model, and kernels are those compiled before.

    original: the conversion of the real model, whose tokenizer and number of layers and heads the small one has.
    """
    place = folder / "models" / conversion_folder(ALIAS).name
    config = AutoConfig.from_pretrained(original)
    for name, value in {
        "hidden_size": 72,
        "head_dim": 8,
        "intermediate_size": 1056,
        "tie_word_embeddings": False,
    }.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.lm_head.weight.data[:_NEVER] = 0
    model.save_pretrained(place)
    for path in original.iterdir():
        if path.name not in ("config.json", "model.safetensors", "foresay.json"):
            shutil.copy(path, place)
    sizes = {path.name: path.stat().st_size for path in sorted(place.iterdir())}
    (place / "foresay.json").write_text(json.dumps({"source": "random", "sizes": sizes}))
    return share_kernels(folder)


def share_kernels(folder: Path) -> Path:
    """Give a folder for FORESAY_CACHE the kernels that are compiled already; without them a child compiles its own."""
    (cache_dir() / "native").mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    (folder / "native").symlink_to(cache_dir() / "native")
    return folder
