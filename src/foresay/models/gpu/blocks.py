"""The skinny product over quantized weights: levels of 8, 6 or 4 bits in groups, which are not expanded in memory.

A program multiplies the tokens by the levels of one group at a time, integers that are exact in the formats of tensor cores, and
adds the sums times the group's scale: each weight keeps the value that the file states. One tile and one order of sums serve 1 to
64 tokens, and more in groups of 64, as in product.py. Only very long passes are multiplied by dequantized weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from foresay.decoding.devices import launching_on
from foresay.models.gpu.levels import DOUBLED, Levels
from foresay.models.gpu.product import MOST, OUTPUTS, TOKENS, Sums, empty_sums, parts_of, product
from foresay.models.layer import StackedExperts

_QUAD = 4
"""Groups of one step of the inner dimension."""
_SLICE = 8192
"""Outputs whose weights are numbers at a time, for many tokens."""
_NOTHING = np.empty((0, 0), np.uint8)


@triton.jit
def _of_group(
    levels, high, column, group, index, stride, inputs,
    GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """The levels of a group, [GROUP, OUTPUTS], less the one that stands for 0. `index`: which of four groups, at compile time."""
    inner = tl.arange(0, GROUP)
    inside = (group * GROUP + inner < inputs)[:, None]
    if BITS == 8:
        at = column[None, :] * stride + (group * GROUP + inner)[:, None]
        level = tl.load(levels + at, mask=inside, other=0).to(tl.int32)
    else:
        at = column[None, :] * stride + (group // 2 * GROUP + inner)[:, None]
        pair = tl.load(levels + at, mask=inside, other=0)
        level = ((pair >> (4 * (index % 2))) & 15).to(tl.int32)
        if BITS == 6:
            at = column[None, :] * (stride // 2) + (group // 4 * GROUP + inner)[:, None]
            quad = tl.load(high + at, mask=inside, other=0)
            level += ((quad >> (2 * index)) & 3).to(tl.int32) * 16
    return level - ZERO


@triton.jit
def _float_of(byte):
    """The float of 8 bits, [...] int32, divided by E4M3: its exponent and mantissa are those of a float16."""
    return (((byte & 128) << 8) | ((byte & 127) << 7)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _float4_of(code):
    """Twice the float of 4 bits (E2M1), an integer: [...] int32."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    size = tl.where(exponent > 0, (2 + mantissa) << tl.maximum(exponent - 1, 0), mantissa)
    return tl.where((code & 8) > 0, -size, size)


