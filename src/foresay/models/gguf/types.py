"""Representations of a GGUF file's tensors in memory: 4-bit blocks, 8-bit rows with one scale each, or unquantized numbers.

Owns the layout of llama.cpp's blocks. Types that are neither 4-bit nor unquantized become 8-bit rows, converted a few rows at a
time so that a tensor is never dequantized as a whole. Does not know the purpose of a tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from foresay.errors import ModelLoadError
from foresay.models.cpu.rounding import Groups, dequantized, quantize_int8
from foresay.models.gguf.header import Bytes, StoredTensor
from foresay.models.huggingface.linears import Table, of_blocks, of_groups, of_rows
from foresay.models.huggingface.products import Product

_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q4_K": 144}
"""Size of a block in bytes, for each 4-bit type."""
_SCALE_BYTES = {"Q4_0": 2, "Q4_1": 4, "Q4_K": 4}
"""Number of bytes at the start of a block that are float16 numbers; the remaining bytes are integers."""
_PIECE_NUMBERS = 1 << 21
"""Most weights that are dequantized at a time."""


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """4-bit weights in the file's blocks: one tensor, or the rows of several, concatenated."""

    stored: tuple[StoredTensor, ...]

    def reordered(self, order: torch.Tensor) -> BlockWeight:
        """Return the rows of a single tensor in another order."""
        [one] = self.stored
        return BlockWeight((dataclasses.replace(one, data=one.data[order.numpy()]),))

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights as [out, in] in `dtype`."""
        return torch.cat([dequantized(piece).to(dtype) for piece in self._pieces()])

    def is_finite(self) -> bool:
        """True if no weight is infinite or NaN."""
        scales = (_split_blocks(one)[..., : _SCALE_BYTES[one.kind]] for one in self.stored)
        return all(bool(np.isfinite(np.ascontiguousarray(part).view(np.float16)).all()) for part in scales)

    def requantized(self) -> Int8Weight:
        """Return the weights quantized again, to 8 bits."""
        return Int8Weight(*quantize_int8(self.dense(torch.float32), torch.float32))

    def product(self, dtype: torch.dtype, bias: torch.Tensor | None) -> Product:
        """Return the product with these weights for inputs of a dtype."""
        packed = of_blocks([(one.kind, one.data) for one in self.stored], bias)
        return of_groups(self._pieces(), dtype, bias) if packed is None else packed

    def _pieces(self) -> Iterator[Groups]:
        """Yield the levels, scales and offsets of a few rows at a time."""
        for one in self.stored:
            step = max(1, _PIECE_NUMBERS // one.shape[-1])
            for first in range(0, len(one.data), step):
                blocks = _split_blocks(one)[first : first + step]
                yield _from_q4_k(blocks) if one.kind == "Q4_K" else _from_q4(blocks, shifted=one.kind == "Q4_1")


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """8-bit weights: w = scale * level, with levels [out, in] int8 from -127 to 127 and one scale for each row, [out]."""

    levels: torch.Tensor
    scales: torch.Tensor

    def reordered(self, order: torch.Tensor) -> Int8Weight:
        """Return the rows in another order."""
        return Int8Weight(self.levels[order], self.scales[order])

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights as [out, in] in `dtype`."""
        return (self.levels * self.scales[:, None].float()).to(dtype)

    def is_finite(self) -> bool:
        """True if no weight is infinite or NaN: the scale of a row comes from its largest weight."""
        return _all_finite(self.scales)

    def product(self, dtype: torch.dtype, bias: torch.Tensor | None) -> Table:
        """Return the product with these weights for inputs of a dtype."""
        return of_rows(self.levels, self.scales, dtype, bias)


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Unquantized weights, in the file's shape and dtype."""

    values: torch.Tensor

    def reordered(self, order: torch.Tensor) -> DenseWeight:
        """Return the rows in another order."""
        return DenseWeight(self.values[order])

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights in another dtype."""
        return self.values.to(dtype)

    def is_finite(self) -> bool:
        """True if no weight is infinite or NaN."""
        return _all_finite(self.values)


Weight = BlockWeight | Int8Weight | DenseWeight


def read_weight(tensor: StoredTensor) -> Weight:
    """Return a tensor's weights in the representation of its type."""
    data, kind = tensor.data, tensor.kind
    if kind in _BLOCK_BYTES:
        return BlockWeight((tensor,))
    plain = _unquantized(data, kind)
    if plain is not None:
        return DenseWeight(plain.reshape(tensor.shape))
    return _quantized_int8(data, kind, tensor.shape[-1])


def concatenated(weights: list[Weight | None]) -> BlockWeight | Int8Weight | None:
    """Concatenate the rows of weights: as blocks if all are blocks, else in 8 bits.

    Return None if one is missing or not quantized. Raises ModelLoadError for rows of different lengths.
    """
    widths = [
        w.stored[0].shape[-1] if isinstance(w, BlockWeight) else w.levels.shape[-1]
        for w in weights
        if isinstance(w, BlockWeight | Int8Weight)
    ]
    if len(set(widths)) > 1:
        found = ", ".join(map(str, widths))
        raise ModelLoadError(
            f"tensors of the GGUF file that read the same input have rows of {found} weights; they must be equal"
        )
    blocks = [w for w in weights if isinstance(w, BlockWeight)]
    if len(blocks) == len(weights):
        return BlockWeight(tuple(one for w in blocks for one in w.stored))
    quantized = [
        w if isinstance(w, Int8Weight) else w.requantized() for w in weights if isinstance(w, Int8Weight | BlockWeight)
    ]
    if len(quantized) == len(weights):
        return Int8Weight(*(torch.cat([getattr(w, name) for w in quantized]) for name in ("levels", "scales")))
    return None


