"""Trees of suffix matches: several continuations of the context, merged by common prefixes.

Owns the choice of continuations. The matches are those of `suffix`; besides the latest occurrence of the longest match, this
drafter uses the earliest one, shorter suffixes and earlier requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresay.checks import check_int
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Row, Rows
from foresay.drafters.known_text import known_tokens
from foresay.drafters.memory import Memory
from foresay.drafters.suffix import SuffixDrafter, SuffixState

MAX_BRANCHES = 16


class SuffixTreeDrafter(SuffixDrafter):
    """Draft a tree of continuations of the context's longest matches; budgets count nodes."""

    def __init__(
        self,
        memory: Memory | None = None,
        *,
        branches: int = 3,
        prompts: bool = True,
        scale: float = 3.0,
        min_match: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """branches: most continuations. memory, prompts, scale, min_match: see `SuffixDrafter`."""
        super().__init__(memory, prompts=prompts, scale=scale, min_match=min_match, device=device)
        self.branches = check_int("branches", branches, 1, MAX_BRANCHES)

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draft a tree of at most `budget` nodes for each row, all point masses."""
        trees = [
            merge(self._continuations(row, state, max(0, n)), max(0, n))
            for row, state, n in zip(rows, self._states, budget, strict=True)
        ]
        tokens, parents = zip(*trees, strict=True)
        return Proposal.of_lists(tokens, self._device, parents=parents)

    def _continuations(self, row: Row, state: SuffixState, count: int) -> list[list[int]]:
        """Return known tokens, or at most `branches` continuations of at most `count` tokens, that of the longest match first."""
        if known := known_tokens(row, count, lambda row, count: self.draft_tokens(row, state, count)[:count]):
            self.draft_tokens(row, state, 0)
            return [known]
        first = self.draft_tokens(row, state, count)
        if not first:
            return []
        out = [first]
        for other in self.others(row, state, count):
            if len(out) == self.branches:
                break
            if other and other not in out:
                out.append(other)
        return out


def merge(continuations: Sequence[Sequence[int]], budget: int) -> tuple[list[int], list[int]]:
    """Merge continuations into a tree of at most `budget` nodes: (token ids, index of each node's parent, -1 for the context).

    The first continuation leaves one node for each of the others; the remaining nodes are shared evenly among those.
    """
    tokens: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    for i, continuation in enumerate(continuations):
        num_others = len(continuations) - i - 1
        remaining = budget - len(tokens)
        most = remaining - num_others if i == 0 else remaining // (num_others + 1)
        parent, added = -1, 0
        for token in continuation:
            node = children.get((parent, token))
            if node is None:
                if added >= max(1, most) or len(tokens) >= budget:
                    break
                node = children[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
                added += 1
            parent = node
    return tokens, parents