@triton.jit
def _power_of(stored):
    """2^(stored - 128), [...] int32 -> float32. The two smallest exponents are those of subnormal numbers."""
    bits = tl.where(stored > 1, (tl.maximum(stored, 1) - 1) << 23, 0x200000 << tl.minimum(stored, 1))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weights_of_group(
    levels, high, scales, zeros, mins, whole, column, group, index, inputs, level_stride, num_scales,
    GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, PER: tl.constexpr, SHARED: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINS: tl.constexpr, FLOATS: tl.constexpr,
):  # fmt: skip
    """The levels of a group of some columns [GROUP, C], its scales [C] float32, and its mins [C] float32 if there are any."""
    groups = (inputs + GROUP - 1) // GROUP
    level = _of_group(levels, high, column, group, index, level_stride, inputs, GROUP, BITS, ZERO)
    here = column * num_scales + tl.minimum(group, groups - 1) // PER
    if FLOATS:
        level = _float_of(level) if BITS == 8 else _float4_of(level)
    if HAS_ZEROS:
        level -= tl.load(zeros + here).to(tl.int32)[None, :]
    stored = tl.load(scales + here)
    scale = _power_of(stored.to(tl.int32)) if FLOATS and BITS == 4 else stored.to(tl.float32)
    if SHARED > 0:
        shared = (column * (groups // SHARED) + tl.minimum(group, groups - 1) // SHARED) * 2
        scale *= tl.load(whole + shared).to(tl.float32)
    least = scale
    if HAS_MINS:
        least = tl.load(mins + here).to(tl.float32)
        if SHARED > 0:
            least *= tl.load(whole + shared + 1).to(tl.float32)
    return level, scale, least


@triton.jit(do_not_specialize=["num_tokens"])
def _product(
    states, levels, high, scales, zeros, mins, whole, sums, bias, num_tokens, outputs, stride, inputs, level_stride, num_scales,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    PER: tl.constexpr, SHARED: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINS: tl.constexpr, FLOATS: tl.constexpr,
    PARTS: tl.constexpr, QUAD: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.minimum(column, outputs - 1).to(tl.int64)  # padding repeats the last one, and is not stored
    part, token = tl.program_id(2), tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    groups = (inputs + GROUP - 1) // GROUP
    steps = (groups + QUAD - 1) // QUAD
    share = (steps + PARTS - 1) // PARTS
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for step in range(part * share, tl.minimum((part + 1) * share, steps)):
        for index in tl.static_range(QUAD):
            group = step * QUAD + index
            at = group * GROUP + tl.arange(0, GROUP)
            x = tl.load(
                states + token[:, None].to(tl.int64) * stride + at[None, :],
                mask=(token < num_tokens)[:, None] & (at < inputs)[None, :],
                other=0.0,
            )
            level, scale, least = weights_of_group(
                levels, high, scales, zeros, mins, whole, column, group, index, inputs, level_stride, num_scales,
                GROUP, BITS, ZERO, PER, SHARED, HAS_ZEROS, HAS_MINS, FLOATS,
            )  # fmt: skip
            total += tl.dot(x, level.to(x.dtype), input_precision="ieee") * scale[None, :]
            if HAS_MINS:
                total -= tl.sum(x.to(tl.float32), 1)[:, None] * least[None, :]
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        sums + (part * num_tokens + token[:, None].to(tl.int64)) * outputs + column[None, :],
        total.to(sums.dtype.element_ty),
        mask=(token < num_tokens)[:, None] & (column < outputs)[None, :],
    )


def _powers(stored: torch.Tensor) -> torch.Tensor:
    """See `_power_of`."""
    exponents = stored.int()
    bits = torch.where(exponents > 1, (exponents - 1) << 23, 0x200000 << exponents.clamp(max=1))
    return bits.view(torch.float32)


class BlockProduct:
    """A frozen product over quantized weights on a GPU; see cpu.product.Product."""

    def __init__(self, found: Levels, dtype: torch.dtype, device: torch.device, bias: torch.Tensor | None) -> None:
        """dtype: of inputs, outputs and the bias."""
        self.out_features, self.in_features = found.levels.shape
        packed, high = _packed(found.levels, found.bits, found.group)
        self._levels, self._scales = (torch.from_numpy(one).to(device) for one in (packed, found.scales))
        rest = (high, found.zeros, found.mins, found.whole)
        own = [None if one is None else torch.from_numpy(one).to(device) for one in rest]
        self._high, self._zeros, self._mins, self._whole = own
        self._how = replace(found, levels=_NOTHING, scales=_NOTHING, zeros=None, mins=None, whole=None)
        self.dtype = dtype
        self.bias = None if bias is None else bias.to(device, dtype)
        self.nbytes = sum(one.nbytes for one in (self._levels, self._scales, *own) if one is not None)
        self.bits = 8.0 * self.nbytes / found.levels.size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in] -> [..., out]."""
        flat = x.reshape(-1, self.in_features)
        with launching_on(x.device):
            if len(flat) <= 2 * MOST:  # numbers would be made anew in every pass
                out = self.sums_of(flat.contiguous()).outputs()
            else:
                parts = [
                    self.rows(at, min(_SLICE, self.out_features - at)) for at in range(0, self.out_features, _SLICE)
                ]
                out = torch.cat([F.linear(flat, part.dense()) for part in parts], 1)
                out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def sums_of(self, states: torch.Tensor) -> Sums:
        """Return the sums of a few tokens, [N, in] contiguous."""
        count, outputs = len(states), self.out_features
        parts = parts_of(outputs, self.in_features, OUTPUTS)
        sums, own = empty_sums(parts, states, outputs, self.bias)
        _product[(triton.cdiv(count, TOKENS), triton.cdiv(outputs, OUTPUTS), parts)](
            states, *self.tensors, sums.parts, sums.parts if own is None else own, count, outputs, states.stride(0), *self.sizes,
            TOKENS=TOKENS, OUTPUTS=OUTPUTS, PARTS=parts, HAS_BIAS=own is not None, **self.constants,
        )  # fmt: skip
        return sums

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Levels, their upper bits, scales, zeros, mins and factors of these; the levels in place of those that are missing."""
        every = (self._levels, self._high, self._scales, self._zeros, self._mins, self._whole)
        return [self._levels if one is None else one for one in every]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Inputs, and columns of the levels and of the scales."""
        return self.in_features, self._levels.shape[1], self._scales.shape[1]

    @property
    def constants(self) -> dict[str, Any]:
        """Arguments of `weights_of_group` that are known when a kernel is compiled, and the groups of a step."""
        how = self._how
        own = {"GROUP": how.group, "BITS": how.bits, "ZERO": how.zero, "PER": how.per, "SHARED": how.shared}
        has = {"HAS_ZEROS": self._zeros is not None, "HAS_MINS": self._mins is not None, "FLOATS": how.is_float}
        return own | has | {"QUAD": _QUAD}

    def with_bias(self, bias: torch.Tensor) -> BlockProduct:
        """Return the product of the same weights, in the same memory, with a bias [out]."""
        out = copy(self)
        out.bias = bias.to(self._levels.device, self.dtype)
        return out

    def rows(self, first: int, count: int) -> BlockProduct:
        """Return the product of some outputs, over the same memory and without a bias."""
        out = copy(self)
        out.out_features, out.bias, last = count, None, first + count
        for name in ("_levels", "_high", "_scales", "_zeros", "_mins", "_whole"):
            one = getattr(self, name)
            setattr(out, name, None if one is None else one[first:last])
        out.nbytes = self.nbytes * count // self.out_features
        return out

    def dense(self) -> torch.Tensor:
        """Return the weights in plain layout, [out, in]."""
        how, groups = self._how, -(-self.in_features // self._how.group)

        def of_groups(one: torch.Tensor) -> torch.Tensor:
            return one.float().repeat_interleave(how.per, 1)[:, :groups]

        levels = self._unpacked()
        levels = F.pad(levels, (0, -levels.shape[1] % how.group)).view(self.out_features, -1, how.group)
        levels = levels[:, :groups] - how.zero
        if self._zeros is not None:
            levels = levels - of_groups(self._zeros)[..., None]
        scales = of_groups(_powers(self._scales) if how.is_float and how.bits == 4 else self._scales)
        mins = None if self._mins is None else of_groups(self._mins)
        if self._whole is not None:
            whole = self._whole.float().repeat_interleave(how.shared, 1)
            scales = scales * whole[..., 0]
            mins = None if mins is None else mins * whole[..., 1]
        out = levels * scales[..., None]
        out = out if mins is None else out - mins[..., None]
        return out.flatten(1)[:, : self.in_features].to(self.dtype)

    def _unpacked(self) -> torch.Tensor:
        """Return the levels as float32, [out, in or more]."""
        levels, rows = self._levels, self.out_features
        if self._how.is_float and self._how.bits == 8:
            byte = levels.int()
            return ((byte & 128) << 8 | (byte & 127) << 7).to(torch.int16).view(torch.float16).float()
        if self._how.bits == 8:
            return levels.float()
        pairs = levels.view(rows, -1, self._how.group)
        low = torch.stack([pairs & 15, pairs >> 4], 2).view(rows, -1, self._how.group)
        if self._high is not None:
            quads = self._high.view(rows, -1, self._how.group)
            upper = torch.stack([quads >> (2 * i) & 3 for i in range(_QUAD)], 2)
            low = low + upper.view(rows, -1, self._how.group) * 16
        if self._how.is_float:
            return torch.tensor(DOUBLED, dtype=torch.float32, device=low.device)[low.long()].view(rows, -1)
        return low.float().view(rows, -1)


class ExpertProduct:
    """One expert's rows of a product of all experts, with its bias: as a product of its own it is dequantized for each use."""

    def __init__(self, whole: BlockProduct, index: int, count: int) -> None:
        """whole: its bias is [count * out]. index, count: of the expert and of all."""
        self.out_features, self.in_features = whole.out_features // count, whole.in_features
        self._rows = whole.rows(index * self.out_features, self.out_features)
        self.bias = None if whole.bias is None else whole.bias.view(count, -1)[index]
        self.bits, self.nbytes = whole.bits, self._rows.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in] -> [..., out]."""
        return F.linear(x, self.dense(), self.bias)

    def dense(self) -> torch.Tensor:
        """Return the weights in plain layout, [out, in]."""
        return self._rows.dense()


def stacked_experts(gate_up: BlockProduct, down: BlockProduct, count: int) -> StackedExperts:
    """Return experts over products of the rows of one after another, gates first; each product may have a bias."""
    bias, down_bias = (None if one.bias is None else one.bias.view(count, -1) for one in (gate_up, down))
    return StackedExperts(gate_up, down, bias, down_bias)


def experts_of(whole: BlockProduct, count: int) -> list[ExpertProduct]:
    """Return the product of each expert."""
    return [ExpertProduct(whole, i, count) for i in range(count)]


class NumberProduct:
    """A frozen product of unquantized weights, next to those of other types."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight: [out, in]. bias: [out]."""
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias, self.dtype, self.nbytes = weight.contiguous(), bias, weight.dtype, weight.nbytes
        self.bits = 8.0 * weight.element_size()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in] -> [..., out]."""
        flat = x.reshape(-1, self.in_features).contiguous()
        with launching_on(x.device):
            multiply = product if len(flat) <= MOST else F.linear
            out = multiply(flat, self.weight, self.bias)
        return out.view(*x.shape[:-1], self.out_features)

    def dense(self) -> torch.Tensor:
        """Return the weights in plain layout, [out, in]."""
        return self.weight


class StackedProduct:
    """Products of the same input, one after the other: tensors of several types that are multiplied jointly."""

    def __init__(self, parts: Sequence[BlockProduct | NumberProduct]) -> None:
        self._parts = parts
        self.in_features, self.out_features = parts[0].in_features, sum(one.out_features for one in parts)
        self.dtype, self.nbytes = parts[0].dtype, sum(one.nbytes for one in parts)
        self.bits = 8.0 * self.nbytes / (self.in_features * self.out_features)
        biases = [one.bias for one in parts if one.bias is not None]
        self.bias = torch.cat(biases) if biases else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in] -> [..., out]."""
        return torch.cat([one(x) for one in self._parts], -1)

    def dense(self) -> torch.Tensor:
        """Return the weights in plain layout, [out, in]."""
        return torch.cat([one.dense() for one in self._parts])


QUANTIZED = (BlockProduct, StackedProduct)
"""Products over quantized weights."""


def _packed(
    levels: npt.NDArray[np.uint8], bits: int, group: int
) -> tuple[npt.NDArray[np.uint8 | np.int8], npt.NDArray[np.uint8] | None]:
    """Return levels as the kernel reads them: the low halves of two groups in a byte, the upper bits of four in another."""
    if bits == 8:
        return np.ascontiguousarray(levels).view(np.int8), None
    rows = len(levels)
    groups = np.pad(levels.reshape(rows, -1, group), ((0, 0), (0, -(levels.shape[1] // group) % _QUAD), (0, 0)))
    low = groups & 15
    pairs = np.ascontiguousarray((low[:, ::2] | low[:, 1::2] << 4).reshape(rows, -1))
    if bits == 4:
        return pairs, None
    upper = groups >> 4
    quads = upper[:, ::4] | upper[:, 1::4] << 2 | upper[:, 2::4] << 4 | upper[:, 3::4] << 6
    return pairs, np.ascontiguousarray(quads.reshape(rows, -1))
