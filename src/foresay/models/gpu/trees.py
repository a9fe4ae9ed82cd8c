"""Trees of a decoder's likeliest continuations, grown and pruned on the device in one captured graph (EAGLE-2, Li et al. 2024).

Level after level, the most probable nodes get children; then the most probable of all nodes are kept. The host chooses the
number of levels and reads nothing. Tokens are those of drafters/tree.py, which ends when a level adds none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from foresay.decoding.chains import Grown, TreeLimits
from foresay.decoding.devices import launching_on, to_device
from foresay.decoding.protocols import ModelInput
from foresay.models.gpu import growth
from foresay.models.gpu.attention import NODES, PAGE
from foresay.models.gpu.chains import after_known
from foresay.models.gpu.flat import size_of
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
    """Inputs, nodes and outputs of a graph, at fixed addresses."""

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
        self.sources = [torch.zeros(size * count, dtype=torch.int64, device=device) for count in shape.parents]
        """For each token of these passes, the one of the pass before whose features it reads."""
        depths = [level for level, count in enumerate(shape.candidates, 1) for _ in range(count)]
        self.depths = to_device(depths, device, torch.int32)
        self.nodes, self.parents, self.places = torch.zeros(3, size, len(depths), dtype=torch.int64, device=device)
        """[R, n] each: all nodes, level after level, their parents, -1 for roots, and their indices among those that are kept."""
        self.paths = torch.zeros(size, len(depths), dtype=torch.float64, device=device)
        """The product of the draft probabilities along the path of each."""
        expanded = sum(shape.parents)
        self.expanded = torch.zeros(size, expanded, dtype=torch.float64, device=device)
        """[R, e], the same of the nodes that got children, level after level."""
        self.indices, self.bits = torch.zeros(2, size, expanded, dtype=torch.int64, device=device)
        """[R, e] each: their index among all nodes, and bit i for the i-th of them on the path, the node's own included."""
        self.token_ids, self.above = torch.zeros(2, size, shape.nodes, dtype=torch.int64, device=device)
        """The tree: tokens and parents."""


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
            found = torch.stack([state.token_ids, state.above])[:, : len(rows), : max(budget)]
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
        for level in range(shape.levels):
            self._expand(decoder.scores(outputs), shape, state, level)
            if level == len(shape.parents):
                break
            at = state.passes[level]
            if at.features is not None:
                torch.index_select(features, 0, state.sources[level], out=at.features)
            _, hidden = decoder.states(at, self.passes.pool, self._keys)
            outputs = hidden[self._outputs]
            features = outputs if self._nexts is None else hidden[self._nexts]
        nodes, most = sum(shape.candidates), shape.nodes
        growth.prune[(shape.rows,)](
            state.numbers, state.depths, state.nodes, state.parents, state.paths, state.places, state.token_ids, state.above,
            shape.rows, NODES=nodes, PADDED=triton.next_power_of_2(nodes), MOST=most,
            MOST_PADDED=triton.next_power_of_2(most),
        )  # fmt: skip
        return None, {}

    def _expand(self, scores: torch.Tensor, shape: _Shape, state: _State, level: int) -> None:
        """Add a level of the likeliest children; unless it is the last, its likeliest nodes go to the next pass.

        scores: [R * n, num_scores], after the nodes that the level before expanded, or after the contexts.
        """
        count, vocab = shape.candidates[level], scores.shape[1]
        tokens = torch.empty(shape.rows, count, dtype=torch.int64, device=scores.device)
        probs = torch.empty(shape.rows, count, dtype=torch.float32, device=scores.device)
        growth.children[(shape.rows * count // shape.branches,)](
            scores, tokens if self._token_ids is None else self._token_ids, tokens, probs, vocab,
            BRANCHES=shape.branches, CHUNK=growth.CHUNK, MAPS=self._token_ids is not None,
        )  # fmt: skip
        grows, size, tile = 0, 0, 1
        inputs: list[torch.Tensor] = [tokens] * 5
        if level < len(shape.parents):
            at = state.passes[level]
            grows, size, tile = shape.parents[level], at.size, at.visible.tile
            inputs = [state.sources[level], at.fields, at.visible.seen, at.token_ids, at.tiles]
        growth.expand[(shape.rows,)](
            state.numbers, tokens, probs, state.nodes, state.parents, state.paths, state.expanded, state.indices, state.bits,
            *inputs, size, shape.rows,
            LEVEL=level, BASE=sum(shape.candidates[:level]), BEFORE=sum(shape.parents[:level]),
            LAST=shape.parents[level - 1] if level else 0, COUNT=count, PADDED=triton.next_power_of_2(count),
            BRANCHES=shape.branches, NODES=sum(shape.candidates), EXPANDED=sum(shape.parents), TILE=tile, GROWS=grows,
        )  # fmt: skip


def _num_nodes(shape: _Shape, budget: int, depth: int) -> int:
    return min(budget, sum(shape.candidates[:depth]))
