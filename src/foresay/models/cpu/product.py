"""Frozen matrix products: one class over the compiled kernels for weights in 32, 16, 8, 6 and 4 bits, and PyTorch's packed bf16.

Owns the packing of weights into the layout that products.h and quantized.h read. Sums of the kernels have a fixed order, so a
row's bits are the same alone, in any batch, and with any number of threads. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from foresay.decoding.devices import is_remote
from foresay.errors import ConfigError
from foresay.models.cpu import low_bits, structs
from foresay.models.cpu.build import library
from foresay.models.cpu.rounding import q4_1_blocks, q8_0_blocks
from foresay.threads import num_threads

Bytes = npt.NDArray[np.uint8]
ACTIVATIONS = ("float32", "bf16", "int8")
"""Roundings of activations, in the order of the enum in products.h."""
PANEL = 32
"""Number of outputs that are interleaved in memory."""
_FLOAT32, _BFLOAT16, _QUANTIZED, _FLOAT32_ROWS, _BFLOAT16_ROWS = range(5)
_PACKED = {torch.float32: _FLOAT32, torch.bfloat16: _BFLOAT16}
_IN_PLACE = {torch.float32: _FLOAT32_ROWS, torch.bfloat16: _BFLOAT16_ROWS}
_SCALE, _SCALE_OFFSET, _MULTIPLES, _MULTIPLES_16, _EXPONENTS, _OFFSETS_16 = range(6)
_CODES_3, _CODES_4, _CODES_4_WIDE, _CODES_4_ODD = 9, 10, 11, 12
BLOCKS = {
    "Q4_0": (32, 18, 4, _SCALE),
    "Q4_1": (32, 20, 4, _SCALE_OFFSET),
    "Q4_K": (256, 144, 4, _MULTIPLES),
    "Q5_0": (32, 22, 6, _SCALE),
    "Q5_1": (32, 24, 6, _SCALE_OFFSET),
    "Q5_K": (256, 176, 6, _MULTIPLES),
    "Q6_K": (256, 210, 6, _MULTIPLES_16),
    "Q8_0": (32, 34, 8, _SCALE),
    "MXFP4": (32, 17, 4, _EXPONENTS),
    "IQ4_NL": (32, 18, _CODES_4_WIDE, _SCALE),
    "Q2_K": (256, 84, 2, _OFFSETS_16),
    "Q3_K": (256, 110, 3, _MULTIPLES_16),
    "IQ2_XXS": (256, 66, _CODES_3, _MULTIPLES_16),
    "IQ2_XS": (256, 74, _CODES_3, _MULTIPLES_16),
    "IQ2_S": (256, 82, _CODES_3, _MULTIPLES_16),
    "IQ3_XXS": (256, 98, _CODES_4, _MULTIPLES_16),
    "IQ3_S": (256, 110, _CODES_4_ODD, _MULTIPLES_16),
    "IQ4_XS": (256, 136, _CODES_4_WIDE, _MULTIPLES_16),
}
"""GGUF types that are packed without another rounding: weights and bytes of a block, kind of levels, scaling."""
_WIDTHS = {_CODES_3: 3, _CODES_4: 4, _CODES_4_WIDE: 4, _CODES_4_ODD: 4}
"""Bits of the kinds of levels whose number is not that of their bits."""
_NUMBERS = {kind: i for i, kind in enumerate(list(BLOCKS)[:12])}
_NUMBERS |= dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), 12) | {"IQ3_XXS": 13, "IQ4_XS": 14, "IQ3_S": 15}
"""Numbers of the layouts in blocks.h."""
_SCALE_BYTES = {
    _SCALE: (32, 64),
    _SCALE_OFFSET: (32, 128),
    _MULTIPLES: (256, 640),
    _MULTIPLES_16: (256, 576),
    _OFFSETS_16: (256, 1152),
    _EXPONENTS: (32, 32),
}
"""Depths that share a record of scales of a panel, and its bytes, by scaling; see quantized.h."""
_DENSE = 1 << 21
"""Number of weights dequantized at once."""


def packed_shapes(kind: str, rows: int, depth: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of packed levels and scales of a type in BLOCKS, [panels, bytes] each; see quantized.h."""
    _, _, levels, scaling = BLOCKS[kind]
    step, size = _SCALE_BYTES[scaling]
    panels = -(-rows // PANEL)
    return (panels, depth * PANEL * _WIDTHS.get(levels, levels) // 8), (panels, depth // step * size)


def block_bits(kind: str) -> tuple[float, float]:
    """Return the bits per weight of a type in BLOCKS, scales included: (as stored in the file, as packed)."""
    weights, size, _, _ = BLOCKS[kind]
    return 8 * size / weights, sum(8 * bytes_of / (PANEL * 256) for _, bytes_of in packed_shapes(kind, PANEL, 256))


class Product(Protocol):
    """x [..., in] -> x W^T + b, [..., out], with frozen weights W [out, in]."""

    in_features: int
    out_features: int
    bias: torch.Tensor | None
    bits: float
    """Bits per weight in memory, scales included."""
    nbytes: int
    """Bytes of weights that one call reads."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in] -> [..., out], both in the dtype that the product was made for."""
        ...

    def dense(self) -> torch.Tensor:
        """Return the weights in plain layout, [out, in]."""
        ...


class PackedProduct(Product):
    """bf16 or float32 weights in oneDNN's packed layout, for machines without compiled kernels.

    PyTorch's bf16 linear packs weights again on every call and reaches about half of the memory bandwidth; this reaches most
    of it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)
        self.bias, self.bits, self.nbytes = bias, 8.0 * weight.element_size(), weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Product."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._packed, self.bias, "none", [], "")
        return out

    def dense(self) -> torch.Tensor:
        """See Product."""
        return self._packed.to_dense()


class NativeProduct(Product):
    """A product by the kernels, in float32 or bf16 with float32 sums: of weights in one format, or of several such parts."""

    kind: str = ""
    """Type in BLOCKS of quantized weights."""

    def __init__(
        self,
        struct: structs.ProductStruct,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        parts: Sequence[NativeProduct] = (),
    ) -> None:
        """struct: see products.h, without the address of `bias`. weights: the memory that it points to. bias: [out] in any dtype.

        parts: products that are stacked vertically, instead of weights. Raises LookupError without compiled kernels.
        """
        self._library = found = _library()
        self._multiply, self.packed, self.parts = found.foresay_multiply, list(weights), list(parts)
        self.struct = struct
        """The argument of the kernels, valid while this object exists."""
        self._kept: Any = None
        """Further memory that the struct points to."""
        self._structs, self.bias = [struct], bias
        if parts:
            self._structs = [structs.ProductStruct.from_buffer_copy(part.struct) for part in parts]
            for one, following in zip(self._structs, self._structs[1:], strict=False):
                one.next = ctypes.addressof(following)
            self.struct = self._structs[0]
        elif bias is not None and struct.bias is None:
            self._kept = bias.detach().float().contiguous()
            struct.bias = structs.address(self._kept, (struct.outputs,), torch.float32)
        self.in_features: int = self.struct.depth
        self.out_features: int = sum(one.outputs for one in self._structs)
        self.nbytes: int = sum(part.nbytes for part in parts) + sum(weight.nbytes for weight in weights)
        self.bits = 8.0 * self.nbytes / (self._padded_outputs * self.in_features)
        kinds = [_roundings(one.format, found) for one in self._structs]
        self.allowed = tuple(kind for kind in kinds[0] if all(kind in others for others in kinds))
        """Possible values of `activations`, the default first."""
        self.activations = self.allowed[0]

    @classmethod
    def of_numbers(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeProduct:
        """Pack weights [out, in] in float32 or bf16 without quantization. Raises LookupError for another dtype."""
        if weight.dtype not in _PACKED:
            raise LookupError(f"the kernels do not support weights of {weight.dtype}")
        rows, columns = map(int, weight.shape)
        padded = F.pad(weight.detach(), (0, columns % 2, 0, -rows % PANEL))
        panels = padded.view(-1, PANEL, padded.shape[1] // 2, 2).permute(0, 2, 1, 3)  # [panels, depth / 2, 32, 2]
        panels = (panels.transpose(2, 3) if weight.dtype is torch.float32 else panels).contiguous()
        struct = structs.ProductStruct(_PACKED[weight.dtype], rows, columns, weights=panels.data_ptr())
        return cls(struct, [panels], bias)

    @classmethod
    def of_blocks(
        cls, kind: str, stored: Sequence[Bytes], bias: torch.Tensor | None = None, depth: int | None = None
    ) -> NativeProduct:
        """Pack blocks of a type in BLOCKS. stored: vertically stacked arrays [rows, bytes] uint8.

        depth: number of weights in a row without padding of the last block. Raises ValueError if rows differ in their number of
        weights or do not consist of whole blocks, and LookupError without compiled kernels.
        """
        depths = {_depth(kind, data) for data in stored}
        if len(depths) > 1:
            raise ValueError(_uneven(depths))
        [whole] = depths
        rows = sum(map(len, stored))
        # NumPy allocates large arrays in huge pages
        levels, scales = (torch.from_numpy(np.empty(shape, np.uint8)) for shape in packed_shapes(kind, rows, whole))
        pack, first = _library().foresay_pack, 0
        for some in _whole_panels(kind, stored, whole):
            addresses = torch.cat([_addresses(data.ctypes.data, data.strides[0], len(data)) for data in some])
            places = [packed[first // PANEL :].data_ptr() for packed in (levels, scales)]
            pack(_NUMBERS[kind], addresses.data_ptr(), len(addresses), whole, *places, num_threads())
            first += len(addresses)
        return cls.of_packed(kind, rows, whole if depth is None else depth, [levels, scales], bias)

    @classmethod
    def of_packed(
        cls, kind: str, rows: int, depth: int, packed: Sequence[torch.Tensor], bias: torch.Tensor | None
    ) -> NativeProduct:
        """Return the product of weights that were packed by `of_blocks`, of a type in BLOCKS, [rows, depth].

        packed: levels and scales of the shapes of `packed_shapes`, uint8.
        """
        _, _, bits, scaling = BLOCKS[kind]
        levels, scales = packed
        struct = structs.ProductStruct(_QUANTIZED, rows, depth, bits, scaling)
        struct.weights, struct.scales = levels.data_ptr(), scales.data_ptr()
        product = cls(struct, packed, bias)
        product.kind = kind
        return product

    @classmethod
    def int8(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeProduct:
        """Quantize weights [out, in] of any dtype to 8 bits in groups of 32 and pack them."""
        return cls.of_blocks("Q8_0", [q8_0_blocks(weight.detach())], bias, int(weight.shape[1]))

    @classmethod
    def int4(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeProduct:
        """Quantize weights [out, in] of any dtype to 4 bits in groups of 32 and pack them; `in` must be a multiple of 32."""
        return cls.of_blocks("Q4_1", [q4_1_blocks(weight.detach())], bias)

    @classmethod
    def in_place(cls, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> NativeProduct:
        """Read weights directly from a model's tensors: nothing is copied, and changes of the weights and biases take effect.

        weights: [out, in] each, stacked vertically, float32 or bf16 on the CPU. biases: [out] each in the same dtype, or None for
        all. Sums run in another order than those of packed weights. Raises LookupError for other weights or biases, and without
        compiled kernels.
        """
        own, dtype = [one for one in biases if one is not None], weights[0].dtype
        if len(own) not in (0, len(weights)) or not all(_plain(one, dtype) for one in (*weights, *own)):
            raise LookupError(f"the kernels cannot read weights of {dtype} in their current layout")
        if len({one.shape[1:] for one in weights}) > 1 or weights[0].dim() != 2:
            shapes = ", ".join(str(list(one.shape)) for one in weights)
            raise LookupError(f"weights of shapes {shapes} cannot be multiplied together")
        if own and [one.shape for one in own] != [one.shape[:1] for one in weights]:
            raise LookupError("the lengths of the biases differ from those of their weights")
        rows = _row_addresses([one.detach() for one in weights])
        struct = structs.ProductStruct(_IN_PLACE[dtype], len(rows), int(weights[0].shape[1]), weights=rows.data_ptr())
        addresses = _row_addresses([one.detach()[:, None] for one in own]) if own else None
        struct.bias = None if addresses is None else addresses.data_ptr()
        product = cls(struct, [one.detach() for one in weights], torch.cat(own).detach() if own else None)
        product._kept = rows, addresses, own
        return product

    @classmethod
    def stacked(cls, parts: Sequence[NativeProduct]) -> NativeProduct:
        """Stack products of the same input vertically, whose weights may be in different formats.

        parts: at least one, each with its own bias or without. Raises ValueError if their inputs differ in width.
        """
        if len(parts) == 1:
            return parts[0]
        if len(widths := {part.in_features for part in parts}) > 1:
            raise ValueError(_uneven(widths))
        biases = [part.bias for part in parts if part.bias is not None]
        return cls(parts[0].struct, (), torch.cat(biases) if biases else None, parts)

    def with_bias(self, bias: torch.Tensor | None) -> NativeProduct:
        """Return the product of the same memory of blocks with a bias."""
        return self.of_packed(self.kind, self.out_features, self.in_features, self.packed, bias)

    @property
    def _padded_outputs(self) -> int:
        """Number of outputs with those that fill up the last panel of a single packed part."""
        packed = not self.parts and self.struct.format not in _IN_PLACE.values()
        return -(-self.out_features // PANEL) * PANEL if packed else self.out_features

    @property
    def activations(self) -> str:
        """The dtype that inputs are rounded to before they are multiplied."""
        return ACTIVATIONS[self.struct.activations]

    @activations.setter
    def activations(self, kind: str) -> None:
        """Change the rounding of inputs. Raises ConfigError for a kind that these weights do not support."""
        if kind not in self.allowed:
            raise ConfigError(
                f"must be {' or '.join(map(repr, self.allowed))} for these weights", param="activations", value=kind
            )
        for one in (*self._structs, *(part.struct for part in self.parts)):
            one.activations = ACTIVATIONS.index(kind)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Product. Inputs other than float32 and bf16 are converted. Raises ValueError for a wrong width or device."""
        if x.dtype not in _PACKED:
            return self(x.float()).to(x.dtype)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        count = len(rows)
        address = structs.address(rows, (count, self.in_features), rows.dtype)
        out = rows.new_empty(count, self.out_features)
        threads = num_threads()
        self._multiply(ctypes.byref(self.struct), address, out.data_ptr(), count, rows.dtype is torch.bfloat16, threads)
        return out.view(*x.shape[:-1], self.out_features)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows of packed weights in one format, [...] int64 -> [..., in]."""
        if self.struct.format != _QUANTIZED:
            [packed] = self.packed
            panel, output = ids // PANEL, ids % PANEL
            wide = packed.transpose(2, 3) if packed.dtype is torch.float32 else packed
            return wide[panel, :, output].flatten(-2)[..., : self.in_features].to(dtype)
        flat = ids.reshape(-1).contiguous()
        out = torch.empty(len(flat), self.in_features)
        self._library.foresay_rows(ctypes.byref(self.struct), flat.data_ptr(), len(flat), out.data_ptr())
        return out.view(*ids.shape, self.in_features).to(dtype)

    def dense(self) -> torch.Tensor:
        """See Product. bf16 for bf16 weights, else float32."""
        if self.parts:
            return torch.cat([part.dense() for part in self.parts])
        if self.struct.format in _IN_PLACE.values():
            return torch.cat(self.packed)
        dtype = torch.bfloat16 if self.struct.format == _BFLOAT16 else torch.float32
        pieces = torch.split(torch.arange(self.out_features), max(PANEL, _DENSE // self.in_features))
        return torch.cat([self.rows(piece, dtype) for piece in pieces])


def _library() -> ctypes.CDLL:
    """Return the compiled kernels. Raises LookupError if there are none."""
    found = library()
    if found is None:
        raise LookupError("there are no compiled kernels")
    return found


def _roundings(form: int, kernels: ctypes.CDLL) -> tuple[str, ...]:
    """Return the possible roundings of activations for a format of weights, the default first."""
    if form == _QUANTIZED:
        return ("int8", "float32")
    if form == _BFLOAT16:
        return ("bf16", "float32") if kernels.foresay_bf16_dots() else ("float32", "bf16")
    return ("float32",)


def _depth(kind: str, data: Bytes) -> int:
    """Return the number of weights in each row of blocks. data: [rows, bytes]."""
    weights, size, _, _ = BLOCKS[kind]
    if data.dtype != np.uint8 or data.ndim != 2 or data.strides[1] != 1 or data.shape[1] % size:
        raise ValueError(
            f"rows of {kind} must consist of whole blocks of {size} bytes; got {data.shape} of {data.dtype}"
        )
    return int(data.shape[1]) // size * weights


def _whole_panels(kind: str, stored: Sequence[Bytes], depth: int) -> Iterator[Sequence[Bytes]]:
    """Yield rows of blocks as blocks.h reads them: all, or whole panels of those that are taken apart before."""
    if kind not in low_bits.TYPES:
        yield stored
        return
    step = max(1, _DENSE // (depth * PANEL)) * PANEL
    rows = stored[0] if len(stored) == 1 else np.concatenate(stored)
    for first in range(0, len(rows), step):
        yield [low_bits.unpacked(kind, rows[first : first + step])]


def _uneven(widths: set[int]) -> str:
    return f"rows of {', '.join(map(str, sorted(widths)))} weights are not one matrix; all rows need the same number"


def _plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """True for a plain CPU tensor of this dtype whose last dimension is contiguous."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return False
    return tensor.dtype == dtype and dtype in _IN_PLACE and not is_remote(tensor.device) and tensor.stride(-1) == 1


def _addresses(start: int, step: int, count: int) -> torch.Tensor:
    """Return the addresses of `count` rows that are `step` bytes apart, [count] int64."""
    return start + step * torch.arange(count)


def _row_addresses(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the address of each row of tensors [rows, columns] one after another, [rows] int64."""
    return torch.cat([_addresses(one.data_ptr(), one.stride(0) * one.element_size(), len(one)) for one in weights])
