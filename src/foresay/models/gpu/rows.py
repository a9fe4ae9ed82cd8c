"""The operations between matrix products, one program per token, by Triton kernels: norms, rotary positions, gates.

Each computes in float32 and rounds its result once, to the dtype of its output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foresay.models.gpu.attention import PAGE
from foresay.models.gpu.overlap import overlapping, wait
from foresay.models.gpu.product import GATES, Sums, activated, total_of


@triton.jit
def _normed(x, weight, offsets, inside, size, eps):
    """x / rms(x) * weight over `size` values."""
    scale = tl.math.rsqrt(tl.sum(x * x, 0) / size + eps)
    return x * scale * tl.load(weight + offsets, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def _add_norm(
    states, sums, bias, weight_after, weight_before, out, scale, eps_after, eps_before, num_tokens, size,
    BLOCK: tl.constexpr, ADDS: tl.constexpr, AFTER: tl.constexpr, BEFORE: tl.constexpr,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait(OVERLAPS)
    token, offsets = tl.program_id(0), tl.arange(0, BLOCK)
    inside, at = offsets < size, token.to(tl.int64) * size + offsets
    x = tl.load(states + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        dtype: tl.constexpr = states.dtype.element_ty
        more = total_of(sums, bias, token, offsets, inside, num_tokens, size, PARTS, HAS_BIAS, dtype)
        if AFTER:
            more = _normed(more, weight_after, offsets, inside, size, eps_after)
        x = (x + scale * more).to(states.dtype.element_ty)
        tl.store(states + at, x, mask=inside)
        x = x.to(tl.float32)
    if BEFORE:
        x = _normed(x, weight_before, offsets, inside, size, eps_before)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["positions", "slots", "rows"])
def _place(
    sums, bias, q_weight, k_weight, cosines, sines, positions, slots, rows, pages, queries, keys, values,
    q_eps, k_eps, num_tokens, width,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    ROTATED: tl.constexpr, PAGE: tl.constexpr, NORMS: tl.constexpr, EQUAL: tl.constexpr, UNIT: tl.constexpr,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait(OVERLAPS)
    token, head = tl.program_id(0), tl.program_id(1)
    slot, depth = tl.load(slots + token), tl.arange(0, DIM_PADDED)
    dtype: tl.constexpr = queries.dtype.element_ty
    to_query = queries + (token.to(tl.int64) * QUERY_HEADS + head) * DIM + depth
    if slot < 0:
        if head < QUERY_HEADS:
            tl.store(to_query, tl.zeros([DIM_PADDED], dtype), mask=depth < DIM)
        return
    is_value = head >= QUERY_HEADS + KEY_HEADS
    heads: tl.constexpr = QUERY_HEADS + (1 if EQUAL else 2) * KEY_HEADS
    source = head
    if EQUAL:  # the keys are the values, too
        source = tl.where(is_value, head - KEY_HEADS, head)
    inside, outputs = depth < DIM, heads * DIM
    turns = depth < tl.where(is_value, 0, ROTATED)
    half: tl.constexpr = ROTATED // 2
    partner = tl.where(turns, tl.where(depth < half, depth + half, depth - half), depth)
    x = total_of(sums, bias, token, source * DIM + depth, inside, num_tokens, outputs, PARTS, HAS_BIAS, dtype)
    y = total_of(sums, bias, token, source * DIM + partner, inside, num_tokens, outputs, PARTS, HAS_BIAS, dtype)
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
        tl.store(to_query, x.to(dtype), mask=inside)
    else:
        page = tl.load(pages + tl.load(rows + token) * width + slot // PAGE).to(tl.int64)
        key_head = (head - QUERY_HEADS) % max(KEY_HEADS, 1)
        at = ((page * KEY_HEADS + key_head) * PAGE + slot % PAGE) * DIM
        if is_value:
            tl.store(values + at + depth, x.to(values.dtype.element_ty), mask=inside)
        else:
            tl.store(keys + at + depth, x.to(keys.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _gate(
    sums, bias, out, num_tokens, size, BLOCK: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    dtype: tl.constexpr = out.dtype.element_ty
    gate = total_of(sums, bias, token, offsets, inside, num_tokens, 2 * size, PARTS, HAS_BIAS, dtype)
    up = total_of(sums, bias, token, size + offsets, inside, num_tokens, 2 * size, PARTS, HAS_BIAS, dtype)
    tl.store(out + token.to(tl.int64) * size + offsets, (activated(gate, KIND) * up).to(dtype), mask=inside)


Weight = tuple[torch.Tensor, float]
"""Factors of a root-mean-square norm, float32, and its epsilon."""


def add_norm(
    states: torch.Tensor,
    delta: torch.Tensor | Sums | None,
    *,
    after: Weight | None,
    before: Weight | None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Add `scale` times the delta to the states in place, [N, H], and return the states' norm, [N, H].

    after: norm of the delta; None adds it as it is. before: norm of the result; None returns a copy of the states. Without a
    delta, the states' norm alone is computed.
    """
    count, size = states.shape
    out, nothing, sums = torch.empty_like(states), states, Sums.of(states if delta is None else delta)
    first, second = after or (nothing, 0.0), before or (nothing, 0.0)
    _add_norm[(count,)](
        states, *sums.tensors, first[0], second[0], out, scale, first[1], second[1], count, size,
        BLOCK=triton.next_power_of_2(size), ADDS=delta is not None, AFTER=after is not None, BEFORE=before is not None,
        **sums.constants, **overlapping(states.device),
    )  # fmt: skip
    return out


