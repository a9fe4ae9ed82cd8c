"""The types of a GGUF file's tensors, and what each is kept as: 4-bit blocks, bytes with one scale a row, or numbers.

Owns how llama.cpp lays out its blocks. Types that are neither 4-bit nor plain numbers are rounded to 8 bits a row, some rows at a
time, so that nobody holds a tensor's numbers whole. Knows nothing of what a tensor is for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from foresay.errors import ModelLoadError
from foresay.models.cpu.rounding import Groups, quantize_int8, restored
from foresay.models.gguf.header import Bytes, StoredTensor
from foresay.models.huggingface.linears import Table, of_blocks, of_groups, of_rows
from foresay.models.huggingface.products import Product

_FOUR_BITS = {"Q4_0": 18, "Q4_1": 20, "Q4_K": 144}
"""Bytes of a block."""
_SCALES = {"Q4_0": 2, "Q4_1": 4, "Q4_K": 4}
"""Bytes of a block that begin it as float16 numbers; the others are whole numbers."""
_AT_ONCE = 1 << 21
"""Numbers that are unpacked at a time."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """4-bit weights as the file holds them, of one tensor or of several, one below the other."""

    stored: tuple[StoredTensor, ...]

    def rows(self, order: torch.Tensor) -> Blocks:
        """The rows of one tensor in another order."""
        [one] = self.stored
        return Blocks((dataclasses.replace(one, data=one.data[order.numpy()]),))

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """As numbers, [out, in]."""
        return torch.cat([restored(piece).to(dtype) for piece in self._pieces()])

    def is_finite(self) -> bool:
        """Whether no number is infinite or NaN."""
        scales = (_split_blocks(one)[..., : _SCALES[one.kind]] for one in self.stored)
        return all(bool(np.isfinite(np.ascontiguousarray(part).view(np.float16)).all()) for part in scales)

    def in_eights(self) -> Eights:
        """Rounded once more, to 8 bits a row."""
        return Eights(*quantize_int8(self.dense(torch.float32), torch.float32))

    def product(self, dtype: torch.dtype, bias: torch.Tensor | None) -> Product:
        """The product of these weights for inputs of a dtype."""
        packed = of_blocks([(one.kind, one.data) for one in self.stored], bias)
        return of_groups(self._pieces(), dtype, bias) if packed is None else packed

    def _pieces(self) -> Iterator[Groups]:
        """Some rows at a time."""
        for one in self.stored:
            step = max(1, _AT_ONCE // one.shape[-1])
            for first in range(0, len(one.data), step):
                blocks = _split_blocks(one)[first : first + step]
                yield _from_q4_k(blocks) if one.kind == "Q4_K" else _from_q4(blocks, shifted=one.kind == "Q4_1")


@dataclass(frozen=True, slots=True)
class Eights:
    """Weights in 8 bits: levels [out, in] of -127 to 127, w = scale * level with one scale for each row."""

    levels: torch.Tensor
    scales: torch.Tensor

    def rows(self, order: torch.Tensor) -> Eights:
        """The rows in another order."""
        return Eights(self.levels[order], self.scales[order])

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """As numbers, [out, in]."""
        return (self.levels * self.scales[:, None].float()).to(dtype)

    def is_finite(self) -> bool:
        """Whether no number is infinite or NaN: the scale of a row is that of its largest."""
        return _all_finite(self.scales)

    def product(self, dtype: torch.dtype, bias: torch.Tensor | None) -> Table:
        """The product of these weights for inputs of a dtype."""
        return of_rows(self.levels, self.scales, dtype, bias)


@dataclass(frozen=True, slots=True)
class Numbers:
    """Weights that the file holds as numbers, in the file's shape and dtype."""

    values: torch.Tensor

    def rows(self, order: torch.Tensor) -> Numbers:
        """The rows in another order."""
        return Numbers(self.values[order])

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """As numbers of another dtype."""
        return self.values.to(dtype)

    def is_finite(self) -> bool:
        """Whether no number is infinite or NaN."""
        return _all_finite(self.values)


Weight = Blocks | Eights | Numbers


def unpacked(tensor: StoredTensor) -> Weight:
    """A tensor's weights."""
    data, kind = tensor.data, tensor.kind
    if kind in _FOUR_BITS:
        return Blocks((tensor,))
    plain = _plain(data, kind)
    if plain is not None:
        return Numbers(plain.reshape(tensor.shape))
    return _eights(data, kind, tensor.shape[-1])


