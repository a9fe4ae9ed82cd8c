"""Matrix products with frozen weights, one class for each way of keeping them: packed bf16, 8 bits, 4 bits.

A decoding step on a CPU reads every weight once, so its floor is bytes / bandwidth: fewer bits are a lower floor. Whatever the
format, a row's product has the same bits in any batch; `alone_as_among` asks the machine at hand whether also alone. Owns the
rounding of weights and the kernels' layouts. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

GROUP = 32
"""Weights of a row that share one scale and one offset, in 4 bits."""
_ROWS = 64
"""The 4-bit kernel takes output features by multiples of this; missing ones are filled up."""
Groups = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""4-bit weights: levels [out, in] of 0 to 15; scales and offsets [out, in / 32]; w = scale * (level - 8) + offset."""
_PACKED_LINEAR = torch.ops.mkldnn._linear_pointwise.default
_INT8 = torch.ops.aten._weight_int8pack_mm.default
_INT4 = torch.ops.aten._weight_int4pack_mm_for_cpu.default
_PACK_INT4 = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default


_AT_ONCE = 1 << 17
"""Weights that are rounded at a time: what a core's cache holds."""
_PACKED = 1 << 21
"""Weights that are packed at a time."""
_SHARES = (1.0, 0.97, 0.94, 0.91, 0.87, 0.83)
"""Of a group's range, which ends are tried."""


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

    @property
    def levels(self) -> torch.Tensor:
        """[out, in] int8."""
        return self._weight

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weights, [...] int64 -> [..., in]."""
        return self._weight[ids].to(self._dtype) * self._scales[ids][..., None]

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
    """4 bits a weight; each group of 32 has a scale and an offset: w = scale * (q - 8) + offset."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        rows = max(_ROWS, _PACKED // weight.shape[1])
        self._hold(map(rounded_int4, torch.split(weight.detach(), rows)), weight.dtype, bias)

    @classmethod
    def of_groups(cls, pieces: Iterable[Groups], dtype: torch.dtype, bias: torch.Tensor | None = None) -> Int4Product:
        """From levels of 0 to 15 and the scales and offsets of their groups, rounded to `dtype`, some rows at a time."""
        out = cls.__new__(cls)
        out._hold(pieces, dtype, bias)
        return out

    def _hold(self, pieces: Iterable[Groups], dtype: torch.dtype, bias: torch.Tensor | None) -> None:
        weights, groups, rows = [], [], 0
        for levels, scales, offsets in _in_tiles(pieces):
            weights.append(_PACK_INT4(levels.to(torch.int32), 1))
            groups.append(torch.stack([scales, offsets], -1).to(dtype))
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


def _in_tiles(pieces: Iterable[Groups]) -> Iterator[Groups]:
    """The rows of pieces again, by whole tiles: what is packed in pieces is then what is packed as a whole.

    Levels of the last one are filled up with rows of zeros.
    """
    rest: Groups | None = None
    for piece in pieces:
        both = piece if rest is None else tuple(map(torch.cat, zip(rest, piece, strict=True)))
        whole = len(both[0]) // _ROWS * _ROWS
        if whole:
            yield tuple(x[:whole] for x in both)  # type: ignore[misc]
        rest = tuple(x[whole:] for x in both) if whole < len(both[0]) else None  # type: ignore[assignment]
    if rest is not None:
        levels, scales, offsets = rest
        missing = -len(levels) % _ROWS
        yield torch.cat([levels, levels.new_zeros(missing, levels.shape[1])]), scales, offsets


def rounded_int8(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels [out, in] of -127 to 127 in int8, and the scales [out] of their rows in a dtype, for the weights [out, in]."""
    scales = (weight.float().abs().amax(1).clamp(min=1e-30) / 127).to(dtype)
    # rounded against the scale as it is kept
    return (weight.float() / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def rounded_int4(weight: torch.Tensor) -> Groups:
    """Levels [out, in] of 0 to 15, scales and offsets [out, in / 32] for the weights [out, in], the latter two in their dtype.

    The range of a group is what is between its least and greatest weight, narrowed by what makes the squared error least:
    weights near the ends are rare, and cutting them off a little makes all others finer. Levels are chosen for the scales and
    offsets as they are kept.
    """
    at_once = max(1, _AT_ONCE // weight.shape[1])
    parts = [
        _rounded_rows(rows.float().view(len(rows), -1, GROUP), weight.dtype) for rows in torch.split(weight, at_once)
    ]
    levels, scales, offsets = (torch.cat(column) for column in zip(*parts, strict=True))
    return levels, scales, offsets


def _rounded_rows(groups: torch.Tensor, dtype: torch.dtype) -> Groups:
    """`rounded_int4` of some rows, [out, in / 32, 32] float32."""
    low, high = groups.amin(2), groups.amax(2)
    middle, half = (high + low) / 2, (high - low) / 2
    best = torch.full_like(low, torch.inf)
    kept, buffer = torch.ones_like(low), torch.empty_like(groups)
    for share in _SHARES:
        scales, offsets = _range(middle, half * share, dtype)
        _levels(groups, scales, offsets, buffer)
        error = buffer.sub_(8).mul_(scales[..., None]).add_(offsets[..., None]).sub_(groups).square_().sum(2)
        kept = torch.where(error < best, share, kept)
        best = torch.minimum(best, error)
    scales, offsets = _range(middle, half * kept, dtype)
    return _levels(groups, scales, offsets, buffer).flatten(1).to(torch.uint8), scales.to(dtype), offsets.to(dtype)


def _range(middle: torch.Tensor, half: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets of 16 levels from middle - half to middle + half, as `dtype` holds them, in float32."""
    scales = (2 * half / 15).to(dtype).float()
    return scales, (middle + scales / 2).to(dtype).float()


def _levels(groups: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    divisors = scales.clamp(min=torch.finfo(torch.float32).tiny)  # a group of equal weights has the scale 0
    return torch.sub(groups, offsets[..., None], out=out).div_(divisors[..., None]).round_().add_(8).clamp_(0, 15)


def alone_as_among(product: Product) -> bool:
    """Whether a row alone has the bits that it has among others, by this product's kernel, on this machine, with these threads.

    Which kernel a product takes depends on its shape too, so each shape is asked for itself.
    """
    x = torch.randn(9, product.in_features, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole = product(x)
    alone = all(torch.equal(product(x[i : i + 1]), whole[i : i + 1]) for i in (0, 4, 8))
    return alone and torch.equal(product(x[:2]), whole[:2])
