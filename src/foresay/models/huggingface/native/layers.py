"""The layers of a lean model over the compiled kernels: products by PyTorch, all between them by `kernels.cpp`.

Owns the order of the calls and what is passed to them; no shape leaves this file unchecked, since the kernels read memory as
they are told. A pass over N tokens holds its tokens flat, [N, width]. Knows nothing of families.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foresay.models.huggingface.gated_layer import GatedLayer, Norm
from foresay.models.huggingface.native.build import Attention, library
from foresay.models.huggingface.slot_cache import Placement, SlotCache

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_tanh": 1, "gelu_new": 1, "gelu": 2}
"""transformers' names of the activations that the kernels know."""
_ALONE = 1 << 18
"""Products of an attention below which one thread is faster than two that must meet."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """A layer's norms as the kernels read them, in float32; None where it has none."""

    before_attention: torch.Tensor | None
    after_attention: torch.Tensor | None
    before_mlp: torch.Tensor | None
    after_mlp: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None

    @staticmethod
    def of(layer: GatedLayer) -> _Weights:
        norms = {name: getattr(layer, name) for name in _Weights.__dataclass_fields__}
        return _Weights(**{name: None if norm is None else norm.float32() for name, norm in norms.items()})


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the layers of one pass share: where each of N tokens goes, [N] int64 each, and its cosines and sines [N, R]."""

    rows: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    ancestors: torch.Tensor | None
    turns: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    columns: int
    threads: int
    attending: int


class NativeLayers:
    """All layers of a model and its last norm."""

    def __init__(
        self,
        layers: Sequence[GatedLayer],
        last_norm: Norm,
        activation: str,
        residual_scale: float,
        dtype: torch.dtype,
    ) -> None:
        """Raises LookupError where the kernels are not there, or lack the dtype, the activation or norms of several eps."""
        found = library()
        alike = all(norm.eps == last_norm.eps for layer in layers for norm in layer.norms)
        if found is None or dtype not in DTYPES or activation not in ACTIVATIONS or not alike:
            raise LookupError(f"no kernels for {dtype} and {activation}")
        name = DTYPES[dtype]
        self._add_norm = getattr(found, f"foresay_add_norm_{name}")
        self._gate = getattr(found, f"foresay_gate_{name}")
        self._attend = getattr(found, f"foresay_attend_{name}")
        self._layers, self._dtype, self._eps = list(layers), dtype, last_norm.eps
        self._weights, self._last_norm = [_Weights.of(layer) for layer in layers], last_norm.float32()
        self._activation, self._scale = ACTIVATIONS[activation], residual_scale
        self._attentions = [_attention(*pair, self._eps) for pair in zip(layers, self._weights, strict=True)]

    def run(
        self,
        x: torch.Tensor,
        at: Placement,
        cache: SlotCache,
        turns: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        wanted: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """x: [B, T, H], overwritten -> the normed output [B, T, H] and the hidden states asked for.

        turns: by kind of layer, cosines and sines [B, T, R] in float32.
        """
        shape = x.shape
        flat = x.reshape(-1, shape[-1])
        if flat.dtype != self._dtype or not flat.is_contiguous():
            raise ValueError(f"[B, T, H] of {self._dtype} is wanted, in one piece")
        one = self._prepared(at, turns, flat.shape[0])
        states: dict[int, torch.Tensor] = {}
        normed = self._normed(flat, None, None, self._weights[0].before_attention, one)
        for i, (layer, norms) in enumerate(zip(self._layers, self._weights, strict=True)):
            if i in wanted:
                states[i] = flat.clone().view(shape)
            seen = self._attended(i, layer, layer.qkv(normed), cache, one)
            normed = self._normed(flat, layer.output(seen), norms.after_attention, norms.before_mlp, one)
            inner = layer.down(self._gated(layer.gate_up(normed), one))
            last = i + 1 == len(self._layers)
            before = self._last_norm if last else self._weights[i + 1].before_attention
            normed = self._normed(flat, inner, norms.after_mlp, before, one)
        normed = normed.view(shape)
        if len(self._layers) in wanted:
            states[len(self._layers)] = normed
        return normed, states

    def _prepared(self, at: Placement, turns: Mapping[str, tuple[torch.Tensor, torch.Tensor]], tokens: int) -> _Pass:
        rows, slots = at.place(torch.device("cpu"))
        columns = slots.shape[1]
        if rows.shape[0] * columns != tokens:
            raise ValueError(f"{tokens} tokens for {rows.shape[0]} rows of {columns} columns")
        ancestors = None if at.ancestors is None else at.ancestors.reshape(tokens, columns).to(torch.uint8).contiguous()
        threads = torch.get_num_threads()
        first = self._layers[0]
        work = tokens * first.heads[0] * first.dim * at.width
        return _Pass(
            rows.expand(-1, columns).contiguous(),
            slots.contiguous(),
            at.positions.expand(rows.shape[0], -1).contiguous(),
            ancestors,
            {kind: (cos.contiguous(), sin.contiguous()) for kind, (cos, sin) in turns.items()},
            columns,
            threads if tokens >= 32 else 1,
            threads if work >= _ALONE else 1,
        )

    def _normed(
        self,
        flat: torch.Tensor,
        added: torch.Tensor | None,
        after: torch.Tensor | None,
        before: torch.Tensor | None,
        one: _Pass,
    ) -> torch.Tensor:
        """Add to the residual stream `flat` [N, H], in place; the stream normed, or as it is where nothing norms it."""
        out = flat if before is None else torch.empty_like(flat)
        tokens, width = flat.shape
        if added is not None:
            _check(added, flat.shape, flat.dtype)
        self._add_norm(
            *(flat.data_ptr(), _pointer(added), _pointer(after), self._scale, _pointer(before), out.data_ptr()),
            *(tokens, width, self._eps, one.threads),
        )
        return out

    def _gated(self, joint: torch.Tensor, one: _Pass) -> torch.Tensor:
        tokens, twice = joint.shape
        _check(joint, (tokens, twice), self._dtype)
        out = joint.new_empty(tokens, twice // 2)
        self._gate(joint.data_ptr(), out.data_ptr(), tokens, twice // 2, self._activation, one.threads)
        return out

    def _attended(self, i: int, layer: GatedLayer, joint: torch.Tensor, cache: SlotCache, one: _Pass) -> torch.Tensor:
        (many, few), dim, tokens = layer.heads, layer.dim, one.rows.numel()
        _check(joint, (tokens, (many + 2 * few) * dim), self._dtype)
        keys, values = cache.stores(i, few, dim, joint)
        for store in (keys, values):
            _check(store, (*keys.shape[:2], few, dim), self._dtype)
        # a copy: another thread's pass over the same model must not see this one's addresses
        asked: Any = Attention.from_buffer_copy(self._attentions[i])
        cos, sin = one.turns[layer.kind]
        if layer.rotates:
            _check(cos, (*cos.shape[:2], cos.shape[2]), torch.float32)
            asked.cosines, asked.sines, asked.rotated = cos.data_ptr(), sin.data_ptr(), cos.shape[2]
        asked.tokens, asked.columns, asked.row_stride = tokens, one.columns, keys.stride(0)
        asked.rows, asked.slots = one.rows.data_ptr(), one.slots.data_ptr()
        asked.positions, asked.ancestors = one.positions.data_ptr(), _pointer(one.ancestors)
        out = joint.new_empty(tokens, many * dim)
        room = torch.empty(tokens, many * dim)
        self._attend(
            *(ctypes.byref(asked), joint.data_ptr(), room.data_ptr(), keys.data_ptr(), values.data_ptr()),
            *(out.data_ptr(), one.attending),
        )
        return out


def _attention(layer: GatedLayer, weights: _Weights, eps: float) -> Attention:
    """What never changes of a layer's attention."""
    for norm, heads in ((weights.q_norm, layer.heads[0]), (weights.k_norm, layer.heads[1])):
        if norm is not None:
            _check(norm, (heads * layer.dim if layer.wide_norm else layer.dim,), torch.float32)
    return Attention(
        queries=layer.heads[0],
        keys=layer.heads[1],
        dim=layer.dim,
        wide=int(layer.wide_norm),
        window=layer.window or 0,
        query_norm=_pointer(weights.q_norm),
        key_norm=_pointer(weights.k_norm),
        eps=eps,
        scaling=layer.scaling,
        softcap=layer.softcap or 0.0,
    )


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check(tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"{list(shape)} of {dtype} is wanted in one piece, not {list(tensor.shape)} of {tensor.dtype}")
