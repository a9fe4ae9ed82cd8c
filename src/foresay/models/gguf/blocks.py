"""Loads a GGUF file's weights into a model: in their quantized blocks, without dequantizing them, or as numbers.

Owns the mapping from tensors to modules and the order of rows. transformers loads and dequantizes architectures whose tensors
are rearranged in ways unknown here. types.py decides the representation of each tensor type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from foresay.models.cpu.product import NativeProduct
from foresay.models.families.orders import ReorderedInput
from foresay.models.families.table import FAMILIES
from foresay.models.gguf.header import GgufHeader, StoredTensor
from foresay.models.gguf.names import PRECISE, Name, gguf_namer, part_of
from foresay.models.gguf.packed import PackedWeights
from foresay.models.gguf.positions import scale_positions
from foresay.models.gguf.shapes import check_tensors, empty_model, expert_parts
from foresay.models.gguf.types import (
    BlockWeight,
    DenseWeight,
    Weight,
    concatenated,
    is_quantized,
    read_numbers,
    read_weight,
)
from foresay.models.gguf.values import invalid_tensor
from foresay.models.hardware import CPU
from foresay.models.huggingface.experts import expert_weights, is_experts, set_expert_weights
from foresay.models.huggingface.frozen import FrozenEmbedding, FrozenExperts, FrozenLinear
from foresay.models.huggingface.linears import JOINT_LAYERS, freeze_linears, replace_jointly, stored_weights
from foresay.models.layer import StackedExperts


def model_of_file(
    header: GgufHeader,
    config: Any,
    dtype: torch.dtype,
    *,
    in_blocks: bool,
    gpu: torch.device | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Any:
    """Return a transformers model with a file's weights; numbers are in `dtype`.

    header: checked by `check_values`, of one of ARCHITECTURES. in_blocks: True for linear layers and experts over the file's
    blocks; otherwise all weights are numbers, except those of linear layers and experts in types that our kernels for GPUs read,
    on `gpu`. progress: called with texts while weights are packed.
    Raises ModelLoadError if the tensors do not match the model or contain numbers that are not finite, and ConfigError for blocks
    without compiled kernels.
    """
    if in_blocks:
        CPU.check_compiled("set dtype='float32', which dequantizes the file", param="model", value=header.path.name)
    model, name = empty_model(config, dtype), gguf_namer(header, config.num_hidden_layers)
    if (split := header.family.split) is not None:
        split(model, header.tensors)
    check_tensors(header, model, name)
    packed = PackedWeights(header, progress=progress) if in_blocks else None
    file = FileWeights(header, config, dtype, name, packed, gpu)
    if packed is not None or gpu is not None:
        model.tie_weights = lambda *args, **kwargs: None  # tied layers may use two representations of one weight
        _fill_embeddings(model, file)
    fill(model, file)
    if packed is None and gpu is None:
        model.tie_weights()
    elif packed is not None:
        freeze_linears(model)
        packed.write()
    scale_positions(model, header)
    return model.eval()


class FileWeights:
    """The tensors of a file, by transformers' parameter names."""

    def __init__(
        self,
        header: GgufHeader,
        config: Any,
        dtype: torch.dtype,
        name: Name,
        packed: PackedWeights | None,
        gpu: torch.device | None = None,
    ) -> None:
        """packed: None to read numbers only, or products on `gpu`."""
        self._gpu = gpu
        self.form = header.family
        self._header, self._name, self.dtype, self._packed, self.config = header, name, dtype, packed, config
        heads = (config.num_attention_heads, config.num_key_value_heads) if self.form.interleaved else (1, 1)
        self._heads = dict(zip(("attn_q", "attn_k"), heads, strict=True))

    @property
    def in_blocks(self) -> bool:
        """True if quantized weights stay in their blocks."""
        return self._packed is not None

    def _stored(self, name: str) -> StoredTensor | None:
        return self._header.tensors.get(self._name(name))

    def contains(self, name: str) -> bool:
        """True if the file has a parameter."""
        return self._stored(name) is not None

    def get(self, name: str) -> Weight | None:
        """Return a parameter, or None if the file lacks it. Raises ModelLoadError for numbers that are not finite."""
        tensor_name, tensor = self._name(name), self._stored(name)
        if tensor is None:
            return None
        weight, kind = (read_weight if self.in_blocks else read_numbers)(tensor), tensor_name.split(".")[-2]
        if not weight.is_finite():
            raise invalid_tensor(self._header, tensor_name, "contains numbers that are not finite")
        if self.form.interleaved and kind in self._heads:  # biases too
            return weight.reordered(row_order(tensor.shape[0], self._heads[kind]))
        if self.form.norms_from_one and "norm" in tensor_name and "ssm_norm" not in tensor_name:
            return DenseWeight(weight.dense(torch.float32) - 1)  # transformers adds the 1 in the norm
        return self._of_hybrid(weight, tensor_name) if self.form.mixed else weight

    def _of_hybrid(self, weight: Weight, tensor_name: str) -> Weight:
        """Return a weight in the form and order of transformers."""
        if part_of(tensor_name) == "ssm_a":
            rates = -weight.dense(torch.float32)
            if not bool((rates > 0).all()):
                raise invalid_tensor(self._header, tensor_name, "contains numbers that are not negative")
            weight = DenseWeight(rates.log())
        order = None if self.form.row_order is None else self.form.row_order(self.config, part_of(tensor_name))
        return weight if order is None else weight.reordered(order)

    def product(self, names: Sequence[str], bias: torch.Tensor | None) -> Any | None:
        """Return one product of parameters whose rows are concatenated; None unless all of them stay in quantized blocks.

        Raises as `get` does, and ModelLoadError for rows of different lengths.
        """
        if self._gpu is not None:
            return self._on_gpu(names, bias, self._gpu)
        return self._native(names, bias)

    def table(self, name: str) -> NativeProduct | None:
        """Return the product whose rows an embedding reads; None unless it stays in quantized blocks."""
        return self._native([name], None)

    def _on_gpu(self, names: Sequence[str], bias: torch.Tensor | None, device: torch.device) -> Any | None:
        """Return the product of weights of which some are in types that the kernels read; the others are numbers in it."""
        from foresay.models.gpu.blocks import BlockProduct, NumberProduct, StackedProduct
        from foresay.models.levels import KINDS, Levels

        stored = [one for one in map(self._stored, names) if one is not None]
        if len(stored) < len(names) or not any(one.kind in KINDS for one in stored):
            return None
        rows = [one.shape[0] for one in stored]
        biases = [None] * len(rows) if bias is None else torch.split(bias, rows)
        parts: list[Any] = []
        for name, own in zip(names, biases, strict=True):
            weight = self.get(name)
            assert weight is not None
            if isinstance(weight, BlockWeight) and weight.stored[0].kind in KINDS:
                [one] = weight.stored
                parts.append(BlockProduct(Levels.of_file(one.kind, one.data), self.dtype, device, own))
            else:
                bias_there = None if own is None else own.to(device, self.dtype)
                parts.append(NumberProduct(weight.dense(self.dtype).to(device), bias_there))
        if len({part.in_features for part in parts}) > 1:
            concatenated([self.get(name) for name in names])  # refuses them
        return parts[0] if len(parts) == 1 else StackedProduct(parts)

    def experts_on_gpu(
        self, ups: Sequence[str], down: str, count: int, bias: torch.Tensor | None, down_bias: torch.Tensor | None
    ) -> StackedExperts | None:
        """Return the experts of a layer over their blocks; None unless all are in types that the kernels of a GPU read.

        ups: parameters [experts, out, in] of one type, whose rows are concatenated. bias, down_bias: [experts, all out].
        """
        stored, device = [self._stored(name) for name in (*ups, down)], self._gpu
        if device is None or None in stored or not FAMILIES[self.config.model_type].has_experts:
            return None
        from foresay.models.gpu.blocks import BlockProduct, stacked_experts
        from foresay.models.levels import KINDS, Levels

        kinds = [one.kind for one in stored if one is not None]
        if len(set(kinds[:-1])) > 1 or not {*kinds} <= KINDS.keys():
            return None

        def product(names: Sequence[str], own: torch.Tensor | None) -> BlockProduct:
            weights = concatenated([self.get(name) for name in names])  # refuses rows of different lengths
            assert weights is not None
            levels = [Levels.of_file(one.kind, one.data) for one in weights.stored]
            return BlockProduct(
                Levels.of_experts(levels, count), self.dtype, device, None if own is None else own.flatten()
            )

        return stacked_experts(product(ups, bias), product([down], down_bias), count)

    def _native(self, names: Sequence[str], bias: torch.Tensor | None) -> NativeProduct | None:
        stored = [one for one in map(self._stored, names) if one is not None]
        if self._packed is None or len(stored) < len(names) or not all(map(is_quantized, stored)):
            return None

        def make() -> NativeProduct:
            weight = concatenated([self.get(name) for name in names])
            assert weight is not None
            return weight.product(bias)

        shape = sum(one.shape[0] for one in stored), stored[0].shape[-1]
        return self._packed.product(names[0], shape, bias, make)

    def expert_products(
        self, names: Sequence[str], count: int, bias: torch.Tensor | None
    ) -> list[NativeProduct] | None:
        """Return the product of each expert, of parameters [experts, out, in] whose rows are concatenated; see `product`.

        bias: [experts, all out].
        """
        stored, packed = [one for one in map(self._stored, names) if one is not None], self._packed
        if packed is None or not all(map(is_quantized, stored)):
            return None
        weights: list[Weight | None] = []

        def make(i: int) -> NativeProduct:
            weights.extend(map(self.get, () if weights else names))
            weight = concatenated([one.part(i, count) for one in weights if isinstance(one, BlockWeight)])
            assert weight is not None
            return weight.product(biases[i])

        biases = [None] * count if bias is None else list(bias)
        shape = sum(one.shape[1] for one in stored), stored[0].shape[-1]
        return [packed.product(f"{names[0]}.{i}", shape, biases[i], partial(make, i)) for i in range(count)]

    def release_pages(self) -> None:
        """See `GgufHeader`."""
        self._header.release_pages()

    def dense(self, name: str) -> torch.Tensor | None:
        """Return a parameter in `dtype`, or None if the file lacks it. Some of recurrent layers are in float32."""
        weight = self.get(name)
        precise = self.form.mixed and part_of(self._name(name)) in PRECISE and not name.endswith(_OF_PRODUCTS)
        return None if weight is None else weight.dense(torch.float32 if precise else self.dtype)


