"""The skinny matrix product: a few tokens times a weight matrix, with the same bits for any number of tokens.

Decoding reads every weight once for a handful of tokens, so that the memory is the limit and the order of sums is free. Weights
are the long side of a tile, and tokens the short one, whose length depends on their number: a single token is copied with few
others, and many tokens read the weights few times. A device's short sides are those with the same bits, which is tried once; the
division of the inner dimension depends on the weight alone. So a token's outputs do not depend on the others. Groups of tokens
are the fastest dimension of the grid: those which read the same weights run at the same time, all but the first from the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from foresay.decoding.devices import is_remote
from foresay.models.gpu.overlap import overlapping, prefetch, wait

GATES = ("silu", "gelu_pytorch_tanh", "gelu")
"""Activations that a gate may have."""
TOKENS = 64
"""Tokens of a tile, on every device."""
SIDES = (16, TOKENS, 128, 256)
"""Tokens of a tile where all of them give the same bits."""
LONG = 64
"""Outputs of a tile."""
MOST = 512
"""Tokens beyond which a library multiplies, in another order of sums."""
INNER = 128
"""Inputs of a tile."""
PROGRAMS = 512
"""Least number of programs: the inner dimension is divided until there are as many, by a factor that the weight alone decides."""


def parts_of(outputs: int, inputs: int, tile: int = LONG) -> int:
    """Return the number of parts of the inner dimension, a power of two; by the weight's shape alone. tile: outputs of one."""
    parts = 1
    while parts * triton.cdiv(outputs, tile) < PROGRAMS and inputs // (2 * parts) >= 4 * INNER:
        parts *= 2
    return parts


@triton.jit
def activated(x, KIND: tl.constexpr):
    """An activation, by its index in GATES."""
    if KIND == 0:
        x = x / (1 + tl.exp(-x))
    elif KIND == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1 + tl.exp(-2 * inner))
    else:
        x = 0.5 * x * (1 + tl.math.erf(x * 0.7071067811865476))
    return x


