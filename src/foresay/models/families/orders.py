"""Linear layers whose weights a file has in another order than the family's own code."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class ReorderedInput(nn.Module):
    """A linear layer whose weights have their columns in another order than its input."""

    def __init__(self, inner: nn.Module, order: torch.Tensor) -> None:
        """order: index into the input of each column, [in] int64."""
        super().__init__()
        self.inner, self.order = inner, order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in] -> [..., out]."""
        out: torch.Tensor = self.inner(x[..., self.order.to(x.device)])
        return out


class ReorderedOutput(nn.Module):
    """Linear layers that read the same input, with their outputs, one after the other, in another order."""

    def __init__(self, layers: Mapping[str, nn.Module], order: torch.Tensor) -> None:
        """order: index of each output among those of the layers, [out] int64."""
        super().__init__()
        self.order = order
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in] -> [..., out]."""
        out = torch.cat([layer(x) for layer in self.children()], -1)
        return out[..., self.order.to(x.device)]


def as_attention(layers: Mapping[str, nn.Module], output: nn.Module, mixer: object) -> dict[str, object]:
    """Return the parts of a mixer under the names of attention. layers: those that read its input, in the kernels' order."""
    inner = output.inner if isinstance(output, ReorderedInput) else output
    own = {"inputs": tuple(layers), "o_proj": inner, "head_dim": 0, "scaling": 1.0, "use_rope": False, "mixer": mixer}
    return {**layers, **own}
