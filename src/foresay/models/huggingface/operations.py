"""A layer of a Llama-like decoder in a minimal number of PyTorch operations.

Owns the attention and feed-forward halves of a layer, rotary positions and causal masks. Knows no family and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foresay.models.huggingface import attention
from foresay.models.layer import Layer, Norm

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [B, T, 1, rotated dimensions]; the first half of the sines is negated."""
Write = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Store keys and values [B, heads, T, dim] of a pass; return all that its rows attend to, [B, heads, width, dim] each."""


def attend(
    layer: Layer,
    x: torch.Tensor,
    read: torch.Tensor,
    write: Write,
    rotary: Rotary | None,
    mask: torch.Tensor,
    scale: float = 1.0,
    query_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x [B, T, H] plus `scale` times the attention output. read: the input of queries, keys and values.

    rotary: None for a layer without rotary positions. query_scales: [B, T] factors of queries, for a layer that has them.
    """
    batch, columns = x.shape[:2]
    query_heads, key_heads = layer.heads
    conv, delta = layer.attention_conv, None
    if conv is not None:
        read, delta = conv.around(read)
    joint = layer.qkv(read)
    if layer.q_norm is not None and layer.k_norm is not None:
        joint = _normalize_heads(layer, joint)
    joint = joint.view(batch, columns, query_heads + 2 * key_heads, layer.dim)
    rotated = joint[:, :, : query_heads + key_heads]
    if layer.rotates:
        assert rotary is not None
        rotated = _rotate(rotated, *rotary)
    keys, values = write(
        rotated[:, :, query_heads:].transpose(1, 2), joint[:, :, query_heads + key_heads :].transpose(1, 2)
    )
    query = rotated[:, :, :query_heads].transpose(1, 2)
    if layer.query_scale is not None:
        assert query_scales is not None
        query = query * query_scales.to(query.dtype)[:, None, :, None]
    attended, _ = attention.attention(None, query, keys, values, mask, layer.scaling, softcap=layer.softcap)
    out = layer.output(attended.reshape(batch, columns, query_heads * layer.dim))
    if conv is not None and delta is not None:
        out = conv.after(out, delta)
    return _add_residual(x, out, layer.after_attention, scale)


def feed_forward(layer: Layer, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return x [B, T, H] plus `scale` times the feed-forward output."""
    assert layer.gate_up is not None and layer.activation is not None and layer.down is not None
    read, conv, delta = x if layer.before_mlp is None else layer.before_mlp(x), layer.mlp_conv, None
    if conv is not None:
        read, delta = conv.around(read)
    gate, up = layer.gate_up(read).chunk(2, -1)
    out = layer.down(layer.activation(gate) * up)
    if conv is not None and delta is not None:
        out = conv.after(out, delta)
    return _add_residual(x, out, layer.after_mlp, scale)


def rotary_of(cos: torch.Tensor, sin: torch.Tensor) -> Rotary:
    """Build a Rotary from cosines and sines [B, T, rotated dimensions]."""
    half = sin.shape[-1] // 2
    return cos[:, :, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, :, None]


class RotaryTable:
    """A rotary module's cosines and sines, cached for all positions up to the highest requested."""

    STATIC = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
    """RoPE types whose frequencies do not depend on the sequence length."""

    def __init__(self, rotary: Any, kind: str | None = None, *, halves: bool = False) -> None:
        """rotary: a rotary embedding module of transformers with its buffers on the CPU. kind: of its layers, if it needs one.

        halves: True if it returns the R / 2 different cosines and sines only.
        """
        types = getattr(rotary, "rope_type", "")
        self._rotary, self._kind = rotary, [] if kind is None else [kind]
        self.is_static = (types.get(kind) if isinstance(types, dict) else types) in self.STATIC
        """True if the frequencies do not depend on the sequence length."""
        self._repeats = 2 if halves else 1
        self._table = torch.empty(0, 0), torch.empty(0, 0)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of positions, [N] int64 -> [N, R] float32 each, contiguous."""
        table = self.until(int(positions.max()) + 1)
        return self._compute(positions) if table is None else (table[0][positions], table[1][positions])

    def until(self, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return cosines and sines of at least the first `count` positions, [P, R] float32 each; None if they depend on more."""
        if not self.is_static:
            return None
        table = self._table  # another thread may replace it
        if count > len(table[0]):
            table = self._table = self._compute(torch.arange(count + 2048))
        return table

    def _compute(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._rotary(torch.empty(0), positions[None], *self._kind)
        return cos[0].repeat(1, self._repeats), sin[0].repeat(1, self._repeats)


def causal_mask(window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask of the current pass, [B, 1, T, width].

    window: number of positions that a token attends to, its own included; None for all up to its own.
    """

    def seen(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        causal = key <= query
        return causal if window is None else causal & (key > query - window)

    out: torch.Tensor = attention.additive_mask(mask_function=seen, dtype=dtype)
    return out


def _add_residual(x: torch.Tensor, out: torch.Tensor, norm: Norm | None, scale: float) -> torch.Tensor:
    if norm is not None:
        out = norm(out)
    return x + out if scale == 1.0 else torch.add(x, out, alpha=scale)


def _normalize_heads(layer: Layer, joint: torch.Tensor) -> torch.Tensor:
    """Normalize queries and keys, per head or over all heads of a token (wide_norm). joint: [B, T, heads * dim]."""
    assert layer.q_norm is not None and layer.k_norm is not None
    sizes = [layer.heads[0] * layer.dim, layer.heads[1] * layer.dim, layer.heads[1] * layer.dim]
    query, key, value = torch.split(joint, sizes, -1)
    if not layer.wide_norm:
        query, key = (part.reshape(*part.shape[:-1], -1, layer.dim) for part in (query, key))
    query, key = layer.q_norm(query), layer.k_norm(key)
    if not layer.wide_norm:
        query, key = query.flatten(-2), key.flatten(-2)
    return torch.cat([query, key, value], -1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to the first R of D dimensions. x: [B, T, heads, D]; cos, sin: [B, T, 1, R]."""
    size = cos.shape[-1]
    part = x[..., :size]
    rolled = part.roll(size // 2, -1)
    out = torch.addcmul(part * cos, rolled, sin)
    return out if size == x.shape[-1] else torch.cat([out, x[..., size:]], -1)
