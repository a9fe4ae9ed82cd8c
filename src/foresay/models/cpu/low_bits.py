"""GGUF's types of 2 to 4 bits, taken apart to levels and multiples of scales, which blocks.h packs.

The package of GGUF files dequantizes blocks whose scale is set to 1. Divided by the multiples of their groups, the weights are
whole numbers: levels, or entries of a table. That they are is checked. The file's own float16 scales stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
UNPACKED = 292
"""Bytes of 256 weights that are taken apart: two float16 scales, 16 multiples of each, 256 levels."""
_SUPER = 256
_IQ2 = (-43, -25, -8, 8, 25, 43)
_IQ3 = (-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S = tuple(range(-15, 16, 2))
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class _Type:
    scale: int
    """Byte of a block from which on it has its float16 scale; that of offsets, if it has one, follows."""
    multiples: Callable[[Bytes], npt.NDArray[Any]]
    """Blocks [N, bytes] -> multiples of the scale, [N, groups]."""
    values: tuple[int, ...]
    """Levels of the codes 0, 1, 2 and so on."""
    factor: float = 1.0
    """The share of the scale that a multiple of 1 stands for."""
    offsets: Callable[[Bytes], npt.NDArray[Any]] | None = None
    """The same as `multiples` for the offset, which is subtracted."""


def _halves_of(data: Bytes) -> Bytes:
    """Return the low and the high half of each byte, [N, 2 * bytes]."""
    return np.stack([data & 15, data >> 4], -1).reshape(len(data), -1)


def _odd(first: int) -> Callable[[Bytes], npt.NDArray[Any]]:
    """Return multiples 2 n + 1 of the halves of the bytes of a block from `first` on."""
    return lambda blocks: 2 * _halves_of(blocks[:, first:]) + 1


def _in_words(first: int, step: int) -> Callable[[Bytes], npt.NDArray[Any]]:
    """Return multiples 2 n + 1 of the upper 4 bits of each `step`-th byte of a block from `first` on."""
    return lambda blocks: 2 * (blocks[:, first::step] >> 4) + 1


def _of_q3_k(blocks: Bytes) -> npt.NDArray[Any]:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    lower = np.concatenate([low & 15, low >> 4], 1)
    upper = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], 1)
    multiples: npt.NDArray[np.int8] = (lower | upper << 4).astype(np.int8) - np.int8(32)
    return multiples


def _of_iq4_xs(blocks: Bytes) -> npt.NDArray[Any]:
    upper = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    return (_halves_of(blocks[:, 4:8]) | upper.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)


TYPES = {
    "Q2_K": _Type(80, lambda b: b[:, :16] & 15, (0, 1, 2, 3), offsets=lambda b: b[:, :16] >> 4),
    "Q3_K": _Type(108, _of_q3_k, tuple(range(-4, 4))),
    "IQ2_XXS": _Type(0, _in_words(9, 8), _IQ2, 1 / 8),
    "IQ2_XS": _Type(0, _odd(66), _IQ2, 1 / 8),
    "IQ2_S": _Type(0, _odd(74), _IQ2, 1 / 8),
    "IQ3_XXS": _Type(0, _in_words(69, 4), _IQ3, 1 / 4),
    "IQ3_S": _Type(0, _odd(106), _IQ3_S),
    "IQ4_XS": _Type(0, _of_iq4_xs, _IQ4),
}
"""Types that are taken apart before they are packed."""


def unpacked(kind: str, data: Bytes) -> Bytes:
    """Take rows of blocks of a type in TYPES apart. data: [rows, bytes]; returns [rows, in / 256 * UNPACKED].

    Raises ValueError if the package of GGUF files dequantizes them to other numbers than multiples of the levels.
    """
    import gguf

    own, number = TYPES[kind], gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[number][1]
    blocks = np.ascontiguousarray(data).reshape(-1, size)
    out = np.zeros((len(blocks), UNPACKED), np.uint8)
    both = 2 if own.offsets is None else 4
    out[:, :both] = blocks[:, own.scale : own.scale + both]
    multiples = own.multiples(blocks).astype(np.int8)
    out[:, 4:20] = _for_16(multiples).view(np.uint8)
    if own.offsets is not None:
        out[:, 20:36] = _for_16(own.offsets(blocks))
    ones = blocks.copy()
    ones[:, own.scale : own.scale + both] = np.array([1, 0], np.float16).view(np.uint8)[:both]
    weights = np.asarray(gguf.dequantize(ones, number)).reshape(len(blocks), multiples.shape[1], -1)
    wide = (multiples * np.float32(own.factor))[..., None]
    levels = (weights / np.where(wide == 0, np.float32(1), wide)).astype(np.int8)
    codes = np.zeros(256, np.uint8)
    codes[np.array(own.values, np.int8).view(np.uint8)] = np.arange(len(own.values))
    found = codes[levels.view(np.uint8)]
    if not np.array_equal(np.array(own.values, np.float32)[found] * wide, weights):
        raise ValueError(f"blocks of {kind} are dequantized to other numbers than multiples of their levels")
    out[:, 36:] = found.reshape(len(blocks), _SUPER)
    return out.reshape(len(data), -1)


def _for_16(multiples: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return multiples for groups of 16 weights, [N, 16]."""
    return np.repeat(multiples, 16 // multiples.shape[1], 1)
