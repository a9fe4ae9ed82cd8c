"""Modules of a model whose weights are frozen: linear layers, joint ones, embeddings and experts over products.

Knows nothing of models except the arguments of these modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from foresay.models.cpu.product import NativeProduct, Product
from foresay.models.layer import ClampedGate, StackedExperts


class FrozenLinear(nn.Module):
    """A linear layer computed by a frozen product."""

    weight: torch.Tensor | None = None
    """None, so that T5 does not read a dtype from it."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.in_features, self.out_features = product.in_features, product.out_features
        self.product, self.bias = product, product.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in] -> [..., out]."""
        return self.product(x)


class FrozenEmbedding(nn.Module):
    """An embedding over a frozen product, which decodes rows when they are read. The output head may share the product."""

    def __init__(self, product: NativeProduct, dtype: torch.dtype, scale: float = 1.0) -> None:
        """scale: factor of the rows (Gemma)."""
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.product = product.out_features, product.in_features, product
        self._dtype, self._scale = dtype, torch.tensor(scale, dtype=dtype)

    @property
    def weight(self) -> torch.Tensor:
        """An empty tensor [V, H] on the meta device, for callers that read the shape."""
        return torch.empty(self.num_embeddings, self.embedding_dim, dtype=self._dtype, device="meta")

    def without_scale(self) -> FrozenEmbedding:
        """Return the embedding of the same rows without a factor."""
        return self if self._scale == 1.0 else FrozenEmbedding(self.product, self._dtype)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings, token_ids [...] -> [..., H]."""
        rows = self.product.rows(token_ids, self._dtype)
        return rows if self._scale == 1.0 else rows * self._scale


class Joint:
    """Linear layers that read the same input, multiplied jointly: fewer, wider products reach more of the memory bandwidth.

    The first layer called with an input computes the outputs of all layers and keeps them until the others are called. A layer
    called with another input, or twice, computes again, so results do not depend on the order of the calls.
    """

    def __init__(self, product: Product, sizes: Sequence[int]) -> None:
        self.product, self._sizes = product, list(sizes)
        # (input, outputs not taken yet); a single attribute, so that threads read both consistently
        self._pending: tuple[torch.Tensor, dict[int, torch.Tensor]] | None = None

    def joins(self, layers: Sequence[nn.Module]) -> bool:
        """True if these are all its layers, in order."""
        indices = [layer._index for layer in layers if isinstance(layer, JointLinear) and layer._joint is self]
        return indices == list(range(len(self._sizes)))

    def output(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Return the output of the layer `index` for x [..., in]."""
        pending = self._pending
        if pending is None or pending[0] is not x or index not in pending[1]:
            pending = (x, dict(enumerate(torch.split(self.product(x), self._sizes, -1))))
        out = pending[1].pop(index)
        self._pending = pending if pending[1] else None
        return out


class JointLinear(nn.Module):
    """One of several linear layers that are multiplied jointly."""

    def __init__(self, joint: Joint, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._joint, self._index = joint, index

    @property
    def product(self) -> Product:
        """The product of all joint layers."""
        return self._joint.product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in] -> [..., out]."""
        return self._joint.output(x, self._index)


@dataclass(frozen=True, slots=True)
class UsualGate:
    """activation(gate) * up."""

    activation: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Combine gate and up, [..., inner] each."""
        return self.activation(gate) * up


class FrozenExperts(nn.Module):
    """The experts of a mixture-of-experts layer, each with products of its own, so that only selected ones are read."""

    def __init__(
        self,
        gate_up: Sequence[Product],
        down: Sequence[Product],
        gate: UsualGate | ClampedGate,
        stacked: StackedExperts | None = None,
    ) -> None:
        """gate_up: of each expert, [2 * inner, hidden], the rows of the gate first. down: of each expert, [hidden, inner].

        stacked: the same weights, of all experts, for kernels of GPUs.
        """
        super().__init__()
        self.num_experts, self.gate, self.stacked = len(gate_up), gate, stacked
        self.gate_up, self.down = (nn.ModuleList(map(FrozenLinear, products)) for products in (gate_up, down))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts. hidden_states: [N, H]; top_k_index, top_k_weights: [N, k]."""
        out = torch.zeros_like(hidden_states)
        for i in sorted(set(top_k_index.flatten().tolist()) & set(range(self.num_experts))):  # others are masked
            tokens, places = torch.where(top_k_index == i)
            gate, up = self.gate_up[i](hidden_states[tokens]).chunk(2, -1)
            part = self.down[i](self.gate(gate, up)) * top_k_weights[tokens, places, None]
            out.index_add_(0, tokens, part.to(out.dtype))
        return out