@triton.jit(do_not_specialize=["num_tokens"])
def _product(
    states, weight, sums, bias, num_tokens, outputs, inputs, stride,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr, UNIT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    lane, half, size = tl.arange(0, OUTPUTS), OUTPUTS // 2, outputs // 2
    column = tl.program_id(1) * OUTPUTS + lane
    if KIND >= 0:  # the first half of a tile are gates, the other one the ups of the same numbers
        number = tl.program_id(1) * half + lane % half
        column = tl.where(number < size, number + lane // half * size, outputs)
    part, token = tl.program_id(2), tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    share = ((inputs + UNIT - 1) // UNIT + PARTS - 1) // PARTS * UNIT
    total = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    if OVERLAPS:
        line = tl.minimum(part * share + tl.arange(0, 4) * (INNER // 2), inputs - 1)
        prefetch(weight + tl.minimum(column, outputs - 1)[:, None].to(tl.int64) * inputs + line[None, :])
    wait(OVERLAPS)
    for begin in range(part * share, tl.minimum((part + 1) * share, inputs), INNER):
        at = begin + tl.arange(0, INNER)
        x = tl.load(
            states + token[None, :].to(tl.int64) * stride + at[:, None],
            mask=(token < num_tokens)[None, :] & (at < inputs)[:, None],
            other=0.0,
        )
        w = tl.load(
            weight + column[:, None].to(tl.int64) * inputs + at[None, :],
            mask=(column < outputs)[:, None] & (at < inputs)[None, :],
            other=0.0,
        )
        total += tl.dot(w, x, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[:, None]
    total = total.to(sums.dtype.element_ty)
    if KIND >= 0:
        pairs = tl.permute(tl.reshape(total.to(tl.float32), (2, OUTPUTS // 2, TOKENS)), (1, 2, 0))
        gate, up = tl.split(pairs)
        number = tl.program_id(1) * half + tl.arange(0, OUTPUTS // 2)
        tl.store(
            sums + token[None, :].to(tl.int64) * size + number[:, None],
            (activated(gate, KIND) * up).to(sums.dtype.element_ty),
            mask=(token < num_tokens)[None, :] & (number < size)[:, None],
        )
    else:
        tl.store(
            sums + (part * num_tokens + token[None, :].to(tl.int64)) * outputs + column[:, None],
            total,
            mask=(token < num_tokens)[None, :] & (column < outputs)[:, None],
        )


@triton.jit
def total_of(
    sums, bias, token, column, inside, num_tokens, outputs,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Some outputs of a token, of `Sums`: the parts in order, the bias, rounded to DTYPE. Returns float32."""
    if PARTS == 1:
        total = tl.load(sums + token.to(tl.int64) * outputs + column, mask=inside, other=0.0).to(tl.float32)
    else:
        total = tl.zeros(column.shape, tl.float32)
        for part in range(PARTS):
            total += tl.load(sums + (part * num_tokens + token.to(tl.int64)) * outputs + column, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return total.to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens"])
def _reduce(sums, bias, out, num_tokens, outputs, BLOCK: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < outputs
    dtype: tl.constexpr = out.dtype.element_ty
    total = total_of(sums, bias, token, column, inside, num_tokens, outputs, PARTS, HAS_BIAS, dtype)
    tl.store(out + token.to(tl.int64) * outputs + column, total.to(dtype), mask=inside)


class Sums(NamedTuple):
    """The outputs of a product, of which each reader adds up the parts of the inner dimension itself."""

    parts: torch.Tensor
    """[P, N, O], float32 unless P is 1."""
    bias: torch.Tensor | None
    """[O], which the parts do not contain; None for none."""
    dtype: torch.dtype
    """To which outputs are rounded."""

    @staticmethod
    def of(outputs: torch.Tensor | Sums) -> Sums:
        """Return outputs [N, ...] as one part; sums as they are."""
        return outputs if isinstance(outputs, Sums) else Sums(outputs.view(1, len(outputs), -1), None, outputs.dtype)

    @property
    def constants(self) -> dict[str, int]:
        """Arguments of `total_of` that are known when a kernel is compiled."""
        return {"PARTS": len(self.parts), "HAS_BIAS": self.bias is not None}

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The parts, and the bias; the parts in place of a missing one."""
        return self.parts, self.parts if self.bias is None else self.bias

    def outputs(self) -> torch.Tensor:
        """Return the outputs, [N, O]."""
        parts, count, outputs = self.parts.shape
        if parts == 1:
            return self.parts[0]
        out = self.parts.new_empty(count, outputs, dtype=self.dtype)
        grid = (count, triton.cdiv(outputs, 1024))
        _reduce[grid](*self.tensors, out, count, outputs, BLOCK=1024, **self.constants)
        return out


def product(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return states times the transposed weight plus the bias, [N, O] in the dtype of the states.

    states: [N, I], rows contiguous. weight: [O, I] contiguous. bias: [O].
    """
    return sums_of(states, weight, bias).outputs()


def gated_product(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor | None:
    """Return activation(gate) * up of a product of gates and ups, [N, O / 2]; None for one with several parts.

    activation: one of GATES. See `product`.
    """
    if parts_of(len(weight), states.shape[1]) > 1:
        return None
    return sums_of(states, weight, bias, GATES.index(activation)).parts[0]


def sums_of(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, gate: int | None = None
) -> Sums:
    """Return the sums of `product`. gate: index of the activation of `gated_product`, whose outputs are then returned."""
    sides = sides_of(states.device, states.dtype)
    side = next((one for one in sides if one >= len(states)), sides[-1])
    return _sums_of(states, weight, bias, gate, side)


def _sums_of(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gate: int | None, side: int
) -> Sums:
    (count, inputs), outputs = states.shape, weight.shape[0]
    parts = parts_of(outputs, inputs)
    sums, own = empty_sums(parts, states, outputs if gate is None else outputs // 2, bias)
    _product[(triton.cdiv(count, side), triton.cdiv(outputs, LONG), parts)](
        states, weight, sums.parts, sums.parts if own is None else own, count, outputs, inputs, states.stride(0),
        TOKENS=side, OUTPUTS=LONG, INNER=INNER * 128 // max(side, 128), PARTS=parts, HAS_BIAS=own is not None,
        KIND=-1 if gate is None else gate, UNIT=INNER, num_warps=8 if side > 128 else 4, **overlapping(states.device),
    )  # fmt: skip
    return sums


@cache
def sides_of(device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the SIDES that are used on a device, ascending. They are tried before its first pass is captured."""
    return equal_sides(device, dtype) if is_remote(device) else (TOKENS,)


def equal_sides(device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the SIDES whose sums have the bits of those of TOKENS on a device."""
    generator = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(rows, 1024, generator=generator).to(device, dtype) for rows in (SIDES[-1], LONG))
    return equal(lambda side: _sums_of(states, weight, None, None, side).parts, SIDES)


def equal(parts: Callable[[int], torch.Tensor], sides: Sequence[int]) -> tuple[int, ...]:
    """Return the sides whose sums have the bits of those of TOKENS. parts: of a side, by a product of the same numbers."""
    wanted = parts(TOKENS)
    return tuple(side for side in sides if torch.equal(parts(side), wanted))


def empty_sums(
    parts: int, states: torch.Tensor, outputs: int, bias: torch.Tensor | None
) -> tuple[Sums, torch.Tensor | None]:
    """Return memory for sums, and the bias that they contain: with one part they are the outputs."""
    dtype = states.dtype if parts == 1 else torch.float32
    sums = torch.empty(parts, len(states), outputs, dtype=dtype, device=states.device)
    return Sums(sums, None if parts == 1 else bias, states.dtype), bias if parts == 1 else None
