"""A draft's next token in one launch: one program for a row of up to MOST scores, which stay in its registers.

Computes what sampling_kernels.py does for vocabularies of any size in a launch for each step: there a row is divided among
programs, which a draft's few scores do not pay for. Thresholds are found bit by bit, as the whole row is at hand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foresay.decoding.devices import launching_on
from foresay.decoding.sampling_kernels import block_of, place_in

MOST = 1 << 15
"""Most scores of a row."""
_BLOCK = 128
"""Tokens of a block, the first level of a draw."""


@triton.jit
def _raised(weights, bits, floor, goal, BY_MASS: tl.constexpr):
    """The largest weight, as bits, such that enough tokens, or enough of the mass, reach it and the floor."""
    if BY_MASS:
        whole = tl.sum(tl.sum(tl.where(bits >= floor, weights, 0.0), 1), 0)
        goal = tl.where(goal < 1.0, goal * whole, float("inf"))
    found = 0
    for step in range(30):  # floats from 0 to 1 have 30 bits, ordered as they are
        candidate = found + (1 << (29 - step))
        reached = bits >= tl.maximum(candidate, floor)
        if BY_MASS:
            total = tl.sum(tl.sum(tl.where(reached, weights, 0.0), 1), 0)
        else:
            total = tl.sum(tl.sum(tl.where(reached, 1.0, 0.0), 1), 0)
        found = tl.where(total >= goal, candidate, found)
    # a goal of 0, as a share that float32 does not have, leaves the greatest weight, which is 1
    return tl.maximum(floor, tl.minimum(found, 0x3F800000))


@triton.jit(do_not_specialize=["count"])
def _choose(
    scores, numbers, uniforms, steps, probs, tokens, vocab, count, width,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SAMPLES: tl.constexpr, BY_K: tl.constexpr, BY_P: tl.constexpr,
    BY_MIN: tl.constexpr, GREATEST: tl.constexpr = 3.4028234663852886e38,
):  # fmt: skip
    row, block, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    at = block[:, None] * BLOCK + lane[None, :]
    x = tl.load(scores + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    known = tl.where(x != x, GREATEST, tl.minimum(x, GREATEST))  # NaN counts as the greatest
    top = tl.max(tl.max(known, 1), 0)
    token = tl.min(tl.min(tl.where(known == top, at, vocab), 1), 0)
    if SAMPLES:
        x = (x - top) / tl.load(numbers + row)
        weights = tl.where(x < -80.0, 0.0, tl.exp(x))
        bits, floor = weights.to(tl.int32, bitcast=True), 0
        if BY_K:
            most = tl.load(numbers + count + row)
            floor = _raised(weights, bits, floor, tl.where(most > 0, most, vocab + 1.0), False)
        if BY_P:
            floor = _raised(weights, bits, floor, tl.load(numbers + 2 * count + row), True)
        least = tl.cast(floor, tl.float32, bitcast=True) if BY_K or BY_P else 0.0
        if BY_MIN:
            least = tl.maximum(least, tl.load(numbers + 3 * count + row))
        weights = tl.where(weights < least, 0.0, weights)
        weights = weights / tl.sum(tl.sum(weights, 1), 0)
        tl.store(probs + row * vocab + at, weights, mask=at < vocab)
        uniform = tl.load(uniforms + row * width + tl.minimum(tl.load(steps + row), width - 1))
        chosen, rest = block_of(tl.sum(weights, 1).to(tl.float64), block, uniform)
        inner = tl.sum(tl.where((block == chosen)[:, None], weights, 0.0), 0)
        drawn = tl.minimum(chosen * BLOCK + place_in(inner.to(tl.float64), lane, rest, BLOCK), vocab - 1)
        token = tl.where(tl.load(numbers + 4 * count + row) > 0, token, drawn)
    tl.store(tokens + row, token.to(tl.int64))


def choose(
    scores: torch.Tensor,
    numbers: torch.Tensor,
    uniforms: torch.Tensor,
    steps: torch.Tensor,
    probs: torch.Tensor,
    kinds: tuple[bool, bool, bool] | None,
) -> torch.Tensor:
    """Return the index of each row's chosen score, [R] int64. scores: [R, V], contiguous, V at most MOST.

    kinds: whether some row has a top-k, top-p and min-p; None takes the likeliest and reads nothing else. numbers: [5, R]
    float32: temperature, top-k, top-p, min-p, and 1 for rows that take the likeliest. uniforms: [R, W] float64, of which row i
    reads number steps[i], [R] int32. probs: [R, V] float32, which receives the distributions.
    """
    (count, vocab), device = scores.shape, scores.device
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    blocks = int(triton.next_power_of_2(triton.cdiv(vocab, _BLOCK)))
    by_k, by_p, by_min = kinds or (False, False, False)
    with launching_on(device):
        _choose[(count,)](
            scores, numbers, uniforms, steps, probs, tokens, vocab, count, uniforms.shape[1],
            BLOCKS=blocks, BLOCK=_BLOCK, SAMPLES=kinds is not None, BY_K=by_k, BY_P=by_p, BY_MIN=by_min,
            num_warps=min(16, max(1, blocks // 16)),
        )  # fmt: skip
    return tokens
