"""A GGUF file's weights in the blocks they are stored in, without dequantising them first.

Owns how llama.cpp lays out its 4-bit blocks (Q4_0, Q4_1, Q4_K), what other types become, and the names of tensors. The
configuration and the tokenizer are read by transformers. Architectures whose tensors are rearranged in ways that are not
known here are left to transformers, which dequantises them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from foresay.errors import ModelLoadError
from foresay.models.huggingface.linears import TOGETHER, FrozenLinear, freeze_linears, replace_jointly
from foresay.models.huggingface.products import Int4Product, Int8Product, Product

ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"})
"""What files are read here; in Llama's, the rows of queries and keys are interleaved, in Gemma's, one is added to norms."""
_FOUR_BITS = frozenset({"Q4_0", "Q4_1", "Q4_K"})
_PLAIN = frozenset({"F32", "F16", "BF16"})
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Blocks:
    """4-bit weights: levels [out, in] of 0 to 15; scales and offsets [out, in / 32], w = scale * (level - 8) + offset."""

    levels: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor

    def rows(self, order: torch.Tensor) -> Blocks:
        """The rows in another order."""
        return Blocks(self.levels[order], self.scales[order], self.offsets[order])

    def product(self, dtype: torch.dtype, bias: torch.Tensor | None) -> Product:
        """The product of these weights for inputs of a dtype, in which scales and offsets are kept."""
        return Int4Product.of_groups(self.levels, self.scales, self.offsets, dtype, bias)


@dataclass(frozen=True, slots=True)
class Numbers:
    """Weights as numbers, float32; whether the file holds them in fewer than 16 bits."""

    values: torch.Tensor
    rounded: bool

    def rows(self, order: torch.Tensor) -> Numbers:
        """The rows in another order."""
        return Numbers(self.values[order], self.rounded)


Weight = Blocks | Numbers


def supports(path: Path) -> bool:
    """Whether a file's architecture is read here."""
    import gguf

    field = gguf.GGUFReader(path).get_field("general.architecture")
    return field is not None and field.contents() in ARCHITECTURES


def load_blocks(path: Path, dtype: torch.dtype) -> Any:
    """A transformers model whose linear layers hold the file's blocks. Activations and all else are in `dtype`.

    Raises ModelLoadError for a file that lacks tensors.
    """
    import gguf
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    reader = gguf.GGUFReader(path)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    file = _File(reader, config)
    _fill(model, file, dtype)
    left = [name for name, one in model.named_parameters() if one.device.type == "meta"]
    if left:
        raise ModelLoadError(f"{str(path)!r} lacks {len(left)} of the model's tensors ({', '.join(left[:3])}, ...)")
    return model.eval()


class _File:
    """The tensors of a file by transformers' names."""

    def __init__(self, reader: Any, config: Any) -> None:
        import gguf

        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        field = reader.get_field("general.architecture")
        self._architecture = str(field.contents())
        known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
        self._names = gguf.get_tensor_name_map(known[self._architecture], config.num_hidden_layers)
        self._heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}

    def get(self, name: str) -> Weight | None:
        """A parameter by transformers' name; None where the file has none."""
        stem, _, suffix = name.rpartition(".")
        own = self._names.get_name(stem)
        tensor = self._tensors.get(f"{own}.{suffix}")
        if tensor is None:
            return None
        weight = unpacked(tensor.data, tensor.tensor_type.name)
        if (
            self._architecture == "llama"
            and (kind := str(own).rpartition(".")[2]) in self._heads
            and suffix == "weight"
        ):
            return weight.rows(_interleaved(int(tensor.shape[1]), self._heads[kind]))
        if self._architecture.startswith("gemma") and "norm" in str(own):
            assert isinstance(weight, Numbers)
            return Numbers(weight.values - 1, weight.rounded)
        return weight


