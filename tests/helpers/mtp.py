"""Tiny checkpoints with multi-token-prediction layers, in the layouts in which they are published."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from foresay.models.drafts.mtp import _complete
from helpers import tiny
from helpers.families import make


def save_with_mtp(folder: Path, family: str, *, seed: int = 3, **changes: Any) -> Path:
    """A checkpoint of a family whose layers are followed by multi-token-prediction layers with random weights."""
    model = make(family, seed, **changes)
    tiny.save(folder, model)
    weights = load_file(folder / "model.safetensors")
    depth = model.config.num_hidden_layers
    for index, short, value in _random_layers(model, family, seed):
        for published, part in _published(short, value, family, depth + index):
            weights[published] = part.to(torch.float32).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def layers_of_gguf(model: Any, family: str, *, seed: int = 3) -> dict[str, torch.Tensor]:
    """The weights of such a checkpoint's layers under the names that llama.cpp's converter reads, after the model's layers."""
    depth, found = model.config.num_hidden_layers, {}
    for index, short, value in _random_layers(model, family, seed):
        name = short.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        found[f"model.layers.{depth + index}.{name}"] = value
    return found


def _random_layers(model: Any, family: str, seed: int) -> Iterator[tuple[int, str, torch.Tensor]]:
    """(layer, transformers' name in it, values) of each weight."""
    _complete(model.config)
    layers = MtpModel(model, model.config.num_mtp_layers)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in layers.state_dict().items():
        if not name.startswith("layers."):
            continue
        _, index, short = name.split(".", 2)
        value = torch.randn(weight.shape, generator=generator)
        value = value * weight.shape[-1] ** -0.5 * 2 if weight.dim() >= 2 else 1 + 0.3 * value
        if weight.dim() == 1 and family.startswith("qwen3"):  # norms that count from one
            value = value - 1
        yield int(index), short, value


def _published(name: str, value: torch.Tensor, family: str, depth: int) -> list[tuple[str, torch.Tensor]]:
    """The name of a weight in a published checkpoint; fused experts become one weight each."""
    qwen = family.startswith("qwen3")
    inner = name.removeprefix("mtp_block.")
    if inner == name:
        if qwen:
            names = {
                "enorm": "pre_fc_norm_embedding",
                "hnorm": "pre_fc_norm_hidden",
                "eh_proj": "fc",
                "post_norm": "norm",
            }
            part = name.split(".")[0]
            return [(f"mtp.{names[part]}.weight", value)]
        return [(f"model.layers.{depth}.{name.replace('post_norm', 'shared_head.norm')}", value)]
    prefix = "mtp.layers.0." if qwen else f"model.layers.{depth}."
    fused = re.fullmatch(r"mlp\.experts\.(gate_up_proj|down_proj)", inner)
    if fused is None:
        return [(prefix + inner, value)]
    out = []
    for i, one in enumerate(value):
        parts = (
            dict(zip(("gate_proj", "up_proj"), one.chunk(2), strict=True))
            if fused[1] == "gate_up_proj"
            else {"down_proj": one}
        )
        out += [(f"{prefix}mlp.experts.{i}.{part}.weight", weight) for part, weight in parts.items()]
    return out
