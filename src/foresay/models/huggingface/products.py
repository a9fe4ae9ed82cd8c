"""Matrix products with frozen weights by PyTorch's own kernels: packed bf16, 8 bits, 4 bits.

A decoding step on a CPU reads every weight once, so its floor is bytes / bandwidth: fewer bits are a lower floor. Where the
kernels of native/ are there, linears.py takes those instead. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from foresay.models.cpu.product import in_tiles
from foresay.models.cpu.rounding import GROUP, Groups, rounded_int4, rounded_int8

_ROWS = 64
"""The 4-bit kernel takes output features by multiples of this; missing ones are filled up."""
_PACKED = 1 << 21
"""Weights that are packed at a time."""
_PACKED_LINEAR = torch.ops.mkldnn._linear_pointwise.default
_INT8 = torch.ops.aten._weight_int8pack_mm.default
_INT4 = torch.ops.aten._weight_int4pack_mm_for_cpu.default
_PACK_INT4 = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default


class Product(Protocol):
    """x [..., in] -> x W^T + b, [..., out], with frozen weights W [out, in]."""

    in_features: int
    out_features: int
    bias: torch.Tensor | None
    bits: float
    """Bits a weight takes in memory, scales included."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], both in the dtype the product was made for."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads of its weights."""
        ...

    def dense(self) -> torch.Tensor:
        """The weights in plain layout, [out, in]."""
        ...


class PackedProduct:
    """bf16 or float32 weights in oneDNN's own layout, made once.

    PyTorch's bf16 linear re-derives a layout on every call and reaches about half of the bandwidth; this reaches most of it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bits = 8.0 * weight.element_size()
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Product."""
        out: torch.Tensor = _PACKED_LINEAR(x, self._packed, self.bias, "none", [], "")
        return out

    @property
    def nbytes(self) -> int:
        """See Product."""
        return self._packed.numel() * self._packed.element_size()

    def dense(self) -> torch.Tensor:
        """See Product."""
        return self._packed.to_dense()


class _Quantized:
    """What the products of quantized weights have in common."""

    in_features: int
    out_features: int
    _dtype: torch.dtype
    bias: torch.Tensor | None

    def _multiplied(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Product."""
        out = self._multiplied(x.reshape(-1, self.in_features))
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def dense(self) -> torch.Tensor:
        """See Product: products with unit vectors are the weights."""
        parts = torch.split(torch.eye(self.in_features, dtype=self._dtype), 256)
        return torch.cat([self._multiplied(part) for part in parts]).t().contiguous()


class Int8Product(_Quantized):
    """8 bits a weight, one scale for each output feature."""

    bits = 8.0

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._hold(*rounded_int8(weight.detach(), weight.dtype), bias)

    @classmethod
    def of_rows(cls, levels: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Product:
        """From levels [out, in] of -127 to 127 in int8 and the scales [out] of their rows, in the inputs' dtype."""
        out = cls.__new__(cls)
        out._hold(levels, scales, bias)
        return out

    def _hold(self, levels: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = levels.shape
        self._weight, self._scales, self._dtype, self.bias = levels.contiguous(), scales, scales.dtype, bias

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the weights, [...] int64 -> [..., in]."""
        return (self._weight[ids] * self._scales[ids][..., None]).to(dtype)

    def dense(self) -> torch.Tensor:
        """See Product."""
        return self._weight.to(self._dtype) * self._scales[:, None]

    def _multiplied(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _INT8(rows.contiguous(), self._weight, self._scales)
        return out

    @property
    def nbytes(self) -> int:
        """See Product."""
        return self._weight.nbytes + self._scales.nbytes


class Int4Product(_Quantized):
    """4 bits a weight; each group of 32 has a scale and an offset."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        rows = max(_ROWS, _PACKED // weight.shape[1])
        pieces = (rounded_int4(part, weight.dtype) for part in torch.split(weight.detach(), rows))
        self._hold(pieces, weight.dtype, bias)

    @classmethod
    def of_groups(cls, pieces: Iterable[Groups], dtype: torch.dtype, bias: torch.Tensor | None = None) -> Int4Product:
        """From 4-bit weights, some rows at a time, for inputs of a dtype, in which scales are kept."""
        out = cls.__new__(cls)
        out._hold(pieces, dtype, bias)
        return out

    def _hold(self, pieces: Iterable[Groups], dtype: torch.dtype, bias: torch.Tensor | None) -> None:
        weights, groups, rows = [], [], 0
        for levels, scales, least in in_tiles(pieces, _ROWS):
            missing = -len(levels) % _ROWS
            weights.append(_PACK_INT4(torch.nn.functional.pad(levels.to(torch.int32), (0, 0, 0, missing)), 1))
            # the kernel's offset is what a level of 8 stands for
            groups.append(torch.stack([scales.float(), least.float() + 8 * scales.float()], -1).to(dtype))
            rows += len(scales)
        self._weight = torch.cat(weights)
        joined = torch.cat(groups)
        self.out_features, self.in_features = rows, joined.shape[1] * GROUP
        missing = len(self._weight) - rows
        self._groups = torch.cat([joined, joined.new_zeros(missing, *joined.shape[1:])]).transpose(0, 1).contiguous()
        self._dtype, self.bias = dtype, bias
        self.bits = 8.0 * self.nbytes / (self.out_features * self.in_features)

    def _multiplied(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _INT4(rows.contiguous(), self._weight, GROUP, self._groups)
        return out if out.shape[1] == self.out_features else out[:, : self.out_features].contiguous()

    @property
    def nbytes(self) -> int:
        """See Product."""
        return self._weight.nbytes + self._groups.nbytes
