"""Loads a GGUF file's weights into a model in their quantized blocks, without dequantizing them.

Owns the mapping from tensors to modules and the order of rows. transformers loads and dequantizes architectures whose tensors
are rearranged in ways unknown here. types.py decides the representation of each tensor type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from foresay.models.cpu.product import NativeProduct
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.positions import scale_positions
from foresay.models.gguf.shapes import Name, check_tensors, empty_model, gguf_namer
from foresay.models.gguf.types import BlockWeight, DenseWeight, Weight, concatenated, read_weight
from foresay.models.gguf.values import invalid_tensor
from foresay.models.huggingface.linears import (
    JOINT_LAYERS,
    FrozenEmbedding,
    FrozenLinear,
    compiled,
    freeze_linears,
    replace_jointly,
)


def model_of_blocks(header: GgufHeader, config: Any, dtype: torch.dtype) -> Any:
    """Return a transformers model whose linear layers use the file's blocks. Activations and all other weights are in `dtype`.

    header: checked by `check_values`, of one of ARCHITECTURES. Raises ModelLoadError if the tensors do not match the model or
    contain numbers that are not finite.
    """
    model, name = empty_model(config, dtype), gguf_namer(header, config)
    check_tensors(header, model, name)
    _fill(model, _File(header, config, dtype, name))
    scale_positions(model, header)
    return model.eval()


class _File:
    """The tensors of a file, by transformers' parameter names."""

    def __init__(self, header: GgufHeader, config: Any, dtype: torch.dtype, name: Name) -> None:
        self._header, self._name, self.dtype = header, name, dtype
        self._heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}

    def get(self, name: str) -> Weight | None:
        """Return a parameter, or None if the file lacks it. Raises ModelLoadError for numbers that are not finite."""
        tensor_name = self._name(name)
        tensor = self._header.tensors.get(tensor_name)
        if tensor is None:
            return None
        weight, kind = read_weight(tensor), tensor_name.split(".")[-2]
        if not weight.is_finite():
            raise invalid_tensor(self._header, tensor_name, "contains numbers that are not finite")
        if self._header.architecture == "llama" and kind in self._heads:  # biases too
            return weight.reordered(_row_order(tensor.shape[0], self._heads[kind]))
        if self._header.architecture.startswith("gemma") and "norm" in tensor_name:
            return DenseWeight(weight.dense(torch.float32) - 1)  # transformers adds the 1 in the norm
        return weight

    def release_pages(self) -> None:
        """See `GgufHeader`."""
        self._header.release_pages()

    def dense(self, name: str) -> torch.Tensor | None:
        """Return a parameter in `dtype`, or None if the file lacks it."""
        weight = self.get(name)
        return None if weight is None else weight.dense(self.dtype)


def _row_order(rows: int, heads: int) -> torch.Tensor:
    """Return the file's row index of each of transformers' rows; Llama's files interleave the two halves of a head."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def _fill(model: Any, file: _File) -> None:
    """Load the file's weights into a model on the meta device."""
    model.tie_weights = lambda *args, **kwargs: None  # tied layers may use two representations of one weight
    _fill_embeddings(model, file)
    for name, module in list(model.named_modules()):
        file.release_pages()  # of the weights that were packed
        for joint in JOINT_LAYERS:
            _fill_joint(module, name, joint, file)
        for short, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child.weight.device.type == "meta":
                path = f"{name}.{short}" if name else short
                _fill_linear(module, short, file.get(path + ".weight"), file.dense(path + ".bias"), file.dtype)
        if isinstance(module, nn.Linear):
            continue  # replaced through its parent
        for short, parameter in list(module.named_parameters(recurse=False)):
            found = file.dense(f"{name}.{short}") if parameter.device.type == "meta" else None
            if found is not None:
                setattr(module, short, nn.Parameter(found, requires_grad=False))
    freeze_linears(model)


def _fill_embeddings(model: Any, file: _File) -> None:
    """Load the embedding and the output layer, which share one product if they are tied and its rows can be read."""
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    output_weight, embedding_weight = file.get(names[output] + ".weight"), file.get(names[embedding] + ".weight")
    if embedding_weight is None:
        return
    parent, _, short = names[output].rpartition(".")
    table = None
    if isinstance(embedding_weight, BlockWeight) and type(embedding) is nn.Embedding and compiled():
        table = embedding_weight.product(None)
        assert isinstance(table, NativeProduct)  # of a single tensor
        model.set_input_embeddings(FrozenEmbedding(table, file.dtype))
    if output_weight is None and table is not None:
        setattr(model.get_submodule(parent), short, FrozenLinear(table))
    else:
        weight = embedding_weight if output_weight is None else output_weight
        _fill_linear(model.get_submodule(parent), short, weight, None, file.dtype)


def _fill_linear(
    parent: nn.Module, name: str, weight: Weight | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """Load a linear layer: as a product if the kernels read the file's blocks, else as a plain layer."""
    if weight is None:
        return
    if isinstance(weight, BlockWeight) and compiled():
        setattr(parent, name, FrozenLinear(weight.product(bias)))
        return
    values = weight.dense(dtype)
    layer = nn.Linear(values.shape[1], values.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(values, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    setattr(parent, name, layer)


def _fill_joint(parent: Any, path: str, names: Sequence[str], file: _File) -> None:
    """Replace layers that read the same input by one product, if all their weights are quantized."""
    layers = [getattr(parent, name, None) for name in names]
    if not compiled() or not all(
        isinstance(layer, nn.Linear) and layer.weight.device.type == "meta" for layer in layers
    ):
        return
    weight = concatenated([file.get(f"{path}.{name}.weight") for name in names])
    biases = [file.dense(f"{path}.{name}.bias") for name in names]
    if weight is None or len({bias is None for bias in biases}) > 1:
        return
    bias = None if biases[0] is None else torch.cat([one for one in biases if one is not None])
    replace_jointly(parent, names, weight.product(bias))
