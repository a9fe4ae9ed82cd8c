"""The steps by which trees of likeliest continuations grow, in one launch each, by Triton kernels.

A level's children are found, added to the tree and to the next pass, and at the end the likeliest nodes are kept. Nodes are in
the order of their levels; of equal scores the earlier node counts as the likelier.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 4096
"""Scores that a program reads at once."""
_SLICE = tl.constexpr(16)
"""Nodes that all others are compared with at once."""


@triton.jit(do_not_specialize=["vocab"])
def children(
    scores, ids, tokens, probs, vocab, BRANCHES: tl.constexpr, CHUNK: tl.constexpr, MAPS: tl.constexpr
):  # fmt: skip
    """The BRANCHES likeliest tokens after each context, likeliest first, and their softmax probabilities, float32."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNK)
    top = float("-inf")
    for begin in range(0, vocab, CHUNK):
        x = tl.load(scores + row * vocab + begin + lane, mask=begin + lane < vocab, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(x, 0))
    mass = tl.zeros([CHUNK], tl.float32)
    for begin in range(0, vocab, CHUNK):
        x = tl.load(scores + row * vocab + begin + lane, mask=begin + lane < vocab, other=float("-inf")).to(tl.float32)
        mass += tl.exp(x - top)
    total, last, place = tl.sum(mass, 0), float("inf"), -1
    for branch in range(BRANCHES):  # each is the first of the greatest after the one before
        best, at = float("-inf"), vocab
        for begin in range(0, vocab, CHUNK):
            index = begin + lane
            x = tl.load(scores + row * vocab + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
            follows = (index < vocab) & ((x < last) | ((x == last) & (index > place)))
            own = tl.max(tl.where(follows, x, float("-inf")), 0)
            first = tl.min(tl.where(follows & (x == own), index, vocab), 0)
            at = tl.where(own > best, first, tl.where(own == best, tl.minimum(at, first), at))
            best = tl.maximum(best, own)
        last, place = best, at
        token = tl.minimum(at, vocab - 1).to(tl.int64)
        if MAPS:
            token = tl.load(ids + token)
        tl.store(tokens + row * BRANCHES + branch, token)
        tl.store(probs + row * BRANCHES + branch, tl.exp(best - top) / total)


@triton.jit
def _ranks(scores, first, own, number, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """How many of COUNT nodes from `first` on are likelier than each of them, which a program stored before."""
    ranks = tl.zeros([PADDED], tl.int32)
    for begin in range(0, COUNT, _SLICE):
        other = begin + tl.arange(0, _SLICE)
        theirs = tl.load(scores + first + other, mask=other < COUNT, other=-2.0)
        ahead = (theirs[None, :] == own[:, None]) & (other[None, :] < number[:, None])
        ranks += tl.sum(((theirs[None, :] > own[:, None]) | ahead).to(tl.int32), 1)
    return ranks


@triton.jit
def expand(
    numbers, tokens, probs, nodes, parents, paths, expanded, indices, bits, sources,
    fields, seen, token_ids, tiles, size, rows,
    LEVEL: tl.constexpr, BASE: tl.constexpr, BEFORE: tl.constexpr, LAST: tl.constexpr, COUNT: tl.constexpr,
    PADDED: tl.constexpr, BRANCHES: tl.constexpr, NODES: tl.constexpr, EXPANDED: tl.constexpr, TILE: tl.constexpr,
    GROWS: tl.constexpr,
):  # fmt: skip
    """Add a level's COUNT nodes to a tree; the likeliest of them, in their order, become the inputs of the next pass.

    LAST: nodes of the level before that were expanded, 0 for the first. BASE, BEFORE: nodes, and expanded ones, before the level.
    GROWS: nodes that are expanded, 0 for the last level.
    """
    row, number = tl.program_id(0), tl.arange(0, PADDED)
    real, above = number < COUNT, number // BRANCHES
    at = row * COUNT + number
    token = tl.load(tokens + at, mask=real, other=0)
    path, parent, mark = tl.load(probs + at, mask=real, other=0.0).to(tl.float64), tl.full([PADDED], -1, tl.int64), 0
    if LAST > 0:
        over = row * EXPANDED + BEFORE - LAST + above
        path *= tl.load(expanded + over, mask=real, other=0.0)
        parent = tl.load(indices + over, mask=real, other=0)
        mark = tl.load(bits + over, mask=real, other=0)
    path = tl.where(real, path, -2.0)
    node = row * NODES + BASE + number
    tl.store(nodes + node, token, mask=real)
    tl.store(parents + node, parent, mask=real)
    tl.store(paths + node, path, mask=real)
    if GROWS > 0:
        tl.debug_barrier()  # the scores are read by every thread
        chosen = (_ranks(paths, row * NODES + BASE, path, number, COUNT, PADDED) < GROWS) & real
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
        own, out = row * EXPANDED + BEFORE + place, row * GROWS + place
        mark = mark | (tl.full([PADDED], 1, tl.int64) << (BEFORE + place).to(tl.int64))
        tl.store(expanded + own, path, mask=chosen)
        tl.store(indices + own, (BASE + number).to(tl.int64), mask=chosen)
        tl.store(bits + own, mark, mask=chosen)
        tl.store(sources + out, (row * tl.maximum(LAST, 1) + above).to(tl.int64), mask=chosen)
        start = tl.load(numbers + rows + row).to(tl.int32)
        is_row = tl.load(numbers + 2 * rows + row) > 0
        nothing = tl.zeros([PADDED], tl.int32)
        slot = tl.where(is_row, start + BEFORE + place, -1)
        tl.store(fields + out, nothing + tl.load(numbers + row).to(tl.int32), mask=chosen)  # rows
        tl.store(fields + size + out, nothing + start + LEVEL, mask=chosen)  # positions
        tl.store(fields + 2 * size + out, slot, mask=chosen)
        tl.store(fields + 3 * size + out, nothing + start, mask=chosen)  # firsts
        tl.store(fields + 4 * size + out, nothing + tl.where(is_row, start + BEFORE + GROWS, 0), mask=chosen)  # ends
        tl.store(seen + out, mark, mask=chosen)
        tl.store(token_ids + out, token, mask=chosen)
        tile = (row * ((GROWS + TILE - 1) // TILE) + number) * 2
        begins = number * TILE < GROWS
        tl.store(tiles + tile, row * GROWS + number * TILE, mask=begins)
        tl.store(tiles + tile + 1, tl.where(is_row, tl.minimum(GROWS - number * TILE, TILE), 0), mask=begins)


@triton.jit
def prune(
    numbers, depths, nodes, parents, paths, places, token_ids, above, rows,
    NODES: tl.constexpr, PADDED: tl.constexpr, MOST: tl.constexpr, MOST_PADDED: tl.constexpr,
):  # fmt: skip
    """Keep the likeliest nodes of a tree within its budget and its depth: a parent before its children."""
    row, number = tl.program_id(0), tl.arange(0, PADDED)
    real, at, slot = number < NODES, row * NODES + number, tl.arange(0, MOST_PADDED)
    tl.store(token_ids + row * MOST + slot, tl.zeros([MOST_PADDED], tl.int64), mask=slot < MOST)
    tl.store(above + row * MOST + slot, tl.zeros([MOST_PADDED], tl.int64), mask=slot < MOST)
    path, budget = tl.load(paths + at, mask=real, other=-2.0), tl.load(numbers + 2 * rows + row)
    most = tl.load(numbers + 3 * rows + row)
    path = tl.where(real & (tl.load(depths + number, mask=real, other=0) > most), -1.0, path)
    tl.store(paths + at, path, mask=real)
    tl.debug_barrier()
    kept = (_ranks(paths, row * NODES, path, number, NODES, PADDED) < budget) & real
    place = (tl.cumsum(kept.to(tl.int32), 0) - 1).to(tl.int64)
    tl.store(places + at, place, mask=real)
    tl.debug_barrier()
    parent = tl.load(parents + at, mask=real, other=0)
    over = tl.load(places + row * NODES + tl.maximum(parent, 0), mask=real, other=0)
    tl.store(token_ids + row * MOST + place, tl.load(nodes + at, mask=real, other=0), mask=kept)
    tl.store(above + row * MOST + place, tl.where(parent < 0, -1, over), mask=kept)