_OF_PRODUCTS = ("_proj.weight", "_proj.bias")


def row_order(rows: int, heads: int) -> torch.Tensor:
    """Return the file's row index of each of transformers' rows; Llama's files interleave the two halves of a head."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def fill(model: Any, file: FileWeights) -> None:
    """Load the file's weights into the modules of a model that are on the meta device."""
    replaced: set[int] = set()
    for name, module in list(model.named_modules()):
        file.release_pages()  # of the weights that were packed
        for joint in JOINT_LAYERS:
            _fill_joint(module, name, joint, file)
        for short, child in list(module.named_children()):
            path = f"{name}.{short}" if name else short
            if isinstance(child, nn.Linear) and child.weight.is_meta:
                _fill_linear(module, short, path + ".weight", file.dense(path + ".bias"), file)
            elif isinstance(child, nn.Embedding) and (table := file.table(path + ".weight")) is not None:
                setattr(module, short, FrozenEmbedding(table, file.dtype, _scale_of(child)))
                replaced.add(id(child))
            elif is_experts(child):
                setattr(module, short, _filled_experts(child, path, file))
        if isinstance(module, nn.Linear) or is_experts(module) or id(module) in replaced:
            continue  # replaced through its parent
        for short, one in stored_weights(module).items():
            if not isinstance(one, nn.Parameter):
                numbers = file.get(f"{name}.{short}")
                assert numbers is not None  # see check_tensors
                setattr(module, short, numbers.dense(one.dtype))
            elif one.is_meta and (found := file.dense(f"{name}.{short}")) is not None:
                _set_parameter(module, short, found.view(one.shape), file.dtype)
    columns = file.form.column_order
    if columns is not None and (order := columns(file.config)) is not None:
        for module in [one for one in model.modules() if hasattr(one, "in_proj_qkv")]:
            module.out_proj = ReorderedInput(module.out_proj, order)


