"""Tree drafters with known shapes, for the tests of trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresay.decoding.draws import inverse_cdf
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.randomness import Purpose
from foresay.decoding.rows import Rows
from foresay.drafters.stateless import Stateless
from foresay.models.table import TableModel

SHAPE = (-1, -1, -1, 0, 0, 1, 3, 3)
"""Parents: three roots, two children of the first, one of the second, two of a grandchild."""


class TableTree(Stateless):
    """A tree of a fixed shape drawn from a table: siblings without replacement, and the last of some as point masses."""

    branches = 3

    def __init__(self, table: TableModel, shape: Sequence[int] = SHAPE, named: Sequence[int] = (2, 4)) -> None:
        """named: columns that are not drawn but named: the likeliest token that no sibling holds."""
        self.table, self.shape, self.named = table, shape, named

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        size = self.table.vocab_size
        numbers = rows.streams(torch.device("cpu")).uniform(Purpose.DRAFT, torch.arange(len(self.shape)))
        distributions: list[torch.Tensor] = []
        ids = torch.zeros(len(rows), len(self.shape), dtype=torch.int64)
        index = torch.full_like(ids, -1)
        for i, row in enumerate(rows):
            contexts = {-1: row.tokens.tolist()}
            places: dict[int, int] = {}
            for column, parent in enumerate(self.shape):
                distribution = self.table.distribution(contexts[parent]).float()
                siblings = [c for c in range(column) if self.shape[c] == parent]
                left = distribution.clone()
                left[[int(ids[i, c]) for c in siblings]] = 0
                if column in self.named or row.params.greedy:
                    ids[i, column] = int(left.argmax())
                else:
                    if parent not in places:
                        places[parent] = len(distributions)
                        distributions.append(distribution)
                    index[i, column] = places[parent]
                    ids[i, column] = int(inverse_cdf(left[None], numbers[i, column : column + 1])[0])
                contexts[column] = [*contexts[parent], int(ids[i, column])]
            assert size == len(distribution)
        counts = [
            min(n, len(self.shape) - (row.size + i) % 3) for i, (row, n) in enumerate(zip(rows, budget, strict=True))
        ]
        parents = torch.tensor(self.shape).repeat(len(rows), 1)
        if not distributions:
            return Proposal(ids, counts, parents=parents)
        return Proposal(ids, counts, torch.stack(distributions), index, parents=parents)


class RightTree(Stateless):
    """Knows the outputs: the right token is one of several siblings at each depth, now first, now last, now missing."""

    branches = 3

    def __init__(self, outputs: Sequence[Sequence[int]], vocab_size: int) -> None:
        self.outputs, self.vocab_size = outputs, vocab_size

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        trees: list[tuple[list[int], list[int]]] = []
        for i, (row, n) in enumerate(zip(rows, budget, strict=True)):
            right = list(self.outputs[row.request_id][row.num_new :])
            tokens: list[int] = []
            parents: list[int] = []
            at, turn = -1, row.size * 5 + i
            for depth, token in enumerate(right):
                if len(tokens) + 3 > n:
                    break
                wrong = [(token + k) % self.vocab_size for k in (1, 2)]
                slot = (turn + depth) % 4
                siblings = (
                    [*wrong[:slot], token, *wrong[slot:]] if slot < 3 else [*wrong, (token + 3) % self.vocab_size]
                )
                parents += [at] * len(siblings)
                tokens += siblings
                if slot == 3:
                    break
                at = len(tokens) - len(siblings) + slot
            trees.append((tokens[:n], parents[:n]))
        width = max(len(tokens) for tokens, _ in trees)
        if width == 0:
            return Proposal.empty(len(rows), torch.device("cpu"))
        ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens, _ in trees])
        above = torch.tensor([[*parents, *[-1] * (width - len(parents))] for _, parents in trees])
        return Proposal(ids, [len(tokens) for tokens, _ in trees], parents=above)
