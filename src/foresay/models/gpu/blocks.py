"""The skinny product over quantized weights: levels of 8, 6 or 4 bits in groups, which are not expanded in memory.

A program multiplies the tokens by the levels of one group at a time, integers that are exact in the formats of tensor cores, and
adds the sums times the group's scale: each weight keeps the value that the file states. One tile and one order of sums serve 1 to
64 tokens, and more in groups of 64, as in product.py. Only very long passes are multiplied by dequantized weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from foresay.decoding.devices import launching_on
from foresay.models.gpu.product import MOST, OUTPUTS, TOKENS, parts_of, product, reduced

KINDS = {"Q8_0": (8, 32, 0, 0), "Q4_0": (4, 32, 8, 0), "Q4_K": (4, 32, 0, 8), "Q6_K": (6, 16, 32, 16)}
"""Types of GGUF files: bits of a level, weights of a group, the level that stands for 0, and the groups that share a scale of
their scales, 0 if they have none."""
_QUAD = 4
"""Groups of one step of the inner dimension."""


@triton.jit
def _of_group(
    levels, high, column, group, index, stride, inputs, GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr
):
    """The levels of a group, [GROUP, OUTPUTS], less the one that stands for 0. `index`: which of four groups, at compile time."""
    inner = tl.arange(0, GROUP)
    inside = (group * GROUP + inner < inputs)[:, None]
    if BITS == 8:
        return tl.load(levels + column[None, :] * stride + (group * GROUP + inner)[:, None], mask=inside, other=0).to(
            tl.int32
        )
    pair = tl.load(levels + column[None, :] * stride + (group // 2 * GROUP + inner)[:, None], mask=inside, other=0)
    level = ((pair >> (4 * (index % 2))) & 15).to(tl.int32)
    if BITS == 6:
        quad = tl.load(
            high + column[None, :] * (stride // 2) + (group // 4 * GROUP + inner)[:, None], mask=inside, other=0
        )
        level += ((quad >> (2 * index)) & 3).to(tl.int32) * 16
    return level - ZERO


@triton.jit
def _product(
    states, levels, high, scales, mins, whole, sums, num_tokens, outputs, inputs, stride, level_stride,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    SHARED: tl.constexpr, HAS_MINS: tl.constexpr, PARTS: tl.constexpr, QUAD: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.minimum(column, outputs - 1).to(tl.int64)  # padding repeats the last one, and is not stored
    part, token = tl.program_id(2), tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    groups = inputs // GROUP
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
            level = _of_group(levels, high, column, group, index, level_stride, inputs, GROUP, BITS, ZERO)
            here = column * groups + tl.minimum(group, groups - 1)
            scale = tl.load(scales + here).to(tl.float32)
            if SHARED > 0:
                shared = (column * (groups // SHARED) + tl.minimum(group, groups - 1) // SHARED) * 2
                scale *= tl.load(whole + shared).to(tl.float32)
            total += tl.dot(x, level.to(x.dtype), input_precision="ieee") * scale[None, :]
            if HAS_MINS:
                least = tl.load(mins + here).to(tl.float32) * tl.load(whole + shared + 1).to(tl.float32)
                total -= tl.sum(x.to(tl.float32), 1)[:, None] * least[None, :]
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    tl.store(
        sums + (part * num_tokens + token[:, None].to(tl.int64)) * outputs + column[None, :],
        total,
        mask=(token < num_tokens)[:, None] & (column < outputs)[None, :],
    )


class BlockProduct:
    """A frozen product over the blocks of a GGUF file on a GPU; see cpu.product.Product."""

    def __init__(
        self,
        kind: str,
        data: npt.NDArray[np.uint8],
        dtype: torch.dtype,
        device: torch.device,
        bias: torch.Tensor | None,
    ) -> None:
        """data: [out, bytes], the rows' blocks of a type in KINDS. dtype: of inputs, outputs and the bias."""
        bits, group, *_ = KINDS[kind]
        levels, scales, mins, whole = _READ[kind](np.ascontiguousarray(data))
        self.out_features, self.in_features = levels.shape
        packed, high = _packed(levels, bits, group)
        self._levels, self._scales = (torch.from_numpy(one).to(device) for one in (packed, scales))
        rest = [None if one is None else torch.from_numpy(one).to(device) for one in (high, mins, whole)]
        self._high, self._mins, self._whole = rest
        self._kind, self.dtype = kind, dtype
        self.bias = None if bias is None else bias.to(device, dtype)
        self.nbytes = sum(one.nbytes for one in (self._levels, self._scales, *rest) if one is not None)
        self.bits = 8.0 * self.nbytes / levels.size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in] -> [..., out]."""
        flat = x.reshape(-1, self.in_features)
        with launching_on(x.device):
            out = self._skinny(flat.contiguous()) if len(flat) <= MOST else F.linear(flat, self.dense(), self.bias)
        return out.view(*x.shape[:-1], self.out_features)

    def _skinny(self, states: torch.Tensor) -> torch.Tensor:
        bits, group, zero, shared = KINDS[self._kind]
        count, (outputs, inputs) = len(states), (self.out_features, self.in_features)
        parts = parts_of(outputs, inputs)
        sums = torch.empty(parts, count, outputs, dtype=torch.float32, device=states.device)
        none = self._levels
        _product[(triton.cdiv(count, TOKENS), triton.cdiv(outputs, OUTPUTS), parts)](
            states, self._levels, none if self._high is None else self._high, self._scales,
            none if self._mins is None else self._mins, none if self._whole is None else self._whole,
            sums, count, outputs, inputs, states.stride(0), self._levels.shape[1],
            TOKENS=TOKENS, OUTPUTS=OUTPUTS, GROUP=group, BITS=bits, ZERO=zero, SHARED=shared,
            HAS_MINS=self._mins is not None, PARTS=parts, QUAD=_QUAD,
        )  # fmt: skip
        return reduced(sums, self.bias, states.dtype)

    def dense(self) -> torch.Tensor:
        """Return the weights in plain layout, [out, in]."""
        bits, group, zero, shared = KINDS[self._kind]
        levels = _unpacked(self._levels, self._high, bits, group).view(self.out_features, -1, group)
        levels = levels[:, : self.in_features // group] - zero
        scales, mins = self._scales.float(), None if self._mins is None else self._mins.float()
        if self._whole is not None:
            whole = self._whole.float().repeat_interleave(shared, 1)
            scales = scales * whole[..., 0]
            mins = None if mins is None else mins * whole[..., 1]
        out = levels * scales[..., None]
        out = out if mins is None else out - mins[..., None]
        return out.view(self.out_features, self.in_features).to(self.dtype)


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
Numbers = npt.NDArray[np.float16 | np.uint8 | np.int8]
Read = tuple[npt.NDArray[np.uint8], Numbers, Numbers | None, Numbers | None]
"""Levels [out, in]; scales and mins [out, groups]; scales of these, [out, groups / shared, 2] float16."""


def _halves(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(data).view(np.float16)[..., 0]


def _read_q8_0(data: npt.NDArray[np.uint8]) -> Read:
    blocks = data.reshape(len(data), -1, 34)
    return blocks[..., 2:].reshape(len(data), -1), _halves(blocks[..., :2]), None, None


def _read_q4_0(data: npt.NDArray[np.uint8]) -> Read:
    blocks = data.reshape(len(data), -1, 18)
    pairs = blocks[..., 2:]
    return np.concatenate([pairs & 15, pairs >> 4], -1).reshape(len(data), -1), _halves(blocks[..., :2]), None, None


def _read_q4_k(data: npt.NDArray[np.uint8]) -> Read:
    blocks = data.reshape(len(data), -1, 144)
    q, pairs = blocks[..., 4:16], blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    low, high = q[..., :4], q[..., 4:8]
    rest = q[..., 8:]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], -1)
    mins = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], -1)
    levels = np.stack([pairs & 15, pairs >> 4], -2)
    whole = np.stack([_halves(blocks[..., :2]), _halves(blocks[..., 2:4])], -1)
    return levels.reshape(len(data), -1), scales.reshape(len(data), -1), mins.reshape(len(data), -1), whole


def _read_q6_k(data: npt.NDArray[np.uint8]) -> Read:
    blocks = data.reshape(len(data), -1, 210)
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 2, 32)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32)
    parts = [
        (low[..., i % 2, :] >> (4 * (i // 2)) & 15) | ((high >> (2 * i) & 3) << 4) for i in range(4)
    ]  # weights 32 i to 32 i + 31 of each half
    levels = np.stack(parts, -2)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    whole = np.stack([_halves(blocks[..., 208:])] * 2, -1)
    return levels.reshape(len(data), -1), scales.reshape(len(data), -1), None, whole


_READ = {"Q8_0": _read_q8_0, "Q4_0": _read_q4_0, "Q4_K": _read_q4_k, "Q6_K": _read_q6_k}


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


def _unpacked(levels: torch.Tensor, high: torch.Tensor | None, bits: int, group: int) -> torch.Tensor:
    """Return packed levels as float32, [out, in or more]."""
    if bits == 8:
        return levels.float()
    rows = len(levels)
    pairs = levels.view(rows, -1, group)
    low = torch.stack([pairs & 15, pairs >> 4], 2).view(rows, -1, group)
    if high is not None:
        quads = high.view(rows, -1, group)
        low = low + torch.stack([quads >> (2 * i) & 3 for i in range(_QUAD)], 2).view(rows, -1, group) * 16
    return low.float().view(rows, -1)
