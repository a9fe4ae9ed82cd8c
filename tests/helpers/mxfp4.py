"""Folders of tiny gpt-oss models whose experts are in MXFP4, and the numbers they stand for."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from helpers import tiny
from helpers.families import make
from helpers.quantized import VOCAB, Change, save_tensors

FLOATS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def folder_of(path: Path, change: Change = lambda weights: None, layers: int = 3) -> tuple[Path, PreTrainedModel]:
    """A folder with random blocks, and the model of their numbers in float32. change: of the tensors of the folder."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "swiglu_limit": 7.0}
    model = make("gpt_oss", 3, num_hidden_layers=layers, **sizes)
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16).float()
    generator, stored = torch.Generator().manual_seed(1), {}
    for layer, block in enumerate(model.model.layers):
        for part in ("gate_up_proj", "down_proj"):
            weight = getattr(block.mlp.experts, part)
            count, depth, rows = weight.shape
            blocks = torch.randint(0, 256, (count, rows, depth // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 125, (count, rows, depth // 32), generator=generator, dtype=torch.uint8)
            fours = torch.stack([blocks & 15, blocks >> 4], -1).flatten(3).long()
            numbers = FLOATS[fours & 7] * torch.where(fours > 7, -1.0, 1.0) * 2.0 ** (scales.float() - 127)[..., None]
            weight.data = numbers.flatten(2).transpose(1, 2).contiguous()
            name = f"model.layers.{layer}.mlp.experts.{part}"
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    tiny.save(path, model)
    found = load_file(path / "model.safetensors")
    weights = {name: one.to(torch.bfloat16) for name, one in found.items() if not name.endswith("_proj")} | stored
    change(weights)
    how = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    save_tensors(path, weights, quantization_config=how, dtype="bfloat16")
    return path, model
