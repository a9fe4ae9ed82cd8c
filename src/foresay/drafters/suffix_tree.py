"""Several continuations of a suffix match as one tree: what followed the longest match, and what else followed it.

Owns which continuations are worth a node. The matches are those of `suffix`; where it keeps the latest occurrence alone, this
drafter also asks for the earliest one, for shorter suffixes and for earlier requests, and merges what begins alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresay.checks import check_int
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Row, Rows
from foresay.drafters.suffix import PastRequests, SuffixDrafter, SuffixState

MAX_BRANCHES = 16


class SuffixTreeDrafter(SuffixDrafter):
    """Drafts a tree of what followed the context's longest matches; a budget is one of nodes."""

    def __init__(
        self,
        past: PastRequests | None = None,
        *,
        branches: int = 3,
        scale: float = 3.0,
        min_match: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """branches: continuations at most. past, scale, min_match: as `SuffixDrafter` takes them."""
        super().__init__(past, scale=scale, min_match=min_match, device=device)
        self.branches = check_int("branches", branches, 1, MAX_BRANCHES)

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """A tree of point masses for each row, of `budget` nodes at most."""
        trees = [
            merged(self._continuations(row, state, max(0, n)), max(0, n))
            for row, state, n in zip(rows, self._states, budget, strict=True)
        ]
        counts = [len(tokens) for tokens, _ in trees]
        width = max(counts)
        if width == 0:
            return Proposal.empty(len(rows), self._device)
        ids = [[*tokens, *[0] * (width - len(tokens))] for tokens, _ in trees]
        parents = [[*above, *[-1] * (width - len(above))] for _, above in trees]
        if all(above == list(range(-1, len(above) - 1)) for _, above in trees):  # nobody branches: a chain
            return Proposal(torch.tensor(ids, device=self._device), counts)
        return Proposal(
            torch.tensor(ids, device=self._device), counts, parents=torch.tensor(parents, device=self._device)
        )

    def _continuations(self, row: Row, state: SuffixState, count: int) -> list[list[int]]:
        """What followed the matches, the likeliest continuation first; at most `branches`, of `count` tokens each."""
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


def merged(continuations: Sequence[Sequence[int]], budget: int) -> tuple[list[int], list[int]]:
    """Continuations as one tree of at most `budget` nodes: (token ids, the column each follows, -1 for the context).

    The first one leaves a node for each of the others, and each of them shares what is left with those after it.
    """
    tokens: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    for place, continuation in enumerate(continuations):
        waiting = len(continuations) - place - 1
        left = budget - len(tokens)
        most = left - waiting if place == 0 else left // (waiting + 1)
        at, added = -1, 0
        for token in continuation:
            column = children.get((at, token))
            if column is None:
                if added >= max(1, most) or len(tokens) >= budget:
                    break
                column = children[at, token] = len(tokens)
                tokens.append(token)
                parents.append(at)
                added += 1
            at = column
    return tokens, parents
