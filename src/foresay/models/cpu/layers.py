"""All layers of a fused model in one call of the compiled kernels.

Owns the structs passed to them, with a check of the memory at each address. A forward pass contains only real tokens, without
padding, as [N, width] float32; the cache keeps its own dtype. Knows nothing of families.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

from foresay import threads
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.cache.state_cache import StateCache
from foresay.models.cache.stores import RowStores
from foresay.models.cpu import structs
from foresay.models.cpu.build import library
from foresay.models.cpu.flat_tokens import Addresses, FlatTokens, head_size
from foresay.models.cpu.mixers import Mixers, StatePass
from foresay.models.cpu.product import NativeProduct
from foresay.models.layer import Convolution, Experts, Layer, LayerInput, Norm

CACHES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""Supported dtypes of a cache, and their numbers in the kernels. In int8 each head of a key or value has a scale."""
_NUMBERS = (torch.float32, torch.bfloat16)
"""Supported dtypes of norms."""
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_tanh": 1, "gelu_new": 1, "gelu": 2}
"""transformers' names of the supported activations, and their numbers in the kernels."""
_CLAMPED = 3
"""Number of ClampedGate in the kernels."""
_OWN, _EQUAL, _OTHERS = range(3)
"""Sources of a layer's keys and values, in the order of attention.h."""
_NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp")


