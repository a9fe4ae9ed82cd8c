"""Logits to probabilities and tokens on a GPU, by Triton kernels: what truncation.py and draws.py compute, in a few launches.

A row is divided among programs of SPAN tokens whose results are combined in a fixed order, so that a row's bits depend on neither
other rows nor chance. Top-k and top-p are thresholds: the largest weight such that so many tokens, or so much of the mass, reach
it. The bits of positive floats are ordered as the floats, so that a threshold is found digit by digit, without sorting and
without reading a value back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from foresay.decoding.devices import launching_on

SPAN = 4096
"""Tokens of a program."""
_BLOCK = 128
"""Tokens of a block, the first level of a draw."""
_CHUNK = 128
"""Tokens that are compared with all candidates of a digit at once."""
_DIGIT = 5
_LEVELS = 6
"""Digits of a weight: floats from 0 to 1 have 30 bits."""
_DIGITS = 1 << _DIGIT


@triton.jit(do_not_specialize_on_alignment=["tops", "masses", "best"])
def _peaks(scores, tops, masses, best, vocab, SPAN: tl.constexpr, GREATEST: tl.constexpr = 3.4028234663852886e38):
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = part * SPAN + tl.arange(0, SPAN)
    x = tl.load(scores + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, GREATEST, tl.minimum(x, GREATEST))  # NaN counts as the greatest
    top = tl.max(x, 0)
    out = row * parts + part
    tl.store(tops + out, top)
    tl.store(best + out, tl.min(tl.where(x == top, at, vocab), 0))
    tl.store(masses + out, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0))


@triton.jit(do_not_specialize_on_alignment=["tops", "masses", "best"])
def _likeliest(tops, masses, best, tokens, probability, vocab, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS_PADDED)
    inside = part < PARTS
    own = tl.load(tops + row * PARTS + part, mask=inside, other=float("-inf"))
    top = tl.max(own, 0)
    first = tl.load(best + row * PARTS + part, mask=inside, other=0)
    token = tl.min(tl.where(inside & (own == top), first, vocab), 0)
    mass = tl.load(masses + row * PARTS + part, mask=inside, other=0.0)
    scale = tl.exp(own - tl.where(top == float("-inf"), 0.0, top))
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(probability + row, 1 / tl.maximum(tl.sum(mass * scale, 0), 1.0))  # the likeliest alone has 1


@triton.jit(do_not_specialize_on_alignment=["tops", "temperature", "sums"])
def _weigh(scores, tops, temperature, weights, sums, vocab, SPAN: tl.constexpr, PARTS: tl.constexpr,
           PARTS_PADDED: tl.constexpr):  # fmt: skip
    """exp((x - max) / temperature), 0 below e^-80."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    others, at = tl.arange(0, PARTS_PADDED), part * SPAN + tl.arange(0, SPAN)
    top = tl.max(tl.load(tops + row * PARTS + others, mask=others < PARTS, other=float("-inf")), 0)
    x = tl.load(scores + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    x = (x - top) / tl.load(temperature + row)
    weight = tl.where(x < -80.0, 0.0, tl.exp(x))
    tl.store(weights + row * vocab + at, weight, mask=at < vocab)
    tl.store(sums + row * PARTS + part, tl.sum(weight, 0))


@triton.jit
def _totals(partial, row, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, DIGITS: tl.constexpr):
    """The sums of each candidate of a digit over the parts of a row."""
    part, digit = tl.arange(0, PARTS_PADDED), tl.arange(0, DIGITS)
    found = tl.load(
        partial + (row * PARTS + part[:, None]) * DIGITS + digit[None, :], mask=(part < PARTS)[:, None], other=0.0
    )
    return tl.sum(found, 0)


@triton.jit
def _goal(goals, totals, row, FIRST: tl.constexpr, BY_MASS: tl.constexpr, DIGITS: tl.constexpr):
    """The number of tokens, or the mass, to be reached. The first digit's sums contain the whole mass, that of candidate 0."""
    goal = tl.load(goals + row)
    if FIRST and BY_MASS:
        whole = tl.sum(tl.where(tl.arange(0, DIGITS) == 0, totals, 0.0), 0)
        goal = tl.where(goal < 1.0, goal * whole, float("inf"))
    return goal


@triton.jit
def _extended(prefix, totals, goal, shift, DIGITS: tl.constexpr):
    """The prefix with its next digit: the largest whose sums reach the goal."""
    digit = tl.arange(0, DIGITS)
    return prefix + (tl.max(tl.where(totals >= goal, digit, 0), 0) << shift)


@triton.jit(do_not_specialize_on_alignment=["floors", "goals", "sums_before", "sums"])
def _search(
    weights, floors, goals, prefixes, sums_before, sums, vocab, shift,
    LEVEL: tl.constexpr, BY_MASS: tl.constexpr, SPAN: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr, DIGIT: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    digit, prefix = tl.arange(0, DIGITS), 0
    if LEVEL > 0:
        totals = _totals(sums_before, row, PARTS, PARTS_PADDED, DIGITS)
        goal = _goal(goals + (LEVEL - 1) * tl.num_programs(0), totals, row, LEVEL == 1, BY_MASS, DIGITS)
        prefix = tl.load(prefixes + (LEVEL - 1) * tl.num_programs(0) + row)
        prefix = _extended(prefix, totals, goal, shift + DIGIT, DIGITS)
        if part == 0:
            tl.store(goals + LEVEL * tl.num_programs(0) + row, goal)
            tl.store(prefixes + LEVEL * tl.num_programs(0) + row, prefix)
    elif part == 0:
        tl.store(prefixes + row, 0)
    floor, candidates = tl.load(floors + row), prefix + (digit << shift)
    found = tl.zeros([DIGITS, CHUNK], tl.float32)
    for step in range(SPAN // CHUNK):
        at = part * SPAN + step * CHUNK + tl.arange(0, CHUNK)
        weight = tl.load(weights + row * vocab + at, mask=at < vocab, other=-1.0)
        bits = weight.to(tl.int32, bitcast=True)
        reaches = (bits >= floor)[None, :] & (bits[None, :] >= candidates[:, None])
        if BY_MASS:
            found += tl.where(reaches, weight[None, :], 0.0)
        else:
            found += tl.where(reaches, 1.0, 0.0)
    tl.store(sums + (row * PARTS + part) * DIGITS + digit, tl.sum(found, 1))


@triton.jit(do_not_specialize_on_alignment=["goals", "sums", "thresholds"])
def _threshold(
    goals, prefixes, sums, thresholds,
    LEVEL: tl.constexpr, BY_MASS: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    totals = _totals(sums, row, PARTS, PARTS_PADDED, DIGITS)
    goal = _goal(goals + LEVEL * tl.num_programs(0), totals, row, LEVEL == 0, BY_MASS, DIGITS)
    prefix = tl.load(prefixes + LEVEL * tl.num_programs(0) + row)
    # a goal of 0, as a share that float32 does not have, leaves the greatest weight, which is 1
    found = tl.minimum(_extended(prefix, totals, goal, 0, DIGITS), 0x3F800000)
    tl.store(thresholds + row, tl.maximum(tl.load(thresholds + row), found))


@triton.jit(do_not_specialize_on_alignment=["thresholds", "min_p", "sums"])
def _cut(weights, thresholds, min_p, sums, vocab, SPAN: tl.constexpr, PARTS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * SPAN + tl.arange(0, SPAN)
    weight = tl.load(weights + row * vocab + at, mask=at < vocab, other=0.0)
    least = tl.maximum(tl.load(thresholds + row).to(tl.float32, bitcast=True), tl.load(min_p + row))
    weight = tl.where(weight < least, 0.0, weight)
    tl.store(weights + row * vocab + at, weight, mask=at < vocab)
    tl.store(sums + row * PARTS + part, tl.sum(weight, 0))


@triton.jit(do_not_specialize_on_alignment=["sums"])
def _divide(weights, sums, vocab, SPAN: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    others, at = tl.arange(0, PARTS_PADDED), part * SPAN + tl.arange(0, SPAN)
    total = tl.sum(tl.load(sums + row * PARTS + others, mask=others < PARTS, other=0.0), 0)
    weight = tl.load(weights + row * vocab + at, mask=at < vocab, other=0.0)
    tl.store(weights + row * vocab + at, weight / total, mask=at < vocab)


@triton.jit
def _block_sums(probs, sums, vocab, blocks, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = part * (SPAN // BLOCK) + tl.arange(0, SPAN // BLOCK)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    found = tl.load(probs + row * vocab + at, mask=at < vocab, other=0.0)
    tl.store(sums + row * blocks + block, tl.sum(found, 1), mask=block < blocks)


@triton.jit
def block_of(mass, block, uniform):
    """The block in which a uniform's share of the mass ends, and what is left of it there. mass: of each block, float64."""
    ends = tl.cumsum(mass, 0)
    goal = uniform * tl.max(ends, 0)
    last = tl.max(tl.where(mass > 0, block, 0), 0)
    chosen = tl.minimum(tl.sum(tl.where(ends <= goal, 1, 0), 0), last)
    return chosen, goal - tl.sum(tl.where(block == chosen, ends - mass, 0.0), 0)


@triton.jit
def place_in(inner, place, rest, BLOCK: tl.constexpr):
    """The index in a block at which the rest of a draw ends. inner: the block's probabilities, float64."""
    index = tl.sum(tl.where(tl.cumsum(inner, 0) <= rest, 1, 0), 0)
    index = tl.minimum(index, tl.max(tl.where(inner > 0, place, 0), 0))
    # rounding may leave the rest slightly below zero: then the first positive entry is drawn
    return tl.maximum(index, tl.min(tl.where(inner > 0, place, BLOCK - 1), 0))


@triton.jit
def _inverse(
    probs, sums, rows, uniforms, tokens, vocab, blocks, BLOCK: tl.constexpr, BLOCKS_PADDED: tl.constexpr
):  # fmt: skip
    draw = tl.program_id(0)
    row, block = tl.load(rows + draw), tl.arange(0, BLOCKS_PADDED)
    mass = tl.load(sums + row * blocks + block, mask=block < blocks, other=0.0).to(tl.float64)
    chosen, rest = block_of(mass, block, tl.load(uniforms + draw))
    place = tl.arange(0, BLOCK)
    at = chosen * BLOCK + place
    inner = tl.load(probs + row * vocab + at, mask=at < vocab, other=0.0).to(tl.float64)
    index = place_in(inner, place, rest, BLOCK)
    tl.store(tokens + draw, tl.minimum(chosen * BLOCK + index, vocab - 1).to(tl.int64))


@dataclass(frozen=True, slots=True)
class Cuts:
    """Limits of the distributions of some rows, None for a kind that no row has; each [N]."""

    top_k: torch.Tensor | None = None
    """int64, 0 for all."""
    top_p: torch.Tensor | None = None
    """float32, 1 for all."""
    min_p: torch.Tensor | None = None
    """float32, 0 for all."""


def likeliest(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first greatest score's index and its softmax probability, [N] int64 and float32. scores: [N, V], contiguous.

    NaN counts as the greatest.
    """
    (count, vocab), parts = scores.shape, _parts(scores)
    device = scores.device
    tops, masses = torch.empty(2, count, parts, dtype=torch.float32, device=device)
    best = torch.empty(count, parts, dtype=torch.int32, device=device)
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    probability = torch.empty(count, dtype=torch.float32, device=device)
    with launching_on(device):
        _peaks[(count, parts)](scores, tops, masses, best, vocab, SPAN=SPAN)
        _likeliest[(count,)](tops, masses, best, tokens, probability, vocab, PARTS=parts, PARTS_PADDED=_padded(parts))
    return tokens, probability


def probabilities(scores: torch.Tensor, temperature: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """Return the probabilities after temperature, top-k, top-p and min-p, [N, V] float32; see truncation.probabilities.

    scores: [N, V], contiguous. temperature: [N] float32, positive.
    """
    with launching_on(scores.device):
        return _probabilities(scores, temperature, cuts)


def _probabilities(scores: torch.Tensor, temperature: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    (count, vocab), parts, device = scores.shape, _parts(scores), scores.device
    shared = {"PARTS": parts, "PARTS_PADDED": _padded(parts)}
    grid = (count, parts)
    tops, sums = torch.empty(2, count, parts, dtype=torch.float32, device=device)
    best = torch.empty(count, parts, dtype=torch.int32, device=device)
    out = torch.empty(count, vocab, dtype=torch.float32, device=device)
    _peaks[grid](scores, tops, sums, best, vocab, SPAN=SPAN)
    _weigh[grid](scores, tops, temperature, out, sums, vocab, SPAN=SPAN, **shared)
    if any(one is not None for one in (cuts.top_k, cuts.top_p, cuts.min_p)):
        thresholds = torch.zeros(count, dtype=torch.int32, device=device)
        if cuts.top_k is not None:
            goals = torch.where(cuts.top_k > 0, cuts.top_k, vocab + 1).float()
            _raise_thresholds(out, thresholds, goals, by_mass=False)
        if cuts.top_p is not None:
            _raise_thresholds(out, thresholds, cuts.top_p, by_mass=True)
        least = torch.zeros_like(temperature) if cuts.min_p is None else cuts.min_p
        _cut[grid](out, thresholds, least, sums, vocab, SPAN=SPAN, PARTS=parts)
    _divide[grid](out, sums, vocab, SPAN=SPAN, **shared)
    return out


def inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the tokens [M] int64 that uniforms [M] float64 draw from rows [M] int64 of probabilities; see draws.inverse_cdf.

    probs: [N, V] float32, contiguous.
    """
    (count, vocab), blocks = probs.shape, triton.cdiv(probs.shape[1], _BLOCK)
    sums = torch.empty(count, blocks, dtype=torch.float32, device=probs.device)
    tokens = torch.empty_like(rows)
    with launching_on(probs.device):
        _block_sums[(count, _parts(probs))](probs, sums, vocab, blocks, SPAN=SPAN, BLOCK=_BLOCK)
        _inverse[(len(rows),)](
            probs,
            sums,
            rows,
            uniform,
            tokens,
            vocab,
            blocks,
            BLOCK=_BLOCK,
            BLOCKS_PADDED=triton.next_power_of_2(blocks),
        )
    return tokens


def warm_up(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels for scores of V tokens in a dtype, and in float32, so that no step waits for a compiler."""
    temperature, half = torch.ones(1, device=device), torch.full((1,), 0.5, device=device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    for kind in {dtype, torch.float32}:
        scores = torch.zeros(1, vocab, dtype=kind, device=device)
        likeliest(scores)
        probs = probabilities(scores, temperature, Cuts(one, half, half))
    inverse_cdf(probs, half.double(), torch.zeros_like(one))


def _raise_thresholds(weights: torch.Tensor, thresholds: torch.Tensor, goals: torch.Tensor, *, by_mass: bool) -> None:
    """Raise each row's threshold, bits of a float, to the largest weight that enough tokens reach.

    goals: [N], numbers of tokens, or shares of the mass of the tokens that reach the present threshold.
    """
    (count, vocab), parts, device = weights.shape, _parts(weights), weights.device
    wanted = torch.empty(_LEVELS, count, dtype=torch.float32, device=device)
    wanted[0] = goals
    prefixes = torch.empty(_LEVELS, count, dtype=torch.int32, device=device)
    sums = torch.empty(2, count, parts, _DIGITS, dtype=torch.float32, device=device)
    shared = {"PARTS": parts, "PARTS_PADDED": _padded(parts), "DIGITS": _DIGITS, "BY_MASS": by_mass}
    for level in range(_LEVELS):
        _search[(count, parts)](
            weights, thresholds, wanted, prefixes, sums[1 - level % 2], sums[level % 2], vocab,
            _DIGIT * (_LEVELS - 1 - level), LEVEL=level, SPAN=SPAN, CHUNK=_CHUNK, DIGIT=_DIGIT, **shared,
        )  # fmt: skip
    last = _LEVELS - 1
    _threshold[(count,)](wanted, prefixes, sums[last % 2], thresholds, LEVEL=last, **shared)


def _parts(rows: torch.Tensor) -> int:
    return int(triton.cdiv(rows.shape[1], SPAN))


def _padded(parts: int) -> int:
    return int(triton.next_power_of_2(parts))
