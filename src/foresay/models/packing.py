"""Linear layers whose weights are laid out once for the CPU's matrix kernels.

A decoding step on a CPU reads every weight once, so its floor is bytes / bandwidth. PyTorch's bf16 linear re-derives a
layout on every call and reaches about half of that floor; oneDNN's packed layout, made once, reaches most of it. The
products are the same bits, for one row or many. Knows nothing of models but that they hold `nn.Linear`.
"""

from __future__ import annotations

import torch
from torch import nn


class PackedLinear(nn.Module):
    """A frozen linear layer in oneDNN's own layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in] -> [..., out]."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


def available(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packing helps: bf16 on a CPU whose oneDNN has bf16 kernels."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module) -> int:
    """Replace every bf16 CPU `nn.Linear` of `model` by a packed one, freeing its weight where nothing else uses it.

    Returns how many were replaced. A weight tied to an embedding stays, since the embedding reads it in plain layout.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and available(child.weight.dtype, child.weight.device):
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count
