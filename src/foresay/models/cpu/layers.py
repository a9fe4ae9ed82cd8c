"""All layers of a lean model by one call of kernels compiled for this machine.

Owns what is passed to them: each address with a check of its memory. A pass contains its real tokens alone, flat,
[N, width], in float32; the cache keeps its dtype. Knows nothing of families.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from foresay import threads
from foresay.models.cache.slot_cache import Placement, SlotCache
from foresay.models.cache.stores import RowStores
from foresay.models.cpu import structs
from foresay.models.cpu.build import library
from foresay.models.cpu.gated_layer import GatedLayer, Norm
from foresay.models.cpu.product import CompiledProduct

CACHES = {torch.float32: 0, torch.bfloat16: 1}
"""Dtypes that a cache may have."""
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_tanh": 1, "gelu_new": 1, "gelu": 2}
"""transformers' names of the activations that the kernels know."""
_NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp")


@dataclass(frozen=True, slots=True)
class Beside:
    """What a first layer reads in the place of its input: two vectors of its width, each normed by its own weights."""

    norms: tuple[Norm, Norm]
    is_input: bool
    """Whether the second one, normed, is also what the layer adds to."""


@dataclass(frozen=True, slots=True)
class FlatTokens:
    """The real tokens of a pass, row after row: where each goes, and where its row begins, [N] int64 each.

    ancestors: [N, T] bool, the columns of its row that each token sees; None for chains.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    positions: torch.Tensor
    ancestors: torch.Tensor | None
    columns: int

    @staticmethod
    def of(at: Placement, real: torch.Tensor | None) -> FlatTokens:
        """real: [B, T] bool, the tokens that are no pads; None: all."""
        rows, slots = at.place(torch.device("cpu"))
        shape = slots.shape
        every = [rows.expand(shape), slots, slots[:, :1].expand(shape), at.positions.expand(shape)]
        flat = [(one.reshape(-1) if real is None else one[real]).contiguous() for one in every]
        seen = at.ancestors
        if seen is not None:
            seen = (seen.reshape(-1, shape[1]) if real is None else seen[real]).to(torch.uint8).contiguous()
        return FlatTokens(flat[0], flat[1], flat[2], flat[3], seen, int(shape[1]))

    def __len__(self) -> int:
        return len(self.rows)

    def addresses(self) -> dict[str, int | None]:
        """Where each is in memory."""
        count, seen = len(self.rows), self.ancestors
        return {
            "rows": structs.address(self.rows, (count,), torch.int64),
            "slots": structs.address(self.slots, (count,), torch.int64),
            "starts": structs.address(self.starts, (count,), torch.int64),
            "positions": structs.address(self.positions, (count,), torch.int64),
            "ancestors": None if seen is None else structs.address(seen, (count, self.columns), torch.uint8),
        }


class _Addresses:
    """Where the kernels find the keys and values of each row.

    The blocks are the cache's alone, so that a row that grows can let go of its old one; they are there while `made` is the same.
    """

    def __init__(self, stores: RowStores) -> None:
        self.made, self.rows, self.layers = stores.made, len(stores.blocks), stores.num_layers
        capacities = [0 if block is None else int(block.shape[1]) for block in stores.blocks]
        shape = (2 * stores.num_layers, stores.heads, stores.dim)
        places = [
            None if block is None else structs.address(block, (shape[0], slots, *shape[1:]), stores.dtype)
            for block, slots in zip(stores.blocks, capacities, strict=True)
        ]
        self.blocks = (ctypes.c_void_p * self.rows)(*places)
        self.capacities = (ctypes.c_int64 * self.rows)(*capacities)


class NativeLayers:
    """All layers of a model and its last norm."""

    def __init__(
        self,
        layers: Sequence[GatedLayer],
        last_norm: Norm,
        activation: str,
        residual_scale: float,
        dtype: torch.dtype,
        *,
        beside: Beside | None = None,
    ) -> None:
        """dtype: of the cache. beside: what the first layer reads, where `run` is given that apart.

        Raises LookupError where the kernels are not there, or do not know what the layers are made of.
        """
        found = library()
        norms = [norm for layer in layers for norm in layer.norms] + [*(beside.norms if beside else ())]
        alike = all(norm.eps == last_norm.eps for norm in norms)
        if found is None or dtype not in CACHES or activation not in ACTIVATIONS or not alike:
            raise LookupError(f"no kernels for {dtype} and {activation}")
        self._run, self._dtype, self._layers = found.foresay_pass, dtype, list(layers)
        self._turns = sorted({layer.kind for layer in layers})
        self._caches: WeakKeyDictionary[SlotCache, _Addresses] = WeakKeyDictionary()
        self._held: list[Any] = []
        """What the structs point to."""
        gate = _native(layers[0].gate_up)
        self._hidden, self._inner = gate.in_features, gate.out_features // 2
        self._beside = beside
        structs_ = [self._struct(layer, last_norm.eps) for layer in layers]
        self._model = structs.Model(
            layers=len(layers),
            hidden=self._hidden,
            inner=self._inner,
            activation=ACTIVATIONS[activation],
            eps=last_norm.eps,
            residual_scale=residual_scale,
            last_norm=self._vector(last_norm, self._hidden),
            layer=(structs.Layer * len(layers))(*structs_),
            beside=(structs.Vector * 2)(
                *(self._vector(one, self._hidden) for one in (beside.norms if beside else (None, None)))
            ),
            from_beside=int(beside is not None and beside.is_input),
        )
        try:
            found.foresay_check(ctypes.byref(self._model))
        except ValueError as error:
            raise LookupError(f"no kernels for layers of such sizes: {error}") from None

    def run(
        self,
        x: torch.Tensor,
        tokens: FlatTokens,
        cache: SlotCache,
        turns: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        wanted: Sequence[int],
        read: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """x: [N, H] float32, which becomes the output before the last norm -> that normed [N, H], and the states asked for.

        turns: by kind of layer, cosines and sines [N, R] in float32. read: [N, 2 * H] float32 of a model that was made with
        `beside`, before it is normed; where that is also the layer's input, what x holds does not matter.
        """
        count = len(tokens)
        given = structs.address(x, (count, self._hidden), torch.float32)
        apart = None if read is None else structs.address(read, (count, 2 * self._hidden), torch.float32)
        normed = torch.empty_like(x)
        states = {n: torch.empty_like(x) for n in wanted if n < len(self._layers)}
        stores = self._stores_of(cache)
        waves = [turns[kind] for kind in self._turns]
        widths = [int(cos.shape[-1]) for cos, _ in waves]
        tables = [
            [structs.address(wave[i], (count, width), torch.float32) for wave, width in zip(waves, widths, strict=True)]
            for i in (0, 1)
        ]
        # read by the kernels until they return
        cosines, sines = ((ctypes.c_void_p * len(waves))(*table) for table in tables)
        rotated = (ctypes.c_int64 * len(waves))(*widths)
        places = [states[n].data_ptr() if n in states else None for n in range(len(self._layers))]
        kept = (ctypes.c_void_p * len(places))(*places)
        asked = structs.Pass(
            tokens=count,
            columns=tokens.columns,
            threads=threads.num_threads(),
            cache_is_bf16=CACHES[self._dtype],
            turns=len(waves),
            store_rows=stores.rows,
            store_layers=stores.layers,
            **tokens.addresses(),
            cosines=ctypes.addressof(cosines),
            sines=ctypes.addressof(sines),
            rotated=ctypes.addressof(rotated),
            blocks=ctypes.addressof(stores.blocks),
            capacities=ctypes.addressof(stores.capacities),
            x=given,
            normed=normed.data_ptr(),
            states=ctypes.addressof(kept),
            read=apart,
        )
        self._run(ctypes.byref(self._model), ctypes.byref(asked))
        if len(self._layers) in wanted:
            states[len(self._layers)] = normed
        return normed, states

    def new_cache(self) -> SlotCache:
        """A cache without rows, laid out as the kernels read it."""
        one = self._layers[0]
        return SlotCache(RowStores(len(self._layers), one.heads[1], one.dim, self._dtype))

    def _stores_of(self, cache: SlotCache) -> _Addresses:
        """The addresses in a cache, looked up again whenever it made or freed blocks."""
        stores, one = cache.tensors, self._layers[0]
        known = self._caches.get(cache)
        if known is not None and known.made == stores.made:
            return known
        fits = isinstance(stores, RowStores) and stores.num_layers >= len(self._layers)
        if not isinstance(stores, RowStores) or not fits or (stores.heads, stores.dim) != (one.heads[1], one.dim):
            raise ValueError("the cache was not made by these layers")
        found = self._caches[cache] = _Addresses(stores)
        return found

    def _struct(self, layer: GatedLayer, eps: float) -> structs.Layer:
        products = {name: _native(getattr(layer, name)) for name in ("qkv", "output", "gate_up", "down")}
        self._held.extend(products.values())
        sizes = dict.fromkeys(_NORMS, self._hidden)
        for name, heads in zip(("query_norm", "key_norm"), layer.heads, strict=True):
            sizes[name] = heads * layer.dim if layer.wide_norm else layer.dim
        own = {"query_norm": layer.q_norm, "key_norm": layer.k_norm, **{name: getattr(layer, name) for name in _NORMS}}
        norms = {name: self._vector(own[name], size) for name, size in sizes.items()}
        attention = structs.Attention(
            queries=layer.heads[0],
            keys=layer.heads[1],
            dim=layer.dim,
            wide=int(layer.wide_norm),
            window=layer.window or 0,
            eps=eps,
            scaling=layer.scaling,
            softcap=layer.softcap or 0.0,
        )
        turn = self._turns.index(layer.kind) if layer.rotates else -1
        fields = {name: product.struct for name, product in products.items()}
        return structs.Layer(**fields, **norms, attention=attention, turn=turn)

    def _vector(self, norm: Norm | None, size: int) -> structs.Vector:
        """A norm's weight where it lies."""
        if norm is None:
            return structs.Vector(None, 0, 0, 0)
        if norm.weight.dtype not in CACHES:
            raise LookupError(f"no kernels for norms in {norm.weight.dtype}")
        try:
            values = structs.address(norm.weight, (size,), norm.weight.dtype)
        except ValueError as error:
            raise LookupError(f"no kernels for such norms: {error}") from None
        self._held.append(norm.weight)
        return structs.Vector(values, size, norm.weight.dtype is torch.bfloat16, norm.from_one)


def _native(product: Any) -> CompiledProduct:
    if not isinstance(product, CompiledProduct):
        raise LookupError(f"no kernels for a {type(product).__name__}")
    return product