def _interleaved(rows: int, heads: int) -> torch.Tensor:
    """For each row as transformers wants it, its place in the file, where the two halves of a head alternate."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def unpacked(data: Bytes, kind: str) -> Weight:
    """The weights of a tensor: 4-bit blocks as they are, any other type as numbers. data: [out, bytes of a row]."""
    if kind not in _FOUR_BITS:
        import gguf

        values = np.array(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]), dtype=np.float32)
        return Numbers(torch.from_numpy(values), kind not in _PLAIN)
    rows = data.shape[0]
    if kind == "Q4_K":
        return _unpacked_q4_k(data.reshape(rows, -1, 144))
    blocks = data.reshape(rows, -1, 18 if kind == "Q4_0" else 20)
    scales = _halves(blocks[..., :2])
    offsets = np.zeros_like(scales) if kind == "Q4_0" else _halves(blocks[..., 2:4]) + 8 * scales
    nibbles = blocks[..., -16:]
    levels = np.concatenate([nibbles & 15, nibbles >> 4], -1).reshape(rows, -1)
    return Blocks(torch.from_numpy(levels), torch.from_numpy(scales), torch.from_numpy(offsets))


def _unpacked_q4_k(blocks: Bytes) -> Blocks:
    """Blocks of 256: eight groups of 32, whose scales and offsets are 6-bit multiples of two numbers. [out, n, 144]."""
    rows = blocks.shape[0]
    scale, least = _halves(blocks[..., 0:2]), _halves(blocks[..., 2:4])
    packed, nibbles = blocks[..., 4:16], blocks[..., 16:].reshape(rows, -1, 4, 32)
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    multiples = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], -1).astype(np.float32)
    below = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], -1).astype(np.float32)
    scales = (scale[..., None] * multiples).reshape(rows, -1)
    offsets = 8 * scales - (least[..., None] * below).reshape(rows, -1)
    levels = np.stack([nibbles & 15, nibbles >> 4], 3).reshape(rows, -1)
    return Blocks(torch.from_numpy(levels), torch.from_numpy(scales), torch.from_numpy(offsets))


def _halves(two: Bytes) -> npt.NDArray[np.float32]:
    """Pairs of bytes as float16 numbers: [..., 2] -> [...] float32."""
    return np.ascontiguousarray(two).view(np.float16)[..., 0].astype(np.float32)


def _fill(model: Any, file: _File, dtype: torch.dtype) -> None:
    """Put the file's weights into a model on the meta device."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    as_head = file.get(names[head] + ".weight") or file.get(names[embedding] + ".weight")
    model.tie_weights = lambda *args, **kwargs: None  # they may be kept in two ways
    for name, module in list(model.named_modules()):
        for together in TOGETHER:
            _fill_together(module, name, together, file, dtype)
        for short, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                path = f"{name}.{short}" if name else short
                weight = as_head if child is head else file.get(path + ".weight")
                _fill_linear(module, short, weight, _dense(file.get(path + ".bias"), dtype), dtype)
        for short, parameter in list(module.named_parameters(recurse=False)):
            found = _dense(file.get(f"{name}.{short}"), dtype) if parameter.device.type == "meta" else None
            if found is not None:
                setattr(module, short, nn.Parameter(found, requires_grad=False))
    freeze_linears(model)


def _fill_linear(
    parent: nn.Module, name: str, weight: Weight | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """A layer's weights: as a product where the file holds them rounded, else as they are."""
    if weight is None:
        return
    product = _product(weight, dtype, bias)
    if product is not None:
        setattr(parent, name, FrozenLinear(product))
        return
    assert isinstance(weight, Numbers)
    rows, columns = weight.values.shape
    layer = nn.Linear(columns, rows, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.values.to(dtype), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    setattr(parent, name, layer)


def _fill_together(parent: Any, path: str, names: Sequence[str], file: _File, dtype: torch.dtype) -> None:
    """Replace layers that read the same input by one product, where their weights are rounded in one way."""
    layers = [getattr(parent, name, None) for name in names]
    if not all(isinstance(layer, nn.Linear) for layer in layers):
        return
    joined = _joined([file.get(f"{path}.{name}.weight") for name in names])
    biases = [_dense(file.get(f"{path}.{name}.bias"), dtype) for name in names]
    if joined is None or len({bias is None for bias in biases}) > 1:
        return
    product = _product(joined, dtype, None if biases[0] is None else torch.cat([b for b in biases if b is not None]))
    if product is not None:
        replace_jointly(parent, names, product)


def _joined(weights: Sequence[Weight | None]) -> Weight | None:
    """Weights one below the other; None where they are not all blocks, or all rounded numbers."""
    blocks = [w for w in weights if isinstance(w, Blocks)]
    if len(blocks) == len(weights):
        parts = zip(*((w.levels, w.scales, w.offsets) for w in blocks), strict=True)
        return Blocks(*(torch.cat(column) for column in parts))
    numbers = [w.values for w in weights if isinstance(w, Numbers) and w.rounded]
    return Numbers(torch.cat(numbers), True) if len(numbers) == len(weights) else None


def _product(weight: Weight, dtype: torch.dtype, bias: torch.Tensor | None) -> Product | None:
    """4-bit blocks as they are, other rounded weights in 8 bits with one scale a row; None for weights that are not rounded."""
    if isinstance(weight, Blocks):
        return weight.product(dtype, bias)
    return Int8Product(weight.values.to(dtype), bias) if weight.rounded else None


def _dense(weight: Weight | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Weights as numbers of a dtype."""
    if isinstance(weight, Blocks):
        groups = weight.levels.float().view(len(weight.levels), -1, 32)
        values = (groups - 8) * weight.scales[..., None] + weight.offsets[..., None]
        return values.flatten(1).to(dtype)
    return None if weight is None else weight.values.to(dtype)