def _all_finite(numbers: torch.Tensor) -> bool:
    """True if no number is infinite or NaN. Checks the minimum and maximum, without a copy."""
    return bool(torch.isfinite(torch.stack(torch.aminmax(numbers))).all())


def _split_blocks(tensor: StoredTensor) -> Bytes:
    """Return a tensor's blocks, [out, blocks of a row, bytes of a block]."""
    return tensor.data.reshape(len(tensor.data), -1, _BLOCK_BYTES[tensor.kind])


def _float16_values(two: Bytes) -> torch.Tensor:
    """Decode pairs of bytes as float16 numbers: [..., 2] -> [...] float32."""
    return torch.from_numpy(np.ascontiguousarray(two).view(np.float16)[..., 0].astype(np.float32))


def _copied(data: Bytes) -> torch.Tensor:
    """Return a copy, since the file is mapped read-only."""
    return torch.from_numpy(np.array(data))


def _unquantized(data: Bytes, kind: str) -> torch.Tensor | None:
    """Return the numbers of an unquantized type, or None for a quantized one."""
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(kind)
    return None if dtype is None else _copied(data).view(dtype)


def _from_q4(blocks: Bytes, *, shifted: bool) -> Groups:
    """Decode blocks of 32 weights, [out, n, bytes]: a scale, the smallest weight (Q4_1 only), 16 bytes of two levels each."""
    scales = _float16_values(blocks[..., :2])
    least = _float16_values(blocks[..., 2:4]) if shifted else -8 * scales
    return _split(_copied(blocks[..., -16:])), scales, least


def _from_q4_k(blocks: Bytes) -> Groups:
    """Decode blocks of 256 weights, [out, n, 144]: 8 groups of 32; scales and offsets are 6-bit multiples of two numbers."""
    scale, least = _float16_values(blocks[..., 0:2]), _float16_values(blocks[..., 2:4])
    first, second, third = torch.split(_copied(blocks[..., 4:16]), 4, -1)
    multiples = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], -1)
    below = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], -1)
    scales = (scale[..., None] * multiples).flatten(1)
    below_zero = -(least[..., None] * below).flatten(1)
    return _split(_copied(blocks[..., 16:]).view(*blocks.shape[:2], 4, 32)), scales, below_zero


def _split(nibbles: torch.Tensor) -> torch.Tensor:
    """Unpack levels [out, ..., n] -> [out, in]: the low 4 bits of each group of n bytes, then the high 4 bits."""
    out = torch.empty(*nibbles.shape[:-1], 2, nibbles.shape[-1], dtype=torch.uint8)
    torch.bitwise_and(nibbles, 15, out=out[..., 0, :])
    torch.bitwise_right_shift(nibbles, 4, out=out[..., 1, :])
    return out.flatten(1)


def _quantized_int8(data: Bytes, kind: str, columns: int) -> Int8Weight:
    """Convert rows of any quantized type to 8 bits."""
    levels, scales = torch.empty(len(data), columns, dtype=torch.int8), torch.empty(len(data))
    step = max(1, _PIECE_NUMBERS // columns)
    for first in range(0, len(data), step):
        some = slice(first, first + step)
        levels[some], scales[some] = quantize_int8(_dequantized(data[some], kind), torch.float32)
    return Int8Weight(levels, scales)


def _dequantized(data: Bytes, kind: str) -> torch.Tensor:
    """Dequantize rows of any quantized type, [rows, in] float32."""
    if kind == "Q8_0":
        blocks = data.reshape(len(data), -1, 34)
        return (_copied(blocks[..., 2:]).view(torch.int8) * _float16_values(blocks[..., :2])[..., None]).flatten(1)
    if kind == "Q6_K":
        return _from_q6_k(data.reshape(len(data), -1, 210))
    import gguf

    return torch.from_numpy(np.array(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]), dtype=np.float32))


def _from_q6_k(blocks: Bytes) -> torch.Tensor:
    """Decode blocks of 256 weights, [out, n, 210] -> [out, in] float32.

    A block stores the low 4 bits of all weights, the high 2 bits of all, an 8-bit scale for each 16, and a scale of these scales.
    """
    shape = blocks.shape[:2]
    low, high = _copied(blocks[..., :128]).view(*shape, 2, 2, 32), _copied(blocks[..., 128:192]).view(*shape, 2, 1, 32)
    low = torch.cat([low & 15, low >> 4], 3)
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], 3)
    levels = ((low | (high << 4)).to(torch.int8) - 32).view(*shape, 16, 16)
    scales = _copied(blocks[..., 192:208]).view(torch.int8) * _float16_values(blocks[..., 208:])[..., None]
    return (levels * scales[..., None]).flatten(1)
