"""A GGUF file's weights in the blocks they are stored in, without dequantising them first.

Owns the names of tensors, their order of rows, and which module holds what. Architectures whose tensors are rearranged in ways
that are not known here are left to transformers, which dequantises them. What a type becomes is gguf_types.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from foresay.errors import ModelLoadError
from foresay.models.huggingface.linears import (
    TOGETHER,
    FrozenEmbedding,
    FrozenLinear,
    Table,
    freeze_linears,
    of_rows,
    replace_jointly,
)
from foresay.models.huggingface.native.product import NativeProduct
from foresay.models.huggingface.rounding import rounded_int8
from foresay.models.sources.gguf_head import GgufHead
from foresay.models.sources.gguf_positions import scale_positions
from foresay.models.sources.gguf_types import Blocks, Eights, Numbers, Weight, joined, unpacked

ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"})
"""What files are read here; in Llama's, the rows of queries and keys are interleaved, in Gemma's, one is added to norms."""


def model_of_blocks(head: GgufHead, config: Any, dtype: torch.dtype) -> Any:
    """A transformers model whose linear layers hold a file's blocks. Activations and all else are in `dtype`.

    head: of an architecture in ARCHITECTURES. Raises ModelLoadError for a file that lacks tensors.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with init_empty_weights(), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _fill(model, _File(head, config, dtype))
    left = [name for name, one in model.named_parameters() if one.device.type == "meta"]
    if left:
        raise ModelLoadError(f"the GGUF file lacks {len(left)} of the model's tensors ({', '.join(left[:3])}, ...)")
    scale_positions(model, head)
    return model.eval()


class _File:
    """The tensors of a file by transformers' names."""

    def __init__(self, head: GgufHead, config: Any, dtype: torch.dtype) -> None:
        import gguf

        self._tensors, self._architecture, self.dtype = head.tensors, head.architecture, dtype
        known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
        self._names = gguf.get_tensor_name_map(known[self._architecture], config.num_hidden_layers)
        self._heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}

    def get(self, name: str) -> Weight | None:
        """A parameter by transformers' name; None where the file has none."""
        stem, _, suffix = name.rpartition(".")
        own = str(self._names.get_name(stem))
        tensor = self._tensors.get(f"{own}.{suffix}")
        if tensor is None:
            return None
        weight, kind = unpacked(tensor), own.rpartition(".")[2]
        if self._architecture == "llama" and kind in self._heads:  # biases too
            return weight.rows(_interleaved(tensor.shape[0], self._heads[kind]))
        if self._architecture.startswith("gemma") and "norm" in own:
            return Numbers(weight.dense(torch.float32) - 1)
        return weight

    def dense(self, name: str) -> torch.Tensor | None:
        """A parameter as numbers."""
        weight = self.get(name)
        return None if weight is None else weight.dense(self.dtype)


def _interleaved(rows: int, heads: int) -> torch.Tensor:
    """For each row as transformers wants it, its place in the file, where the two halves of a head alternate."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def _fill(model: Any, file: _File) -> None:
    """Put the file's weights into a model on the meta device."""
    model.tie_weights = lambda *args, **kwargs: None  # they may be kept in two ways
    _fill_ends(model, file)
    for name, module in list(model.named_modules()):
        for together in TOGETHER:
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
    return of_rows(*rounded_int8(weight.dense(dtype), torch.float32), dtype, None)


def _fill_linear(
    parent: nn.Module, name: str, weight: Weight | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """A layer's weights: as a product where the file holds them rounded, else as they are."""
    if weight is None:
        return
    old = getattr(parent, name)
    if old.bias is not None and bias is None:
        raise ModelLoadError(f"the GGUF file lacks the biases of {name}")
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
    lacking = any(one is None and layer.bias is not None for one, layer in zip(biases, layers, strict=True) if layer)
    if weight is None or lacking or len({bias is None for bias in biases}) > 1:
        return  # the configuration need not say that there are biases: the file does
    bias = None if biases[0] is None else torch.cat([one for one in biases if one is not None])
    replace_jointly(parent, names, weight.product(file.dtype, bias))
