"""Trees of a decoder's likeliest continuations, grown and pruned on the device in one captured graph (EAGLE-2, Li et al. 2024).

Level after level, the most probable nodes get children; then the most probable of all nodes are kept. The host chooses the
number of levels and reads nothing. Tokens are those of drafters/tree.py, which ends when a level adds none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foresay.decoding.chains import Grown, TreeLimits
from foresay.decoding.devices import launching_on, to_device
from foresay.decoding.protocols import ModelInput
from foresay.models.gpu.attention import NODES, PAGE
from foresay.models.gpu.chains import after_known
from foresay.models.gpu.flat import Buffers, size_of
from foresay.models.gpu.pages import PagedCache
from foresay.models.gpu.passes import Outputs, PagedPasses, Replay


@dataclass(frozen=True, slots=True)
class _Shape:
    """The sizes of trees, by which a graph is captured."""

    rows: int
    nodes: int
    """Most nodes."""
    branches: int
    """Children of a node."""
    width: int
    """Most nodes of a level that get children."""

    @property
    def levels(self) -> int:
        """Number of levels."""
        return min(self.nodes, self.nodes.bit_length() + 1)

    @property
    def candidates(self) -> list[int]:
        """Number of nodes that each level adds."""
        out = [self.branches]
        for _ in range(1, self.levels):
            out.append(min(self.width, out[-1]) * self.branches)
        return out

    @property
    def parents(self) -> list[int]:
        """Number of nodes of each level but the last that get children."""
        return [min(self.width, count) for count in self.candidates[:-1]]


class _State:
    """Inputs and outputs of a graph, at fixed addresses."""

    def __init__(self, shape: _Shape, like: torch.Tensor, passes: PagedPasses) -> None:
        """like: [0, H], of the states of `passes`."""
        size, device = shape.rows, like.device
        self.numbers = torch.zeros(4, size, dtype=torch.int64, device=device)
        """For each row its number in the cache, the slot of its first node, and the most nodes and levels of its tree."""
        self.outputs = like.new_zeros(size, like.shape[1])
        """Hidden states that the first level's scores are computed of."""
        self.features = like.new_zeros(size, like.shape[1])
        """Features that the first level reads."""
        self.passes = [passes.buffers(size * count) for count in shape.parents]
        """The inputs of the pass of each level but the last."""
        self.token_ids = torch.zeros(size, shape.nodes, dtype=torch.int64, device=device)
        self.parents = torch.zeros_like(self.token_ids)


@dataclass(frozen=True, slots=True)
class _Level:
    """Nodes of one level, or of several; [R, n] each."""

    token_ids: torch.Tensor
    parents: torch.Tensor
    """Index among all nodes, -1 for roots."""
    scores: torch.Tensor
    """The product of the draft probabilities along the path, float64."""
    depths: torch.Tensor
    """Number of the level, the first one 1."""


@dataclass(frozen=True, slots=True)
class _Expanded:
    """Nodes that get children, [R, n] each."""

    token_ids: torch.Tensor
    index: torch.Tensor
    """Among all nodes."""
    scores: torch.Tensor
    above: torch.Tensor
    """Position of the parent among the nodes expanded on the level before; meaningless on the first level."""
    bits: torch.Tensor
    """int64, bit i for the i-th expanded node of the tree if it is on the path, the node itself included."""