def _set_parameter(module: nn.Module, name: str, values: torch.Tensor, dtype: torch.dtype) -> None:
    """Set a parameter; one of another dtype than the model's becomes a buffer: the first parameter states a model's dtype."""
    if values.dtype == dtype:
        setattr(module, name, nn.Parameter(values, requires_grad=False))
        return
    delattr(module, name)
    module.register_buffer(name, values)


def _fill_embeddings(model: Any, file: FileWeights) -> None:
    """Load the embedding and the output layer, which share one product if they are tied and its rows can be read."""
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    output_name, embedding_name = (names[module] + ".weight" for module in (output, embedding))
    if not file.contains(embedding_name):
        return
    parent, _, short = names[output].rpartition(".")
    table = file.table(embedding_name)
    if table is not None:
        model.set_input_embeddings(FrozenEmbedding(table, file.dtype, _scale_of(embedding)))
    if not file.contains(output_name) and table is not None:
        setattr(model.get_submodule(parent), short, FrozenLinear(table))
    else:
        source = output_name if file.contains(output_name) else embedding_name
        _fill_linear(model.get_submodule(parent), short, source, None, file)


def _scale_of(embedding: nn.Module) -> float:
    """Return the factor by which an embedding of Gemma multiplies its rows; 1.0 for a plain one."""
    return float(getattr(embedding, "scalar_embed_scale", 1.0))


