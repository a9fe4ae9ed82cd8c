"""A GGUF file's weights in the blocks they are stored in, without dequantising them first.

Owns the names of tensors, their order of rows, and which module holds what. Architectures whose tensors are rearranged in ways
that are not known here are left to transformers, which dequantises them. What a type becomes is types.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from foresay.models.cpu.product import NativeProduct
from foresay.models.cpu.rounding import quantize_int8
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.positions import scale_positions
from foresay.models.gguf.shapes import Name, check_tensors, empty_model, namer
from foresay.models.gguf.types import Blocks, Eights, Numbers, Weight, joined, unpacked
from foresay.models.gguf.values import refused_tensor
from foresay.models.huggingface.linears import (
    JOINT_LAYERS,
    FrozenEmbedding,
    FrozenLinear,
    Table,
    freeze_linears,
    of_rows,
    replace_jointly,
)


def model_of_blocks(head: GgufHeader, config: Any, dtype: torch.dtype) -> Any:
    """A transformers model whose linear layers hold a file's blocks. Activations and all else are in `dtype`.

    head: of one of ARCHITECTURES, whose values are checked. Raises ModelLoadError for a file whose tensors are not the model's,
    or contain numbers that are not finite.
    """
    model, name = empty_model(config, dtype), namer(head, config)
    check_tensors(head, model, name)
    _fill(model, _File(head, config, dtype, name))
    scale_positions(model, head)
    return model.eval()


class _File:
    """The tensors of a file by transformers' names."""

    def __init__(self, head: GgufHeader, config: Any, dtype: torch.dtype, name: Name) -> None:
        self._head, self._name, self.dtype = head, name, dtype
        self._heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}

    def get(self, name: str) -> Weight | None:
        """A parameter by transformers' name; None where the file has none. Raises ModelLoadError for numbers not finite."""
        own = self._name(name)
        tensor = self._head.tensors.get(own)
        if tensor is None:
            return None
        weight, kind = unpacked(tensor), own.split(".")[-2]
        if not weight.is_finite():
            raise refused_tensor(self._head, own, "has numbers that are not finite")
        if self._head.architecture == "llama" and kind in self._heads:  # biases too
            return weight.rows(_interleaved(tensor.shape[0], self._heads[kind]))
        if self._head.architecture.startswith("gemma") and "norm" in own:
            return Numbers(weight.dense(torch.float32) - 1)
        return weight

    def dense(self, name: str) -> torch.Tensor | None:
        """A parameter as numbers."""
        weight = self.get(name)
        return None if weight is None else weight.dense(self.dtype)


def _interleaved(rows: int, heads: int) -> torch.Tensor:
    """For each row as transformers wants it, its index in a Llama's file, where the two halves of a head alternate."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def _fill(model: Any, file: _File) -> None:
    """Put the file's weights into a model on the meta device."""
    model.tie_weights = lambda *args, **kwargs: None  # they may be kept in two ways
    _fill_ends(model, file)
    for name, module in list(model.named_modules()):
        for together in JOINT_LAYERS:
            _fill_together(module, name, together, file)
        for short, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child.weight.device.type == "meta":
                path = f"{name}.{short}" if name else short
                _fill_linear(module, short, file.get(path + ".weight"), file.dense(path + ".bias"), file.dtype)
        if isinstance(module, nn.Linear):
            continue  # its parent has replaced it
        for short, parameter in list(module.named_parameters(recurse=False)):
            found = file.dense(f"{name}.{short}") if parameter.device.type == "meta" else None
            if found is not None:
                setattr(module, short, nn.Parameter(found, requires_grad=False))
    freeze_linears(model)


def _fill_ends(model: Any, file: _File) -> None:
    """The embedding and the head: both are one product where they are tied, and rows of it can be looked up."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    own, looked_up = file.get(names[head] + ".weight"), file.get(names[embedding] + ".weight")
    if looked_up is None:
        return
    table = None
    if not isinstance(looked_up, Numbers) and type(embedding) is nn.Embedding:
        table = _table(looked_up, file.dtype)
        model.set_input_embeddings(FrozenEmbedding(table, file.dtype))
    parent, _, short = names[head].rpartition(".")
    if own is None and (isinstance(table, NativeProduct) or (table is not None and isinstance(looked_up, Eights))):
        setattr(model.get_submodule(parent), short, FrozenLinear(table))
    else:
        _fill_linear(model.get_submodule(parent), short, looked_up if own is None else own, None, file.dtype)


def _table(weight: Weight, dtype: torch.dtype) -> Table:
    """What an embedding's rows are looked up in: the file's own blocks where there are kernels for them, else 8 bits."""
    if isinstance(weight, Eights):
        return weight.product(dtype, None)
    if isinstance(weight, Blocks):
        blocks = weight.product(dtype, None)
        if isinstance(blocks, NativeProduct):
            return blocks
    return of_rows(*quantize_int8(weight.dense(dtype), torch.float32), dtype, None)


def _fill_linear(
    parent: nn.Module, name: str, weight: Weight | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """A layer's weights: as a product where the file holds them rounded, else as they are."""
    if weight is None:
        return
    if not isinstance(weight, Numbers):
        setattr(parent, name, FrozenLinear(weight.product(dtype, bias)))
        return
    rows, columns = weight.values.shape
    layer = nn.Linear(columns, rows, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.dense(dtype), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    setattr(parent, name, layer)


def _fill_together(parent: Any, path: str, names: Sequence[str], file: _File) -> None:
    """Replace layers that read the same input by one product, where their weights are rounded in one way."""
    layers = [getattr(parent, name, None) for name in names]
    if not all(isinstance(layer, nn.Linear) and layer.weight.device.type == "meta" for layer in layers):
        return
    weight = joined([file.get(f"{path}.{name}.weight") for name in names])
    biases = [file.dense(f"{path}.{name}.bias") for name in names]
    if weight is None or len({bias is None for bias in biases}) > 1:
        return  # the configuration need not say that there are biases: the file does
    bias = None if biases[0] is None else torch.cat([one for one in biases if one is not None])
    replace_jointly(parent, names, weight.product(file.dtype, bias))
