"""The skinny matrix product: a few tokens times a weight matrix, with the same bits for any number of tokens.

Decoding reads every weight once for a handful of tokens, so that the memory is the limit and the order of sums is free. One tile
of 64 tokens, one instruction shape and one division of the inner dimension serve 1 to 64 tokens, and more in groups of 64: a
token's outputs do not depend on the others. Groups are the fastest dimension of the grid, so that those which read the same
weights run at the same time: for all but the first these come from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TOKENS = 64
"""Tokens of a tile."""
MOST = 512
"""Tokens beyond which a library multiplies, in another order of sums."""
OUTPUTS, INNER = 32, 128
"""Outputs and inputs of a tile of weights."""
PROGRAMS = 512
"""Least number of programs: the inner dimension is divided until there are as many, by a factor that the weight alone decides."""


def parts_of(outputs: int, inputs: int) -> int:
    """Return the number of parts of the inner dimension, a power of two; by the weight's shape alone."""
    parts = 1
    while parts * triton.cdiv(outputs, OUTPUTS) < PROGRAMS and inputs // (2 * parts) >= 4 * INNER:
        parts *= 2
    return parts


@triton.jit(do_not_specialize=["num_tokens"])
def _product(
    states, weight, sums, bias, num_tokens, outputs, inputs, stride,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    part, token = tl.program_id(2), tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inner = tl.arange(0, INNER)
    steps = (inputs + INNER - 1) // INNER
    share = (steps + PARTS - 1) // PARTS
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for step in range(part * share, tl.minimum((part + 1) * share, steps)):
        at = step * INNER + inner
        x = tl.load(
            states + token[:, None].to(tl.int64) * stride + at[None, :],
            mask=(token < num_tokens)[:, None] & (at < inputs)[None, :],
            other=0.0,
        )
        w = tl.load(
            weight + column[None, :].to(tl.int64) * inputs + at[:, None],
            mask=(column < outputs)[None, :] & (at < inputs)[:, None],
            other=0.0,
        )
        total += tl.dot(x, w, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        sums + (part * num_tokens + token[:, None].to(tl.int64)) * outputs + column[None, :],
        total.to(sums.dtype.element_ty),
        mask=(token < num_tokens)[:, None] & (column < outputs)[None, :],
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _reduce(sums, bias, out, num_tokens, outputs, BLOCK: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < outputs
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(PARTS):
        total += tl.load(sums + (part * num_tokens + token) * outputs + column, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * outputs + column, total.to(out.dtype.element_ty), mask=inside)


def product(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return states times the transposed weight plus the bias, [N, O] in the dtype of the states.

    states: [N, I], rows contiguous. weight: [O, I] contiguous. bias: [O].
    """
    (count, inputs), outputs = states.shape, weight.shape[0]
    parts = parts_of(outputs, inputs)
    sums, own = sums_of(parts, states, outputs, bias)
    _product[(triton.cdiv(count, TOKENS), triton.cdiv(outputs, OUTPUTS), parts)](
        states, weight, sums, sums if own is None else own, count, outputs, inputs, states.stride(0),
        TOKENS=TOKENS, OUTPUTS=OUTPUTS, INNER=INNER, PARTS=parts, HAS_BIAS=own is not None,
    )  # fmt: skip
    return sums[0] if parts == 1 else reduced(sums, bias, states.dtype)


def sums_of(
    parts: int, states: torch.Tensor, outputs: int, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return memory for the sums of parts, [parts, N, O], and the bias that these contain: with one part they are the outputs."""
    dtype = states.dtype if parts == 1 else torch.float32
    sums = torch.empty(parts, len(states), outputs, dtype=dtype, device=states.device)
    return sums, bias if parts == 1 else None


def reduced(sums: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the sums of the parts of an inner dimension in order, [parts, N, O] float32 -> [N, O], plus the bias [O]."""
    parts, count, outputs = sums.shape
    out = torch.empty(count, outputs, dtype=dtype, device=sums.device)
    _reduce[(count, triton.cdiv(outputs, 1024))](
        sums, sums if bias is None else bias, out, count, outputs, BLOCK=1024, PARTS=parts, HAS_BIAS=bias is not None
    )
    return out
