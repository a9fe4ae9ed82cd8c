"""Trees over a block (DDTree, arXiv 2604.12989): several continuations from one draft pass.

Nodes are expanded best first, by the product of the draft's probabilities along their path, until the budget is used. Their
tokens are chosen, not drawn: under sampling they are point masses, and any choice is exact.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from foresay.checks import check_int
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy, ModelOutput
from foresay.decoding.rows import Row, Rows
from foresay.drafters.block import BlockDrafter
from foresay.drafters.proposal_builder import Interruptible

if TYPE_CHECKING:  # at run time this would import transformers
    from foresay.models.blocks.model import BlockModel

MAX_NODES = 256


class BlockTreeDrafter(BlockDrafter):
    """Draft trees with a block drafter; budgets count nodes."""

    def __init__(self, block: BlockModel, target_vocab_size: int, *, nodes: int = 16, branches: int = 3) -> None:
        """nodes: most nodes of a tree. branches: most children of one node."""
        super().__init__(block, target_vocab_size, sample=False)
        self.nodes = check_int("nodes", nodes, 1, MAX_NODES)
        self.branches = check_int("branches", branches, 2, 16)

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Choose a tree of at most `budget` nodes for each row, all point masses."""
        context, device = self.context, self.context.block.device
        viewed = context.view(rows)
        depths = [n if b > 0 else 0 for n, b in zip(context.room(viewed, [MAX_NODES] * len(rows)), budget, strict=True)]
        if max(depths) <= 0:
            return Proposal.empty(len(rows), device)
        fed = [n > 0 for n in depths]
        context.prepare(viewed, fed)
        output = context.catch_up(viewed, fed)
        trees = [
            _Tree(row, min(n, self.nodes) if depth > 0 else 0, depth)
            for row, n, depth in zip(rows, budget, depths, strict=True)
        ]
        unfinished = Interruptible()
        with unfinished.keeping():
            self._grow(trees, output)
        return _proposal(trees, device, unfinished.failure)

    def _grow(self, trees: Sequence[_Tree], output: ModelOutput) -> None:
        """Grow all trees together: in each round every tree's best open node gets its children. output: scores of the roots."""
        probs, ids = self._likeliest(output)
        for tree, chances, tokens in zip(trees, probs, ids, strict=True):
            tree.expand(-1, chances, tokens)
        while any(tree.open for tree in trees):
            chosen = [(i, tree.take()) for i, tree in enumerate(trees) if tree.open]
            growing = [(i, node) for i, node in chosen if trees[i].may_grow(node)]
            if not growing:
                continue
            rows = torch.tensor([i for i, _ in growing])
            last = torch.tensor([trees[i].tokens[node] for i, node in growing])
            depth = torch.tensor([trees[i].depths[node] + 1 for i, node in growing])
            probs, ids = self._likeliest(self.context.scores_at(rows, last, depth))
            for (i, node), chances, tokens in zip(growing, probs, ids, strict=True):
                trees[i].expand(node, chances, tokens)

    def _likeliest(self, output: ModelOutput) -> tuple[list[list[float]], list[list[int]]]:
        """Return the probabilities and the ids of the likeliest tokens of scores [B, 1, K], `branches` of each row."""
        assert output.logits is not None
        logits = output.logits[:, -1].float()
        top = logits.softmax(-1).topk(min(self.branches, logits.shape[-1]))
        ids = top.indices if output.subset is None else output.subset.token_ids[top.indices]
        return top.values.tolist(), ids.tolist()


class _Tree:
    """One row's nodes, in the order in which they were chosen, and its candidates."""

    def __init__(self, row: Row, budget: int, depth: int) -> None:
        """budget: most nodes. depth: most nodes of a path."""
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self._row, self._budget, self._depth = row, budget, depth
        self._probs: list[float] = []
        self._candidates: list[tuple[float, int, int, int]] = []
        """(minus the path's probability, order, parent, token)."""
        self._order = 0

    @property
    def open(self) -> bool:
        """True if there is another candidate and room for it."""
        return bool(self._candidates) and len(self.tokens) < self._budget

    def expand(self, node: int, probs: Sequence[float], ids: Sequence[int]) -> None:
        """Add the children of a node to the candidates; -1: of the root."""
        path = 1.0 if node < 0 else self._probs[node]
        for prob, token in zip(probs, ids, strict=True):
            heapq.heappush(self._candidates, (-path * prob, self._order, node, token))
            self._order += 1

    def take(self) -> int:
        """Make the most probable candidate a node; return its index."""
        value, _, parent, token = heapq.heappop(self._candidates)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
        self._probs.append(-value)
        return len(self.tokens) - 1

    def may_grow(self, node: int) -> bool:
        """True if a node may have children: within the depth and the budget, and not after an end token."""
        depth = self.depths[node] + 1
        if depth >= self._depth or len(self.tokens) >= self._budget:
            return False
        return not self._row.ends_with(self.tokens[node], self._row.num_new + depth)


def _proposal(trees: Sequence[_Tree], device: torch.device, failure: BaseException | None) -> Proposal:
    counts = [len(tree.tokens) for tree in trees]
    width = max(counts)
    if not width:
        return Proposal.empty(len(trees), device)
    ids = torch.tensor([[*tree.tokens, *[0] * (width - len(tree.tokens))] for tree in trees], device=device)
    parents = [[*tree.parents, *[-1] * (width - len(tree.parents))] for tree in trees]
    if all(tree.parents == list(range(-1, len(tree.parents) - 1)) for tree in trees):
        return Proposal(ids, counts, failure=failure)
    return Proposal(ids, counts, parents=torch.tensor(parents, device=device), failure=failure)
