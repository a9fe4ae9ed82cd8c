"""Mixtures of experts by Triton kernels: only selected experts are read, and the host reads no selection.

Owns the order of kernels of such a layer. A token's outputs do not depend on the others: an expert multiplies its tokens in tiles
of one shape, and a token's experts are added in the order of their weights.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from foresay.models.gpu.blocks import BlockProduct
from foresay.models.gpu.product import INNER, LONG
from foresay.models.gpu.registers import add_step
from foresay.models.gpu.rows import gated
from foresay.models.layer import ClampedGate, Experts, Sigmoids, StackedExperts

TOKENS, PROMPT_TOKENS = 16, 64
"""Tokens of a tile of an expert, in a step and in a prompt."""
_CHUNK = 1024
"""Selections that are compared at once."""
_NUMBERS = dict.fromkeys(("GROUP", "BITS", "ZERO", "PER", "SHARED", "QUAD"), 0)
_NUMBERS |= dict.fromkeys(("HAS_ZEROS", "HAS_MINS", "FLOATS", "PTX"), False)
"""`BlockProduct.constants` of weights that are numbers."""


@triton.jit(do_not_specialize=["num_tokens", "num_pairs"], do_not_specialize_on_alignment=["slots"])
def _list(selected, slots, pairs, counts, num_pairs, num_tokens, ACTIVE: tl.constexpr, CHUNK: tl.constexpr):
    """The selections of an expert, in order. Padding tokens, of slot -1, select none."""
    expert = tl.program_id(0)
    count = 0
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        inside = pair < num_pairs
        chosen = tl.load(selected + pair, mask=inside, other=-1) == expert
        chosen = chosen & (tl.load(slots + pair // ACTIVE, mask=inside, other=-1) >= 0)
        ones = chosen.to(tl.int32)
        tl.store(pairs + expert.to(tl.int64) * num_tokens + count + tl.cumsum(ones, 0) - 1, pair, mask=chosen)
        count += tl.sum(ones, 0)
    tl.store(counts + expert, count)


@triton.jit(do_not_specialize=["num_tokens"])
def _grouped(
    states, weight, bias, pairs, counts, out, num_tokens, outputs, inputs, expert_stride, output_stride, input_stride,
    high, scales, zeros, mins, whole, level_stride, num_scales,
    ACTIVE: tl.constexpr, OF_TOKENS: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    INNER: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, PER: tl.constexpr,
    SHARED: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINS: tl.constexpr, FLOATS: tl.constexpr, QUAD: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The products of the tokens of each expert. GROUP: of quantized weights, whose levels are `weight`; 0 for numbers."""
    column, expert = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1).to(tl.int64)
    row_of_all = expert * outputs + tl.minimum(column, outputs - 1)  # padding repeats the last one, and is not stored
    inner, count = tl.arange(0, INNER), tl.load(counts + expert)
    unit: tl.constexpr = GROUP * QUAD if GROUP > 0 else INNER
    for start in range(0, count, TOKENS):
        place = start + tl.arange(0, TOKENS)
        valid = place < count
        pair = tl.load(pairs + expert * num_tokens + place, mask=valid, other=0).to(tl.int64)
        begins = (pair // ACTIVE if OF_TOKENS else pair) * inputs
        total = tl.zeros([OUTPUTS, TOKENS], tl.float32)
        for step in range((inputs + unit - 1) // unit):
            if GROUP > 0:
                total = add_step(
                    total, states, begins, valid, weight, high, scales, zeros, mins, whole, row_of_all, step, inputs,
                    level_stride, num_scales,
                    GROUP, BITS, ZERO, PER, SHARED, HAS_ZEROS, HAS_MINS, FLOATS, PTX, QUAD,
                )  # fmt: skip
            else:
                at = step * INNER + inner
                x = tl.load(
                    states + begins[None, :] + at[:, None], mask=valid[None, :] & (at < inputs)[:, None], other=0.0
                )
                w = tl.load(
                    weight + expert * expert_stride + column[:, None].to(tl.int64) * output_stride
                    + at[None, :].to(tl.int64) * input_stride,
                    mask=(column < outputs)[:, None] & (at < inputs)[None, :],
                    other=0.0,
                )  # fmt: skip
                total += tl.dot(w, x, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + expert * outputs + column, mask=column < outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(
            out + pair[None, :] * outputs + column[:, None],
            total.to(out.dtype.element_ty),
            mask=valid[None, :] & (column < outputs)[:, None],
        )


@triton.jit
def _clamped(joint, out, size, alpha, limit, ALTERNATES: tl.constexpr, BLOCK: tl.constexpr):
    """gpt-oss's gate, see ClampedGate. Gates and ups alternate, or the gates come first."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    first, second = (2 * offsets, 2 * offsets + 1) if ALTERNATES else (offsets, size + offsets)
    gate = tl.load(joint + row * 2 * size + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joint + row * 2 * size + second, mask=inside, other=0.0).to(tl.float32)
    gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    value = gate / (1 + tl.exp(-alpha * gate)) * (up + 1)
    tl.store(out + row * size + offsets, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _mix(parts, weights, out, size, ACTIVE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    total = tl.zeros([BLOCK], tl.float32)
    for index in range(ACTIVE):
        part = tl.load(parts + (token * ACTIVE + index) * size + offsets, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(weights + token * ACTIVE + index)
    tl.store(out + token * size + offsets, total.to(out.dtype.element_ty), mask=inside)


def selected(scores: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token and their weights, [N, k] int32 and float32. scores: [N, experts] of the router."""
    if (by := experts.sigmoids) is not None:
        return _by_sigmoids(scores.float(), experts, by)
    if experts.clamped is not None:  # gpt-oss: a softmax of the selected ones
        found, index = scores.float().topk(experts.active, -1)
        return index.int(), found.softmax(-1)
    weights, index = scores.float().softmax(-1).topk(experts.active, -1)
    return index.int(), weights / weights.sum(-1, keepdim=True) if experts.renormalized else weights


def _by_sigmoids(scores: torch.Tensor, experts: Experts, by: Sigmoids) -> tuple[torch.Tensor, torch.Tensor]:
    weights = scores.sigmoid()
    ranked = weights + by.correction.float()
    if by.groups > 1:
        grouped = ranked.unflatten(-1, (by.groups, -1))
        best = grouped.topk(2, -1).values.sum(-1).topk(by.active_groups, -1).indices
        allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, value=True)
        ranked = torch.where(allowed[..., None], grouped, 0.0).flatten(-2)
    index = ranked.topk(experts.active, -1).indices
    found = weights.gather(-1, index)
    if experts.renormalized:
        found = found / (found.sum(-1, keepdim=True) + 1e-20)
    return index.int(), found * by.scale


def mixture(
    states: torch.Tensor,
    scores: torch.Tensor,
    experts: Experts,
    activation: str,
    slots: torch.Tensor,
    *,
    is_prompt: bool,
) -> torch.Tensor:
    """Return the weighted sums of the tokens' experts, [N, H], without shared experts; zeros for padding.

    states: [N, H]. scores: [N, experts] of the router. slots: [N] int32, -1 for padding.
    """
    stacked = experts.stacked
    assert stacked is not None
    index, weights = selected(scores, experts)
    (count, active), size, device = index.shape, states.shape[1], states.device
    num_experts = scores.shape[1]
    pairs = torch.empty(num_experts, count, dtype=torch.int32, device=device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    _list[(num_experts,)](
        index.contiguous(), slots, pairs, counts, count * active, count, ACTIVE=active,
        CHUNK=min(_CHUNK, triton.next_power_of_2(count * active)),
    )  # fmt: skip
    lists = pairs, counts, PROMPT_TOKENS if is_prompt else TOKENS
    joint = _multiply(states, stacked.gate_up, stacked.gate_up_bias, lists, active, of_tokens=True)
    inner = _gated(joint, experts.clamped, stacked, activation)
    parts = _multiply(inner, stacked.down, stacked.down_bias, lists, active, of_tokens=False)
    out = torch.empty_like(states)
    _mix[(count, triton.cdiv(size, 1024))](parts, weights.contiguous(), out, size, ACTIVE=active, BLOCK=1024)
    return out


def _multiply(
    states: torch.Tensor, weight: Any, bias: torch.Tensor | None, lists: Any, active: int, *, of_tokens: bool
) -> torch.Tensor:
    """Return each selection's product, [N * k, outputs]; zeros for padding. weight: see StackedExperts."""
    pairs, counts, tokens = lists
    num_experts, count = pairs.shape
    if isinstance(weight, BlockProduct):
        levels, *rest = weight.tensors
        outputs, strides, (inputs, *sizes), how = (
            weight.out_features // num_experts,
            (0, 0, 0),
            weight.sizes,
            weight.constants,
        )
    else:
        levels, rest, (_, outputs, inputs), strides, sizes = weight, [weight] * 5, weight.shape, weight.stride(), [0, 0]
        how = _NUMBERS
    out = states.new_zeros(count * active, outputs)
    _grouped[(triton.cdiv(outputs, LONG), num_experts)](
        states, levels, levels if bias is None else bias, pairs, counts, out, count, outputs, inputs, *strides, *rest, *sizes,
        ACTIVE=active, OF_TOKENS=of_tokens, HAS_BIAS=bias is not None, TOKENS=tokens, OUTPUTS=LONG, INNER=INNER, **how,
    )  # fmt: skip
    return out


def _gated(joint: torch.Tensor, clamped: ClampedGate | None, stacked: StackedExperts, activation: str) -> torch.Tensor:
    if clamped is None:
        return gated(joint, activation)
    rows, size = joint.shape[0], joint.shape[1] // 2
    out = joint.new_empty(rows, size)
    _clamped[(rows, triton.cdiv(size, 1024))](
        joint, out, size, clamped.alpha, clamped.limit, ALTERNATES=stacked.alternates, BLOCK=1024
    )
    return out
