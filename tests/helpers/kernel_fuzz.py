"""Random sizes for every entry of the compiled kernels, run as a program of its own: a wrong check would kill the process.

    python -m helpers.kernel_fuzz SEED COUNT

Memory is always as large as the sizes state, so that nothing but a check can be wrong. Prints {entry: [calls that ran, refused]}.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from foresay.models.cache.slot_cache import Placement
from foresay.models.cpu import build, structs
from foresay.models.cpu.flat_tokens import FlatTokens
from foresay.models.cpu.layers import NativeLayers
from foresay.models.cpu.product import NativeProduct
from foresay.models.layer import (
    ClampedGate,
    Convolution,
    Experts,
    Layer,
    LayerInput,
    Norm,
    Pair,
    QueryScale,
    ShortConvolution,
    Sigmoids,
)

ODD = (-(1 << 63), -(1 << 31), -33, -1, 0, 1 << 31, 1 << 40, (1 << 63) - 1)
"""Sizes that nothing has."""
LARGE = 1 << 12
"""Sizes up to this have memory."""


class Sizes:
    """Sizes and the memory for them, from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._held: list[Any] = []
        self._structs: list[Any] = []

    def one(self, *usual: int, odd: float = 0.08) -> int:
        """A size: one of the usual ones, or sometimes one that nothing has."""
        return self._random.choice(ODD if self._random.random() < odd else usual)

    def often(self, share: float) -> bool:
        return self._random.random() < share

    def floats(self, *shape: int) -> int | None:
        """The address of random float32 numbers, which are bf16 numbers, levels and scales as well; None without memory."""
        count = 1
        for size in shape:
            if not 0 < size <= LARGE:
                return None
            count *= size
        self._held = [*self._held[-64:], torch.rand(count)]
        return int(self._held[-1].data_ptr())

    def integers(self, count: int, low: int, high: int) -> int | None:
        """The address of `count` int64 numbers from low to high, mostly in order."""
        if not 0 < count <= LARGE:
            return None
        found = [self._random.randint(low, max(low, high)) for _ in range(count)]
        return self.keep(torch.tensor(sorted(found) if self.often(0.9) else found))

    def keep_struct(self, struct: Any) -> None:
        self._structs = [*self._structs[-8:], struct]

    def keep(self, tensor: torch.Tensor) -> int:
        self._held.append(tensor)
        return int(tensor.data_ptr())


