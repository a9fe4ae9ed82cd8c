"""A layer of a Llama-like decoder by PyTorch's operations, in as few as can be.

Owns the two halves of a layer, rotary positions and the masks they look through. None of them depends on a number in a tensor, so
that a pass over them can be captured. Knows no family and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foresay.models.cpu.gated_layer import GatedLayer, Norm
from foresay.models.huggingface import attention

Turn = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [B, T, 1, rotated dimensions]; the sines of the first half negated."""
Write = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [B, heads, T, dim] of a pass -> all that its rows see, [B, heads, width, dim]."""


def attend(
    layer: GatedLayer,
    x: torch.Tensor,
    read: torch.Tensor,
    write: Write,
    turn: Turn,
    mask: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor:
    """x [B, T, H] and `scale` times what attention gathers. read: what queries, keys and values are made of."""
    batch, columns = x.shape[:2]
    many, few = layer.heads
    joint = layer.qkv(read)
    if layer.q_norm is not None and layer.k_norm is not None:
        joint = _normed(layer, joint)
    joint = joint.view(batch, columns, many + 2 * few, layer.dim)
    turned = joint[:, :, : many + few]
    if layer.rotates:
        turned = _rotated(turned, *turn)
    keys, values = write(turned[:, :, many:].transpose(1, 2), joint[:, :, many + few :].transpose(1, 2))
    query = turned[:, :, :many].transpose(1, 2)
    seen, _ = attention.attention(None, query, keys, values, mask, layer.scaling, softcap=layer.softcap)
    return _added(x, layer.output(seen.reshape(batch, columns, many * layer.dim)), layer.after_attention, scale)


def feed_forward(layer: GatedLayer, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """x [B, T, H] and `scale` times its feed-forward."""
    gate, up = layer.gate_up(x if layer.before_mlp is None else layer.before_mlp(x)).chunk(2, -1)
    return _added(x, layer.down(layer.activation(gate) * up), layer.after_mlp, scale)


def turn_of(cos: torch.Tensor, sin: torch.Tensor) -> Turn:
    """From cosines and sines [B, T, rotated dimensions]."""
    half = sin.shape[-1] // 2
    return cos[:, :, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, :, None]


class TurnTable:
    """A rotary module's cosines and sines, computed once for all positions up to the highest that was asked for."""

    STATIC = frozenset({"default", "linear", "llama3", "yarn"})
    """Kinds whose frequencies do not depend on how long the text is."""

    def __init__(self, rotary: Any) -> None:
        """rotary: transformers' own, whose buffers are on the CPU."""
        self._rotary, self._static = rotary, getattr(rotary, "rope_type", "") in self.STATIC
        self._table = torch.empty(0, 0), torch.empty(0, 0)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: [N] int64 -> [N, R] float32 each, in one piece."""
        if not self._static:
            return self._of(positions)
        needed = int(positions.max()) + 1
        if needed > len(self._table[0]):
            self._table = self._of(torch.arange(max(1024, 2 * needed)))
        cos, sin = self._table
        return cos[positions], sin[positions]

    def _of(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._rotary(torch.empty(0), positions[None])
        return cos[0].contiguous(), sin[0].contiguous()


def causal_mask(window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """The additive mask of the pass under way, [B, 1, T, width]. window: positions that a token sees; None: all before it."""

    def seen(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        near = key <= query
        return near if window is None else near & (key > query - window)

    out: torch.Tensor = attention.additive_mask(mask_function=seen, dtype=dtype)
    return out


def _added(x: torch.Tensor, out: torch.Tensor, after: Norm | None, scale: float) -> torch.Tensor:
    if after is not None:
        out = after(out)
    return x + out if scale == 1.0 else torch.add(x, out, alpha=scale)


def _normed(layer: GatedLayer, joint: torch.Tensor) -> torch.Tensor:
    """Queries and keys normed: each head by itself, or all heads of a token together. joint: [B, T, heads * dim]."""
    assert layer.q_norm is not None and layer.k_norm is not None
    sizes = [layer.heads[0] * layer.dim, layer.heads[1] * layer.dim, layer.heads[1] * layer.dim]
    query, key, value = torch.split(joint, sizes, -1)
    if not layer.wide_norm:
        query, key = (part.reshape(*part.shape[:-1], -1, layer.dim) for part in (query, key))
    query, key = layer.q_norm(query), layer.k_norm(key)
    if not layer.wide_norm:
        query, key = query.flatten(-2), key.flatten(-2)
    return torch.cat([query, key, value], -1)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions. x: [B, T, heads, D]; cos, sin: [B, T, 1, R], of which D - R dimensions are left as they are."""
    size = cos.shape[-1]
    turned = x[..., :size]
    rolled = turned.roll(size // 2, -1)
    out = torch.addcmul(turned * cos, rolled, sin)
    return out if size == x.shape[-1] else torch.cat([out, x[..., size:]], -1)
