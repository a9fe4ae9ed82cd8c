"""Attention of a flat list of tokens over keys and values in pages, by Triton kernels.

A token's result depends on its own row alone, to the bit: keys are read in pages of fixed size, each of a fixed number of
programs takes every `SPLITS`-th page of a row, and the last one to end combines the results in a fixed order. Other rows, other
draft tokens and the size of the pass change none of it: a page that a token does not see adds exact zeros. Prompts, whose
products are a library's, have larger tiles, so that a page is read for many tokens at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from foresay.models.gpu.overlap import overlapping, wait

PAGE = 64
"""Slots of a page."""
SPLITS = 16
"""Programs among which the pages of a row are divided."""
LINES = 16
"""Queries of a tile."""
PROMPT_LINES, PROMPT_SPLITS = 128, 4
"""The same for prompts, of queries of up to SHORT bytes."""
SHORT = 256
"""Bytes of a query, such as 128 numbers in bf16. Longer ones have fewer lines and one page in flight: a program has 99 KB
of shared memory on NVIDIA's consumer cards (compute capability 8.6 to 12.0), and 64 KB on AMD's."""
NODES = 64
"""Slots of a row's last pass of which a token sees some only: the nodes of a draft tree."""
_NO_WINDOW = 1 << 30
_FAR = tl.constexpr(1 << 30)


@dataclass(frozen=True, slots=True)
class Visible:
    """The slots that each token of a pass attends to.

    Token n of row `rows[n]` sees the slots before `firsts[n]`, and slot firsts[n] + i if bit i of `seen[n]` is set. In a chain
    `firsts` is the token's own slot, and `seen` is 1. In layers with a window it sees those slots that lie within the window: a
    slot before `firsts` has its number as position, and the bits are a path, so that one with b bits after it is b away.
    """

    rows: torch.Tensor
    """[N] int32."""
    positions: torch.Tensor
    """[N] int32."""
    firsts: torch.Tensor
    """[N] int32."""
    seen: torch.Tensor
    """[N] int64."""
    ends: torch.Tensor
    """[N] int32, the slot after the last one that the token sees; 0 for padding."""
    tiles: torch.Tensor
    """[at most N, 2] int32: first token and number of tokens of each tile, all of one row; (0, 0) after the last."""
    pages: torch.Tensor
    """[rows, P] int32, the page of every PAGE slots of a row."""
    counts: torch.Tensor
    """[at least tiles * Hk] int32, programs that have ended of each tile and key head; 0 between passes."""
    tile: int
    """Tokens of a tile, at most; a power of two."""
    is_prompt: bool = False