def _fill_linear(parent: nn.Module, name: str, source: str, bias: torch.Tensor | None, file: FileWeights) -> None:
    """Load a linear layer with the parameter `source`: as a product if it is quantized, else as a plain layer."""
    product = file.product([source], bias)
    if product is not None:
        setattr(parent, name, FrozenLinear(product))
        return
    values = file.dense(source)
    if values is None:
        return
    values = values.view(-1, values.shape[-1])
    layer = nn.Linear(values.shape[1], values.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(values, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    setattr(parent, name, layer)


def _filled_experts(experts: Any, path: str, file: FileWeights) -> Any:
    """Return the experts of a layer: with products if they are quantized, else with numbers."""
    *ups, down = (f"{path}.{short}" for short in expert_parts(path, file.contains))
    biases = [one for name in ups if (one := file.dense(f"{name}.bias")) is not None]
    bias, down_bias = torch.cat(biases, 1) if biases else None, file.dense(f"{down}.bias")
    names = [f"{name}.weight" for name in ups]
    gate_up = file.expert_products(names, experts.num_experts, bias)
    products = file.expert_products([f"{down}.weight"], experts.num_experts, down_bias)
    weights = expert_weights(experts)
    assert weights is not None
    stacked = file.experts_on_gpu(names, f"{down}.weight", weights.count, bias, down_bias)
    if stacked is not None:
        from foresay.models.gpu.blocks import experts_of

        own, own_down = (experts_of(one, weights.count) for one in (stacked.gate_up, stacked.down))
        return FrozenExperts(own, own_down, weights.gate, stacked)
    if gate_up is not None and products is not None:
        return FrozenExperts(gate_up, products, weights.gate)
    hidden = weights.down(0)[0].shape[0]
    *up_weights, down_weight = (one for name in (*ups, down) if (one := file.dense(f"{name}.weight")) is not None)
    joint = torch.cat([one.view(weights.count, -1, hidden) for one in up_weights], 1)
    both = [one for one in (bias, down_bias) if one is not None]
    set_expert_weights(experts, joint, down_weight.view(weights.count, hidden, -1), *both)
    return experts


def _fill_joint(parent: Any, path: str, names: Sequence[str], file: FileWeights) -> None:
    """Replace layers that read the same input by one product, if all their weights are quantized."""
    layers = [getattr(parent, name, None) for name in names]
    if not all(isinstance(layer, nn.Linear) and layer.weight.is_meta for layer in layers):
        return
    biases = [file.dense(f"{path}.{name}.bias") for name in names]
    if len({bias is None for bias in biases}) > 1:
        return
    bias = None if biases[0] is None else torch.cat([one for one in biases if one is not None])
    product = file.product([f"{path}.{name}.weight" for name in names], bias)
    if product is not None:
        replace_jointly(parent, names, product)
