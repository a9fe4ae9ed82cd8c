"""Matrix products by the compiled kernels, for weights in 32, 16, 8 and 4 bits.

Owns the packing of weights into the layout that products.h reads. Sums have a fixed order, so a row's bits are the same alone, in
any batch, and with any number of threads. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from foresay.models.cpu import structs
from foresay.models.cpu.build import library
from foresay.models.cpu.rounding import GROUP, Groups, quantize_int4, quantize_int8
from foresay.threads import num_threads

BLOCKS = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144)}
"""GGUF types that are packed without requantization, in the order of blocks.h's enum: (weights, bytes) of a block."""
PANEL = 32
"""Number of outputs that are interleaved in memory."""
_FLOAT32, _BFLOAT16, _INT8, _INT4, FLOAT32_ROWS, BFLOAT16_ROWS = range(6)
_FORMATS = {torch.float32: _FLOAT32, torch.bfloat16: _BFLOAT16}
_STORED = {_FLOAT32: torch.float32, _BFLOAT16: torch.bfloat16, _INT8: torch.int8, _INT4: torch.int32}
"""Dtypes of packed weights."""
_PACKED = 1 << 21
"""Number of weights packed at once."""


class CompiledProduct:
    """x [..., in] W^T + b in float32 or bf16 by the kernels, with float32 sums. Subclasses own the memory of the weights."""

    bits: float
    """See Product."""

    def __init__(self, struct: structs.Product) -> None:
        """struct: see products.h. Raises LookupError without compiled kernels."""
        found = library()
        if found is None:
            raise LookupError("there are no compiled kernels")
        self.out_features, self.in_features = struct.outputs, struct.depth
        self._multiply = found.foresay_multiply
        self.struct = struct
        """The argument of the kernels, valid while this object exists."""

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
    """A product with weights packed in panels, in 32, 16, 8 or 4 bits."""

    def __init__(
        self,
        form: int,
        weights: torch.Tensor,
        scales: torch.Tensor | None,
        shape: tuple[int, int],
        bias: torch.Tensor | None,
    ) -> None:
        """form, weights, scales: see products.h. shape: (out, in). bias: [out] in any dtype."""
        self.bias, self._wide_bias = bias, None if bias is None else bias.detach().float().contiguous()
        self._form, self._weights, self._scales = form, weights, scales
        self.bits = {_FLOAT32: 32.0, _BFLOAT16: 16.0, _INT8: 8 + 32 / shape[1], _INT4: 4 + 32 / GROUP}[form]
        rows, columns = shape
        panels = -(-rows // PANEL)
        packed = (panels, columns // 4, 16) if form == _INT4 else (panels, -(-columns // 4) * 4, PANEL)
        addresses = [structs.address(weights, packed, _STORED[form]), None, None]
        if scales is not None and form == _INT4:
            addresses[1] = structs.address(scales, (panels, columns // GROUP, 2, PANEL), torch.float16)
        elif scales is not None:
            addresses[1] = structs.address(scales, (rows,), torch.float32)
        if self._wide_bias is not None:
            addresses[2] = structs.address(self._wide_bias, (rows,), torch.float32)
        super().__init__(structs.Product(form, rows, columns, *addresses))

    @classmethod
    def of_numbers(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeProduct:
        """Pack weights [out, in] in float32 or bf16 without quantization. Raises LookupError for another dtype."""
        if weight.dtype not in _FORMATS:
            raise LookupError(f"the kernels do not support weights of {weight.dtype}")
        return cls(_FORMATS[weight.dtype], _panels(weight.detach(), 4), None, _shape(weight), bias)

    @classmethod
    def of_rows(cls, levels: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> NativeProduct:
        """Pack int8 levels [out, in] in [-127, 127] with the scales [out] of their rows."""
        return cls(_INT8, _panels(levels, 4), scales.float().contiguous(), _shape(levels), bias)

    @classmethod
    def of_groups(cls, pieces: Iterable[Groups], bias: torch.Tensor | None = None) -> NativeProduct:
        """Pack 4-bit weights given in pieces of rows. Scales and offsets are rounded to float16."""
        weights, scales, rows = [], [], 0
        for levels, scale, offset in in_tiles(pieces, PANEL):
            weights.append(_pack_words(levels))
            both = [_panels(one.to(torch.float16), 1) for one in (scale, offset)]
            scales.append(torch.stack(both, 2))
            rows += len(scale)
        joined = torch.cat(scales)
        return cls(_INT4, torch.cat(weights), joined, (rows, joined.shape[1] * GROUP), bias)

    @classmethod
    def of_blocks(
        cls, stored: Sequence[tuple[str, npt.NDArray[np.uint8]]], bias: torch.Tensor | None = None
    ) -> NativeProduct:
        """Pack a GGUF file's blocks. stored: vertically stacked tensors, each a type in BLOCKS and bytes [rows, bytes] uint8.

        Raises ValueError if rows differ in their number of weights or do not consist of whole blocks, and LookupError without
        compiled kernels.
        """
        found = library()
        if found is None:
            raise LookupError("there are no compiled kernels")
        depths = {_depth(kind, data) for kind, data in stored}
        if len(depths) != 1:
            raise ValueError(
                f"rows of {', '.join(map(str, sorted(depths)))} weights are not one matrix; all rows need the same number"
            )
        [depth] = depths
        addresses = torch.cat([row_addresses(data.ctypes.data, data.strides[0], len(data)) for _, data in stored])
        numbers = [list(BLOCKS).index(kind) for kind, _ in stored]
        kinds = torch.cat(
            [torch.full((len(data),), n, dtype=torch.uint8) for n, (_, data) in zip(numbers, stored, strict=True)]
        )
        count, panels = len(addresses), -(-len(addresses) // PANEL)
        weights = torch.zeros(panels, depth // 4, 16, dtype=torch.int32)
        scales = torch.zeros(panels, depth // GROUP, 2, PANEL, dtype=torch.float16)
        found.foresay_pack(
            addresses.data_ptr(), kinds.data_ptr(), count, depth, weights.data_ptr(), scales.data_ptr(), num_threads()
        )
        return cls(_INT4, weights, scales, (count, depth), bias)

    @classmethod
    def int8(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeProduct:
        """Quantize weights [out, in] of any dtype to 8 bits and pack them."""
        return cls.of_rows(*quantize_int8(weight.detach(), torch.float32), bias)

    @classmethod
    def int4(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeProduct:
        """Quantize weights [out, in] of any dtype to 4 bits and pack them; `in` must be a multiple of 32."""
        rows = max(PANEL, _PACKED // weight.shape[1])
        pieces = (quantize_int4(part, torch.float16) for part in torch.split(weight.detach(), rows))
        return cls.of_groups(pieces, bias)

    @property
    def nbytes(self) -> int:
        """See Product."""
        return self._weights.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows of the weights, [...] int64 -> [..., in]."""
        panel, output = ids // PANEL, ids % PANEL
        if self._form == _INT4:
            return self._dequantize_rows(panel, output).to(dtype)
        levels = self._weights[panel, :, output][..., : self.in_features]
        return (levels if self._scales is None else levels * self._scales[ids][..., None]).to(dtype)

    def _dequantize_rows(self, panel: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return rows of 4-bit weights, [...] -> [..., in] float32. output: index within the panel."""
        assert self._scales is not None
        words = self._weights[panel, :, output % 16]
        shifts = 8 * torch.arange(4, dtype=torch.int32) + (4 * (output // 16)).to(torch.int32)[..., None]
        levels = (words[..., None] >> shifts[..., None, :] & 15).flatten(-2)
        grouped = levels.view(*levels.shape[:-1], -1, GROUP)
        scales, offsets = self._scales[panel, :, :, output].float().unbind(-1)
        return (grouped * scales[..., None] + offsets[..., None]).flatten(-2)

    def dense(self) -> torch.Tensor:
        """See Product. bf16 for bf16 weights, else float32."""
        dtype = torch.bfloat16 if self._form == _BFLOAT16 else torch.float32
        parts = torch.split(torch.arange(self.out_features), max(PANEL, _PACKED // self.in_features))
        return torch.cat([self.rows(part, dtype) for part in parts])


def row_addresses(start: int, step: int, count: int) -> torch.Tensor:
    """Return the addresses of `count` rows that are `step` bytes apart, [count] int64."""
    return start + step * torch.arange(count)


def _depth(kind: str, data: npt.NDArray[np.uint8]) -> int:
    """Return the number of weights in each row of blocks. data: [rows, bytes]."""
    weights, size = BLOCKS[kind]
    if data.dtype != np.uint8 or data.ndim != 2 or data.strides[1] != 1 or data.shape[1] % size:
        raise ValueError(
            f"rows of {kind} must consist of whole blocks of {size} bytes; got {data.shape} of {data.dtype}"
        )
    return int(data.shape[1]) // size * weights


def _shape(weight: torch.Tensor) -> tuple[int, int]:
    return int(weight.shape[0]), int(weight.shape[1])


def _panels(weight: torch.Tensor, step: int) -> torch.Tensor:
    """Rearrange [out, in] to panels [panels, in, 32], padded with zeros; `in` is padded to a multiple of `step`."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % step, 0, -rows % PANEL))
    return padded.view(-1, PANEL, padded.shape[1]).transpose(1, 2).contiguous()


def _pack_words(levels: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit levels [out, in] into words [panels, in / 4, 16] int32; `out` is padded to whole panels."""
    missing = -len(levels) % PANEL
    padded = torch.nn.functional.pad(levels, (0, 0, 0, missing)) if missing else levels.contiguous()
    # view four levels of one row, a byte each, as one int32; the low half of each byte of word i is row i's, the high half
    # row 16 + i's
    fours = padded.view(torch.int32).view(-1, 2, 16, levels.shape[1] // 4)
    return (fours[:, 0] | fours[:, 1] << 4).transpose(1, 2).contiguous()


def in_tiles(pieces: Iterable[Groups], size: int) -> Iterable[Groups]:
    """Regroup pieces of rows into multiples of `size` rows, so that packing in pieces equals packing as a whole."""
    rest: Groups | None = None
    for piece in pieces:
        both = piece if rest is None else tuple(map(torch.cat, zip(rest, piece, strict=True)))
        whole = len(both[0]) // size * size
        if whole:
            yield tuple(x[:whole] for x in both)  # type: ignore[misc]
        rest = tuple(x[whole:] for x in both) if whole < len(both[0]) else None  # type: ignore[assignment]
    if rest is not None:
        yield rest
