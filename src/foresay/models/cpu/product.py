"""Matrix products by the compiled kernels, for weights in 32, 16, 8, 6 and 4 bits.

Owns the packing of weights into the layout that products.h and quantized.h read. Sums have a fixed order, so a row's bits are the
same alone, in any batch, and with any number of threads. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from foresay.errors import ConfigError
from foresay.models.cpu import structs
from foresay.models.cpu.build import library
from foresay.models.cpu.rounding import q4_1_blocks, q8_0_blocks
from foresay.threads import num_threads

Bytes = npt.NDArray[np.uint8]
ACTIVATIONS = ("float32", "bf16", "int8")
"""Roundings of activations, in the order of the enum in products.h."""
PANEL = 32
"""Number of outputs that are interleaved in memory."""
_FLOAT32, _BFLOAT16, _QUANTIZED, FLOAT32_ROWS, BFLOAT16_ROWS = range(5)
_FORMATS = {torch.float32: _FLOAT32, torch.bfloat16: _BFLOAT16}
_SCALE, _SCALE_OFFSET, _MULTIPLES, _MULTIPLES_16 = range(4)
BLOCKS = {
    "Q4_0": (32, 18, 4, _SCALE),
    "Q4_1": (32, 20, 4, _SCALE_OFFSET),
    "Q4_K": (256, 144, 4, _MULTIPLES),
    "Q5_0": (32, 22, 6, _SCALE),
    "Q5_1": (32, 24, 6, _SCALE_OFFSET),
    "Q5_K": (256, 176, 6, _MULTIPLES),
    "Q6_K": (256, 210, 6, _MULTIPLES_16),
    "Q8_0": (32, 34, 8, _SCALE),
}
"""GGUF types that are packed without another rounding, in the order of blocks.h: weights and bytes of a block, bits, scaling."""
_SCALE_BYTES = {_SCALE: (32, 64), _SCALE_OFFSET: (32, 128), _MULTIPLES: (256, 640), _MULTIPLES_16: (256, 576)}
"""Depths that share a record of scales of a panel, and its bytes, by scaling; see quantized.h."""
_DENSE = 1 << 21
"""Number of weights dequantized at once."""
Packed = tuple[torch.Tensor, torch.Tensor]
"""Packed levels and scales, each [panels, bytes] uint8; see quantized.h."""
Allocate = Callable[[str, int, int], Packed]
"""Returns memory for weights to be packed, filled with zeros: (type in BLOCKS, number of rows, weights in a row) -> Packed."""


def packed_shapes(kind: str, rows: int, depth: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of packed levels and scales of a type in BLOCKS."""
    _, _, bits, scaling = BLOCKS[kind]
    step, size = _SCALE_BYTES[scaling]
    panels = -(-rows // PANEL)
    return (panels, depth * PANEL * bits // 8), (panels, depth // step * size)


def packed_views(memory: mmap.mmap, at: int, kind: str, rows: int, depth: int) -> Packed:
    """Return levels and scales, which follow each other from byte `at` of mapped memory on."""
    levels, scales = packed_shapes(kind, rows, depth)
    middle, end = at + levels[0] * levels[1], at + levels[0] * levels[1] + scales[0] * scales[1]
    data = np.frombuffer(memory, np.uint8)
    return torch.from_numpy(data[at:middle]).view(levels), torch.from_numpy(data[middle:end]).view(scales)


def in_memory(kind: str, rows: int, depth: int) -> Packed:
    """Allocate packed weights outside any file."""
    levels, scales = packed_shapes(kind, rows, depth)
    return torch.zeros(levels, dtype=torch.uint8), torch.zeros(scales, dtype=torch.uint8)


class CompiledProduct:
    """x [..., in] W^T + b in float32 or bf16 by the kernels, with float32 sums. Subclasses own the memory of the weights."""

    allowed: tuple[str, ...] = ("float32",)
    """Possible values of `activations`, the default first."""

    bits: float
    """See Product."""

    def __init__(self, struct: structs.Product) -> None:
        """struct: see products.h. Raises LookupError without compiled kernels."""
        found = library()
        if found is None:
            raise LookupError("there are no compiled kernels")
        self.in_features: int = struct.depth
        self.out_features: int = struct.outputs
        self._multiply = found.foresay_multiply
        self.struct = struct
        """The argument of the kernels, valid while this object exists."""

    @property
    def activations(self) -> str:
        """The dtype that inputs are rounded to before they are multiplied."""
        return ACTIVATIONS[self.struct.activations]

    @activations.setter
    def activations(self, kind: str) -> None:
        """Change the rounding of inputs. Raises ConfigError for a kind that these weights do not support."""
        if kind not in self.allowed:
            raise ConfigError(f"activations={kind!r} must be {' or '.join(map(repr, self.allowed))} for these weights")
        self.struct.activations = ACTIVATIONS.index(kind)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Product. Inputs other than float32 and bf16 are converted. Raises ValueError for a wrong width or device."""
        if x.dtype not in _FORMATS:
            return self(x.float()).to(x.dtype)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        count = len(rows)
        address = structs.address(rows, (count, self.in_features), rows.dtype)
        out = rows.new_empty(count, self.out_features)
        threads = num_threads()
        self._multiply(ctypes.byref(self.struct), address, out.data_ptr(), count, rows.dtype is torch.bfloat16, threads)
        return out.view(*x.shape[:-1], self.out_features)


class NativeProduct(CompiledProduct):
    """A product with weights packed in panels: float32, bf16, or a GGUF file's blocks."""

    def __init__(
        self, struct: structs.Product, weights: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None
    ) -> None:
        """struct: without addresses. weights, scales: packed; see products.h and quantized.h. bias: [out] in any dtype."""
        self.bias, self._wide_bias = bias, None if bias is None else bias.detach().float().contiguous()
        self._weights, self._scales = weights, scales
        struct.weights = weights.data_ptr()
        struct.scales = None if scales is None else scales.data_ptr()
        if self._wide_bias is not None:
            struct.bias = structs.address(self._wide_bias, (struct.outputs,), torch.float32)
        self.allowed = _allowed(struct.format)
        super().__init__(struct)
        self.activations = self.allowed[0]
        self.bits = 8.0 * self.nbytes / (-(-self.out_features // PANEL) * PANEL * self.in_features)

    @classmethod
    def of_numbers(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeProduct:
        """Pack weights [out, in] in float32 or bf16 without quantization. Raises LookupError for another dtype."""
        if weight.dtype not in _FORMATS:
            raise LookupError(f"the kernels do not support weights of {weight.dtype}")
        rows, columns = map(int, weight.shape)
        padded = F.pad(weight.detach(), (0, columns % 2, 0, -rows % PANEL))
        panels = padded.view(-1, PANEL, padded.shape[1] // 2, 2).permute(0, 2, 1, 3)  # [panels, depth / 2, 32, 2]
        if weight.dtype is torch.float32:
            panels = panels.transpose(2, 3)
        struct = structs.Product(_FORMATS[weight.dtype], rows, columns)
        return cls(struct, panels.contiguous(), None, bias)

    @classmethod
    def of_blocks(
        cls,
        kind: str,
        stored: Sequence[Bytes],
        bias: torch.Tensor | None = None,
        depth: int | None = None,
        allocate: Allocate = in_memory,
    ) -> NativeProduct:
        """Pack blocks of a type in BLOCKS. stored: vertically stacked arrays [rows, bytes] uint8.

        depth: number of weights in a row without padding of the last block. Raises ValueError if rows differ in their number of
        weights or do not consist of whole blocks, and LookupError without compiled kernels.
        """
        found = library()
        if found is None:
            raise LookupError("there are no compiled kernels")
        [whole] = (
            {_depth(kind, data) for data in stored}
            if len({data.shape[1] for data in stored}) == 1
            else {_uneven(kind, stored)}
        )
        addresses = torch.cat([row_addresses(data.ctypes.data, data.strides[0], len(data)) for data in stored])
        rows = len(addresses)
        weights, scales = allocate(kind, rows, whole)
        number = list(BLOCKS).index(kind)
        found.foresay_pack(
            number, addresses.data_ptr(), rows, whole, weights.data_ptr(), scales.data_ptr(), num_threads()
        )
        return cls.of_packed(kind, rows, whole if depth is None else depth, (weights, scales), bias)

    @classmethod
    def of_packed(
        cls, kind: str, rows: int, depth: int, packed: Packed, bias: torch.Tensor | None = None
    ) -> NativeProduct:
        """Return the product of weights that were packed by `of_blocks`, of a type in BLOCKS, [rows, depth].

        Raises LookupError without compiled kernels.
        """
        _, _, bits, scaling = BLOCKS[kind]
        return cls(structs.Product(_QUANTIZED, rows, depth, bits, scaling), *packed, bias)

    @classmethod
    def int8(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeProduct:
        """Quantize weights [out, in] of any dtype to 8 bits in groups of 32 and pack them."""
        return cls.of_blocks("Q8_0", [q8_0_blocks(weight.detach())], bias, int(weight.shape[1]))

    @classmethod
    def int4(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeProduct:
        """Quantize weights [out, in] of any dtype to 4 bits in groups of 32 and pack them; `in` must be a multiple of 32."""
        return cls.of_blocks("Q4_1", [q4_1_blocks(weight.detach())], bias)

    @property
    def nbytes(self) -> int:
        """See Product."""
        return self._weights.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows of the weights, [...] int64 -> [..., in]."""
        if self._scales is None:
            panel, output = ids // PANEL, ids % PANEL
            wide = self._weights.transpose(2, 3) if self._weights.dtype is torch.float32 else self._weights
            return wide[panel, :, output].flatten(-2)[..., : self.in_features].to(dtype)
        flat = ids.reshape(-1).contiguous()
        out = torch.empty(len(flat), self.in_features)
        found = library()
        assert found is not None
        found.foresay_rows(ctypes.byref(self.struct), flat.data_ptr(), len(flat), out.data_ptr())
        return out.view(*ids.shape, self.in_features).to(dtype)

    def dense(self) -> torch.Tensor:
        """See Product. bf16 for bf16 weights, else float32."""
        dtype = torch.bfloat16 if self._weights.dtype is torch.bfloat16 else torch.float32
        parts = torch.split(torch.arange(self.out_features), max(PANEL, _DENSE // self.in_features))
        return torch.cat([self.rows(part, dtype) for part in parts])


class StackedProduct(CompiledProduct):
    """Products of the same input, stacked vertically, whose weights may be in different formats."""

    def __init__(self, parts: Sequence[NativeProduct]) -> None:
        """parts: at least one, each with its own bias or without. Raises ValueError if their inputs differ in width."""
        if len({part.in_features for part in parts}) > 1:
            widths = ", ".join(str(part.in_features) for part in parts)
            raise ValueError(f"rows of {widths} weights are not one matrix; all rows need the same number")
        self.parts = list(parts)
        self._chain = [structs.Product.from_buffer_copy(part.struct) for part in parts]
        for one, following in zip(self._chain, self._chain[1:], strict=False):
            one.next = ctypes.addressof(following)
        super().__init__(self._chain[0])
        self.out_features = sum(part.out_features for part in parts)
        biases = [part.bias for part in parts if part.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        shared = set.intersection(*(set(part.allowed) for part in parts))
        self.allowed = tuple(one for one in parts[0].allowed if one in shared)
        self.bits = 8.0 * self.nbytes / (self.out_features * self.in_features)
        self.activations = self.allowed[0]

    @property
    def activations(self) -> str:
        """See CompiledProduct."""
        return ACTIVATIONS[self.struct.activations]

    @activations.setter
    def activations(self, kind: str) -> None:
        for part, one in zip(self.parts, self._chain, strict=True):
            part.activations = kind
            one.activations = ACTIVATIONS.index(kind)

    @property
    def nbytes(self) -> int:
        """See Product."""
        return sum(part.nbytes for part in self.parts)

    def dense(self) -> torch.Tensor:
        """See Product."""
        return torch.cat([part.dense() for part in self.parts])


def row_addresses(start: int, step: int, count: int) -> torch.Tensor:
    """Return the addresses of `count` rows that are `step` bytes apart, [count] int64."""
    return start + step * torch.arange(count)


def _allowed(form: int) -> tuple[str, ...]:
    """Return the possible roundings of activations for a format of weights, the default first."""
    if form == _QUANTIZED:
        return ("int8", "float32")
    if form == _BFLOAT16:
        found = library()
        return ("bf16", "float32") if found is not None and found.foresay_bf16_dots() else ("float32", "bf16")
    return ("float32",)


def _depth(kind: str, data: Bytes) -> int:
    """Return the number of weights in each row of blocks. data: [rows, bytes]."""
    weights, size, _, _ = BLOCKS[kind]
    if data.dtype != np.uint8 or data.ndim != 2 or data.strides[1] != 1 or data.shape[1] % size:
        raise ValueError(
            f"rows of {kind} must consist of whole blocks of {size} bytes; got {data.shape} of {data.dtype}"
        )
    return int(data.shape[1]) // size * weights


def _uneven(kind: str, stored: Sequence[Bytes]) -> int:
    found = ", ".join(sorted({str(_depth(kind, data)) for data in stored}))
    raise ValueError(f"rows of {found} weights are not one matrix; all rows need the same number")
