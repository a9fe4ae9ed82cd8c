"""Levels of quantized weights as numbers, in the registers of a kernel that multiplies them.

A word has four levels of 4 bits of one position, of the four groups of a step: two words in a register become two numbers by a
shift and a combination of bits, without a conversion. Triton does not find these two instructions, so they are PTX where that is
known. Knows no product and no file; blocks.py arranges the words.
"""

from __future__ import annotations

import triton
import triton.language as tl

QUAD = 4
"""Groups of one step of the inner dimension."""
_OFFSETS = (0x4300, 0x6400)
"""Bits of 128 in bf16 and of 1,024 in float16, whose last bits are integers."""
_LOW = tl.constexpr(
    tuple(
        f"{{ .reg .b32 t; shr.u32 t, $1, {4 * i}; lop3.b32 $0, t, 0x000f000f, 0x{one << 16 | one:08x}, 0xEA; }}"
        for one in _OFFSETS
        for i in range(QUAD)
    )
)
"""PTX by dtype and group of four: two words -> two numbers, the offset plus a level. 0xEA is (a & b) | c."""
_BOTH = tl.constexpr(
    tuple(
        f"{{ .reg .b32 s, t, h; {'shl' if i < 2 else 'shr'}.b32 h, $4, {abs(4 - 2 * i)}; and.b32 h, h, 0x30303030; "
        + " ".join(
            f"prmt.b32 s, h, 0x{(one >> 8) * 0x01010101:08x}, 0x{pick}; "
            f"shr.u32 t, ${2 + out}, {4 * i}; lop3.b32 ${out}, t, 0x000f000f, s, 0xEA;"
            for out, pick in enumerate(("4140", "4342"))
        )
        + " }"
        for one in _OFFSETS
        for i in range(QUAD)
    )
)
"""The same of four words, and of four bytes with the upper bits of four levels each."""


@triton.jit
def _number_of(
    low, upper, index, BITS: tl.constexpr, ZERO: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """The levels of a group less the one that stands for 0, in bf16 or float16. low, upper: see words_of_step."""
    half: tl.constexpr = 1 if DTYPE.is_fp16() else 0
    if PTX and BITS == 4:
        code: tl.constexpr = _LOW[4 * half + index]
        bits = tl.inline_asm_elementwise(code, "=r,r", [low], dtype=tl.int16, is_pure=True, pack=2)
    elif PTX:
        both: tl.constexpr = _BOTH[4 * half + index]
        bits = tl.inline_asm_elementwise(both, "=r,=r,r,r,r", [low, upper], dtype=tl.int16, is_pure=True, pack=4)
    else:
        bits = _level_of(low, upper, index, BITS).to(tl.int16) | (0x6400 if half else 0x4300)
    return bits.to(DTYPE, bitcast=True) - ((1024.0 if half else 128.0) + ZERO)


@triton.jit
def _level_of(low, upper, index, BITS: tl.constexpr):
    """The levels of a group, int32. low, upper: see words_of_step."""
    level = (low >> (4 * index)).to(tl.int32) & 15
    if BITS == 6:
        level |= ((upper >> (2 * index)).to(tl.int32) & 3) << 4
    return level


@triton.jit
def words_of_step(levels, high, column, step, stride, GROUP: tl.constexpr, BITS: tl.constexpr):
    """The levels of four groups of some columns, [C, GROUP]: words of their last four bits, and bytes of two upper ones.

    Levels of 8 bits are read by groups.
    """
    low, upper = column, column
    if BITS < 8:
        at = column[:, None] * stride + (step * GROUP + tl.arange(0, GROUP))[None, :]
        low = tl.load(levels + at)
        upper = tl.load(high + at) if BITS == 6 else low
    return low, upper


@triton.jit
def _float_of(byte):
    """The float of 8 bits, [...] int8, divided by E4M3: its exponent and mantissa are those of a float16."""
    byte = byte.to(tl.int16)
    return (((byte & 128) << 8) | ((byte & 127) << 7)).to(tl.float16, bitcast=True)


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
    low, upper, levels, scales, zeros, mins, whole, column, group, index, inputs, level_stride, num_scales,
    GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, PER: tl.constexpr, SHARED: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINS: tl.constexpr, FLOATS: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The levels of a group of some columns [C, GROUP] in DTYPE, its scales and, if there are any, its mins, [C] float32 each.

    index: which of the four groups of a step, at compile time. low, upper: of words_of_step, unless levels have 8 bits.
    """
    groups = (inputs + GROUP - 1) // GROUP
    here = column * num_scales + tl.minimum(group, groups - 1) // PER
    if BITS == 8:
        inner = group * GROUP + tl.arange(0, GROUP)
        stored = tl.load(
            levels + column[:, None] * level_stride + inner[None, :], mask=(inner < inputs)[None, :], other=0
        )
        level = _float_of(stored) if FLOATS else stored.to(tl.int32) - ZERO
    elif FLOATS:
        level = _float4_of(_level_of(low, upper, index, BITS))
    elif HAS_ZEROS or DTYPE.is_fp32():
        level = _level_of(low, upper, index, BITS) - ZERO
    else:
        level = _number_of(low, upper, index, BITS, ZERO, DTYPE, PTX)
    if HAS_ZEROS:
        level -= tl.load(zeros + here).to(tl.int32)[:, None]
    stored = tl.load(scales + here)
    scale = _power_of(stored.to(tl.int32)) if FLOATS and BITS == 4 else stored.to(tl.float32)
    if SHARED > 0:  # by the groups of a step, which are read once
        shared = (column * (groups // SHARED) + tl.minimum(group - index, groups - 1) // SHARED) * 2
        scale *= tl.load(whole + shared).to(tl.float32)
    least = scale
    if HAS_MINS:
        least = tl.load(mins + here).to(tl.float32)
        if SHARED > 0:
            least *= tl.load(whole + shared + 1).to(tl.float32)
    return level.to(DTYPE), scale, least


@triton.jit
def add_step(
    total, states, begins, valid, levels, high, scales, zeros, mins, whole, column, step, inputs, level_stride, num_scales,
    GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, PER: tl.constexpr, SHARED: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINS: tl.constexpr, FLOATS: tl.constexpr, PTX: tl.constexpr, QUAD: tl.constexpr,
):  # fmt: skip
    """Add the products of the groups of a step to the totals of some columns and tokens, [C, T] float32.

    begins, valid: [T], where the inputs of each token begin, and whether there is one. The rest: see weights_of_group.
    """
    low, upper = words_of_step(levels, high, column, step, level_stride, GROUP, BITS)
    for index in tl.static_range(QUAD):
        group = step * QUAD + index
        at = group * GROUP + tl.arange(0, GROUP)
        x = tl.load(states + begins[None, :] + at[:, None], mask=valid[None, :] & (at < inputs)[:, None], other=0.0)
        level, scale, least = weights_of_group(
            low, upper, levels, scales, zeros, mins, whole, column, group, index, inputs, level_stride, num_scales,
            GROUP, BITS, ZERO, PER, SHARED, HAS_ZEROS, HAS_MINS, FLOATS, x.dtype, PTX,
        )  # fmt: skip
        total += tl.dot(level, x, input_precision="ieee") * scale[:, None]
        if HAS_MINS:  # the sums of the tokens, as the tensor cores lay them out
            ones = tl.full(level.shape, 1.0, x.dtype)
            total -= tl.dot(ones, x, input_precision="ieee") * least[:, None]
    return total
