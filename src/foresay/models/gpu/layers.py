"""The layers of a Llama-like decoder over flat tokens and pages, by the kernels of this package.

Owns the order of the kernels in a layer. Knows no family: huggingface/fused.py reads the layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from foresay.decoding.devices import launching_on
from foresay.models.gpu.attention import attend
from foresay.models.gpu.blocks import QUANTIZED, BlockProduct, StackedProduct
from foresay.models.gpu.experts import mixture
from foresay.models.gpu.flat import Buffers
from foresay.models.gpu.pages import LayerShape, PagePool
from foresay.models.gpu.product import GATES, MOST, Sums, gated_product, product, sums_of
from foresay.models.gpu.rows import Weight, add_norm, gated, place
from foresay.models.layer import Convolution, Experts, Layer, Norm, Separate

Turns = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of every position, [P, R] float32 each."""
STATES = -1
"""Key of the states before the last norm among a pass's hidden states."""


class PagedLayers:
    """Layers and last norm of a decoder whose keys and values are in pages."""

    def __init__(
        self, layers: Sequence[Layer], norm: Norm, activation: str, residual_scale: float, *, by_library: bool = False
    ) -> None:
        """by_library: True for products of a library in every pass, not in prompts alone.

        Raises LookupError, which names the part, for layers that the kernels do not compute.
        """
        self._by_library = by_library
        for layer in layers:
            _check(layer, activation)
        self._layers, self._scale, self._activation = layers, residual_scale, activation
        self._norms = [tuple(map(_weight, _norms_of(layer))) for layer in layers]
        self._head_norms = [_head_norms(layer) for layer in layers]
        self._input_norms = [None if layer.input is None else _of_norm(layer.input.norm) for layer in layers]
        self._last, pair = _weight(norm), layers[0].pair
        self._pair = () if pair is None else (_of_norm(pair.token), _of_norm(pair.feature))
        own = [i for i, layer in enumerate(layers) if layer.shares is None]
        self.shapes = [LayerShape(layers[i].heads[1], layers[i].dim) for i in own]
        """Sizes of the keys and values of each layer that has its own."""
        self._stores = [own.index(i if layer.shares is None else layer.shares) for i, layer in enumerate(layers)]

    def run(
        self,
        states: torch.Tensor,
        at: Buffers,
        pool: PagePool,
        turns: Mapping[str, Turns],
        wanted: Sequence[int] = (),
        embedded: torch.Tensor | None = None,
        inputs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run the layers over the states of a pass, [N, H]; keys and values go to the pool.

        The states are overwritten, unless the first layer reads a pair: of these features and of `embedded`, [N, H]. turns: by
        kind of layer. wanted: layers whose hidden states are returned. inputs: of all layers, [N, layers * width], for layers
        with inputs of their own. Returns the normalized states, [N, H], and the hidden states, [N, H] each.
        """
        hidden: dict[int, torch.Tensor] = {}
        first: torch.Tensor | None = None
        if (pair := self._layers[0].pair) is not None:
            assert embedded is not None
            token, feature = (
                add_norm(x, None, after=None, before=norm)
                for x, norm in zip((embedded, states), self._pair, strict=True)
            )
            first, states = torch.cat([token, feature], -1), feature if pair.is_residual else states.clone()
        delta: torch.Tensor | Sums | None = None
        after: Weight | None = None
        how = {"by_library": self._library(at)}
        for i, (layer, norms) in enumerate(zip(self._layers, self._norms, strict=True)):
            before_attention, after_attention, before_mlp, after_mlp = norms
            read = first
            if i or read is None:
                read = add_norm(states, delta, after=after, before=before_attention, scale=self._scale)
            if i in wanted:
                hidden[i] = states.clone()
            read, kernel = _around(layer.attention_conv, read, at)
            delta = _after(layer.attention_conv, self._attention(layer, read, at, pool, i, turns), kernel, at)
            read = add_norm(states, delta, after=after_attention, before=before_mlp, scale=self._scale)
            read, kernel = _around(layer.mlp_conv, read, at)
            if layer.experts is not None:
                delta = self._experts(layer.experts, read, at)
            else:
                delta = sums(layer.down, _gated(layer.gate_up, read, self._activation, **how), **how)
            delta, after = _after(layer.mlp_conv, delta, kernel, at), after_mlp
            if layer.input is not None or layer.scale != 1.0:
                self._finish(layer, states, delta, after, (inputs, self._input_norms[i]), at)
                delta = after = None
        out = add_norm(states, delta, after=after, before=self._last, scale=self._scale)
        hidden[STATES] = states
        if len(self._layers) in wanted:
            hidden[len(self._layers)] = out
        return out, hidden

    def _finish(
        self,
        layer: Layer,
        states: torch.Tensor,
        delta: torch.Tensor | Sums,
        after: Weight | None,
        own: tuple[torch.Tensor | None, Weight | None],
        at: Buffers,
    ) -> None:
        """Add a layer's last delta and its own input to the states, and scale them, in place (Gemma 4).

        own: inputs of all layers, and the norm of this one's.
        """
        inputs, norm = own
        read = add_norm(states, delta, after=after, before=None, scale=self._scale)
        if (one := layer.input) is not None:
            assert inputs is not None and layer.activation is not None
            how = {"by_library": self._library(at)}
            gate = linear(one.gate, read, **how)
            width = gate.shape[1]
            read = inputs[:, one.index * width : (one.index + 1) * width]
            inner = (layer.activation(gate.float()) * read.float()).to(gate.dtype)
            add_norm(states, sums(one.projection, inner, **how), after=norm, before=None)
        states.mul_(layer.scale)

    def _library(self, at: Buffers) -> bool:
        """Return True if a library multiplies in a pass."""
        return self._by_library or at.visible.is_prompt

    def _experts(self, experts: Experts, read: torch.Tensor, at: Buffers) -> torch.Tensor:
        how = {"by_library": self._library(at)}
        scores = linear(experts.router, read, **how)
        out = mixture(read, scores, experts, self._activation, at.slots, is_prompt=at.visible.is_prompt)
        if experts.shared is None:
            return out
        gate_up, down = experts.shared
        inner = _gated(gate_up, read, self._activation, **how)
        common = linear(down, inner, **how)
        if experts.shared_gate is not None:
            common = common * linear(experts.shared_gate, read, **how).sigmoid()
        return out + common

    def _attention(
        self, layer: Layer, read: torch.Tensor, at: Buffers, pool: PagePool, i: int, turns: Mapping[str, Turns]
    ) -> torch.Tensor | Sums:
        how = {"by_library": self._library(at)}
        joint, store = sums(layer.qkv, read, **how), self._stores[i]
        keys, values = pool.keys[store], pool.values[store]
        seen = at.visible if layer.causal else at.whole
        norms = self._head_norms[i]
        if layer.wide_norm and norms is not None:
            joint, norms = _normed_as_one(Sums.of(joint).outputs(), layer, norms), None
        queries = place(
            joint,
            keys,
            values,
            turns[layer.kind] if layer.rotates else None,
            seen.positions,
            at.slots,
            seen.rows,
            seen.pages,
            norms,
            writes=layer.shares is None,
            equal=layer.equal_values,
            unit=layer.unit_values,
        )
        if layer.query_scale is not None:
            queries = (queries * layer.query_scale.at(seen.positions)[:, None, None]).to(queries.dtype)
        out = attend(
            queries, keys, values, seen, layer.scaling, window=layer.window, softcap=layer.softcap, sinks=layer.sinks
        )
        return sums(layer.output, out.view(len(read), -1), **how)


def sums(layer: Any, states: torch.Tensor, *, by_library: bool = False) -> torch.Tensor | Sums:
    """Return `linear`'s outputs, as sums if the product has parts: for a kernel that adds them up as it reads them."""
    if by_library or isinstance(layer, Separate | StackedProduct) or len(states) > MOST:
        return linear(layer, states, by_library=by_library)
    if isinstance(layer, BlockProduct):
        with launching_on(states.device):
            return layer.sums_of(states.contiguous())
    return sums_of(states, layer.weight, layer.bias)


def linear(layer: Any, states: torch.Tensor, *, by_library: bool = False) -> torch.Tensor:
    """Return a linear layer's outputs, [N, I] -> [N, O]. by_library: True for a library's product, as many tokens have it."""
    if isinstance(layer, QUANTIZED):
        return layer(states)
    if isinstance(layer, Separate):
        return torch.cat([linear(part, states, by_library=by_library) for part in layer.parts], 1)
    multiply = F.linear if by_library or len(states) > MOST else product
    return multiply(states, layer.weight, layer.bias)


def _gated(layer: Any, states: torch.Tensor, activation: str, *, by_library: bool) -> torch.Tensor:
    """Return activation(gate) * up, [N, I], of a linear layer of gates and ups, at the end of a product of one part."""
    out = None
    if not by_library and len(states) <= MOST and not isinstance(layer, (*QUANTIZED, Separate)):
        out = gated_product(states, layer.weight, layer.bias, activation)
    return gated(sums(layer, states, by_library=by_library), activation) if out is None else out


def outputs_of(layer: Any) -> int:
    """Return the number of a linear layer's outputs."""
    return int(layer.out_features) if isinstance(layer, QUANTIZED) else len(layer.weight)


def _head_norms(layer: Layer) -> tuple[Weight, Weight] | None:
    """Return the norms of queries and keys."""
    return None if layer.q_norm is None else (_of_norm(layer.q_norm), _of_norm(layer.k_norm or layer.q_norm))


def _normed_as_one(joint: torch.Tensor, layer: Layer, norms: tuple[Weight, Weight]) -> torch.Tensor:
    """Normalize the queries of all heads of a token as one vector, and its keys, too (OLMo-2). joint: [N, (Hq + 2 Hk) * D]."""
    queries, keys, values = joint.split([heads * layer.dim for heads in (*layer.heads, layer.heads[1])], 1)
    parts = [
        add_norm(part.contiguous(), None, after=None, before=norm)
        for part, norm in zip((queries, keys), norms, strict=True)
    ]
    return torch.cat([*parts, values], 1)


def _around(conv: Convolution | None, x: torch.Tensor, at: Buffers) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sublayer's convolved input, and the kernel of its output; see Convolution. x: [N, H]."""
    if conv is None:
        return x, x
    deltas = linear(conv.projection, x).view(len(x), 2, conv.base.shape[1], -1)
    return _convolved(x, deltas[:, 0], conv.base[0], at), deltas[:, 1]


def _after(conv: Convolution | None, x: torch.Tensor | Sums, kernel: torch.Tensor, at: Buffers) -> torch.Tensor | Sums:
    return x if conv is None else _convolved(Sums.of(x).outputs(), kernel, conv.base[1], at)


def _convolved(x: torch.Tensor, delta: torch.Tensor, base: torch.Tensor, at: Buffers) -> torch.Tensor:
    """Return layer.convolve of the tokens of each row. delta: [N, taps, groups]. base: [taps, H]."""
    out = torch.zeros_like(x)
    for tap, fixed in enumerate(base):
        moving = delta[:, tap].repeat_interleave(x.shape[-1] // delta.shape[-1], -1)
        seen = torch.where((at.indices >= tap)[:, None], x.roll(tap, 0), 0.0)
        out = out + (fixed + moving) * seen
    return out


def _check(layer: Layer, activation: str) -> None:
    experts = layer.experts
    if layer.mixer is not None or layer.gates_heads or (experts is not None and experts.norms is not None):
        raise LookupError("the kernels do not compute recurrent layers, gated heads, or experts next to a feed-forward")
    if layer.unit_values and layer.q_norm is None:
        raise LookupError("the kernels do not normalize values alone")
    if activation not in GATES:
        raise LookupError(f"the kernels do not compute the activation {activation!r}")
    convs = [one.projection for one in (layer.attention_conv, layer.mlp_conv) if one is not None]
    parts: list[Any] = [layer.qkv, layer.output, *convs]
    parts += [] if layer.input is None else [layer.input.gate, layer.input.projection]
    if experts is None:
        parts += [layer.gate_up, layer.down]
    elif experts.stacked is None:
        raise LookupError("the kernels do not read experts whose weights are apart")
    else:
        parts += [experts.router, *(experts.shared or ()), *([experts.shared_gate] if experts.shared_gate else [])]
        if experts.stacked.gate_up.dtype != layer.norms[0].weight.dtype:
            raise LookupError(f"the kernels do not read experts of {experts.stacked.gate_up.dtype}")
    for part in parts:
        check_linear(part, layer.norms[0].weight.dtype)


def check_linear(part: Any, dtype: torch.dtype) -> None:
    """Raise LookupError for a product whose weights are not one contiguous matrix of the model's dtype."""
    if isinstance(part, QUANTIZED) and part.dtype == dtype:
        return
    if isinstance(part, Separate):
        for one in part.parts:
            check_linear(one, dtype)
        return
    weight = getattr(part, "weight", None)
    if not isinstance(weight, torch.Tensor) or not hasattr(part, "bias"):
        raise LookupError(f"the kernels do not read products of type {type(part).__name__}")
    if weight.dtype != dtype or weight.ndim != 2 or not weight.is_contiguous():
        raise LookupError(f"the kernels do not read weights of {weight.dtype} with strides {weight.stride()}")


def _norms_of(layer: Layer) -> tuple[Norm | None, ...]:
    return layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp


def _of_norm(norm: Norm) -> Weight:
    return norm.float32(), norm.eps


def _weight(norm: Norm | None) -> Any:
    return None if norm is None else _of_norm(norm)