def tokens_per_tile(query_heads: int, key_heads: int, query_bytes: int, *, is_prompt: bool = False) -> int:
    """Return the number of tokens that share a tile of queries: heads that read the same keys, of as many tokens as fit.

    query_bytes: of one head.
    """
    lines, padded = LINES, int(triton.next_power_of_2(query_bytes))
    if is_prompt and padded <= 2 * SHORT:
        lines = PROMPT_LINES * SHORT // max(SHORT, padded)
    return max(1, lines // int(triton.next_power_of_2(query_heads // key_heads)))


def stages(query_bytes: int, backend: str = "hip" if torch.version.hip else "cuda") -> int:
    """Return the number of pages in flight, the one that is computed included, as Triton counts them: as many as memory holds."""
    if triton.next_power_of_2(query_bytes) > SHORT:
        return 1
    return 2 if backend == "hip" else 3


@triton.jit
def _num_bits(bits):
    """Number of set bits of each value, uint64, by sums of neighbours (Warren, Hacker's Delight, 5-1)."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((bits * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def _combined(
    sums, stats, sink, at, apart, depth, valid, inside, splits, like, DIM: tl.constexpr, HAS_SINKS: tl.constexpr
):  # fmt: skip
    """The results of the programs of a tile, summed in their order: [lines, DIM] float32, of the shape of `like`."""
    top, mass = tl.full(at.shape, float("-inf"), tl.float32), tl.zeros(at.shape, tl.float32)
    if HAS_SINKS:
        top = sink
    for one in range(splits):
        top = tl.maximum(top, tl.load(stats + (at + one * apart) * 2, mask=valid, other=0.0, cache_modifier=".cg"))
    if HAS_SINKS:
        mass = tl.exp(sink - top)
    total = tl.zeros(like.shape, tl.float32)
    for one in range(splits):
        part = at + one * apart
        weight = tl.exp(tl.load(stats + part * 2, mask=valid, other=0.0, cache_modifier=".cg") - top)
        mass += tl.load(stats + part * 2 + 1, mask=valid, other=1.0, cache_modifier=".cg") * weight
        part = part[:, None].to(tl.int64) * DIM + depth[None, :]
        total += tl.load(sums + part, mask=inside, other=0.0, cache_modifier=".cg") * weight[:, None]
    return total / mass[:, None]


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["rows", "positions", "firsts", "ends"])
def _partial(
    queries, keys, values, sinks, pages, rows, positions, firsts, seen, ends, tiles, counts, sums, stats,
    scaling, softcap, window, width, num_tokens,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, TOKENS: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, NODES: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait(OVERLAPS)
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, count = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    if count == 0:
        return
    row = tl.load(rows + begin)
    line = tl.arange(0, GROUP_PADDED * TOKENS)
    token, member = begin + line // GROUP_PADDED, line % GROUP_PADDED
    valid = (line // GROUP_PADDED < count) & (member < GROUP)
    depth, place = tl.arange(0, DIM_PADDED), tl.arange(0, PAGE)
    query_head = (token * KEY_HEADS + head) * GROUP + member
    query = tl.load(
        queries + query_head[:, None] * DIM + depth[None, :], mask=valid[:, None] & (depth < DIM)[None, :], other=0.0
    )
    first = tl.load(firsts + token, mask=valid, other=0)
    bits = tl.load(seen + token, mask=valid, other=0)
    low = tl.load(positions + token, mask=valid, other=_FAR) - window + 1
    end = tl.max(tl.load(ends + token, mask=valid, other=0))
    top, mass = tl.full(line.shape, float("-inf"), tl.float32), tl.zeros(line.shape, tl.float32)
    total = tl.zeros([GROUP_PADDED * TOKENS, DIM_PADDED], tl.float32)
    begin_at = split
    if HAS_WINDOW:  # pages before every window are not read
        begin_at += tl.maximum(tl.min(low), 0) // PAGE // SPLITS * SPLITS
    pages, end_at = pages + row * width, (end + PAGE - 1) // PAGE
    following = tl.load(pages + begin_at, mask=begin_at < end_at, other=0).to(tl.int64)
    for index in range(begin_at, end_at, SPLITS):
        page = following  # known a page ahead, so that the copies of the next one begin before this one is computed
        following = tl.load(pages + index + SPLITS, mask=index + SPLITS < end_at, other=0).to(tl.int64)
        slot = index * PAGE + place
        start = (page * KEY_HEADS + head) * PAGE * DIM
        inside = (slot < end)[:, None] & (depth < DIM)[None, :]
        key = tl.load(keys + start + place[:, None] * DIM + depth[None, :], mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
        if HAS_CAP:
            scores = softcap * (2 / (1 + tl.exp(-2 * scores / softcap)) - 1)
        after = slot[None, :] - first[:, None]
        rest = bits[:, None].to(tl.uint64) >> tl.minimum(tl.maximum(after, 0), NODES - 1).to(tl.uint64)
        is_node = tl.where(after < NODES, (rest & 1).to(tl.int32), 0)
        if HAS_WINDOW:
            is_node = tl.where(_num_bits(rest) <= window, is_node, 0)
        sees = tl.where(after < 0, (slot[None, :] >= low[:, None]).to(tl.int32), is_node)
        scores = tl.where(valid[:, None] & (sees == 1), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights, scale = tl.exp(scores - anchor[:, None]), tl.exp(top - anchor)
        value = tl.load(values + start + place[:, None] * DIM + depth[None, :], mask=inside, other=0.0)
        mass = mass * scale + tl.sum(weights, 1)
        total = total * scale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        top = new_top
    at, apart = token * (KEY_HEADS * GROUP) + head * GROUP + member, num_tokens * (KEY_HEADS * GROUP)
    own, inside = at + split * apart, valid[:, None] & (depth < DIM)[None, :]
    tl.store(stats + own * 2, top, mask=valid)
    tl.store(stats + own * 2 + 1, mass, mask=valid)
    tl.store(sums + own[:, None].to(tl.int64) * DIM + depth[None, :], total, mask=inside)
    tl.debug_barrier()  # every thread's stores come before the program is counted
    counter = counts + tile * KEY_HEADS + head
    if tl.atomic_add(counter, 1, sem="acq_rel") < SPLITS - 1:
        return
    tl.store(counter, 0)
    sink = top
    if HAS_SINKS:
        sink = tl.load(sinks + head * GROUP + member, mask=valid, other=0.0).to(tl.float32)
    splits = tl.minimum(SPLITS, end_at)  # the others had no page
    total = _combined(sums, stats, sink, at, apart, depth, valid, inside, splits, total, DIM, HAS_SINKS)
    out = queries + query_head[:, None] * DIM + depth[None, :]
    tl.store(out, total.to(queries.dtype.element_ty), mask=inside)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    at: Visible,
    scaling: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Overwrite the queries by the attention outputs, and return these, [N, Hq, D]. keys, values: [pages, Hk, PAGE, D].

    window: positions that a token sees, its own included; None for all. softcap: scores are softcap * tanh(score / softcap).
    sinks: [Hq], a score of each head that takes weight and has no value. Padding tokens stay as they are.
    """
    (count, heads, dim), key_heads = queries.shape, keys.shape[1]
    group, padded = heads // key_heads, max(16, triton.next_power_of_2(dim))
    group_padded = max(triton.next_power_of_2(group), LINES // at.tile)
    splits = PROMPT_SPLITS if at.is_prompt else SPLITS
    sums = torch.empty(splits, count, heads, dim, dtype=torch.float32, device=queries.device)
    stats = torch.empty(splits, count, heads, 2, dtype=torch.float32, device=queries.device)
    tiles = min(len(at.tiles), triton.cdiv(count, at.tile) + len(at.pages) - 1)  # all of a row's but its last are full
    _partial[(tiles, key_heads, splits)](
        queries, keys, values, queries if sinks is None else sinks, at.pages, at.rows, at.positions, at.firsts, at.seen,
        at.ends, at.tiles, at.counts, sums, stats,
        scaling, 1.0 if softcap is None else softcap, _NO_WINDOW if window is None else window, at.pages.shape[1], count,
        KEY_HEADS=key_heads, GROUP=group, GROUP_PADDED=group_padded, TOKENS=at.tile, DIM=dim, DIM_PADDED=padded,
        PAGE=PAGE, SPLITS=splits, NODES=NODES,
        HAS_CAP=softcap is not None, HAS_WINDOW=window is not None, HAS_SINKS=sinks is not None,
        num_warps=8 if at.is_prompt else 4, num_stages=stages(dim * keys.element_size()), **overlapping(queries.device),
    )  # fmt: skip
    return queries