class DecoderTrees:
    """Trees grown by one decoder over its pages; see DrawsTrees."""

    def __init__(self, passes: PagedPasses, *, outputs: int, nexts: int | None, token_ids: torch.Tensor | None) -> None:
        """See DecoderChains."""
        self.passes, self._outputs, self._nexts, self._token_ids = passes, outputs, nexts, token_ids
        self._keys = (outputs,) if nexts is None else (nexts, outputs)
        self._states: dict[_Shape, tuple[_State, Replay]] = {}

    def grow(self, known: ModelInput, cache: PagedCache, limits: TreeLimits) -> Grown | None:
        """Grow trees; see DrawsTrees.draw_trees. Raises OutOfMemoryError if the pool has too few pages."""
        budget, depths = limits.budget, limits.depths
        rows = [i for i, n in enumerate(budget) if n]
        size, nodes = size_of(len(rows)), 1 << (max(budget) - 1).bit_length()
        branches = min(limits.branches, self.passes.decoder.num_scores)
        if size is None:
            return None
        shape = _Shape(size, nodes, branches, min(limits.width, nodes))
        if sum(shape.parents) > NODES or any(size_of(size * count) is None for count in shape.parents):
            return None
        most_slots = self.passes.table.pages.shape[1] * PAGE
        if any(cache.lengths[i] + known.num_tokens[i] + sum(shape.parents) > most_slots for i in rows):
            return None
        with self.passes.pool.lock, launching_on(self.passes.table.pages.device):
            for i in rows:
                cache.reserve(i, known.num_tokens[i] + sum(shape.parents))
            hidden = after_known(self.passes, known, cache, rows, self._keys)
            state, replay = self._captured(shape)
            state.numbers.zero_()
            given = [rows, [cache.lengths[i] for i in rows], [budget[i] for i in rows], [depths[i] for i in rows]]
            state.numbers[:, : len(rows)].copy_(to_device(given, state.numbers.device), non_blocking=True)
            state.outputs[: len(rows)] = hidden[self._outputs]
            if self._nexts is not None:
                state.features[: len(rows)] = hidden[self._nexts]
            replay()
            found = torch.stack([state.token_ids, state.parents])[:, : len(rows), : max(budget)]
            if len(rows) < len(budget):
                every = found.new_zeros(2, len(budget), found.shape[2])
                every[:, to_device(rows, found.device)] = found
                found = every
        counts = [_num_nodes(shape, n, depth) for n, depth in zip(budget, depths, strict=True)]
        return Grown(found[0], found[1], counts, shape.levels * len(rows))

    def _captured(self, shape: _Shape) -> tuple[_State, Replay]:
        """Return the graph of a shape, which is captured when it first occurs; without rows it writes nothing to the cache."""
        if shape not in self._states:
            state = _State(shape, self.passes.decoder.like, self.passes)
            self._states[shape] = state, self.passes.captured(lambda: self._run(shape, state))
        return self._states[shape]

    def _run(self, shape: _Shape, state: _State) -> Outputs:
        decoder = self.passes.decoder
        outputs, features = state.outputs, state.features
        expanded, every = None, []
        for number in range(shape.levels):
            base = sum(shape.candidates[:number])
            every.append(self._children(decoder.scores(outputs), expanded, shape, number + 1))
            if number == len(shape.parents):
                break
            before = sum(shape.parents[:number])
            expanded = _expanded(every[-1], expanded, base, before, shape.parents[number], shape.branches)
            at = state.passes[number]
            self._place(at, state, expanded, before, number)
            if at.features is not None:
                width = len(features) // shape.rows
                rows = torch.arange(shape.rows, device=features.device)[:, None] * width
                above = rows + (expanded.above if number else 0)
                at.features.copy_(features[above.expand(-1, expanded.index.shape[1]).flatten()])
            _, hidden = decoder.states(at, self.passes.pool, self._keys)
            outputs = hidden[self._outputs]
            features = outputs if self._nexts is None else hidden[self._nexts]
        _keep_likeliest(every, state)
        return None, {}

    def _children(self, scores: torch.Tensor, above: _Expanded | None, shape: _Shape, depth: int) -> _Level:
        """Return the likeliest children of expanded nodes, or of the contexts. scores: [R * n, num_scores]."""
        found = scores.float().softmax(-1).topk(shape.branches)
        ids = found.indices if self._token_ids is None else self._token_ids[found.indices]
        probs = found.values.double().view(shape.rows, -1, shape.branches)
        if above is None:
            parents, paths = torch.full_like(probs, -1, dtype=torch.int64), probs
        else:
            parents, paths = above.index[:, :, None].expand(probs.shape), probs * above.scores[:, :, None]
        tokens = ids.view(shape.rows, -1)
        return _Level(tokens, parents.flatten(1), paths.flatten(1), torch.full_like(tokens, depth))

    def _place(self, at: Buffers, state: _State, nodes: _Expanded, before: int, level: int) -> None:
        """Fill the inputs of a pass over expanded nodes. before: nodes of the tree that were expanded before them."""
        rows, starts, budget, _ = state.numbers
        count = nodes.token_ids.shape[1]
        index = before + torch.arange(count, device=rows.device)
        real, start = (budget > 0)[:, None], starts[:, None]
        values = [
            rows[:, None].expand(-1, count),
            (start + level).expand(-1, count),
            torch.where(real, start + index, -1),
            start.expand(-1, count),
            torch.where(real, start + before + count, 0).expand(-1, count),
        ]
        for field, value in zip(at.fields, values, strict=False):  # rows, positions, slots, firsts, ends
            field.copy_(value.flatten())
        at.visible.seen.copy_(nodes.bits.flatten())
        at.token_ids.copy_(nodes.token_ids.flatten())
        firsts = torch.arange(0, count, at.visible.tile, device=rows.device)
        begins = torch.arange(len(rows), device=rows.device)[:, None] * count + firsts
        sizes = torch.where(real, (count - firsts).clamp(max=at.visible.tile), 0)
        at.tiles[: begins.numel()] = torch.stack([begins, sizes], -1).flatten(0, 1).int()


def _expanded(level: _Level, above: _Expanded | None, base: int, before: int, count: int, branches: int) -> _Expanded:
    """Return the `count` most probable nodes of a level, in their order.

    above: the nodes that were expanded on the level before. base, before: number of all nodes, and of expanded ones, on levels
    before this one.
    """
    chosen = level.scores.topk(count).indices.sort(-1).values
    bits = 1 << (before + torch.arange(count, device=chosen.device)).expand(chosen.shape)
    parents = chosen // branches
    if above is not None:
        bits = bits | above.bits.gather(1, parents)
    return _Expanded(level.token_ids.gather(1, chosen), base + chosen, level.scores.gather(1, chosen), parents, bits)


def _keep_likeliest(levels: Sequence[_Level], state: _State) -> None:
    """Write the most probable nodes of each row, a parent before its children; of equal ones the earlier are kept."""
    tokens, parents, scores, depths = (
        torch.cat([getattr(level, name) for level in levels], 1) for name in _Level.__slots__
    )
    _, _, budget, most = state.numbers
    order = scores.masked_fill(depths > most[:, None], -1.0).sort(dim=-1, descending=True, stable=True).indices
    ranks = torch.zeros_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    kept = ranks < budget[:, None]
    place = kept.long().cumsum(-1) - 1
    last = state.token_ids.shape[1]
    at = torch.where(kept, place, last)
    above = torch.where(parents < 0, -1, place.gather(1, parents.clamp(min=0)))
    for out, values in ((state.token_ids, tokens), (state.parents, above)):
        out.copy_(values.new_zeros(len(values), last + 1).scatter_(1, at, values)[:, :last])


def _num_nodes(shape: _Shape, budget: int, depth: int) -> int:
    return min(budget, sum(shape.candidates[:depth]))
