"""Representations of a GGUF file's tensors in memory: blocks of quantized weights as in the file, or unquantized numbers.

Owns which types the kernels read without another rounding. The types that they do not read are dequantized and rounded to Q8_0,
with a warning. Does not know the purpose of a tensor.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from foresay.errors import ModelLoadError
from foresay.models.cpu import low_bits
from foresay.models.cpu.product import BLOCKS, NativeProduct
from foresay.models.cpu.rounding import q8_0_blocks
from foresay.models.families.stated import Bytes
from foresay.models.gguf.header import StoredTensor

logger = logging.getLogger("foresay")

_SCALES = dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"), (0, 2)) | {"Q6_K": (208, 210)}
_SCALES |= {kind: (one.scale, one.scale + (2 if one.offsets is None else 4)) for kind, one in low_bits.TYPES.items()}
"""Bytes of a block that are float16 numbers, for types with other than the first four; the other bytes are integers."""
MOST_EXPONENT = 252
"""Largest exponent of a block of MXFP4 of which no weight is infinite in float32: 12 * 2^(252 - 128)."""
_PIECE_NUMBERS = 1 << 21
"""Most weights that are dequantized at a time."""


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """Quantized weights in blocks of the file: one tensor, or the rows of several, concatenated."""

    stored: tuple[StoredTensor, ...]

    def reordered(self, order: torch.Tensor) -> BlockWeight:
        """Return the rows of a single tensor in another order."""
        [one] = self.stored
        return BlockWeight((dataclasses.replace(one, data=one.data[order.numpy()]),))

    def part(self, number: int, count: int) -> BlockWeight:
        """Return one of `count` equal parts of the rows of a single tensor."""
        [one] = self.stored
        rows = len(one.data) // count
        data = one.data[number * rows : (number + 1) * rows]
        return BlockWeight((dataclasses.replace(one, shape=(rows, one.shape[-1]), data=data),))

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights as [out, in] in `dtype`."""
        return torch.cat([piece.to(dtype) for one in self.stored for piece in _dequantized(one)])

    def is_finite(self) -> bool:
        """True if no weight is infinite or NaN."""
        return all(_scales_are_finite(one) for one in self.stored)

    def product(self, bias: torch.Tensor | None) -> NativeProduct:
        """Return the product with these weights: of parts, if several types are concatenated.

        Raises LookupError without compiled kernels.
        """
        parts, first = [], 0
        for kind, group in groupby(self.stored, lambda one: one.kind):
            data = [one.data for one in group]
            end = first + sum(map(len, data))
            parts.append(NativeProduct.of_blocks(kind, data, None if bias is None else bias[first:end]))
            first = end
        return NativeProduct.stacked(parts)


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
        """True if no weight is infinite or NaN: checks the minimum and maximum, without a copy."""
        return bool(torch.isfinite(torch.stack(torch.aminmax(self.values))).all())


Weight = BlockWeight | DenseWeight
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def is_quantized(tensor: StoredTensor) -> bool:
    """True if the tensor's weights are quantized; warns once if the kernels do not read their type."""
    if tensor.kind in _DTYPES:
        return False
    if tensor.kind not in BLOCKS:
        _warn_rounded(tensor.kind)
    return True


def read_weight(tensor: StoredTensor) -> Weight:
    """Return a tensor's weights in the representation of its type."""
    if not is_quantized(tensor):
        # a copy, since the file is mapped read-only
        numbers = torch.from_numpy(np.array(tensor.data)).view(_DTYPES[tensor.kind])
        return DenseWeight(numbers.reshape(tensor.shape))
    if tensor.kind not in BLOCKS:
        data = np.concatenate([q8_0_blocks(piece) for piece in _dequantized(tensor)])
        tensor = dataclasses.replace(tensor, kind="Q8_0", data=data)
    return BlockWeight((tensor,))


def read_numbers(tensor: StoredTensor) -> Weight:
    """Return a tensor's weights, to be used as numbers: in a representation that rounds none of them."""
    if tensor.kind in (*_DTYPES, *BLOCKS):
        return read_weight(tensor)
    return DenseWeight(torch.cat(list(_dequantized(tensor))))


def concatenated(weights: list[Weight | None]) -> BlockWeight | None:
    """Concatenate the rows of weights that are all quantized; None otherwise.

    Raises ModelLoadError for rows of different lengths.
    """
    blocks = [one for one in weights if isinstance(one, BlockWeight)]
    widths = [one.stored[0].shape[-1] for one in blocks]
    if len(set(widths)) > 1:
        found = ", ".join(map(str, widths))
        raise ModelLoadError(
            f"tensors of the GGUF file that read the same input have rows of {found} weights; they must be equal"
        )
    if len(blocks) < len(weights):
        return None
    return BlockWeight(tuple(one for w in blocks for one in w.stored))


_warned: set[str] = set()


def _warn_rounded(kind: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        logger.warning(
            "weights of type %s are rounded to Q8_0, 8 bits in groups of 32: the kernels do not read them", kind
        )


def _scales_are_finite(tensor: StoredTensor) -> bool:
    first, end = _SCALES.get(tensor.kind, (0, 4))
    blocks = tensor.data.reshape(len(tensor.data), -1, BLOCKS[tensor.kind][1])
    if tensor.kind == "MXFP4":
        return not bool((blocks[..., 0] > MOST_EXPONENT).any())
    bits = np.ascontiguousarray(blocks[..., first:end]).view(np.uint16)
    return not bool((bits & 0x7C00 == 0x7C00).any())  # the exponent of infinite numbers and NaN


def _dequantized(tensor: StoredTensor) -> Iterable[torch.Tensor]:
    """Yield a few rows of a quantized tensor at a time, [rows, in] float32."""
    step = max(1, _PIECE_NUMBERS // tensor.shape[-1])
    for first in range(0, len(tensor.data), step):
        yield torch.from_numpy(_numbers(tensor.data[first : first + step], tensor.kind))


def _numbers(data: Bytes, kind: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    import gguf

    return np.array(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]), dtype=np.float32)
