"""Replacement of a transformers model's linear layers by frozen products.

Owns which layers are replaced, which are multiplied jointly, and the sizes of a model's weights. Knows nothing of models except
that they contain `nn.Linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn

from foresay.errors import ConfigError, UnsupportedModelError
from foresay.models.cpu.product import NativeProduct, PackedProduct, Product
from foresay.models.cpu.rounding import GROUP, q4_1_blocks, q8_0_blocks
from foresay.models.hardware import CPU, Hardware
from foresay.models.huggingface.experts import active_share, expert_weights, is_experts
from foresay.models.huggingface.frozen import (
    FrozenEmbedding,
    FrozenExperts,
    FrozenLinear,
    Joint,
    JointLinear,
    UsualGate,
)
from foresay.models.huggingface.joined import join, joined
from foresay.models.layer import ClampedGate, Separate

JOINT_LAYERS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q", "k", "v"),
    ("wi_0", "wi_1"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Names of layers that most families apply to the same input."""
_CROSS = ("encoder_attn", "EncDecAttention")
"""Names of cross-attention modules, whose query layer reads another input than the key and value layers."""
MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], Product]


def product_of(*layers: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return one function [..., in] -> [..., sum of out] for layers that read the same input."""
    first = layers[0]
    joint = [layer._joint for layer in layers if isinstance(layer, JointLinear)]
    if len(joint) == len(layers) and joint[0].joins(layers):
        return joint[0].product
    if len(layers) == 1 and isinstance(first, FrozenLinear):
        return first.product
    frozen = [layer.product for layer in layers if isinstance(layer, FrozenLinear)]
    native = [product for product in frozen if isinstance(product, NativeProduct)]
    if len(native) == len(layers):
        return NativeProduct.stacked([part for one in native for part in one.parts or [one]])
    plain = [layer for layer in layers if type(layer) is nn.Linear and Hardware(layer.weight.device).on_cpu]
    if len(plain) == len(layers):
        with suppress(LookupError):
            return NativeProduct.in_place([layer.weight for layer in plain], [layer.bias for layer in plain])
    if len(layers) == 1:
        return first
    products = [layer.product for layer in layers if isinstance(layer, FrozenLinear)]
    if len(products) == len(layers) and all(isinstance(one, NativeProduct) for one in products):
        return NativeProduct.stacked([one for one in products if isinstance(one, NativeProduct)])
    return joined(layers) or Separate(tuple(product_of(layer) for layer in layers))


def expert_products(module: nn.Module) -> tuple[list[Any], list[Any], UsualGate | ClampedGate] | None:
    """Return the two products of each expert, frozen or in the model's own memory, and the gate; None for another layout.

    Raises LookupError for weights that the kernels do not read.
    """
    if isinstance(module, FrozenExperts):
        return [one.product for one in module.gate_up], [one.product for one in module.down], module.gate
    weights = expert_weights(module)
    if weights is None or not weights.in_place:
        return None
    gate_up, down = (
        [NativeProduct.in_place([weight], [bias]) for weight, bias in map(of, range(weights.count))]
        for of in (weights.gate_up, weights.down)
    )
    return gate_up, down, weights.gate


def weight_of(layer: nn.Module) -> torch.Tensor | None:
    """Return a linear layer's weight in plain layout, [out, in]; None for a layer of another kind.

    Raises UnsupportedModelError for weights that accelerate offloads between passes.
    """
    if isinstance(layer, FrozenLinear):
        return layer.product.dense()
    if isinstance(layer, nn.Linear) and layer.weight.is_meta:
        raise UnsupportedModelError(
            "the model's output layer is offloaded by its device_map, and this drafter reads its weights; raise max_memory, or "
            "use another drafter"
        )
    return layer.weight.detach() if isinstance(layer, nn.Linear) else None


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of weights that a forward pass over one token reads.

    These are all except embeddings, of which it reads only a few rows, and except experts that are not selected. An embedding
    tied to the output head counts once.
    """
    sizes, embeddings = _sizes(model)
    total = sum(size for key, size in sizes.items() if key not in embeddings or _is_head(model, key))
    experts = [sum(_sizes(part)[0].values()) for part in model.modules() if is_experts(part)]
    return total - round(sum(experts) * (1 - active_share(model))) if experts else total


def resident_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights, each counted once."""
    sizes, _ = _sizes(model)
    sizes |= {id(m.product): m.product.nbytes for m in model.modules() if isinstance(m, FrozenEmbedding)}
    return sum(sizes.values())


def block_kinds(model: nn.Module) -> list[str]:
    """Return the types of GGUF blocks whose weights stay in them, sorted."""
    products = [one.product for one in model.modules() if isinstance(one, FrozenLinear | JointLinear | FrozenEmbedding)]
    natives = [one for one in products if isinstance(one, NativeProduct)]
    return sorted({part.kind for one in natives for part in one.parts or [one]} - {""})


def _sizes(model: nn.Module) -> tuple[dict[int, int], set[int]]:
    """Return the bytes of each weight by id, and the ids of embedding weights."""
    sizes: dict[int, int] = {}
    embeddings: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            embeddings.add(id(module.weight))
        if isinstance(module, FrozenLinear | JointLinear):
            sizes[id(module.product)] = module.product.nbytes
        for weight in stored_weights(module).values():
            sizes[id(weight)] = weight.numel() * weight.element_size()
    return sizes, embeddings


def stored_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own parameters and buffers, by name, that are part of its checkpoints."""
    left_out = module._non_persistent_buffers_set
    buffers = {name: one for name, one in module.named_buffers(recurse=False) if name not in left_out}
    return dict(module.named_parameters(recurse=False)) | buffers


def device_of(embedding: nn.Module) -> torch.device:
    """Return the device that an embedding computes on: that of its weights, or the one accelerate loads offloaded weights to."""
    if isinstance(embedding, FrozenEmbedding):
        return torch.device("cpu")
    weight: torch.Tensor = embedding.weight  # type: ignore[assignment]
    if weight.is_meta:
        hook = getattr(embedding, "_hf_hook", None)
        for one in getattr(hook, "hooks", [hook]):
            if (device := getattr(one, "execution_device", None)) is not None:
                return torch.device(device)
    return weight.device


def has_products(model: nn.Module) -> bool:
    """Return True if any linear layer or expert of a model is a frozen product."""
    return any(isinstance(one, FrozenLinear | JointLinear) for one in model.modules())


def set_activations(model: nn.Module, kind: str) -> None:
    """Set the rounding of the inputs of all frozen products. Raises ConfigError for a kind that weights do not support."""
    products = _compiled_products(model)
    if not products:
        raise ConfigError(
            "applies to the compiled CPU kernels, which do not run this model", param="activations", value=kind
        )
    for one in products:
        one.activations = kind


def activations_of(model: nn.Module) -> list[str]:
    """Return the roundings of the inputs of frozen products by the compiled kernels, each once."""
    return sorted({one.activations for one in _compiled_products(model)})


def _compiled_products(model: nn.Module) -> list[NativeProduct]:
    products = (m.product for m in model.modules() if isinstance(m, FrozenLinear | JointLinear))
    return [one for one in products if isinstance(one, NativeProduct)]


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, in any format; those of a head tied to the embedding count once."""
    sizes = dict[int, int]()
    for module in model.modules():
        sizes |= {id(weight): weight.numel() for weight in stored_weights(module).values()}
        product = getattr(module, "product", None)
        if isinstance(module, FrozenLinear | JointLinear | FrozenEmbedding) and product is not None:
            bias = product.out_features if product.bias is not None else 0
            sizes[id(product)] = product.in_features * product.out_features + bias
    inner: Any = model
    head, table = inner.get_output_embeddings(), inner.get_input_embeddings()
    if inner.config.get_text_config(decoder=True).tie_word_embeddings and head is not None:
        own, first = (getattr(one, "product", None) or getattr(one, "weight", None) for one in (head, table))
        sizes.pop(id(own) if own is not first else 0, None)
    return sum(sizes.values())


def _is_head(model: nn.Module, key: int) -> bool:
    return any(isinstance(m, nn.Linear) and id(m.weight) == key for m in model.modules())


def unquantized(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """Return the product of unquantized weights."""
    native = CPU.cpu_kernels and weight.dtype in (torch.float32, torch.bfloat16)
    return NativeProduct.of_numbers(weight, bias) if native else PackedProduct(weight, bias)


def int4(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """Return the product of weights quantized to 4 bits, or to 8 bits if rows are not multiples of a group."""
    return (NativeProduct.int8 if weight.shape[1] % GROUP else NativeProduct.int4)(weight, bias)


def quantizer(bits: int, hardware: Hardware = CPU) -> MakeProduct:
    """Return the function that makes products with 8 or 4 bits per weight on a device.

    Raises ConfigError for a CPU without compiled kernels.
    """
    if hardware.gpu_kernels:
        return partial(_on_gpu, bits)
    if not hardware.on_cpu:
        raise ConfigError("is for CPUs, but the model is on a GPU", param="weights", value=f"int{bits}")
    hardware.check_compiled("leave the weights in bfloat16", param="weights", value=f"int{bits}")
    return NativeProduct.int8 if bits == 8 else int4


def _on_gpu(bits: int, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """Return a product with the rounding that CPUs have."""
    from foresay.models.gpu.blocks import BlockProduct
    from foresay.models.levels import Levels

    is_int8 = bits == 8 or weight.shape[1] % GROUP
    data = (q8_0_blocks if is_int8 else q4_1_blocks)(weight.cpu())
    found = Levels.of_file("Q8_0" if is_int8 else "Q4_1", data)
    return BlockProduct(found.cut(weight.shape[1]), weight.dtype, weight.device, bias)


_READ_DIRECTLY = ("dt_proj",)
"""Names of linear layers whose weights a family's code reads without calling the layer (Mamba's time steps)."""

_ROUTER = "per_expert_scale"
"""Parameter of a router whose weights are a linear layer (Gemma 4); those of others are no layers and stay as they are, too."""
_READ_FOR_DTYPE = ("lm_head",)
"""Names of linear layers from whose weights a family's code reads the dtype (Mamba)."""


