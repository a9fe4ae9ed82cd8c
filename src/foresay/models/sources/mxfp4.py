"""Folders whose experts are stored in MXFP4 (gpt-oss): read by transformers, but with the experts in their 4.25 bits.

A folder has blocks [experts, out, in / 32, 16] of two neighbouring 4-bit floats in a byte, and exponents [experts, out, in / 32].
Rows of gates and ups alternate; those of products do not. The kernels for CPUs read the blocks of GGUF files: an exponent, then
bytes with a float of each half. Those for GPUs read levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from transformers.core_model_loading import ConversionOps

from foresay.models.cpu.product import NativeProduct
from foresay.models.families.table import family_of
from foresay.models.gguf.types import MOST_EXPONENT
from foresay.models.hardware import Hardware
from foresay.models.huggingface.frozen import FrozenExperts
from foresay.models.layer import ClampedGate
from foresay.models.levels import Levels
from foresay.models.sources.kept_weights import Reader, kept, reader

_FORMAT = "MXFP4"
_METHOD, _OURS = "mxfp4", "foresay_mxfp4"
_GROUP = 32
_NUMBER_BYTES = 0.5 + 1 / _GROUP
"""Bytes of a number in MXFP4."""
_LOW, _FOUR = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(4)
_PARTS = ("gate_up_proj", "down_proj")


def is_stored(config: Any, device: torch.device) -> bool:
    """Return True for a folder whose experts are in MXFP4, if there are kernels for them on a device. config: transformers'."""
    found, family = getattr(config, "quantization_config", None), family_of(config)
    return (
        family is not None
        and family.stores_mxfp4
        and isinstance(found, Mapping)
        and found.get("quant_method") == _METHOD
        and Hardware(device).has_kernels
    )


def kept_experts(config: Any, device: torch.device) -> Any:
    """Return a copy of such a configuration with which transformers leaves the experts in their blocks.

    device: of the weights.
    """
    return kept(config, _OURS, device=str(device))


