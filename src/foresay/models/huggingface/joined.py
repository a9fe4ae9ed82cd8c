"""Linear layers on a GPU that read the same input, multiplied at once: one large product reads its weights faster than several.

The weights of the layers become views of one tensor, so that nothing is in memory twice, and an update of a layer's weights
updates the product. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import nn


def joinable(layers: Sequence[nn.Module]) -> TypeGuard[Sequence[nn.Linear]]:
    """True for plain linear layers on one device, of one dtype and input size, all with a bias or all without."""
    plain = [
        layer
        for layer in layers
        if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and type(layer.weight.data) is torch.Tensor
    ]
    kinds = {(one.weight.device, one.weight.dtype, one.in_features, one.bias is None) for one in plain}
    return len(plain) == len(layers) and len(kinds) == 1 and plain[0].weight.device.type != "meta"


def joined(layers: Sequence[nn.Linear]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function x [..., in] -> [..., sum of out] of layers that are `joinable`."""
    weight = _one_tensor([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias = _one_tensor(biases) if biases else None
    return lambda x: F.linear(x, weight, bias)


def _one_tensor(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the parts [n, ...] as one tensor [sum of n, ...], of which they are views from now on."""
    first, at = parts[0].data, parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.storage_offset() != at or not part.is_contiguous():
            break
        at += part.numel()
    else:  # joined before, by another reader of the same model
        count = sum(len(part) for part in parts)
        return first.as_strided((count, *first.shape[1:]), first.stride(), first.storage_offset())
    whole = torch.cat([part.data for part in parts])
    for part, view in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
        part.data = view
    return whole
