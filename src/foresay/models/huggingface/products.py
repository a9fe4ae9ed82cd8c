"""Matrix products with frozen weights by PyTorch's own kernels: packed bf16, 8 bits, 4 bits.

A decoding step on a CPU reads every weight once, so it takes at least bytes / bandwidth: fewer bits lower this bound. If the
compiled kernels of models/cpu are available, linears.py uses these instead. Knows nothing of models.
"""

from __future__ import annotations

from typing import Protocol

import torch

from foresay.models.cpu.rounding import GROUP, quantize_int4, quantize_int8

_ROWS = 64
"""The 4-bit kernel needs a multiple of this many output features; weights are padded to it."""
_PACKED = 1 << 21
"""Number of weights packed at once."""
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
    """Bits per weight in memory, scales included."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in] -> [..., out], both in the dtype that the product was made for."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of weights that one call reads."""
        ...

    def dense(self) -> torch.Tensor:
        """Return the weights in plain layout, [out, in]."""
        ...


class PackedProduct:
    """bf16 or float32 weights, converted once to oneDNN's packed layout.

    PyTorch's bf16 linear packs weights again on every call and reaches about half of the memory bandwidth; this reaches most
    of it.
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
    """Base class of products with quantized weights."""

    in_features: int
    out_features: int
    _dtype: torch.dtype
    bias: torch.Tensor | None

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Product."""
        out = self._multiply(x.reshape(-1, self.in_features))
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def dense(self) -> torch.Tensor:
        """See Product. Multiplies unit vectors, whose products are the weights."""
        parts = torch.split(torch.eye(self.in_features, dtype=self._dtype), 256)
        return torch.cat([self._multiply(part) for part in parts]).t().contiguous()


class Int8Product(_Quantized):
    """8 bits per weight, one scale per output feature."""

    bits = 8.0

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        levels, scales = quantize_int8(weight.detach(), weight.dtype)
        self.out_features, self.in_features = levels.shape
        self._weight, self._scales, self._dtype, self.bias = levels.contiguous(), scales, scales.dtype, bias

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows of the weights, [...] int64 -> [..., in]."""
        return (self._weight[ids] * self._scales[ids][..., None]).to(dtype)

    def dense(self) -> torch.Tensor:
        """See Product."""
        return self._weight.to(self._dtype) * self._scales[:, None]

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _INT8(rows.contiguous(), self._weight, self._scales)
        return out

    @property
    def nbytes(self) -> int:
        """See Product."""
        return self._weight.nbytes + self._scales.nbytes


class Int4Product(_Quantized):
    """4 bits per weight; each group of 32 has a scale and an offset."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        weights, groups, self._dtype = [], [], weight.dtype
        rows = max(1, _PACKED // weight.shape[1] // _ROWS) * _ROWS
        for part in torch.split(weight.detach(), rows):
            levels, scales, offsets = quantize_int4(part, weight.dtype)
            missing = -len(levels) % _ROWS
            weights.append(_PACK_INT4(torch.nn.functional.pad(levels.to(torch.int32), (0, 0, 0, missing)), 1))
            # the kernel's offset is the weight at level 8
            groups.append(torch.stack([scales.float(), offsets.float() + 8 * scales.float()], -1).to(weight.dtype))
        self._weight = torch.cat(weights)
        joined = torch.cat(groups)
        self.out_features, self.in_features = map(int, weight.shape)
        missing = len(self._weight) - self.out_features
        self._groups = torch.cat([joined, joined.new_zeros(missing, *joined.shape[1:])]).transpose(0, 1).contiguous()
        self.bias = bias
        self.bits = 8.0 * self.nbytes / (self.out_features * self.in_features)

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _INT4(rows.contiguous(), self._weight, GROUP, self._groups)
        return out if out.shape[1] == self.out_features else out[:, : self.out_features].contiguous()

    @property
    def nbytes(self) -> int:
        """See Product."""
        return self._weight.nbytes + self._groups.nbytes