def freeze_linears(model: nn.Module, make: MakeProduct = unquantized, *, all_dtypes: bool = False) -> int:
    """Replace each linear layer and each expert of `model` by frozen products, and free weights that nothing else uses.

    all_dtypes: replace also layers whose dtype packing does not speed up. Returns the number of replaced layers. A weight tied
    to an embedding stays in memory, since the embedding reads it in plain layout.
    """

    def replaceable(module: object) -> TypeGuard[nn.Linear]:
        return type(module) is nn.Linear and replaceable_weight(module.weight)

    def replaceable_weight(weight: torch.Tensor) -> bool:
        there = Hardware(weight.device)
        return (there.on_cpu or there.gpu_kernels) and (all_dtypes or there.packs(weight.dtype))

    count = 0
    for path, parent in list(model.named_modules()):
        for names, layers in _read_jointly(path, parent):
            count += _join(parent, names, [layer for layer in layers if replaceable(layer)], make)
        for name, child in list(parent.named_children()):
            if (weights := expert_weights(child)) is not None and replaceable_weight(child.down_proj):
                gate_up, down = ([make(*of(i)) for i in range(weights.count)] for of in (weights.gate_up, weights.down))
                setattr(parent, name, FrozenExperts(gate_up, down, weights.gate))
                count += 2 * weights.count
            elif replaceable(child) and name not in _READ_DIRECTLY and not hasattr(parent, _ROUTER):
                bias = None if child.bias is None else child.bias.detach().clone()
                frozen = FrozenLinear(make(child.weight.detach(), bias))
                if name in _READ_FOR_DTYPE:
                    frozen.weight = torch.empty_like(child.weight, device="meta")
                setattr(parent, name, frozen)
                count += 1
    return count