def joined(weights: list[Weight | None]) -> Blocks | Eights | None:
    """Weights one below the other: as blocks where all are, else in 8 bits; None where one is not rounded.

    Raises ModelLoadError for rows of different lengths.
    """
    widths = [
        w.stored[0].shape[-1] if isinstance(w, Blocks) else w.levels.shape[-1]
        for w in weights
        if isinstance(w, Blocks | Eights)
    ]
    if len(set(widths)) > 1:
        found = ", ".join(map(str, widths))
        raise ModelLoadError(
            f"tensors of the GGUF file that read one input have rows of {found} weights; they must be equal"
        )
    blocks = [w for w in weights if isinstance(w, Blocks)]
    if len(blocks) == len(weights):
        return Blocks(tuple(one for w in blocks for one in w.stored))
    eights = [w if isinstance(w, Eights) else w.in_eights() for w in weights if isinstance(w, Eights | Blocks)]
    if len(eights) == len(weights):
        return Eights(*(torch.cat([getattr(w, name) for w in eights]) for name in ("levels", "scales")))
    return None


def _all_finite(numbers: torch.Tensor) -> bool:
    """Whether none is infinite or NaN, by their extremes: one run over them, and no copy."""
    return bool(torch.isfinite(torch.stack(torch.aminmax(numbers))).all())


def _split_blocks(tensor: StoredTensor) -> Bytes:
    """[out, blocks of a row, bytes of a block]."""
    return tensor.data.reshape(len(tensor.data), -1, _FOUR_BITS[tensor.kind])


def _halves(two: Bytes) -> torch.Tensor:
    """Pairs of bytes as float16 numbers: [..., 2] -> [...] float32."""
    return torch.from_numpy(np.ascontiguousarray(two).view(np.float16)[..., 0].astype(np.float32))


def _own(data: Bytes) -> torch.Tensor:
    """A copy: the file is mapped for reading alone."""
    return torch.from_numpy(np.array(data))


def _plain(data: Bytes, kind: str) -> torch.Tensor | None:
    """The numbers of a type that is not rounded; None for one that is."""
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(kind)
    return None if dtype is None else _own(data).view(dtype)


def _from_q4(blocks: Bytes, *, shifted: bool) -> Groups:
    """Blocks of 32: a scale, with Q4_1 the least weight, and 16 bytes of two levels each. [out, n, bytes]."""
    scales = _halves(blocks[..., :2])
    least = _halves(blocks[..., 2:4]) if shifted else -8 * scales
    return _split(_own(blocks[..., -16:])), scales, least


def _from_q4_k(blocks: Bytes) -> Groups:
    """Blocks of 256: eight groups of 32, whose scales and offsets are 6-bit multiples of two numbers. [out, n, 144]."""
    scale, least = _halves(blocks[..., 0:2]), _halves(blocks[..., 2:4])
    first, second, third = torch.split(_own(blocks[..., 4:16]), 4, -1)
    multiples = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], -1)
    below = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], -1)
    scales = (scale[..., None] * multiples).flatten(1)
    below_zero = -(least[..., None] * below).flatten(1)
    return _split(_own(blocks[..., 16:]).view(*blocks.shape[:2], 4, 32)), scales, below_zero


def _split(nibbles: torch.Tensor) -> torch.Tensor:
    """Levels: of [out, ..., n] bytes first the lower halves, then the upper ones of each n, [out, in]."""
    out = torch.empty(*nibbles.shape[:-1], 2, nibbles.shape[-1], dtype=torch.uint8)
    torch.bitwise_and(nibbles, 15, out=out[..., 0, :])
    torch.bitwise_right_shift(nibbles, 4, out=out[..., 1, :])
    return out.flatten(1)


def _eights(data: Bytes, kind: str, columns: int) -> Eights:
    """Rows of any rounded type in 8 bits."""
    levels, scales = torch.empty(len(data), columns, dtype=torch.int8), torch.empty(len(data))
    step = max(1, _AT_ONCE // columns)
    for first in range(0, len(data), step):
        some = slice(first, first + step)
        levels[some], scales[some] = quantize_int8(_numbers(data[some], kind), torch.float32)
    return Eights(levels, scales)


def _numbers(data: Bytes, kind: str) -> torch.Tensor:
    """The numbers that rows of a rounded type stand for, [rows, in] float32."""
    if kind == "Q8_0":
        blocks = data.reshape(len(data), -1, 34)
        return (_own(blocks[..., 2:]).view(torch.int8) * _halves(blocks[..., :2])[..., None]).flatten(1)
    if kind == "Q6_K":
        return _from_q6_k(data.reshape(len(data), -1, 210))
    import gguf

    return torch.from_numpy(np.array(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]), dtype=np.float32))


def _from_q6_k(blocks: Bytes) -> torch.Tensor:
    """Blocks of 256: low 4 bits of all, high 2 bits of all, a scale of 8 bits for each 16, and theirs. [out, n, 210]."""
    shape = blocks.shape[:2]
    low, high = _own(blocks[..., :128]).view(*shape, 2, 2, 32), _own(blocks[..., 128:192]).view(*shape, 2, 1, 32)
    low = torch.cat([low & 15, low >> 4], 3)
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], 3)
    levels = ((low | (high << 4)).to(torch.int8) - 32).view(*shape, 16, 16)
    scales = _own(blocks[..., 192:208]).view(torch.int8) * _halves(blocks[..., 208:])[..., None]
    return (levels * scales[..., None]).flatten(1)
