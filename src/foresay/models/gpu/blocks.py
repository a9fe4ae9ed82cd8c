"""The skinny product over quantized weights: levels of 8, 6 or 4 bits in groups, which are not expanded in memory.

A program multiplies the tokens by the levels of one group at a time, integers that are exact in the formats of tensor cores, and
adds the sums times the group's scale: each weight keeps the value of the file. Tiles are those of product.py, with weights
as the long side: they become numbers in the registers that are multiplied. Only very long passes read dequantized weights.
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

from foresay.decoding.devices import is_remote, launching_on
from foresay.models.gpu.product import LONG, MOST, TOKENS, Sums, empty_sums, equal, parts_of, product
from foresay.models.gpu.product import SIDES as ALL_SIDES
from foresay.models.gpu.registers import QUAD, add_step
from foresay.models.layer import StackedExperts
from foresay.models.levels import DOUBLED, Levels

SIDES = ALL_SIDES[:3]
"""Tokens of a tile where all of them give the same bits: as of other products, but those for which registers do not suffice."""
_EQUAL: dict[tuple[Any, ...], tuple[int, ...]] = {}
_SLICE = 8192
"""Outputs whose weights are numbers at a time, for many tokens."""
_NOTHING = np.empty((0, 0), np.uint8)


@triton.jit(do_not_specialize=["num_tokens"])
def _product(
    states, levels, high, scales, zeros, mins, whole, sums, bias, num_tokens, outputs, stride, inputs, level_stride, num_scales,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    PER: tl.constexpr, SHARED: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINS: tl.constexpr, FLOATS: tl.constexpr,
    PTX: tl.constexpr, PARTS: tl.constexpr, QUAD: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.minimum(column, outputs - 1).to(tl.int64)  # padding repeats the last one, and is not stored
    part, token = tl.program_id(2), tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    groups = (inputs + GROUP - 1) // GROUP
    steps = (groups + QUAD - 1) // QUAD
    share = (steps + PARTS - 1) // PARTS
    total = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for step in range(part * share, tl.minimum((part + 1) * share, steps)):
        total = add_step(
            total, states, token.to(tl.int64) * stride, token < num_tokens, levels, high, scales, zeros, mins, whole,
            column, step, inputs, level_stride, num_scales,
            GROUP, BITS, ZERO, PER, SHARED, HAS_ZEROS, HAS_MINS, FLOATS, PTX, QUAD,
        )  # fmt: skip
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(
        sums + (part * num_tokens + token[None, :].to(tl.int64)) * outputs + column[:, None],
        total.to(sums.dtype.element_ty),
        mask=(token < num_tokens)[None, :] & (column < outputs)[:, None],
    )


def options(side: int) -> dict[str, int]:
    """Return how the product is compiled for tiles of some tokens."""
    return {"num_warps": 8, "num_stages": 2} if side > TOKENS else {"num_warps": 4}


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
        sides = self._sides(states) if is_remote(states.device) else (TOKENS,)
        return self._sums_of(states, next((one for one in sides if one >= len(states)), sides[-1]))

    def _sides(self, states: torch.Tensor) -> tuple[int, ...]:
        """Return the SIDES that are used for such weights on a device; see product.sides_of."""
        key = (states.device, states.dtype, *self.constants.values())
        if key not in _EQUAL:
            numbers = torch.randn(SIDES[-1], self.in_features, generator=torch.Generator().manual_seed(0))
            some = numbers.to(states.device, states.dtype)
            few = self.rows(0, min(LONG, self.out_features))
            _EQUAL[key] = equal(lambda side: few._sums_of(some, side).parts, SIDES)
        return _EQUAL[key]

    def _sums_of(self, states: torch.Tensor, side: int) -> Sums:
        count, outputs = len(states), self.out_features
        parts = parts_of(outputs, self.in_features)
        sums, own = empty_sums(parts, states, outputs, self.bias)
        _product[(triton.cdiv(count, side), triton.cdiv(outputs, LONG), parts)](
            states, *self.tensors, sums.parts, sums.parts if own is None else own, count, outputs, states.stride(0), *self.sizes,
            TOKENS=side, OUTPUTS=LONG, PARTS=parts, HAS_BIAS=own is not None, **self.constants, **options(side),
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
        return own | has | {"QUAD": QUAD, "PTX": is_remote(self._levels.device) and torch.version.hip is None}

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
        words = levels.view(rows, -1, self._how.group)
        low = torch.stack([words >> (4 * i) & 15 for i in range(QUAD)], 2).view(rows, -1, self._how.group)
        if self._high is not None:
            quads = self._high.view(rows, -1, self._how.group)
            upper = torch.stack([quads >> (2 * i) & 3 for i in range(QUAD)], 2)
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
) -> tuple[npt.NDArray[np.int16 | np.int8], npt.NDArray[np.uint8] | None]:
    """Return levels as the kernel reads them: the last four bits of those of four groups in a word, two upper bits in a byte."""
    if bits == 8:
        return np.ascontiguousarray(levels).view(np.int8), None
    rows = len(levels)
    groups = np.pad(levels.reshape(rows, -1, group), ((0, 0), (0, -(levels.shape[1] // group) % QUAD), (0, 0)))
    quads = groups.reshape(rows, -1, QUAD, group)
    shifts = np.arange(QUAD, dtype=np.uint16)[:, None]
    words = np.bitwise_or.reduce((quads & 15).astype(np.uint16) << 4 * shifts, 2).reshape(rows, -1).view(np.int16)
    if bits == 4:
        return words, None
    return words, np.bitwise_or.reduce((quads >> 4) << 2 * shifts, 2).astype(np.uint8).reshape(rows, -1)
