"""What a layer of a Llama-like decoder is made of.

Owns the words for its parts and the norm's definition. Who reads them off a family's modules is lean.py; who computes, lean.py
and native/layers.py. Knows no family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Product = Callable[[torch.Tensor], torch.Tensor]
"""x [..., in] -> [..., out]."""


@dataclass(frozen=True, slots=True)
class Norm:
    """x / rms(x) times the weight [H], or times one plus it."""

    weight: torch.Tensor
    eps: float
    from_one: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., H] -> the same shape and dtype."""
        shape = tuple(self.weight.shape)
        if self.from_one:
            return F.rms_norm(x.float(), shape, self.float32(), self.eps).to(x.dtype)
        return F.rms_norm(x, shape, self.weight, self.eps)

    def float32(self) -> torch.Tensor:
        """What is multiplied by, [H] in float32."""
        return (1.0 + self.weight.float() if self.from_one else self.weight.float()).contiguous()


@dataclass(frozen=True, slots=True)
class GatedLayer:
    """Attention and a gated feed-forward, each with a norm before it, after it or both."""

    kind: str
    """Layers of a kind share cosines and sines."""
    before_attention: Norm | None
    qkv: Product
    heads: tuple[int, int]
    """Heads of the queries, and of the keys."""
    dim: int
    q_norm: Norm | None
    k_norm: Norm | None
    wide_norm: bool
    """Whether q_norm and k_norm take all heads as one vector (OLMo-2)."""
    rotates: bool
    window: int | None
    """Positions that a token sees, its own included; None: all before it."""
    scaling: float
    softcap: float | None
    output: Product
    after_attention: Norm | None
    before_mlp: Norm | None
    gate_up: Product
    activation: Callable[[torch.Tensor], torch.Tensor]
    down: Product
    after_mlp: Norm | None

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Those that it has."""
        names = ("before_attention", "q_norm", "k_norm", "after_attention", "before_mlp", "after_mlp")
        return tuple(one for one in (getattr(self, name) for name in names) if one is not None)