def place(
    joint: torch.Tensor | Sums,
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

    joint: [N, (Hq + 2 Hk) D], queries, keys and values of each token. writes: False for queries alone, [N, Hq D]. equal: True for
    queries and keys, [N, (Hq + Hk) D], whose keys are the values, too. unit: True if values are normalized, without weights.
    keys, values: [pages, Hk, PAGE, D]. turns: cosines and sines of every position, [P, R] float32 each, of which the first R of D
    dimensions turn; None for none. positions, rows: [N] int32.
    slots: [N] int32, -1 for padding, which is not written. pages: see attention.Visible. norms: of each query and key head.
    """
    sums, dim = Sums.of(joint), keys.shape[3]
    _, count, outputs = sums.parts.shape
    key_heads = keys.shape[1] if writes else 0
    query_heads = outputs // dim - (1 if equal else 2) * key_heads
    queries = keys.new_empty(count, query_heads, dim, dtype=sums.dtype)
    cosines, sines = turns or (sums.parts, sums.parts)
    first, second = norms or ((sums.parts, 0.0), (sums.parts, 0.0))
    _place[(count, query_heads + 2 * key_heads)](
        *sums.tensors, first[0], second[0], cosines, sines, positions, slots, rows, pages, queries, keys, values,
        first[1], second[1], count, pages.shape[1],
        QUERY_HEADS=query_heads, KEY_HEADS=key_heads, DIM=dim, DIM_PADDED=triton.next_power_of_2(dim),
        ROTATED=0 if turns is None else cosines.shape[1], PAGE=PAGE, NORMS=norms is not None,
        EQUAL=equal, UNIT=unit, **sums.constants, **overlapping(keys.device),
    )  # fmt: skip
    return queries


def gated(joint: torch.Tensor | Sums, activation: str) -> torch.Tensor:
    """Return activation(gate) * up, [N, I]. joint: [N, 2 I], gate and up of each token. activation: one of GATES."""
    sums = Sums.of(joint)
    count, size = sums.parts.shape[1], sums.parts.shape[2] // 2
    out = sums.parts.new_empty(count, size, dtype=sums.dtype)
    kind = GATES.index(activation)
    _gate[(count, triton.cdiv(size, 1024))](*sums.tensors, out, count, size, BLOCK=1024, KIND=kind, **sums.constants)
    return out