def join_layers(model: nn.Module) -> int:
    """Join the layers of a model on a GPU that read the same input; returns the number of joint products."""
    count = 0
    for path, parent in model.named_modules():
        for _, layers in _read_jointly(path, parent):
            on_gpu = all(isinstance(layer, nn.Linear) and layer.weight.is_cuda for layer in layers)
            count += on_gpu and join(layers)
    return count


def _read_jointly(path: str, parent: nn.Module) -> Iterator[tuple[Sequence[str], list[nn.Module]]]:
    """Yield the names of layers of a module that read the same input, and the layers."""
    for names in () if path.endswith(_CROSS) else JOINT_LAYERS:
        layers = [layer for name in names if (layer := getattr(parent, name, None)) is not None]
        if len(layers) == len(names):
            yield names, layers


def freeze_model(model: Any, make: MakeProduct = unquantized, *, all_dtypes: bool = False) -> None:
    """Freeze a whole model by `freeze_linears`, so that its weights are in memory once and the checkpoint is not mapped.

    If the head is tied to the embedding and its weights are not quantized, the embedding reads the head's product. Weights that
    are not packed are copied, since a view of one keeps the whole checkpoint mapped and the pages of packed weights in memory.
    They are not copied if most of the model consists of them.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = type(head) is nn.Linear and type(embedding) is nn.Embedding and head.weight is embedding.weight
    tied = (
        tied and not model.config.is_encoder_decoder and embedding.max_norm is None
    )  # an encoder-decoder may scale its embedding
    if not freeze_linears(model, make, all_dtypes=all_dtypes):
        return
    product = getattr(model.get_output_embeddings(), "product", None)
    if tied and isinstance(product, NativeProduct) and product.bits >= 16:
        model.set_input_embeddings(FrozenEmbedding(product, embedding.weight.dtype))
    unpacked = [weight for weight in model.parameters() if Hardware(weight.device).on_cpu]
    if sum(weight.nbytes for weight in unpacked) <= resident_bytes(model) / 2:
        for weight in unpacked:
            weight.data = weight.data.clone()


def _join(parent: nn.Module, names: Sequence[str], layers: Sequence[nn.Linear], make: MakeProduct) -> int:
    if len(layers) < len(names) or len({(layer.in_features, layer.bias is None) for layer in layers}) > 1:
        return 0
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    weight = torch.cat([layer.weight.detach() for layer in layers])
    replace_jointly(parent, names, make(weight, torch.cat(biases) if biases else None))
    return len(names)


def replace_jointly(parent: nn.Module, names: Sequence[str], product: Product) -> None:
    """Replace layers of `parent` that read the same input by one product.

    Raises UnsupportedModelError if its shape does not match theirs.
    """
    layers = [parent.get_submodule(name) for name in names]
    sizes = [layer.out_features for layer in layers if isinstance(layer, nn.Linear)]
    depths = {layer.in_features for layer in layers if isinstance(layer, nn.Linear)}
    if depths != {product.in_features} or sum(sizes) != product.out_features:
        raise UnsupportedModelError(
            f"the weights of {', '.join(names)} are {product.out_features} x {product.in_features} together, and the "
            f"configuration has {' + '.join(map(str, sizes))} x {' or '.join(map(str, sorted(depths)))}"
        )
    joint = Joint(product, sizes)
    for i, (name, layer) in enumerate(zip(names, layers, strict=True)):
        assert isinstance(layer, nn.Linear)
        setattr(parent, name, JointLinear(joint, i, layer))
