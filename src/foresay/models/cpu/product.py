"""Matrix products by kernels compiled for this machine, for weights in 32, 16, 8 and 4 bits.

Owns the layout that products.h reads. A row's bits are the same alone, in any batch, and with any number of threads, by the order
of the sums. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from foresay.models.cpu import structs
from foresay.models.cpu.build import library
from foresay.models.cpu.rounding import GROUP, Groups, rounded_int4, rounded_int8
from foresay.threads import num_threads

BLOCKS = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144)}
"""Types of a GGUF file that are packed as they are, in the order of blocks.h's numbers: weights and bytes of a block."""
PANEL = 32
"""Outputs that lie side by side."""
_FLOAT32, _BFLOAT16, _INT8, _INT4, FLOAT32_ROWS, BFLOAT16_ROWS = range(6)
_FORMATS = {torch.float32: _FLOAT32, torch.bfloat16: _BFLOAT16}
_STORED = {_FLOAT32: torch.float32, _BFLOAT16: torch.bfloat16, _INT8: torch.int8, _INT4: torch.int32}
"""Dtypes that weights are packed in."""
_PACKED = 1 << 21
"""Weights that are packed at a time."""


class CompiledProduct:
    """x [..., in] W^T + b in float32 or bf16 by the kernels; sums are float32. Where the weights lie is a subclass's matter."""

    bits: float
    """See Product."""

    def __init__(self, struct: structs.Product) -> None:
        """struct: as products.h has it. Raises LookupError without kernels."""
        found = library()
        if found is None:
            raise LookupError("no kernels")
        self.out_features, self.in_features = struct.outputs, struct.depth
        self._multiply = found.foresay_multiply
        self.struct = struct
        """What kernels are given; good as long as this object is."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Product. x: float32 or bf16. Raises ValueError for an input of another width, or on another device."""
        if x.dtype not in _FORMATS:
            return self(x.float()).to(x.dtype)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        count = len(rows)
        given = structs.address(rows, (count, self.in_features), rows.dtype)
        out = rows.new_empty(count, self.out_features)
        threads = num_threads()
        self._multiply(ctypes.byref(self.struct), given, out.data_ptr(), count, rows.dtype is torch.bfloat16, threads)
        return out.view(*x.shape[:-1], self.out_features)


