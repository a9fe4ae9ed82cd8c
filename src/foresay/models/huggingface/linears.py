"""Linear layers of a transformers model replaced by frozen products.

Owns which layers are replaced, which are multiplied as one, and what a model's weights weigh. Knows nothing of models but that
they hold `nn.Linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from foresay.errors import UnsupportedModelError
from foresay.models.cpu.build import library
from foresay.models.cpu.in_place import InPlaceProduct
from foresay.models.cpu.product import NativeProduct
from foresay.models.cpu.rounding import GROUP, Groups
from foresay.models.huggingface.products import Int4Product, Int8Product, PackedProduct, Product

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q", "k", "v"), ("wi_0", "wi_1"))
"""Names of layers that most families apply to one and the same input."""
_CROSS = ("encoder_attn", "EncDecAttention")
"""Names of attention that reads an encoder's output: its query layer is used without the two others."""
Table = Int8Product | NativeProduct
"""A product whose rows can be looked up."""
MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], Product]


class FrozenLinear(nn.Module):
    """A linear layer by a frozen product."""

    weight: torch.Tensor | None = None
    """None: T5 reads the dtype of its layers' weights where they have any."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.in_features, self.out_features = product.in_features, product.out_features
        self.product, self.bias = product, product.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in] -> [..., out]."""
        return self.product(x)


