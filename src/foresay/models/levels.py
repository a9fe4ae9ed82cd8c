"""Quantized weights as plain arrays: levels, scales and what else stands for a weight, and GGUF's blocks taken apart.

Knows no kernel; blocks.py arranges the arrays for the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float16 | np.float32 | np.uint8 | np.int8]
KINDS = {"Q8_0": (8, 32, 0, 0), "Q4_0": (4, 32, 8, 0), "Q4_1": (4, 32, 0, 0), "Q5_0": (6, 32, 16, 0)}
KINDS |= {
    "MXFP4": (4, 32, 0, 0),
    "Q5_1": (6, 32, 0, 0),
    "Q4_K": (4, 32, 0, 8),
    "Q5_K": (6, 32, 0, 8),
    "Q6_K": (6, 16, 32, 16),
}
"""Types of GGUF files: bits of a level, weights of a group, the level that stands for 0, and the groups that share a scale of
their scales, 0 if they have none."""
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each float of 4 bits (E2M1)."""
E4M3 = 256.0
"""Factor of 8-bit floats with 4 bits of exponent over float16 with the same bits of exponent and mantissa."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Weights (level - zero) * scale - min of a matrix [out, in], in groups of consecutive inputs."""

    bits: int
    """8, 6 or 4."""
    group: int
    """Weights of a group, 16 or 32."""
    levels: npt.NDArray[np.uint8]
    """[out, in]. The bytes of int8 for 8 bits, or of floats with 4 bits of exponent and 3 of mantissa."""
    scales: Numbers
    """[out, S], of `per` consecutive groups each. Of floats of 4 bits exponents, uint8: 2^(exponent - 128) is half the scale."""
    per: int = 1
    zero: int = 0
    """The level that stands for 0."""
    zeros: npt.NDArray[np.int8] | None = None
    """[out, S], in place of one for all."""
    mins: Numbers | None = None
    """[out, S]."""
    whole: Numbers | None = None
    """[out, groups / shared, 2], factors of scales and mins."""
    shared: int = 0
    """Groups that share such factors; 0 without any."""
    is_float: bool = False
    """True for levels that are floats: of 8 bits with 4 of exponent, or of 4 bits with 2, whose doubled values are multiplied."""

    @staticmethod
    def of_file(kind: str, data: npt.NDArray[np.uint8]) -> Levels:
        """Take the blocks of a type in KINDS apart. data: [out, bytes]."""
        bits, group, zero, shared = KINDS[kind]
        levels, scales, mins, whole = _READ[kind](np.ascontiguousarray(data))
        return Levels(
            bits=bits,
            group=group,
            levels=levels,
            scales=scales,
            zero=zero,
            mins=mins,
            whole=whole,
            shared=shared,
            is_float=kind == "MXFP4",
        )

    @staticmethod
    def of_experts(parts: Sequence[Levels], count: int) -> Levels:
        """Return matrices whose rows are those of one expert after another as one, in which each expert has its rows of all.

        parts: of one type, [count * out, in] each.
        """

        def joined(name: str) -> Any:
            arrays = [getattr(one, name) for one in parts]
            if arrays[0] is None:
                return None
            apart = [one.reshape(count, -1, *one.shape[1:]) for one in arrays]
            return np.concatenate(apart, 1).reshape(-1, *arrays[0].shape[1:])

        return replace(parts[0], **{name: joined(name) for name in ("levels", "scales", "zeros", "mins", "whole")})

    def cut(self, depth: int) -> Levels:
        """Return these with the first `depth` inputs of rows that were padded to whole groups."""
        return self if depth == self.levels.shape[1] else replace(self, levels=self.levels[:, :depth])


Read = tuple[npt.NDArray[np.uint8], Numbers, Numbers | None, Numbers | None]
"""Levels, scales, mins, and scales of these."""


def _halves(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(data).view(np.float16)[..., 0]


def _read_q8_0(data: npt.NDArray[np.uint8]) -> Read:
    blocks = data.reshape(len(data), -1, 34)
    return blocks[..., 2:].reshape(len(data), -1), _halves(blocks[..., :2]), None, None


def _read_q4_0(data: npt.NDArray[np.uint8]) -> Read:
    blocks = data.reshape(len(data), -1, 18)
    pairs = blocks[..., 2:]
    return np.concatenate([pairs & 15, pairs >> 4], -1).reshape(len(data), -1), _halves(blocks[..., :2]), None, None


def _read_q4_1(data: npt.NDArray[np.uint8]) -> Read:
    blocks = data.reshape(len(data), -1, 20)
    pairs = blocks[..., 4:]
    levels = np.concatenate([pairs & 15, pairs >> 4], -1).reshape(len(data), -1)
    return levels, _halves(blocks[..., :2]), -_halves(blocks[..., 2:4]), None


def _read_mxfp4(data: npt.NDArray[np.uint8]) -> Read:
    blocks = data.reshape(len(data), -1, 17)
    pairs = blocks[..., 1:]
    levels = np.concatenate([pairs & 15, pairs >> 4], -1).reshape(len(data), -1)
    return levels, np.ascontiguousarray(blocks[..., 0]), None, None


def _read_q5(data: npt.NDArray[np.uint8], at: int) -> Read:
    """at: bytes before the upper bits."""
    blocks = data.reshape(len(data), -1, at + 20)
    upper = np.ascontiguousarray(blocks[..., at : at + 4]).view(np.uint32) >> np.arange(32, dtype=np.uint32) & 1
    pairs = blocks[..., at + 4 :]
    levels = np.bitwise_or(np.concatenate([pairs & 15, pairs >> 4], -1), (upper << 4).astype(np.uint8), dtype=np.uint8)
    mins = -_halves(blocks[..., 2:4]) if at > 2 else None
    return levels.reshape(len(data), -1), _halves(blocks[..., :2]), mins, None


def _read_q5_k(data: npt.NDArray[np.uint8]) -> Read:
    blocks = data.reshape(len(data), -1, 176)
    low, scales, mins, whole = _read_q4_k(
        np.concatenate([blocks[..., :16], blocks[..., 48:]], -1).reshape(len(data), -1)
    )
    upper = np.stack([blocks[..., 16:48] >> i & 1 for i in range(8)], -2)  # bit i is that of group i
    levels = np.bitwise_or(low, upper.reshape(len(data), -1) << 4, dtype=np.uint8)
    return levels, scales, mins, whole


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


_READ: dict[str, Callable[[npt.NDArray[np.uint8]], Read]] = {
    "Q8_0": _read_q8_0,
    "Q4_0": _read_q4_0,
    "Q4_1": _read_q4_1,
    "MXFP4": _read_mxfp4,
    "Q5_0": partial(_read_q5, at=2),
    "Q5_1": partial(_read_q5, at=4),
    "Q4_K": _read_q4_k,
    "Q5_K": _read_q5_k,
    "Q6_K": _read_q6_k,
}