class NativeProduct(CompiledProduct):
    """Weights in panels, packed when this is made, in 32, 16, 8 or 4 bits."""

    def __init__(
        self,
        form: int,
        weights: torch.Tensor,
        scales: torch.Tensor | None,
        shape: tuple[int, int],
        bias: torch.Tensor | None,
    ) -> None:
        """form, weights, scales: as products.h has them. shape: (out, in). bias: [out] in any dtype."""
        self.bias, self._wide_bias = bias, None if bias is None else bias.detach().float().contiguous()
        self._form, self._weights, self._scales = form, weights, scales
        self.bits = {_FLOAT32: 32.0, _BFLOAT16: 16.0, _INT8: 8 + 32 / shape[1], _INT4: 4 + 32 / GROUP}[form]
        rows, columns = shape
        panels = -(-rows // PANEL)
        packed = (panels, columns // 4, 16) if form == _INT4 else (panels, -(-columns // 4) * 4, PANEL)
        places = [structs.address(weights, packed, _STORED[form]), None, None]
        if scales is not None and form == _INT4:
            places[1] = structs.address(scales, (panels, columns // GROUP, 2, PANEL), torch.float16)
        elif scales is not None:
            places[1] = structs.address(scales, (rows,), torch.float32)
        if self._wide_bias is not None:
            places[2] = structs.address(self._wide_bias, (rows,), torch.float32)
        super().__init__(structs.Product(form, rows, columns, *places))

    @classmethod
    def of_numbers(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeProduct:
        """From weights [out, in] in float32 or bf16, kept as they are. Raises LookupError for another dtype."""
        if weight.dtype not in _FORMATS:
            raise LookupError(f"no kernels for {weight.dtype}")
        return cls(_FORMATS[weight.dtype], _panels(weight.detach(), 4), None, _shape(weight), bias)

    @classmethod
    def of_rows(cls, levels: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> NativeProduct:
        """From levels [out, in] of -127 to 127 in int8 and the scales [out] of their rows."""
        return cls(_INT8, _panels(levels, 4), scales.float().contiguous(), _shape(levels), bias)

    @classmethod
    def of_groups(cls, pieces: Iterable[Groups], bias: torch.Tensor | None = None) -> NativeProduct:
        """From 4-bit weights, some rows at a time. Scales are rounded to float16."""
        weights, scales, rows = [], [], 0
        for levels, scale, least in in_tiles(pieces, PANEL):
            weights.append(_words(levels))
            both = [_panels(one.to(torch.float16), 1) for one in (scale, least)]
            scales.append(torch.stack(both, 2))
            rows += len(scale)
        joined = torch.cat(scales)
        return cls(_INT4, torch.cat(weights), joined, (rows, joined.shape[1] * GROUP), bias)

    @classmethod
    def of_blocks(
        cls, stored: Sequence[tuple[str, npt.NDArray[np.uint8]]], bias: torch.Tensor | None = None
    ) -> NativeProduct:
        """From a GGUF file's blocks: tensors one below the other, each a type of BLOCKS and its rows' bytes [rows, bytes].

        Raises ValueError for rows that are not all as deep, or not of whole blocks.
        """
        found = library()
        if found is None:
            raise LookupError("no kernels")
        depths = {_depth(kind, data) for kind, data in stored}
        if len(depths) != 1:
            raise ValueError(f"blocks of rows of {', '.join(map(str, sorted(depths)))} weights are not one matrix")
        [depth] = depths
        places = torch.cat([row_addresses(data.ctypes.data, data.strides[0], len(data)) for _, data in stored])
        numbers = [list(BLOCKS).index(kind) for kind, _ in stored]
        kinds = torch.cat(
            [torch.full((len(data),), n, dtype=torch.uint8) for n, (_, data) in zip(numbers, stored, strict=True)]
        )
        count, panels = len(places), -(-len(places) // PANEL)
        weights = torch.zeros(panels, depth // 4, 16, dtype=torch.int32)
        scales = torch.zeros(panels, depth // GROUP, 2, PANEL, dtype=torch.float16)
        found.foresay_pack(
            places.data_ptr(), kinds.data_ptr(), count, depth, weights.data_ptr(), scales.data_ptr(), num_threads()
        )
        return cls(_INT4, weights, scales, (count, depth), bias)

    @classmethod
    def int8(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeProduct:
        """From weights [out, in] of any dtype, rounded to 8 bits."""
        return cls.of_rows(*rounded_int8(weight.detach(), torch.float32), bias)

    @classmethod
    def int4(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeProduct:
        """From weights [out, in] of any dtype, rounded to 4 bits; in is a multiple of 32."""
        rows = max(PANEL, _PACKED // weight.shape[1])
        pieces = (rounded_int4(part, torch.float16) for part in torch.split(weight.detach(), rows))
        return cls.of_groups(pieces, bias)

    @property
    def nbytes(self) -> int:
        """See Product."""
        return self._weights.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the weights, [...] int64 -> [..., in]."""
        panel, place = ids // PANEL, ids % PANEL
        if self._form == _INT4:
            return self._restored(panel, place).to(dtype)
        found = self._weights[panel, :, place][..., : self.in_features]
        return (found if self._scales is None else found * self._scales[ids][..., None]).to(dtype)

    def _restored(self, panel: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Rows of 4-bit weights, [...] -> [..., in] float32."""
        assert self._scales is not None
        words = self._weights[panel, :, place % 16]
        shifts = 8 * torch.arange(4, dtype=torch.int32) + (4 * (place // 16)).to(torch.int32)[..., None]
        levels = (words[..., None] >> shifts[..., None, :] & 15).flatten(-2)
        grouped = levels.view(*levels.shape[:-1], -1, GROUP)
        scales, least = self._scales[panel, :, :, place].float().unbind(-1)
        return (grouped * scales[..., None] + least[..., None]).flatten(-2)

    def dense(self) -> torch.Tensor:
        """See Product: float32 but for bf16 weights."""
        dtype = torch.bfloat16 if self._form == _BFLOAT16 else torch.float32
        parts = torch.split(torch.arange(self.out_features), max(PANEL, _PACKED // self.in_features))
        return torch.cat([self.rows(part, dtype) for part in parts])


def row_addresses(start: int, step: int, count: int) -> torch.Tensor:
    """Where rows begin that lie `step` bytes apart, [count] int64."""
    return start + step * torch.arange(count)


def _depth(kind: str, data: npt.NDArray[np.uint8]) -> int:
    """Weights of each row of blocks. data: [rows, bytes]."""
    weights, size = BLOCKS[kind]
    if data.dtype != np.uint8 or data.ndim != 2 or data.strides[1] != 1 or data.shape[1] % size:
        raise ValueError(f"rows of {kind} are whole blocks of {size} bytes, not {data.shape} of {data.dtype}")
    return int(data.shape[1]) // size * weights


def _shape(weight: torch.Tensor) -> tuple[int, int]:
    return int(weight.shape[0]), int(weight.shape[1])


def _panels(weight: torch.Tensor, step: int) -> torch.Tensor:
    """[out, in] -> [panels, in, 32], filled up with zeros; `in` up to a multiple of step."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % step, 0, -rows % PANEL))
    return padded.view(-1, PANEL, padded.shape[1]).transpose(1, 2).contiguous()


def _words(levels: torch.Tensor) -> torch.Tensor:
    """[out, in] levels of 4 bits -> [panels, in / 4, 16] int32, `out` filled up to whole panels."""
    missing = -len(levels) % PANEL
    padded = torch.nn.functional.pad(levels, (0, 0, 0, missing)) if missing else levels.contiguous()
    # four levels of one row, a byte each, as a number; the lower half of each byte of a word is row i's, the upper row 16 + i's
    fours = padded.view(torch.int32).view(-1, 2, 16, levels.shape[1] // 4)
    return (fours[:, 0] | fours[:, 1] << 4).transpose(1, 2).contiguous()


def in_tiles(pieces: Iterable[Groups], size: int) -> Iterable[Groups]:
    """The rows of pieces again, by multiples of `size`: what is packed in pieces is then what is packed as a whole."""
    rest: Groups | None = None
    for piece in pieces:
        both = piece if rest is None else tuple(map(torch.cat, zip(rest, piece, strict=True)))
        whole = len(both[0]) // size * size
        if whole:
            yield tuple(x[:whole] for x in both)  # type: ignore[misc]
        rest = tuple(x[whole:] for x in both) if whole < len(both[0]) else None  # type: ignore[assignment]
    if rest is not None:
        yield rest