class FrozenEmbedding(nn.Module):
    """An embedding in 8 or 4 bits: a row is made when it is looked up. Its product may also be the head's."""

    def __init__(self, product: Table, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.product = product.out_features, product.in_features, product
        self._dtype = dtype

    @property
    def weight(self) -> torch.Tensor:
        """[V, H] on the meta device: what asks for a shape gets one."""
        return torch.empty(self.num_embeddings, self.embedding_dim, dtype=self._dtype, device="meta")

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [...] -> [..., H]."""
        return self.product.rows(token_ids, self._dtype)


class _Joint:
    """Linear layers that read the same input, multiplied as one: fewer, wider products reach more of the bandwidth.

    The first layer to be called with an input computes for all and keeps the others' outputs for them. A layer that is called
    with another input, or twice, computes again, so the result does not depend on the order of the calls.
    """

    def __init__(self, product: Product, sizes: Sequence[int]) -> None:
        self.product, self._sizes = product, list(sizes)
        # (input, outputs not taken yet); one attribute, so that threads see the two together
        self._waiting: tuple[torch.Tensor, dict[int, torch.Tensor]] | None = None

    def joins(self, layers: Sequence[nn.Module]) -> bool:
        """Whether these are all its layers, in order."""
        own = [layer._index for layer in layers if isinstance(layer, JointLinear) and layer._joint is self]
        return own == list(range(len(self._sizes)))

    def output(self, x: torch.Tensor, index: int) -> torch.Tensor:
        waiting = self._waiting
        if waiting is None or waiting[0] is not x or index not in waiting[1]:
            waiting = (x, dict(enumerate(torch.split(self.product(x), self._sizes, -1))))
        out = waiting[1].pop(index)
        self._waiting = waiting if waiting[1] else None
        return out


class JointLinear(nn.Module):
    """One of several linear layers that are multiplied together."""

    def __init__(self, joint: _Joint, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._joint, self._index = joint, index

    @property
    def product(self) -> Product:
        """The product of all of them."""
        return self._joint.product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in] -> [..., out]."""
        return self._joint.output(x, self._index)


def product_of(*layers: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """One function [..., in] -> [..., sum of out] for layers that read the same input."""
    first = layers[0]
    joint = [layer._joint for layer in layers if isinstance(layer, JointLinear)]
    if len(joint) == len(layers) and joint[0].joins(layers):
        return joint[0].product
    if len(layers) == 1 and isinstance(first, FrozenLinear):
        return first.product
    plain = [layer for layer in layers if type(layer) is nn.Linear and layer.weight.device.type == "cpu"]
    if len(plain) == len(layers):
        with suppress(LookupError):
            return InPlaceProduct([layer.weight for layer in plain], [layer.bias for layer in plain])
    if len(layers) == 1:
        return first
    return lambda x: torch.cat([layer(x) for layer in layers], -1)


def weight_of(layer: nn.Module) -> torch.Tensor | None:
    """A linear layer's weight in plain layout, [out, in]; None for a layer of another kind.

    Raises UnsupportedModelError for weights that accelerate keeps elsewhere between passes.
    """
    if isinstance(layer, FrozenLinear):
        return layer.product.dense()
    if isinstance(layer, nn.Linear) and layer.weight.device.type == "meta":
        raise UnsupportedModelError(
            "the model's output layer is offloaded by its device_map, and this drafter reads its weights; raise max_memory, or "
            "use another drafter"
        )
    return layer.weight.detach() if isinstance(layer, nn.Linear) else None


def weight_bytes(model: nn.Module) -> int:
    """Bytes of weights that one pass reads: everything but embeddings, of which it reads a few rows.

    An embedding that is also the head's weight counts, once.
    """
    sizes, looked_up = _sizes(model)
    return sum(size for key, size in sizes.items() if key not in looked_up or _is_head(model, key))


def resident_bytes(model: nn.Module) -> int:
    """Bytes that the weights take, each counted once."""
    sizes, _ = _sizes(model)
    sizes |= {id(m.product): m.product.nbytes for m in model.modules() if isinstance(m, FrozenEmbedding)}
    return sum(sizes.values())


def _sizes(model: nn.Module) -> tuple[dict[int, int], set[int]]:
    """(bytes of each weight, which of them rows are looked up in)."""
    sizes: dict[int, int] = {}
    looked_up: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            looked_up.add(id(module.weight))
        if isinstance(module, FrozenLinear | JointLinear):
            sizes[id(module.product)] = module.product.nbytes
        for weight in module.parameters(recurse=False):
            sizes[id(weight)] = weight.numel() * weight.element_size()
    return sizes, looked_up


def device_of(embedding: nn.Module) -> torch.device:
    """The device that an embedding computes on: where its weights are, or where accelerate loads offloaded ones for a pass."""
    if isinstance(embedding, FrozenEmbedding):
        return torch.device("cpu")
    weight: torch.Tensor = embedding.weight  # type: ignore[assignment]
    if weight.device.type == "meta":
        hook = getattr(embedding, "_hf_hook", None)
        for one in getattr(hook, "hooks", [hook]):
            if (device := getattr(one, "execution_device", None)) is not None:
                return torch.device(device)
    return weight.device


def count_parameters(model: nn.Module) -> int:
    """Weights of a model, whatever their format; those of a head that is tied to an embedding once."""
    sizes = {id(weight): weight.numel() for weight in model.parameters()}
    for module in model.modules():
        product = getattr(module, "product", None)
        if isinstance(module, FrozenLinear | JointLinear | FrozenEmbedding) and product is not None:
            bias = product.out_features if product.bias is not None else 0
            sizes[id(product)] = product.in_features * product.out_features + bias
    inner: Any = model
    head, table = inner.get_output_embeddings(), getattr(inner.get_input_embeddings(), "product", None)
    if inner.config.get_text_config(decoder=True).tie_word_embeddings and isinstance(head, FrozenLinear):
        sizes.pop(id(head.product) if head.product is not table else 0, None)
    return sum(sizes.values())


def _is_head(model: nn.Module, key: int) -> bool:
    return any(isinstance(m, nn.Linear) and id(m.weight) == key for m in model.modules())


def available(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether freezing helps: on a CPU, by kernels compiled for it, or else in bf16 by oneDNN's."""
    if device.type != "cpu":
        return False
    if library() is not None and dtype in (torch.float32, torch.bfloat16):
        return True
    if dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def compiled() -> bool:
    """Whether there are kernels of our own for this machine."""
    return library() is not None


def unchanged(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """The product of weights that are not rounded."""
    native = library() is not None and weight.dtype in (torch.float32, torch.bfloat16)
    return (NativeProduct.of_numbers if native else PackedProduct)(weight, bias)


def int8(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """The product of weights rounded to 8 bits."""
    return (Int8Product if library() is None else NativeProduct.int8)(weight, bias)


def int4(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """The product of weights rounded to 4 bits; rows that are not whole groups take 8."""
    if not int4_fits(weight):
        return int8(weight, bias)
    return (Int4Product if library() is None else NativeProduct.int4)(weight, bias)


def of_rows(levels: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None) -> Table:
    """The product of weights that are rounded to 8 bits already: see `rounded_int8`."""
    if library() is None:
        return Int8Product.of_rows(levels, scales.to(dtype), bias)
    return NativeProduct.of_rows(levels, scales, bias)


def of_groups(pieces: Iterable[Groups], dtype: torch.dtype, bias: torch.Tensor | None) -> Product:
    """The product of weights that are rounded to 4 bits already: see `rounded_int4`."""
    if library() is None:
        return Int4Product.of_groups(pieces, dtype, bias)
    return NativeProduct.of_groups(pieces, bias)


def of_blocks(stored: Sequence[tuple[str, npt.NDArray[np.uint8]]], bias: torch.Tensor | None) -> NativeProduct | None:
    """The product of a GGUF file's 4-bit blocks, see `NativeProduct.of_blocks`; None without kernels."""
    return None if library() is None else NativeProduct.of_blocks(stored, bias)


def int4_fits(weight: torch.Tensor) -> bool:
    """Whether the rows of a weight [out, in] are whole groups."""
    return weight.shape[1] % GROUP == 0


def in_bits(bits: int) -> MakeProduct:
    """What makes products of 8 or 4 bits a weight."""
    return int8 if bits == 8 else int4


def freeze_linears(model: nn.Module, make: MakeProduct = unchanged, *, all_dtypes: bool = False) -> int:
    """Replace every `nn.Linear` of `model` on a CPU by a frozen product, freeing its weight where nothing else uses it.

    all_dtypes: also those whose dtype packing would not help. Returns how many were replaced. A weight tied to an embedding
    stays, since the embedding reads it in plain layout.
    """

    def fits(module: object) -> TypeGuard[nn.Linear]:
        if type(module) is not nn.Linear or module.weight.device.type != "cpu":
            return False
        return all_dtypes or available(module.weight.dtype, module.weight.device)

    count = 0
    for path, parent in list(model.named_modules()):
        for names in () if path.endswith(_CROSS) else TOGETHER:
            layers = [getattr(parent, name, None) for name in names]
            count += _join(parent, names, [layer for layer in layers if fits(layer)], make)
        for name, child in list(parent.named_children()):
            if fits(child):
                bias = None if child.bias is None else child.bias.detach().clone()
                setattr(parent, name, FrozenLinear(make(child.weight.detach(), bias)))
                count += 1
    return count


def freeze_model(model: Any, make: MakeProduct = unchanged, *, all_dtypes: bool = False) -> None:
    """Freeze a whole model as `freeze_linears` does, so that its weights are in memory once, and the mapped files not at all.

    The product of a head that is tied to the embedding becomes the embedding's table where its numbers are kept as they are.
    Weights that are not packed are copied: a view of one keeps the whole checkpoint mapped, and the pages of the packed weights
    in memory. A model of mostly such weights is left where it is.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = type(head) is nn.Linear and type(embedding) is nn.Embedding and head.weight is embedding.weight
    tied = tied and not model.config.is_encoder_decoder and embedding.max_norm is None  # an encoder's may be scaled too
    if not freeze_linears(model, make, all_dtypes=all_dtypes):
        return
    product = getattr(model.get_output_embeddings(), "product", None)
    if tied and isinstance(product, NativeProduct) and product.bits >= 16:
        model.set_input_embeddings(FrozenEmbedding(product, embedding.weight.dtype))
    left = [weight for weight in model.parameters() if weight.device.type == "cpu"]
    if sum(weight.nbytes for weight in left) <= resident_bytes(model) / 2:
        for weight in left:
            weight.data = weight.data.clone()


def _join(parent: nn.Module, names: Sequence[str], layers: Sequence[nn.Linear], make: MakeProduct) -> int:
    if len(layers) < len(names) or len({(layer.in_features, layer.bias is None) for layer in layers}) > 1:
        return 0
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    weight = torch.cat([layer.weight.detach() for layer in layers])
    replace_jointly(parent, names, make(weight, torch.cat(biases) if biases else None))
    return len(names)


def replace_jointly(parent: nn.Module, names: Sequence[str], product: Product) -> None:
    """Put one product in the place of layers of `parent` that read the same input.

    Raises UnsupportedModelError where its shape is not theirs.
    """
    layers = [parent.get_submodule(name) for name in names]
    sizes = [layer.out_features for layer in layers if isinstance(layer, nn.Linear)]
    depths = {layer.in_features for layer in layers if isinstance(layer, nn.Linear)}
    if depths != {product.in_features} or sum(sizes) != product.out_features:
        raise UnsupportedModelError(
            f"the weights of {', '.join(names)} are {product.out_features} x {product.in_features} together, and the "
            f"configuration has {' + '.join(map(str, sizes))} x {' or '.join(map(str, sorted(depths)))}"
        )
    joint = _Joint(product, sizes)
    for i, (name, layer) in enumerate(zip(names, layers, strict=True)):
        assert isinstance(layer, nn.Linear)
        setattr(parent, name, JointLinear(joint, i, layer))
