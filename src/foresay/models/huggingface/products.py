"""Matrix products with frozen weights, one class for each way of keeping them: packed bf16, 8 bits, 4 bits.

A decoding step on a CPU reads every weight once, so its floor is bytes / bandwidth: fewer bits are a lower floor. Whatever the
format, a row's product has the same bits alone and among others, which `same_bits` checks on the machine at hand. Owns the
rounding of weights and the kernels' layouts. Knows nothing of models.
"""

from __future__ import annotations

from typing import Protocol

import torch

GROUP = 32
"""Weights of a row that share one scale and one offset, in 4 bits."""
_ROWS = 64
"""The 4-bit kernel takes output features by multiples of this; missing ones are filled up."""
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
        self.out_features, self.in_features = weight.shape
        self._dtype, self.bias = weight.dtype, bias
        scales = weight.detach().float().abs().amax(1).clamp(min=1e-30) / 127
        self._scales = scales.to(weight.dtype)
        # rounded against the scale as it is kept
        self._weight = (
            (weight.detach().float() / self._scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        )

    def _multiplied(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _INT8(rows.contiguous(), self._weight, self._scales)
        return out

    @property
    def nbytes(self) -> int:
        """See Product."""
        return self._weight.nbytes + self._scales.nbytes


class Int4Product(_Quantized):
    """4 bits a weight; each group of 32 has a scale and an offset: w = scale * (q - 8) + offset."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._hold(*rounded_int4(weight.detach()), weight.dtype, bias)

    @classmethod
    def of_groups(
        cls,
        levels: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> Int4Product:
        """From levels [out, in] of 0 to 15 and the scales and offsets of their groups, [out, in / 32], rounded to `dtype`."""
        out = cls.__new__(cls)
        out._hold(levels, scales, offsets, dtype, bias)
        return out

    def _hold(
        self,
        levels: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
    ) -> None:
        self.out_features, self.in_features = levels.shape
        self._dtype, self.bias = dtype, bias
        missing = -self.out_features % _ROWS
        if missing:
            levels, scales, offsets = (
                torch.cat([x, x.new_zeros(missing, x.shape[1])]) for x in (levels, scales, offsets)
            )
        self._weight: torch.Tensor = _PACK_INT4(levels.to(torch.int32).contiguous(), 1)
        self._groups = torch.stack([scales.t(), offsets.t()], -1).to(dtype).contiguous()
        self.bits = 8.0 * self.nbytes / (self.out_features * self.in_features)

    def _multiplied(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _INT4(rows.contiguous(), self._weight, GROUP, self._groups)
        return out if out.shape[1] == self.out_features else out[:, : self.out_features].contiguous()

    @property
    def nbytes(self) -> int:
        """See Product."""
        return self._weight.nbytes + self._groups.nbytes


def rounded_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Levels [out, in] of 0 to 15, scales and offsets [out, in / 32] for the weights [out, in].

    The range of a group is what is between its least and greatest weight, narrowed by what makes the squared error least:
    weights near the ends are rare, and cutting them off a little makes all others finer.
    """
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.amin(2), groups.amax(2)
    best = torch.full_like(low, torch.inf)
    out = [torch.zeros_like(groups), torch.ones_like(low), torch.zeros_like(low)]
    for kept in (1.0, 0.97, 0.94, 0.91, 0.87, 0.83):
        middle, half = (high + low) / 2, (high - low) / 2 * kept
        scales = (2 * half / 15).clamp(min=1e-30)
        offsets = middle - half + 8 * scales
        levels = ((groups - offsets[..., None]) / scales[..., None]).round_().add_(8).clamp_(0, 15)
        restored = (levels - 8) * scales[..., None] + offsets[..., None]
        error = (restored - groups).square_().sum(2)
        better = error < best
        best = torch.where(better, error, best)
        for i, new in enumerate((levels, scales, offsets)):
            out[i] = torch.where(better[..., None] if new.dim() == 3 else better, new, out[i])
    return out[0].flatten(1).to(torch.uint8), out[1], out[2]


def alone_as_among(product: Product) -> bool:
    """Whether a row alone has the bits that it has among others, by this product's kernel, on this machine, with these threads.

    Which kernel a product takes depends on its shape too, so each shape is asked for itself.
    """
    x = torch.randn(9, product.in_features, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole = product(x)
    alone = all(torch.equal(product(x[i : i + 1]), whole[i : i + 1]) for i in (0, 4, 8))
    return alone and torch.equal(product(x[:2]), whole[:2])
