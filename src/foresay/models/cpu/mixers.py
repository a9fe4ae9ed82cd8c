"""Structs of the layers that mix tokens by states, and of a pass over the states of a cache.

Owns the layout of a row's states: which numbers belong to which layer. See recurrent.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from foresay.models.cache.state_cache import SLOTS, RowPass, StateCache, StateSizes
from foresay.models.cpu import structs
from foresay.models.cpu.product import NativeProduct
from foresay.models.layer import GatedDelta, Layer, ShortConvolution, StateSpace

_COLUMNS = 32
"""Columns of a matrix state that the kernels store together."""
_NO_VECTOR = structs.VectorStruct(None, 0, 0, 0)


class Mixers:
    """The structs of a model's layers that have states, and the sizes of these."""

    def __init__(self, layers: Sequence[Layer], hidden: int) -> None:
        """Raises LookupError for layers that the kernels do not support."""
        self.referenced: list[Any] = []
        """Memory that the structs point to."""
        self._structs: dict[int, structs.MixerStruct] = {}
        state = entry = tail = 0
        for index, layer in enumerate(layers):
            mixer = layer.mixer
            if mixer is None:
                continue
            taps = int(mixer.convolution.shape[-1])
            if not 1 <= taps <= SLOTS:
                raise LookupError(f"the kernels do not support convolutions over {taps} tokens")
            made = self._short(mixer, hidden) if isinstance(mixer, ShortConvolution) else self._matrix(mixer)
            made.taps, made.state, made.entry = taps, state, entry
            self._structs[index] = made
            sizes = _sizes(made)
            state, entry, tail = state + sizes[0], entry + sizes[1], max(tail, taps - 1)
        self.sizes = StateSizes(state, entry, tail)

    def __bool__(self) -> bool:
        return bool(self._structs)

    def pointer(self, index: int) -> Any:
        """Return the address of a layer's struct; None for a layer of attention."""
        return ctypes.pointer(self._structs[index]) if index in self._structs else None

    def _matrix(self, mixer: GatedDelta | StateSpace) -> structs.MixerStruct:
        """Return the struct of a layer whose heads have a matrix as their state."""
        (keys, values), (key_dim, value_dim) = mixer.heads, mixer.dims
        channels, own = 2 * keys * key_dim + values * value_dim, dict[str, Any]()
        if isinstance(mixer, GatedDelta):
            own = {"kind": 0, "order": int(mixer.by_key_head), "tiled": int(mixer.tiled)}
            own |= {"side": self._product(mixer.side), "norm": self._vector(mixer.norm.weight, value_dim)}
        else:
            own = {"kind": 2, "norm": self._vector(mixer.norm.weight, values * value_dim)}
            own |= {"bias": self._bias(mixer.bias, channels), "skips": self._vector(mixer.skips, values)}
        return structs.MixerStruct(
            key_heads=keys,
            value_heads=values,
            key_dim=key_dim,
            value_dim=value_dim,
            convolution=self._vector(mixer.convolution, channels * int(mixer.convolution.shape[-1])),
            decays=self._vector(mixer.decays, values),
            steps=self._vector(mixer.steps, values),
            eps=mixer.norm.eps,
            **own,
        )

    def _short(self, mixer: ShortConvolution, hidden: int) -> structs.MixerStruct:
        return structs.MixerStruct(
            kind=1,
            value_dim=hidden,
            convolution=self._vector(mixer.convolution, hidden * int(mixer.convolution.shape[-1])),
            bias=self._bias(mixer.bias, hidden),
        )

    def _bias(self, bias: torch.Tensor | None, size: int) -> structs.VectorStruct:
        return _NO_VECTOR if bias is None else self._vector(bias, size)

    def _product(self, product: Any) -> structs.ProductStruct:
        if not isinstance(product, NativeProduct):
            raise LookupError(f"the kernels do not support a {type(product).__name__}")
        self.referenced.append(product)
        return product.struct

    def _vector(self, weight: torch.Tensor, size: int) -> structs.VectorStruct:
        flat = weight.reshape(-1)
        if weight.dtype not in (torch.float32, torch.bfloat16) or flat.data_ptr() != weight.data_ptr():
            raise LookupError(f"the kernels do not support these weights of {weight.dtype} in their current layout")
        try:
            address = structs.address(flat, (size,), weight.dtype)
        except ValueError as error:
            raise LookupError(f"the kernels do not support these weights: {error}") from None
        self.referenced.append(weight)
        return structs.VectorStruct(address, size, weight.dtype is torch.bfloat16, 0)


def _sizes(mixer: structs.MixerStruct) -> tuple[int, int]:
    """Return the numbers of a layer's states, and of a token's entry."""
    if mixer.kind == 1:
        return 0, mixer.value_dim
    keys, values = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
    blocks = -(-mixer.value_dim // _COLUMNS)
    channels = 2 * keys + values
    return mixer.value_heads * blocks * mixer.key_dim * _COLUMNS, channels + keys + values + mixer.value_heads


class StatePass:
    """The states of the rows of a pass, as the kernels read and write them."""

    def __init__(self, cache: StateCache, rows: torch.Tensor) -> None:
        """rows: the cache row of each token, [N] int64, row after row."""
        found, counts = torch.unique_consecutive(rows, return_counts=True)
        self._cache = cache
        self._passes: list[RowPass] = [
            cache.states(row).next_pass(row, cache.lengths[row], count)
            for row, count in zip(found.tolist(), counts.tolist(), strict=True)
        ]
        self._rows = (structs.StateRowStruct * len(self._passes))()
        first = 0
        for one, struct in zip(self._passes, self._rows, strict=True):
            self._fill(one, struct, first)
            first += one.count
        sizes = cache.sizes
        self.struct = structs.StateRowsStruct(
            len(self._passes), SLOTS, sizes.tail, sizes.state, sizes.entry, self._rows
        )

    def _fill(self, one: RowPass, struct: structs.StateRowStruct, first: int) -> None:
        states, sizes = self._cache.states(one.row), self._cache.sizes
        struct.first, struct.count, struct.length, struct.next = first, one.count, one.length, one.base
        struct.base, struct.from_, struct.end = states.base, states.first, states.end
        struct.at_base = structs.address(states.at_base.numbers, (sizes.state,), torch.float32)
        struct.before = structs.address(states.at_base.tail, (sizes.tail, sizes.entry), torch.float32)
        struct.at_end = structs.address(states.at_end, (sizes.state,), torch.float32)
        struct.ring = structs.address(states.ring, (SLOTS, sizes.entry), torch.float32)

    def __enter__(self) -> StatePass:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        """Record the pass; if it was interrupted, rewind its rows to states that it has not written."""
        for one in self._passes:
            if kind is None:
                self._cache.states(one.row).passed(one)
            else:
                self._cache.drop(one.row)
