"""The operations between matrix products, one program per token, by Triton kernels: norms, rotary positions, gates.

Each computes in float32 and rounds its result once, to the dtype of its output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foresay.models.gpu.attention import PAGE

GATES = ("silu", "gelu_pytorch_tanh", "gelu")
"""Activations that a gate may have."""


@triton.jit
def _normed(x, weight, offsets, inside, size, eps):
    """x / rms(x) * weight over `size` values."""
    scale = tl.math.rsqrt(tl.sum(x * x, 0) / size + eps)
    return x * scale * tl.load(weight + offsets, mask=inside, other=0.0)


@triton.jit
def _add_norm(
    states, delta, weight_after, weight_before, out, scale, eps_after, eps_before, size,
    BLOCK: tl.constexpr, ADDS: tl.constexpr, AFTER: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, BLOCK)
    inside, at = offsets < size, tl.program_id(0).to(tl.int64) * size + offsets
    x = tl.load(states + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        more = tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        if AFTER:
            more = _normed(more, weight_after, offsets, inside, size, eps_after)
        x = (x + scale * more).to(states.dtype.element_ty)
        tl.store(states + at, x, mask=inside)
        x = x.to(tl.float32)
    if BEFORE:
        x = _normed(x, weight_before, offsets, inside, size, eps_before)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots", "rows"])
def _place(
    joint, q_weight, k_weight, cosines, sines, positions, slots, rows, pages, queries, keys, values, q_eps, k_eps, width,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    ROTATED: tl.constexpr, PAGE: tl.constexpr, NORMS: tl.constexpr, EQUAL: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    is_value = head >= QUERY_HEADS + KEY_HEADS
    depth = tl.arange(0, DIM_PADDED)
    heads: tl.constexpr = QUERY_HEADS + (1 if EQUAL else 2) * KEY_HEADS
    source = head
    if EQUAL:  # the keys are the values, too
        source = tl.where(is_value, head - KEY_HEADS, head)
    inside, base = depth < DIM, (token.to(tl.int64) * heads + source) * DIM
    turns = depth < tl.where(is_value, 0, ROTATED)
    half: tl.constexpr = ROTATED // 2
    partner = tl.where(turns, tl.where(depth < half, depth + half, depth - half), depth)
    x = tl.load(joint + base + depth, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(joint + base + partner, mask=inside, other=0.0).to(tl.float32)
    if NORMS and not is_value:
        weight, eps = k_weight, k_eps
        if head < QUERY_HEADS:
            weight, eps = q_weight, q_eps
        scale = tl.math.rsqrt(tl.sum(x * x, 0) / DIM + eps)
        x = x * scale * tl.load(weight + depth, mask=inside, other=0.0)
        y = y * scale * tl.load(weight + partner, mask=inside, other=0.0)
    if UNIT and is_value:
        x = x * tl.math.rsqrt(tl.sum(x * x, 0) / DIM + k_eps)
    if ROTATED > 0:
        turn = tl.load(positions + token).to(tl.int64) * ROTATED + depth
        cosine = tl.load(cosines + turn, mask=turns, other=1.0)
        sine = tl.load(sines + turn, mask=turns, other=0.0)
        x = x * cosine + y * tl.where(depth < half, -sine, sine)
    if head < QUERY_HEADS:
        at = (token.to(tl.int64) * QUERY_HEADS + head) * DIM
        tl.store(queries + at + depth, x.to(queries.dtype.element_ty), mask=inside)
    else:
        page = tl.load(pages + tl.load(rows + token) * width + slot // PAGE).to(tl.int64)
        key_head = (head - QUERY_HEADS) % max(KEY_HEADS, 1)
        at = ((page * KEY_HEADS + key_head) * PAGE + slot % PAGE) * DIM
        if is_value:
            tl.store(values + at + depth, x.to(values.dtype.element_ty), mask=inside)
        else:
            tl.store(keys + at + depth, x.to(keys.dtype.element_ty), mask=inside)


@triton.jit
def _gate(joint, out, size, BLOCK: tl.constexpr, KIND: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    gate = tl.load(joint + token * 2 * size + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joint + token * 2 * size + size + offsets, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        gate = gate / (1 + tl.exp(-gate))
    elif KIND == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1 + tl.exp(-2 * inner))
    else:
        gate = 0.5 * gate * (1 + tl.math.erf(gate * 0.7071067811865476))
    tl.store(out + token * size + offsets, (gate * up).to(out.dtype.element_ty), mask=inside)


Weight = tuple[torch.Tensor, float]
"""Factors of a root-mean-square norm, float32, and its epsilon."""


def add_norm(
    states: torch.Tensor, delta: torch.Tensor | None, *, after: Weight | None, before: Weight | None, scale: float = 1.0
) -> torch.Tensor:
    """Add `scale` times the delta to the states in place, [N, H], and return the states' norm, [N, H].

    after: norm of the delta; None adds it as it is. before: norm of the result; None returns a copy of the states. Without a
    delta, the states' norm alone is computed.
    """
    count, size = states.shape
    out, nothing = torch.empty_like(states), states
    first, second = after or (nothing, 0.0), before or (nothing, 0.0)
    _add_norm[(count,)](
        states, states if delta is None else delta, first[0], second[0], out, scale, first[1], second[1], size,
        BLOCK=triton.next_power_of_2(size), ADDS=delta is not None, AFTER=after is not None, BEFORE=before is not None,
    )  # fmt: skip
    return out


def place(
    joint: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    turns: tuple[torch.Tensor, torch.Tensor] | None,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    pages: torch.Tensor,
    norms: tuple[Weight, Weight] | None = None,
    *,
    writes: bool = True,
    equal: bool = False,
    unit: bool = False,
) -> torch.Tensor:
    """Normalize and rotate queries and keys, write keys and values to their pages, and return the queries, [N, Hq, D].

    joint: [N, Hq + 2 Hk, D], queries, keys and values of each token. writes: False for queries alone, [N, Hq, D]. equal: True for
    queries and keys, [N, Hq + Hk, D], whose keys are the values, too. unit: True if values are normalized, without weights.
    keys, values: [pages, Hk, PAGE, D]. turns: cosines and sines of every position, [P, R] float32 each, of which the first R of D
    dimensions turn; None for none. positions, rows: [N] int32.
    slots: [N] int32, -1 for padding, which is not written. pages: see attention.Visible. norms: of each query and key head.
    """
    count, heads, dim = joint.shape
    key_heads = keys.shape[1] if writes else 0
    query_heads = heads - (1 if equal else 2) * key_heads
    queries = torch.zeros(count, query_heads, dim, dtype=joint.dtype, device=joint.device)
    cosines, sines = turns or (joint, joint)
    first, second = norms or ((joint, 0.0), (joint, 0.0))
    _place[(count, query_heads + 2 * key_heads)](
        joint, first[0], second[0], cosines, sines, positions, slots, rows, pages, queries, keys, values,
        first[1], second[1], pages.shape[1],
        QUERY_HEADS=query_heads, KEY_HEADS=key_heads, DIM=dim, DIM_PADDED=triton.next_power_of_2(dim),
        ROTATED=0 if turns is None else cosines.shape[1], PAGE=PAGE, NORMS=norms is not None,
        EQUAL=equal, UNIT=unit,
    )  # fmt: skip
    return queries


def gated(joint: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up, [N, I]. joint: [N, 2 I], gate and up of each token. activation: one of GATES."""
    count, size = joint.shape[0], joint.shape[1] // 2
    out = torch.empty(count, size, dtype=joint.dtype, device=joint.device)
    _gate[(count, triton.cdiv(size, 1024))](joint, out, size, BLOCK=1024, KIND=GATES.index(activation))
    return out
