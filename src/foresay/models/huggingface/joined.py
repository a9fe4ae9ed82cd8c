"""Linear layers on a GPU that read the same input, multiplied at once: one large product reads its weights faster than several.

The weights of the layers become views of one tensor, so that nothing is in memory twice, and an update of a layer's weights
updates the product. Only for models that nothing else uses: some writers of checkpoints take views of one tensor for copies of
each other and drop them. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import nn


def join(layers: Sequence[nn.Module]) -> bool:
    """Make the weights of layers views of one tensor. Returns False, and changes nothing, if that is not possible.

    It is for plain linear layers on one device, of one dtype and input size, all with a bias or all without, each of which has
    memory of its own.
    """
    if not _are_plain(layers):
        return False
    biases: list[torch.Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    parts: list[list[torch.Tensor]] = [[layer.weight for layer in layers], biases]
    for some in parts:
        if len({id(one) for one in some}) < len(some) or any(
            one.untyped_storage().nbytes() > one.nbytes for one in some
        ):
            return False
    with torch.inference_mode(False), torch.no_grad():
        for some in parts:
            if not some:
                continue
            whole = torch.cat([one.data for one in some])
            for one, view in zip(some, torch.split(whole, [len(one) for one in some]), strict=True):
                one.data = view
    return True


@dataclass(frozen=True, slots=True)
class Joined:
    """The product of layers that read the same input, [..., in] -> [..., sum of out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layers' outputs, one after the other."""
        return F.linear(x, self.weight, self.bias)


def joined(layers: Sequence[nn.Module]) -> Joined | None:
    """Return the product of layers that were joined; None if they were not."""
    if not _are_plain(layers):
        return None
    weight = _whole([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias = _whole(biases) if biases else None
    return None if weight is None or (bias is None) != (not biases) else Joined(weight, bias)


def _are_plain(layers: Sequence[nn.Module]) -> TypeGuard[Sequence[nn.Linear]]:
    plain = [
        layer
        for layer in layers
        if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and type(layer.weight.data) is torch.Tensor
    ]
    kinds = {(one.weight.device, one.weight.dtype, one.in_features, one.bias is None) for one in plain}
    return len(plain) == len(layers) and len(kinds) == 1 and not plain[0].weight.is_meta


def _whole(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor [sum of n, ...] that the parts [n, ...] are consecutive views of; None if there is none."""
    first, at = parts[0].data, parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.storage_offset() != at or not part.is_contiguous():
            return None
        at += part.numel()
    count = sum(len(part) for part in parts)
    return first.as_strided((count, *first.shape[1:]), first.stride(), first.storage_offset())
