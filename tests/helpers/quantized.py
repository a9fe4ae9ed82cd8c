"""Folders of quantized layers: random tensors of each format, packed by other code than ours, and the numbers they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from helpers import tiny
from helpers.families import make

VOCAB = len(tiny.tokenizer())
Made = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The numbers of a layer, [out, in], and its tensors by last name."""
GROUP = 64


def drawn(shape: torch.Size, bits: int, generator: torch.Generator, group: int = GROUP) -> tuple[torch.Tensor, ...]:
    """Random levels, levels that stand for 0, and scales of groups, the last in float16."""
    rows, groups = shape[0], -(-shape[1] // group)
    levels = torch.randint(0, 1 << bits, shape, generator=generator)
    zeros = torch.randint(1, 1 << bits, (rows, groups), generator=generator)
    scales = (torch.rand(rows, groups, generator=generator) * 0.4 + 0.8) * 0.3 / (1 << bits)
    return levels, zeros, scales.half()


def numbers(levels: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    out = torch.empty(levels.shape)
    for column in range(levels.shape[1]):
        at = column // group
        out[:, column] = (levels[:, column] - zeros[:, at]).float() * scales[:, at].float()
    return out


def words(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Values of the last dimension in words of 32 bits. order[i]: which value of a word has the i-th lowest bits."""
    count = 32 // bits
    order = order or tuple(range(count))
    out = torch.zeros(*values.shape[:-1], values.shape[-1] // count, dtype=torch.int64)
    for i, one in enumerate(order):
        out |= values[..., one::count].long() << (bits * i)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).int()


def awq(shape: torch.Size, generator: torch.Generator) -> Made:
    levels, zeros, scales = drawn(shape, 4, generator)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    packed = {"qweight": words(levels.T, 4, order), "qzeros": words(zeros.T, 4, order), "scales": scales.T.contiguous()}
    return numbers(levels, zeros, scales), packed


def gptq(
    shape: torch.Size,
    generator: torch.Generator,
    bits: int = 4,
    symmetric: bool = True,
    version: int = 1,
    ordered: bool = False,
) -> Made:
    levels, zeros, scales = drawn(shape, bits, generator)
    zeros = torch.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros
    groups = torch.arange(shape[1]) // GROUP
    weight = numbers(levels, zeros, scales)
    if ordered:
        order = torch.randperm(shape[1], generator=generator)
        levels, weight, groups = levels[:, order], weight[:, order], groups[order]
    return weight, {
        "qweight": words(levels, bits).T.contiguous(),
        "qzeros": words((zeros - int(version == 1)).T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": groups.int(),
    }


def packed(shape: torch.Size, generator: torch.Generator, bits: int = 4, symmetric: bool = True) -> Made:
    levels, zeros, scales = drawn(shape, bits, generator)
    zeros = torch.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros
    found = {"weight_packed": words(levels, bits), "weight_scale": scales, "weight_shape": torch.tensor(shape)}
    if not symmetric:
        found["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    return numbers(levels, zeros, scales), found


def int8(shape: torch.Size, generator: torch.Generator) -> Made:
    levels = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    scales = (torch.rand(shape[0], 1, generator=generator) * 0.002 + 0.001).half()
    return levels.float() * scales.float(), {"weight": levels, "weight_scale": scales}


def int8_of_modelopt(shape: torch.Size, generator: torch.Generator) -> Made:
    """Scales of rows are a vector, and there is one of the inputs."""
    weight, found = int8(shape, generator)
    return weight, {**found, "weight_scale": found["weight_scale"][:, 0], "input_scale": torch.tensor(0.1)}


def fp8_of_modelopt(shape: torch.Size, generator: torch.Generator, kind: str) -> Made:
    """Scales of rows are a vector, those of blocks have four dimensions; there is one of the inputs for the matrix."""
    weight, found = fp8(shape, generator, kind)
    scales = found.pop("weight_scale_inv", found.get("weight_scale"))
    assert scales is not None
    if kind == "matrix":
        return weight, found | {"weight_scale": scales, "input_scale": torch.tensor(0.1)}
    return weight, found | {"weight_scale": scales.flatten() if kind == "rows" else scales[:, None, :, None]}


def fp8(shape: torch.Size, generator: torch.Generator, kind: str = "blocks") -> Made:
    levels = torch.randn(*shape, generator=generator).clamp(-3, 3).to(torch.float8_e4m3fn)
    sizes = {"blocks": (64, 32), "early": (48, 48), "large": (128, 128), "rows": (1, shape[1]), "matrix": tuple(shape)}
    height, width = sizes[kind]
    scales = torch.rand(-(-shape[0] // height), -(-shape[1] // width), generator=generator) * 0.1 + 0.05
    whole = scales.repeat_interleave(height, 0)[: shape[0]].repeat_interleave(width, 1)[:, : shape[1]]
    name = "weight_scale" if kind == "rows" else "weight_scale_inv"
    return levels.float() * whole, {"weight": levels, name: scales if kind != "matrix" else scales.reshape(())}


def scheme(bits: int, kind: str = "int", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": "group", "group_size": GROUP, "symmetric": True}
    return {"group_0": {"targets": ["Linear"], "weights": weights | more, "input_activations": None}}


def compressed(kind: str, scheme: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": scheme}


GROUPED = {"bits": 4, "group_size": GROUP}
ROWS = {"strategy": "channel", "group_size": None}
FP8_GROUPS = scheme(8, "float", **ROWS)
FP8_BLOCKS = scheme(8, "float", strategy="block", group_size=None, block_structure="64x32")
BLOCKS = {"weight_block_size": [64, 32], "activation_scheme": "dynamic"}
EARLY = {"weight_block_size": [48, 48], "scale_fmt": "float"}
Case = tuple[Callable[..., Made], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "AWQ": (awq, {}, {"quant_method": "awq", **GROUPED, "version": "gemm", "zero_point": True}),
    "GPTQ": (gptq, {}, {"quant_method": "gptq", **GROUPED, "sym": True, "desc_act": False}),
    "GPTQ with levels of zero": (gptq, {"symmetric": False}, {"quant_method": "gptq", **GROUPED, "sym": False}),
    "GPTQ, second version": (
        gptq, {"symmetric": False, "version": 2}, {"quant_method": "gptq", **GROUPED, "checkpoint_format": "gptq_v2"},
    ),
    "GPTQ, 8 bits": (gptq, {"bits": 8}, {"quant_method": "gptq", "bits": 8, "group_size": GROUP}),
    "compressed-tensors int4": (packed, {}, compressed("pack-quantized", scheme(4))),
    "compressed-tensors int4 with levels of zero": (
        packed, {"symmetric": False}, compressed("pack-quantized", scheme(4, symmetric=False)),
    ),
    "compressed-tensors int8": (int8, {}, compressed("int-quantized", scheme(8, **ROWS))),
    "ModelOpt int8": (int8_of_modelopt, {}, {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"}),
}  # fmt: skip
EXPANDED: dict[str, Case] = {
    "GPTQ in the order of activations": (
        gptq,
        {"ordered": True},
        {"quant_method": "gptq", **GROUPED, "desc_act": True},
    ),
    "FP8": (fp8, {}, {"quant_method": "fp8", **BLOCKS}),
    "FP8 of rows": (fp8, {"kind": "rows"}, compressed("float-quantized", FP8_GROUPS)),
    "FP8 of blocks that end early": (fp8, {"kind": "early"}, {"quant_method": "fp8", **EARLY}),
    "FP8 of a matrix": (fp8, {"kind": "matrix"}, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "FP8 of blocks in a text": (fp8, {}, compressed("float-quantized", FP8_BLOCKS)),
    **{
        name: (fp8_of_modelopt, {"kind": kind}, {"quant_method": "modelopt", "quant_algo": algorithm})
        for name, kind, algorithm in (
            ("ModelOpt FP8", "matrix", "FP8"),
            ("ModelOpt FP8 of rows", "rows", "FP8_PER_CHANNEL_PER_TOKEN"),
            ("ModelOpt FP8 of blocks", "large", "fp8_pb_wo"),
        )
    },
}
Change = Callable[[dict[str, torch.Tensor]], Any]


@cache
def _made(case: str, layers: int, with_head: bool) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """The model of the numbers in float32, and the tensors that are stored."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCAB, "num_hidden_layers": layers, "num_key_value_heads": 2}
    model = make("qwen2", 3, **sizes, tie_word_embeddings=False)
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16).float()
    found = {name: one.to(torch.bfloat16) for name, one in sorted(model.state_dict().items())}
    chosen = ("_proj.weight", "lm_head.weight") if with_head else "_proj.weight"
    for name, weight in quantize(found, [one for one in found if one.endswith(chosen)], case).items():
        model.get_parameter(name).data = weight
    return model, found


def folder_of(
    path: Path, case: str, change: Change = lambda tensors: None, layers: int = 3, *, with_head: bool = False
) -> tuple[Path, PreTrainedModel]:
    """A folder whose layers are quantized, without the output layer or with it, and the model of their numbers in float32.

    The model is shared; leave it as it is. case: also "MXFP4". change: of the tensors of the folder.
    """
    if case == "MXFP4":  # of experts
        return mxfp4_folder(path, change, layers)
    model, stored = _made(case, layers, with_head)
    found = {name: one.clone() for name, one in stored.items()}
    change(found)
    path.mkdir()
    for part in (model.config, tiny.tokenizer()):
        part.save_pretrained(path)
    save_tensors(path, found, quantization_config=(CASES | EXPANDED)[case][2], dtype="bfloat16")
    return path, model


def quantize(found: dict[str, torch.Tensor], chosen: list[str], case: str) -> dict[str, torch.Tensor]:
    """Replace weights by random ones in a case's form. Returns the numbers that these stand for."""
    make_layer, given, _ = (CASES | EXPANDED)[case]
    generator, numbers_of = torch.Generator().manual_seed(1), {}
    for name in chosen:
        numbers_of[name], tensors = make_layer(found.pop(name).shape, generator, **given)
        found |= {f"{name.removesuffix('weight')}{part}": one for part, one in tensors.items()}
    return numbers_of


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], **values: Any) -> None:
    """Write the tensors of a folder, and values of its config.json."""
    save_file({name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the values of a folder's config.json."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


FLOATS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4_folder(path: Path, change: Change = lambda weights: None, layers: int = 3) -> tuple[Path, PreTrainedModel]:
    """A folder of a tiny gpt-oss with experts in random blocks of MXFP4, and the model of their numbers in float32.

    change: of the tensors of the folder.
    """
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