class NativeLayers:
    """All layers of a model and its last norm, computed by the kernels."""

    def __init__(
        self, layers: Sequence[Layer], last_norm: Norm, activation: str, residual_scale: float, dtype: torch.dtype
    ) -> None:
        """dtype: of the cache.

        Raises LookupError if the kernels are missing or do not support the layers.
        """
        found = library()
        norms, pair = [norm for layer in layers for norm in layer.norms], layers[0].pair
        same_eps = all(norm.eps == last_norm.eps for norm in norms)
        if found is None or dtype not in CACHES or activation not in ACTIVATIONS or not same_eps:
            raise LookupError(
                f"the kernels do not support a {dtype} cache with the activation {activation!r}, or norms with different eps"
            )
        self._run, self._chain = found.foresay_pass, found.foresay_chain
        self._dtype, self._layers = dtype, list(layers)
        self._gate = structs.GateStruct(ACTIVATIONS[activation], 0.0, 0.0)
        attending = [layer for layer in layers if layer.mixer is None]
        if not attending:
            raise LookupError("the kernels need a layer with attention")
        self._turns = sorted({layer.kind for layer in attending if layer.rotates})
        self._caches: WeakKeyDictionary[SlotCache, Addresses] = WeakKeyDictionary()
        self._referenced: list[Any] = []
        """Objects whose memory the structs point to."""
        self._hidden, self._inner = _native(layers[0].output).out_features, _inner(layers)
        self._mixers = Mixers(layers, self._hidden)
        own = [i for i, layer in enumerate(layers) if layer.mixer is None and layer.shares is None]
        self._shapes = tuple((layers[i].heads[1], head_size(layers[i].dim, dtype)) for i in own)
        """Shapes of a token's keys in the layers that have their own."""
        offsets = dict(zip(own, RowStores(self._shapes, dtype).offsets, strict=False))
        structs_ = [
            self._struct(layer, last_norm.eps, offsets.get(i if layer.shares is None else layer.shares, 0), i)
            for i, layer in enumerate(layers)
        ]
        self._model = structs.ModelStruct(
            layers=len(layers),
            hidden=self._hidden,
            inner=self._inner,
            gate=self._gate,
            eps=last_norm.eps,
            residual_scale=residual_scale,
            last_norm=self._vector(last_norm, self._hidden),
            layer=(structs.LayerStruct * len(layers))(*structs_),
            input_norms=(structs.VectorStruct * 2)(
                *(self._vector(one, self._hidden) for one in ((pair.token, pair.feature) if pair else (None, None)))
            ),
            second_is_residual=int(pair is not None and pair.is_residual),
        )
        try:
            found.foresay_check(ctypes.byref(self._model))
        except ValueError as error:
            raise LookupError(f"the kernels do not support layers of these sizes: {error}") from None

    def run(
        self,
        x: torch.Tensor,
        tokens: FlatTokens,
        cache: SlotCache,
        turns: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        wanted: Sequence[int],
        read: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run all layers. Return the output after the last norm, [N, H] float32, and the hidden states of the layers in `wanted`.

        x: [N, H] float32, overwritten with the output before the last norm. turns: cosines and sines [N, R] float32 by layer
        kind. read: [N, 2 * H] float32, the first layer's input before its norms; only for one of a pair. If the second of these
        vectors is also the residual input, the values in x are ignored. inputs: [N, W] float32, the inputs of the
        layers that have one, consecutively.
        """
        count = len(tokens)
        normed = torch.empty_like(x)
        states = {n: torch.empty_like(x) for n in wanted if n < len(self._layers)}
        rotary = [turns[kind] for kind in self._turns]
        widths = [int(cos.shape[-1]) for cos, _ in rotary]
        tables = [
            [
                structs.address(pair[i], (count, width), torch.float32)
                for pair, width in zip(rotary, widths, strict=True)
            ]
            for i in (0, 1)
        ]
        # local names keep these arrays alive until the kernels return
        cosines, sines = ((ctypes.c_void_p * len(rotary))(*table) for table in tables)
        rotated = (ctypes.c_int64 * len(rotary))(*widths)
        call, _kept = self.call(tokens, cache, x, normed, states)
        call.turns = len(rotary)
        call.cosines, call.sines = ctypes.addressof(cosines), ctypes.addressof(sines)
        call.rotated = ctypes.addressof(rotated)
        call.read = None if read is None else structs.address(read, (count, 2 * self._hidden), torch.float32)
        if inputs is not None:
            call.input_width = int(inputs.shape[1])
            call.inputs = structs.address(inputs, (count, call.input_width), torch.float32)
        with StatePass(cache, tokens.rows) if isinstance(cache, StateCache) else nullcontext() as states_of_rows:
            if states_of_rows is not None:
                call.mixed = ctypes.pointer(states_of_rows.struct)
            self._run(ctypes.byref(self._model), ctypes.byref(call))
        if len(self._layers) in wanted:
            states[len(self._layers)] = normed
        return normed, states

    def call(
        self,
        tokens: FlatTokens,
        cache: SlotCache,
        x: torch.Tensor,
        normed: torch.Tensor,
        states: Mapping[int, torch.Tensor] | None = None,
    ) -> tuple[structs.PassStruct, Any]:
        """Return the argument of a pass without its rotary tables and `read`, and what must be kept until the kernels return.

        x, normed: [N, H] float32. states: layer -> [N, H] float32 to write.
        """
        count, stores = len(tokens), self._stores_of(cache)
        addresses = [states[n].data_ptr() if states and n in states else None for n in range(len(self._layers))]
        state_addresses = (ctypes.c_void_p * len(addresses))(*addresses)
        call = structs.PassStruct(
            tokens=count,
            columns=tokens.columns,
            threads=threads.num_threads(),
            cache_kind=CACHES[self._dtype],
            store_rows=stores.rows,
            store_width=stores.width,
            **tokens.addresses(),
            blocks=ctypes.addressof(stores.blocks),
            capacities=ctypes.addressof(stores.capacities),
            x=structs.address(x, (count, self._hidden), torch.float32),
            normed=structs.address(normed, (count, self._hidden), torch.float32),
            states=ctypes.addressof(state_addresses),
        )
        return call, (stores, state_addresses, tokens, x, normed)

    def draft(self, call: structs.PassStruct, chain: structs.ChainStruct) -> int:
        """Draft tokens one after the other; return their number. See chain.h."""
        count = ctypes.c_int64()
        self._chain(ctypes.byref(self._model), ctypes.byref(call), ctypes.byref(chain), ctypes.byref(count))
        return count.value

    def new_cache(self) -> SlotCache:
        """Return a cache without rows, in the layout of the kernels."""
        stores = RowStores(self._shapes, self._dtype)
        return StateCache(stores, self._mixers.sizes) if self._mixers else SlotCache(stores)

    def cache_bytes(self, lengths: Sequence[int], shared: int) -> int:
        """Return the bytes of a cache whose rows have these lengths. shared: states that a row keeps for others."""
        sizes, slot = self._mixers.sizes, RowStores(self._shapes, self._dtype).slot_bytes
        return len(lengths) * (sizes.row_bytes + shared * sizes.snapshot_bytes) + sum(lengths) * slot

    def _stores_of(self, cache: SlotCache) -> Addresses:
        """Return the addresses in a cache, collected again whenever it allocated or freed blocks."""
        stores = cache.tensors
        cached = self._caches.get(cache)
        if cached is not None and isinstance(stores, RowStores) and cached.version == stores.version:
            return cached
        fits = isinstance(stores, RowStores) and stores.shapes[: len(self._shapes)] == self._shapes
        if not isinstance(stores, RowStores) or not fits or isinstance(cache, StateCache) != bool(self._mixers):
            raise ValueError(
                "the cache was not created by new_cache() of these layers or of a model that contains them"
            )
        found = self._caches[cache] = Addresses(stores)
        return found

    def _struct(self, layer: Layer, eps: float, offset: int, index: int) -> structs.LayerStruct:
        """Return the struct of a layer. offset: numbers of a slot of the cache before its keys. index: among all layers."""
        names = ("qkv", "output") if layer.gate_up is None else ("qkv", "output", "gate_up", "down")
        products = {name: _native(getattr(layer, name)) for name in names}
        self._referenced.extend(products.values())
        sizes = dict.fromkeys(_NORMS, self._hidden)
        for name, heads in zip(("query_norm", "key_norm"), layer.heads, strict=True):
            sizes[name] = heads * layer.dim if layer.wide_norm else layer.dim
        parts = {
            "query_norm": layer.q_norm,
            "key_norm": layer.k_norm,
            **{name: getattr(layer, name) for name in _NORMS},
        }
        norms = {name: self._vector(parts[name], size) for name, size in sizes.items()}
        sinks = None if layer.sinks is None else Norm(layer.sinks, eps)
        attention = structs.AttentionStruct(
            queries=layer.heads[0],
            keys=layer.heads[1],
            dim=layer.dim,
            wide=int(layer.wide_norm),
            window=layer.window or 0,
            offset=offset,
            gated=int(layer.gates_heads),
            source=_OTHERS if layer.shares is not None else _EQUAL if layer.equal_values else _OWN,
            value_norm=int(layer.unit_values),
            eps=eps,
            scaling=layer.scaling,
            softcap=layer.softcap or 0.0,
            scale_length=0 if layer.query_scale is None else layer.query_scale.length,
            scale_rate=0.0 if layer.query_scale is None else layer.query_scale.rate,
        )
        turn = self._turns.index(layer.kind) if layer.rotates and layer.mixer is None else -1
        fields = {name: product.struct for name, product in products.items()}
        experts = None if layer.experts is None else ctypes.pointer(self._experts(layer.experts))
        return structs.LayerStruct(
            **fields,
            **norms,
            sinks=self._vector(sinks, layer.heads[0]),
            attention=attention,
            turn=turn,
            experts=experts,
            causal=int(layer.causal),
            input=None if layer.input is None else ctypes.pointer(self._input(layer.input)),
            expert_norms=None if layer.experts is None else self._expert_norms(layer.experts, eps),
            scale=layer.scale,
            **{
                name: None if one is None else ctypes.pointer(self._convolution(one))
                for name, one in (("attention_conv", layer.attention_conv), ("mlp_conv", layer.mlp_conv))
            },
            mixer=self._mixers.pointer(index),
        )

    def _convolution(self, conv: Convolution) -> structs.ConvolutionStruct:
        projection, base = _native(conv.projection), conv.base.float().contiguous()
        self._referenced += [projection, base]
        taps = int(base.shape[1])
        groups = projection.out_features // (2 * taps)
        address = structs.address(base, (2, taps, self._hidden), torch.float32)
        return structs.ConvolutionStruct(taps, groups, projection.struct, address)

    def _input(self, one: LayerInput) -> structs.LayerInputStruct:
        gate, projection = _native(one.gate), _native(one.projection)
        self._referenced += [gate, projection]
        norm, width = self._vector(one.norm, self._hidden), gate.out_features
        return structs.LayerInputStruct(gate.struct, projection.struct, norm, width, one.index)

    def _experts(self, experts: Experts) -> structs.ExpertsStruct:
        router = _native(experts.router)
        gate_up, down = (list(map(_native, products)) for products in (experts.gate_up, experts.down))
        arrays = [(structs.ProductStruct * len(one))(*(product.struct for product in one)) for one in (gate_up, down)]
        shared = [] if experts.shared is None else [_native(one) for one in experts.shared]
        gate = None if experts.shared_gate is None else _native(experts.shared_gate)
        by, clamped = experts.sigmoids, experts.clamped
        correction = None if by is None else by.correction.float().contiguous()
        self._referenced += [router, gate_up, down, arrays, shared, gate, correction]
        return structs.ExpertsStruct(
            count=len(gate_up),
            active=experts.active,
            inner=gate_up[0].out_features // 2,
            renormalized=int(experts.renormalized),
            sigmoid=int(by is not None),
            groups=1 if by is None else by.groups,
            active_groups=1 if by is None else by.active_groups,
            scale=1.0 if by is None else by.scale,
            correction=None if correction is None else structs.address(correction, (len(gate_up),), torch.float32),
            shared_inner=shared[0].out_features // 2 if shared else 0,
            shared_gate_up=ctypes.pointer(shared[0].struct) if shared else None,
            shared_down=ctypes.pointer(shared[1].struct) if shared else None,
            shared_gate=ctypes.pointer(gate.struct) if gate is not None else None,
            gate=self._gate if clamped is None else structs.GateStruct(_CLAMPED, clamped.alpha, clamped.limit),
            router=router.struct,
            gate_up=arrays[0],
            down=arrays[1],
        )

    def _expert_norms(self, experts: Experts, eps: float) -> Any:
        if (own := experts.norms) is None:
            return None
        norms = [self._vector(one, self._hidden) for one in (own.before, own.router, own.after, own.dense)]
        scales = self._vector(Norm(own.scales, eps), len(experts.gate_up))
        return ctypes.pointer(structs.ExpertNormsStruct(*norms, scales, own.factor))

    def _vector(self, norm: Norm | None, size: int) -> structs.VectorStruct:
        """Return a struct that points to a norm's weight."""
        if norm is None:
            return structs.VectorStruct(None, 0, 0, 0)
        if norm.weight.dtype not in _NUMBERS:
            raise LookupError(f"the kernels do not support norms in {norm.weight.dtype}")
        try:
            values = structs.address(norm.weight, (size,), norm.weight.dtype)
        except ValueError as error:
            raise LookupError(f"the kernels do not support these norms: {error}") from None
        self._referenced.append(norm.weight)
        return structs.VectorStruct(values, size, norm.weight.dtype is torch.bfloat16, norm.from_one)


def _inner(layers: Sequence[Layer]) -> int:
    """Return the largest width between the two products of a feed-forward, or that of experts if all layers consist of them."""
    found = [layer.gate_up for layer in layers if layer.gate_up is not None]
    found = found or [layer.experts.gate_up[0] for layer in layers if layer.experts is not None]
    return max(_native(product).out_features // 2 for product in found)


def _native(product: Any) -> NativeProduct:
    if not isinstance(product, NativeProduct):
        raise LookupError(f"the kernels do not support a {type(product).__name__}")
    return product