@reader(_OURS)
class _Blocks(Reader):
    """Packs a tensor when it is read."""

    serialized_names: ClassVar[dict[str, list[str]]] = {part: [f"{part}_blocks", f"{part}_scales"] for part in _PARTS}

    def __init__(self, quantization_config: Any, **given: Any) -> None:
        super().__init__(quantization_config, **given)
        self._hardware = Hardware(torch.device(quantization_config.given["device"]))
        self._products: dict[str, Any] = {}

    def get_load_operations(self) -> dict[str, Any]:
        """Return the operation for the tensors of `serialized_names`."""
        return {"deserialize": _Pack}

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Return the bytes of an element, for which transformers reserves memory of a GPU before it reads any tensor."""
        return _NUMBER_BYTES if param_name.endswith(_PARTS) else param.element_size()

    def pack(self, model: Any, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make the products of a parameter's experts from its tensors, by their last names: one for all of them on a GPU.

        A problem is raised after loading.
        """
        path, _, part = name.rpartition(".")
        module = model.get_submodule(path)
        count, depth, rows = getattr(module, part).shape
        delattr(module, part)  # it has no memory yet
        module._is_hf_initialized = True  # transformers initializes no weights of it
        groups, found = depth // _GROUP, [tensors.get(stored) for stored in self.serialized_names[part]]
        for one, wanted in zip(found, ((count, rows, groups, _GROUP // 2), (count, rows, groups)), strict=True):
            if one is None or one.dtype != torch.uint8 or one.shape != wanted or depth % _GROUP:
                stored = "are missing" if one is None else f"are of {one.dtype} in the shape {[*one.shape]}"
                self.problem = f"the blocks or scales of {name} {stored}; allowed is torch.uint8 {[*wanted]}"
                return
        blocks, scales = (one for one in found if one is not None)
        if int(scales.max()) > MOST_EXPONENT:
            self.problem = f"the scales of {name} contain {int(scales.max())}; allowed is at most {MOST_EXPONENT}"
            return
        alternates = part == _PARTS[0]
        if self._hardware.gpu_kernels:
            from foresay.models.gpu.blocks import BlockProduct

            levels = _levels(blocks.cpu(), scales.cpu(), alternates=alternates)
            self._products[name] = BlockProduct(levels, model.dtype, self._hardware.device, None)
            return
        self._products[name] = [_product(*one, alternates=alternates) for one in zip(blocks, scales, strict=True)]

    def _process_model_after_weight_loading(self, model: Any, **given: Any) -> None:
        """Replace the experts of all layers by those of the products."""
        for path, module in list(model.named_modules()):
            gate_up, down = (self._products.pop(f"{path}.{part}", None) for part in _PARTS)
            if (gate_up is None) != (down is None):
                self.problem = self.problem or f"only a part of {path} is in {_FORMAT}"
            self.refuse(model)
            if gate_up is None or down is None:
                continue
            biases = module.gate_up_proj_bias.detach().unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
            parent, _, short = path.rpartition(".")
            gate = ClampedGate(float(module.alpha), float(module.limit))
            make = _experts_on_gpu if self._hardware.gpu_kernels else _experts
            setattr(
                model.get_submodule(parent), short, make(gate_up, down, biases, module.down_proj_bias.detach(), gate)
            )
        self.remove_quantization_config(model)


class _Pack(ConversionOps):  # type: ignore[misc]
    """transformers' name of what happens to the tensors of a parameter."""

    def __init__(self, hf_quantizer: _Blocks) -> None:
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo: Any) -> _Pack:
        """Return itself: transformers copies an operation for each parameter, and all of them share one reader."""
        return self

    def convert(self, input_dict: Mapping[str, Any], **given: Any) -> dict[str, torch.Tensor]:
        """Pack tensors, by their last names. Returns no parameter."""
        tensors = {name: one[0] if isinstance(one, list) else one for name, one in input_dict.items()}
        self.hf_quantizer.pack(given["model"], given["full_layer_name"], tensors)
        given["missing_keys"].discard(given["full_layer_name"])
        return {}


def _experts(
    gate_up: Any, down: Any, biases: torch.Tensor, down_biases: torch.Tensor, gate: ClampedGate
) -> FrozenExperts:
    """Return experts over products of their own. biases, down_biases: [experts, out]."""
    gate_up = [one.with_bias(bias) for one, bias in zip(gate_up, biases, strict=True)]
    down = [one.with_bias(bias) for one, bias in zip(down, down_biases, strict=True)]
    return FrozenExperts(gate_up, down, gate)


def _experts_on_gpu(
    gate_up: Any, down: Any, biases: torch.Tensor, down_biases: torch.Tensor, gate: ClampedGate
) -> FrozenExperts:
    """Return experts over products of all. biases, down_biases: [experts, out]."""
    from foresay.models.gpu.blocks import experts_of, stacked_experts

    whole = gate_up.with_bias(biases.flatten()), down.with_bias(down_biases.flatten())
    parts, parts_down = (experts_of(one, len(biases)) for one in whole)
    return FrozenExperts(parts, parts_down, gate, stacked_experts(*whole, len(biases)))


def _levels(blocks: torch.Tensor, scales: torch.Tensor, *, alternates: bool) -> Levels:
    """Return the levels of all experts, blocks [experts, out, groups, 16] and scales [experts, out, groups].

    alternates: as for `_product`.
    """
    if alternates:  # gates first
        blocks, scales = (torch.cat([one[:, ::2], one[:, 1::2]], 1) for one in (blocks, scales))
    depth = scales.shape[2] * _GROUP
    levels = torch.stack([blocks & 15, blocks >> 4], -1).view(-1, depth)
    return Levels(bits=4, group=_GROUP, levels=levels.numpy(), scales=scales.flatten(0, 1).numpy(), is_float=True)


def _product(blocks: torch.Tensor, scales: torch.Tensor, *, alternates: bool) -> NativeProduct:
    """Return the product of blocks [out, groups, 16] and scales [out, groups]. alternates: True if rows of gates and ups do."""
    words = blocks.numpy().view(np.uint64)  # eight bytes at a time
    first, last = words[..., 0], words[..., 1]
    data = np.empty((*scales.shape, 1 + _GROUP // 2), np.uint8)
    data[..., 0] = scales.numpy()
    for at, both in ((1, first & _LOW | (last & _LOW) << _FOUR), (2, (first & ~_LOW) >> _FOUR | last & ~_LOW)):
        data[..., at::2] = both.view(np.uint8).reshape(*scales.shape, -1)
    rows = data.reshape(len(data), -1)
    return NativeProduct.of_blocks(_FORMAT, [rows[::2], rows[1::2]] if alternates else [rows])