def product(sizes: Sizes, parts: int = 2, depth: int | None = None) -> structs.ProductStruct:
    """depth: None for one of its own; memory is that of the depth."""
    form, bits, scaling = sizes.one(0, 1, 2, 2, 2, 3, 4), sizes.one(4, 6, 8), sizes.one(0, 1, 2, 3, 4)
    outputs, own = sizes.one(1, 5, 32, 33, 70), sizes.one(1, 3, 30, 32, 64, 256, 512)
    depth = own if depth is None else depth
    padded = (-(-outputs // 32) * 32, -(-depth // 32) * 32)
    weights = sizes.floats(*padded)
    if form in (3, 4) and weights is not None:
        row = weights
        weights = sizes.keep(torch.tensor([row] * outputs))
    scales = sizes.floats(2, *padded) if sizes.often(0.9) else None
    activations = sizes.one({1: 1, 2: 2}.get(form, 0), 0)
    out = structs.ProductStruct(form, outputs, depth, bits, scaling, activations, weights, scales)
    if parts > 1 and sizes.often(0.2):
        following = product(sizes, parts - 1, depth if sizes.often(0.9) else None)
        sizes.keep_struct(following)
        out.next = ctypes.addressof(following)
    return out


def multiply(sizes: Sizes, library: Any) -> None:
    one, rows = product(sizes), sizes.one(0, 1, 2, 7, 9, 50)
    outputs = one.outputs + (structs.ProductStruct.from_address(one.next).outputs if one.next else 0)
    x, out = sizes.floats(max(rows, 1), one.depth), sizes.floats(max(rows, 1), outputs)
    if x is None or out is None:
        rows = -1
    library.foresay_multiply(ctypes.byref(one), x, out, rows, sizes.one(0, 1, odd=0), sizes.one(1, 2, 3))


def pack(sizes: Sizes, library: Any) -> None:
    outputs, depth = sizes.one(1, 31, 32, 40), sizes.one(31, 32, 64, 256, 260, 512)
    count = outputs if 0 < outputs <= LARGE else 1
    blocks = sizes.floats(max(1, min(depth, LARGE)))
    rows = sizes.keep(torch.tensor([blocks] * count))
    panels = -(-count // 32)
    levels, scales = (
        sizes.keep(torch.zeros(panels * min(max(depth, 32), LARGE) * 32, dtype=torch.uint8)) for _ in "ls"
    )
    library.foresay_pack(sizes.one(*range(8)), rows, outputs, depth, levels, scales, sizes.one(1, 2))


def rows(sizes: Sizes, library: Any) -> None:
    one, count = product(sizes), sizes.one(0, 1, 3)
    out = sizes.floats(max(count, 1), max(one.depth, 1))
    ids = sizes.integers(max(count, 1), 0, one.outputs - 1 if sizes.often(0.9) else one.outputs)
    if out is None or ids is None:
        count = -1
    library.foresay_rows(ctypes.byref(one), ids, count, out)


def add_norm(sizes: Sizes, library: Any) -> None:
    tokens, width = sizes.one(0, 1, 5), sizes.one(1, 7, 100)
    x, added, out = (sizes.floats(max(tokens, 1), width) for _ in range(3))
    if x is None or added is None or out is None:
        width = -1
    library.foresay_add_norm(x, added, sizes.floats(width), 1.0, sizes.floats(width), out, tokens, width, 1e-5)


def gate(sizes: Sizes, library: Any) -> None:
    tokens, width = sizes.one(0, 1, 5), sizes.one(1, 7, 50)
    joint, out = sizes.floats(2, max(tokens, 1), width), sizes.floats(max(tokens, 1), width)
    if joint is None or out is None:
        width = -1
    kind = structs.GateStruct(sizes.one(0, 1, 2, 3), 1.7, sizes.one(7, 0, odd=0.05))
    library.foresay_gate(ctypes.byref(kind), joint, out, tokens, width)


def attend(sizes: Sizes, library: Any) -> None:
    tokens, columns = sizes.one(1, 2, 5, 20, odd=0.02), sizes.one(2, 4, odd=0.02)
    keys, dim = sizes.one(1, 2, 3, odd=0.01), sizes.one(1, 2, 7, 8, 16, odd=0.01)
    queries = keys * sizes.one(1, 2, odd=0) if sizes.often(0.9) else sizes.one(1, 4, 6)
    rows, slots = sizes.one(1, 3, odd=0.01), sizes.one(1, 8, 200, odd=0.01)
    even = dim // 2 * 2
    rotated = sizes.one(0, even, even, even, even, dim + 1, 2 * dim, odd=0.01)
    count = rows if 0 < rows <= LARGE else 1
    places = [sizes.floats(2, slots, keys * dim) for _ in range(count)]
    lost = [sizes.often(0.02) for _ in places]  # rows without a block, whose capacity states so or not
    capacities = [0 if gone and sizes.often(0.5) else slots for gone in lost]
    blocks = sizes.keep(torch.tensor([0 if gone else place or 0 for gone, place in zip(lost, places, strict=True)]))
    held = sizes.keep(torch.tensor([n if abs(n) < 1 << 62 else -1 for n in capacities]))
    tree = sizes.often(0.3)
    most = min(slots, columns) if tree else slots
    step = sizes.integers(tokens, 0, most - 1) if sizes.often(0.9) else sizes.integers(tokens, -2, slots + 2)
    seen = None
    if tree and 0 < tokens <= LARGE and 0 < columns <= LARGE:
        each = [sizes.one(*[1] * 20, 0, odd=0) for _ in range(tokens * columns)]
        seen = sizes.keep(torch.tensor(each, dtype=torch.uint8))
    starts = sizes.integers(tokens, -1 if sizes.often(0.1) else 0, slots if sizes.often(0.1) else 0)
    turned = rotated > 0
    source = sizes.one(0, 0, 0, 1, 2, odd=0.02)
    asked = structs.AttentionStruct(
        source=source, value_norm=sizes.one(0, 1, odd=0.01), tokens=tokens,
        columns=columns, queries=queries, keys=keys, dim=dim, rotated=rotated, wide=0,
        window=sizes.one(0, 0, 3, odd=0.05), store_rows=rows,
        offset=sizes.one(*[0] * 30, 1, -1, odd=0.01), blocks=blocks, capacities=held,
        rows=sizes.integers(tokens, 0, rows - 1) if sizes.often(0.9) else sizes.integers(tokens, -1, rows),
        slots=step, starts=starts, positions=step if sizes.often(0.8) else sizes.integers(tokens, -1, slots),
        ancestors=seen, cosines=sizes.floats(tokens, rotated) if turned else None,
        sines=sizes.floats(tokens, rotated) if turned else None, query_norm=None, key_norm=None, eps=1e-5, scaling=0.3,
        softcap=0.0, scale_rate=0.1, scale_length=sizes.one(0, 0, 1, 5, odd=0.02),
    )  # fmt: skip
    joint = sizes.floats(tokens, queries + 2 * keys, dim)
    scratch, out = sizes.floats(tokens, queries, dim), sizes.floats(tokens, queries, dim)
    if None in (*places, joint, scratch, out):
        asked.tokens = -1
    library.foresay_attend(ctypes.byref(asked), joint, scratch, out, 0, sizes.one(1, 2))


def mix(sizes: Sizes, library: Any) -> None:
    """A layer of states over rows whose lengths mostly fit each other."""
    kind, keys = sizes.one(0, 0, 1, 2, 2, odd=0.01), sizes.one(1, 2)
    key_dim, dim = sizes.one(1, 3, 8), sizes.one(1, 5, 33, odd=0.02)
    values, taps, slots, tail = keys * sizes.one(1, 2, odd=0), sizes.one(1, 2, 4), sizes.one(4, 8), sizes.one(3, 4)
    if kind == 1:
        keys = values = key_dim = 0
    channels = dim if kind == 1 else 2 * keys * key_dim + values * dim
    state, entry = values * -(-dim // 32) * key_dim * 32, channels + keys * key_dim + values * (dim + 1)
    wide = {0: dim, 2: values * dim}.get(kind, 0)
    held = [sizes.floats(channels, taps), *(sizes.floats(count) for count in (values, values, wide, values))]
    heads = values if sizes.often(0.97) else 1

    def vector(address: int | None, size: int) -> structs.VectorStruct:
        return structs.VectorStruct(address if size else None, size, sizes.one(0, 1, odd=0), 0)

    side = structs.ProductStruct(0, 2 * values + sizes.one(0, 0, 0, 0, 1, odd=0), 4, weights=sizes.floats(64, 8))
    mixer = structs.MixerStruct(
        kind, keys, values, key_dim, dim, taps, sizes.one(0, 1, odd=0.02), sizes.one(0, odd=0.02), sizes.one(0, odd=0.02),
        vector(held[0], channels * taps), structs.VectorStruct(None, 0, 0, 0), vector(held[1], 0 if kind == 1 else heads),
        vector(held[2], 0 if kind == 1 else heads), vector(held[3], wide), vector(held[4], heads if kind == 2 else 0), side,
        sizes.one(0, 1, odd=0), 1e-5,
    )  # fmt: skip
    count, tokens = sizes.one(1, 2), 0
    made = (structs.StateRowStruct * (count if 0 < count <= LARGE else 1))()
    for one in made:
        base, own = sizes.one(0, 3, odd=0.02), sizes.one(1, 3, 12, odd=0.02)
        first = base + sizes.one(0, 0, 0, 2, odd=0)
        end = first + sizes.one(0, 2, 4, odd=0.02)
        length = sizes.one(end, end, base, odd=0.02)
        one.first, one.count, one.length, one.base, one.from_, one.end = tokens, own, length, base, first, end
        one.next = length if length != end or first != base else sizes.one(length, base, odd=0.02)
        one.at_base, one.before, one.at_end, one.ring = (
            sizes.floats(size or 1) for size in (state, tail * entry, state, slots * entry)
        )
        tokens += own
    inputs = 3 * channels + 3 * values * (dim + 1)  # of a state space: gates, channels and steps
    joint, out = sizes.floats(max(tokens, 1), inputs), sizes.floats(max(tokens, 1), dim, max(values, 1))
    rows = structs.StateRowsStruct(count, slots, tail, state, entry, made)
    if None in (*held[:1], joint, out) or not all(one.ring for one in made):
        tokens = -1
    x = sizes.floats(max(tokens, 1), 4)
    library.foresay_mix(ctypes.byref(mixer), ctypes.byref(rows), x, joint, out, tokens, sizes.one(1, 2))


def whole(sizes: Sizes, library: Any) -> None:
    """A model of two layers whose sizes mostly fit each other, by the classes that make the structs."""
    hidden, inner, dim, keys = sizes.one(16, 32, odd=0), sizes.one(8, 12, 48, odd=0), sizes.one(4, 8, 3, 1, odd=0), 2
    queries = keys * 2 if sizes.often(0.9) else 3

    def weights(outputs: int, depth: int) -> NativeProduct:
        extra = [sizes.one(-1, 1, 4, odd=0) if sizes.often(0.015) else 0 for _ in range(2)]
        return NativeProduct.of_numbers(torch.randn(max(1, outputs + extra[0]), depth + extra[1]), None)

    def norm(width: int) -> Norm:
        return Norm(torch.ones(width + (1 if sizes.often(0.01) else 0)), 1e-5)

    def experts() -> Experts | None:
        if sizes.often(0.6):
            return None
        count, wide = sizes.one(1, 4, 9, odd=0), sizes.one(8, 12, odd=0)
        count_of_down = count if sizes.often(0.97) else 1
        groups = sizes.one(1, 2 if count == 4 else 1, odd=0.02)
        by = Sigmoids(torch.rand(count), groups, sizes.one(groups, odd=0.02), 1.5) if sizes.often(0.3) else None
        shared = (weights(2 * wide, hidden), weights(hidden, wide)) if sizes.often(0.2) else None
        return Experts(
            weights(count, hidden), [weights(2 * wide, hidden) for _ in range(count)],
            [weights(hidden, wide) for _ in range(count_of_down)], sizes.one(1, count, odd=0.05), sizes.often(0.5),
            ClampedGate(1.7, sizes.one(7, 1, odd=0.05)) if sizes.often(0.3) else None, by, shared,
        )  # fmt: skip

    def convolution() -> Convolution | None:
        if sizes.often(0.5):
            return None
        taps, groups = sizes.one(1, 2, 5, odd=0), sizes.one(*[1, hidden, hidden // 2] * 3, 3, odd=0.02)
        return Convolution(weights(2 * taps * max(1, min(groups, 64)), hidden), torch.rand(2, taps, hidden))

    size = sizes.one(4, 32, odd=0)

    def more(i: int) -> dict[str, Any]:
        """Keys of its own, or of the first layer; and an input of its own."""
        own = sizes.one(2, 2, 2, 2, 1, 0 if i else 2, odd=0)
        given = LayerInput(weights(size, hidden), weights(hidden, size), norm(hidden), i) if sizes.often(0.2) else None
        shares = {"shares": 0 if own == 0 else None, "equal_values": own == 1, "unit_values": sizes.often(0.2)}
        return {**shares, "input": given, "scale": 0.5, "qkv": weights((queries + own * keys) * dim, hidden)}

    layers = [
        Layer(
            **more(i), kind="full_attention", before_attention=norm(hidden),
            heads=(queries, keys), dim=dim, q_norm=norm(dim), k_norm=norm(dim), wide_norm=False, rotates=sizes.often(0.8),
            window=None, scaling=0.3, softcap=None, output=weights(hidden, queries * dim), after_attention=None,
            before_mlp=norm(hidden), gate_up=weights(2 * inner, hidden), activation=torch.nn.functional.silu,
            down=weights(hidden, inner), after_mlp=None, experts=experts(),
            sinks=torch.rand(queries + (1 if sizes.often(0.05) else 0)) if sizes.often(0.3) else None,
            query_scale=QueryScale(0.1, sizes.one(1, 5, odd=0)) if sizes.often(0.2) else None,
            causal=sizes.often(0.5), attention_conv=convolution(), mlp_conv=convolution(),
        )
        for i in range(2)
    ]  # fmt: skip
    if sizes.often(0.3):
        taps = torch.randn(hidden + (1 if sizes.often(0.05) else 0), 1, 3)
        products = {"qkv": weights(3 * hidden, hidden), "output": weights(hidden, hidden), "sinks": None}
        norms = {"q_norm": None, "k_norm": None}
        layers[1] = dataclasses.replace(layers[1], mixer=ShortConvolution(taps, None), **products, **norms)
    native = NativeLayers(layers, norm(hidden), "silu", 1.0, torch.float32)
    cache = native.new_cache()
    cache.add_rows(2)
    at = cache.begin_pass(0, 2, 3, torch.device("cpu"), None)
    if sizes.often(0.1):
        at = Placement(at.slots + sizes.one(-1, 500, 1 << 40, odd=0), sizes.one(0, 1, 7, odd=0), at.width)
    width = sizes.one(dim, dim // 2 * 2, 2 * dim, 0, odd=0)
    table = torch.rand(6, width)
    tokens = FlatTokens.of(at, None)
    if sizes.often(0.5):
        ends = torch.tensor([sizes.one(2, 2, 2, 1, 9, 1 << 40, odd=0) for _ in range(6)])
        tokens = dataclasses.replace(tokens, ends=ends if sizes.often(0.5) else torch.full((6,), 2))
    inputs = torch.randn(6, 2 * size) if sizes.often(0.97) else None
    native.run(torch.randn(6, hidden), tokens, cache, {"full_attention": (table, table)}, (), inputs=inputs)


def chain(sizes: Sizes, library: Any) -> None:
    """Tokens of a head of one layer, whose sizes mostly fit each other."""
    hidden, vocab, count = sizes.one(16, 32, odd=0), sizes.one(5, 40, odd=0), sizes.one(5, 40, 41, odd=0)
    most, positions = sizes.one(1, 4, 0, 9), sizes.one(8, 20)

    def weights(outputs: int, depth: int) -> NativeProduct:
        extra = sizes.one(-1, 2, odd=0) if sizes.often(0.03) else 0
        return NativeProduct.of_numbers(torch.randn(outputs, depth + extra), None)

    layer = Layer(
        kind="full_attention", before_attention=None, qkv=weights(32, 2 * hidden), heads=(2, 1), dim=8, q_norm=None, k_norm=None,
        wide_norm=False, rotates=True, window=None, scaling=0.3, softcap=None, output=weights(hidden, 16), after_attention=None,
        before_mlp=Norm(torch.ones(hidden), 1e-5), gate_up=weights(24, hidden), activation=torch.nn.functional.silu,
        down=weights(hidden, 12), after_mlp=None,
        pair=Pair(Norm(torch.ones(hidden), 1e-5), Norm(torch.ones(hidden), 1e-5), sizes.often(0.5)),
    )  # fmt: skip
    native = NativeLayers([layer], Norm(torch.ones(hidden), 1e-5), "silu", 1.0, torch.float32)
    cache = native.new_cache()
    cache.add_rows(1)
    at = cache.begin_pass(0, 1, sizes.one(4, 9, 16, odd=0), torch.device("cpu"), None)
    known = sizes.one(1, 3, odd=0)
    x, normed = torch.randn(known, hidden), torch.randn(known, hidden)
    call, _kept = native.call(FlatTokens.of(at, None).first(known), cache, x, normed)
    call.turns = sizes.one(1, 1, 1, 1, 2, odd=0.02)
    embeddings, scores = weights(vocab, hidden), weights(count, hidden)
    tokens = most if 0 < most <= LARGE else 1
    made = structs.ChainStruct(
        embeddings=ctypes.addressof(embeddings.struct), scores=ctypes.addressof(scores.struct),
        token_ids=sizes.integers(count, 0, vocab - 1 if sizes.often(0.9) else 2 * vocab) if sizes.often(0.7) else None,
        cosines=sizes.floats(positions, 8), sines=sizes.floats(positions, 8), rotated=sizes.one(8, 4, odd=0.05),
        positions=positions, is_bf16=sizes.one(0, 1, odd=0),
        known=sizes.integers(known, 0, vocab - 1 if sizes.often(0.9) else 2 * vocab), most=most,
        ends=sizes.integers(2, 0, vocab), num_ends=sizes.one(0, 2, odd=0), probability=1.0, threshold=0.0,
        weights=sizes.keep(torch.ones(10, dtype=torch.float64)),
        tokens=sizes.keep(torch.zeros(tokens, dtype=torch.int64)), confidences=sizes.floats(tokens),
    )  # fmt: skip
    native.draft(call, made)


ENTRIES: dict[str, Callable[[Sizes, Any], None]] = {
    "multiply": multiply, "pack": pack, "rows": rows, "add_norm": add_norm, "gate": gate, "attend": attend, "pass": whole,
    "chain": chain, "mix": mix,
}  # fmt: skip


def main(seed: int, count: int) -> None:
    library, sizes = build.library(), Sizes(seed)
    assert library is not None, build.failure_reason()
    torch.manual_seed(seed)
    found = {}
    for name, entry in ENTRIES.items():
        ran = refused = 0
        for _ in range(count):
            try:
                entry(sizes, library)
                ran += 1
            except (ValueError, LookupError):
                refused += 1
        found[name] = [ran, refused]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
