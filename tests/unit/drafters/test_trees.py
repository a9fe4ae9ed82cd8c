"""Trees: the nodes that a draft model gives them, and proposals that are made of trees and chains."""

from __future__ import annotations

import pytest
import torch

from foresay import ConstantLength, Proposal, ProposalBuilder, Row, Rows, SamplingParams, TableModel
from foresay.drafters import ModelTreeDrafter
from foresay.drafters.tree import Tree

SIZE, BRANCHES, WIDTH = 6, 3, 2
Path = tuple[int, ...]
TABLE = TableModel((torch.randn(SIZE, SIZE, SIZE, generator=torch.Generator().manual_seed(4)) * 1.5).exp())


def paths(budgets: list[int], temperature: float = 0.0) -> list[list[Path]]:
    """The proposed nodes of rows that end with tokens 0, 1, 2, ..."""
    params = SamplingParams(max_new_tokens=40, temperature=temperature)
    rows = Rows([Row(i, [3, i], params, limit=60, seed=i) for i in range(len(budgets))])
    drafter = ModelTreeDrafter(TABLE, SIZE, branches=BRANCHES, width=WIDTH)
    drafter.admit(rows, 0)
    proposal = drafter.propose(rows, budgets, ConstantLength(8))
    assert proposal.failure is None
    return nodes_of(proposal)


def nodes_of(proposal: Proposal) -> list[list[Path]]:
    """The path to each node of each row."""
    chains = torch.arange(-1, proposal.width - 1).repeat(len(proposal.num_tokens), 1)
    parents = chains if proposal.parents is None else proposal.parents
    out = []
    for ids, above, n in zip(proposal.token_ids.tolist(), parents.tolist(), proposal.num_tokens, strict=True):
        nodes: list[Path] = []
        for token, parent in zip(ids[:n], above[:n], strict=True):
            nodes.append((*(nodes[parent] if parent >= 0 else ()), token))
        out.append(nodes)
    return out


def searched(last: int, budget: int) -> set[Path]:
    """Level by level, the children of the most probable new nodes among the best `budget` of all."""
    nodes: dict[Path, float] = {}
    level: list[Path] = [()]
    while level:
        newest = {}
        for path in level:
            top = TABLE.distribution([3, last, *path]).topk(BRANCHES)
            for p, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                newest[(*path, token)] = nodes.get(path, 1.0) * p
        nodes |= newest
        best = sorted(nodes, key=lambda path: -nodes[path])[:budget]
        level = sorted((path for path in newest if path in best), key=lambda path: -nodes[path])[:WIDTH]
    return set(best)


@pytest.mark.parametrize("budgets", [[1], [8], [3, 8, 15, 0, 6]])
def test_greedy_rows_get_the_most_probable_nodes(budgets: list[int]) -> None:
    for last, (nodes, budget) in enumerate(zip(paths(budgets), budgets, strict=True)):
        assert len(nodes) == budget and set(nodes) == (searched(last, budget) if budget else set())
    if max(budgets) > 8:
        assert max(len(path) for nodes in paths(budgets) for path in nodes) > 2


def test_without_pruning_the_first_levels_take_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""

    def full(self: Tree) -> None:
        self.stopped = len(self.tokens) >= self.budget

    monkeypatch.setattr(Tree, "prune", full)
    [nodes] = paths([15])
    assert set(nodes) != searched(0, 15)


def test_a_sampled_tree_uses_its_budget_and_drops_no_token() -> None:
    [nodes] = paths([9], temperature=1.0)
    assert len(nodes) == 9 and [len(path) for path in nodes] == sorted(len(path) for path in nodes)


def test_a_tree_next_to_a_chain_and_after_one() -> None:
    """Its roots follow the last token before it. Chains alone stay chains."""
    builder = ProposalBuilder(3, torch.device("cpu"))
    builder.add(Proposal(torch.tensor([[1, 2], [0, 0], [3, 0]]), [2, 0, 1]))
    assert builder.proposal().parents is None
    tree = torch.tensor([[0] * 4, [5, 6, 7, 8], [5, 6, 7, 8]])
    builder.add(Proposal(tree, [0, 4, 3], parents=torch.tensor([[-1] * 4, [-1, -1, 0, 2], [-1, 0, -1, 1]])))
    assert nodes_of(builder.proposal()) == [
        [(1,), (1, 2)],
        [(5,), (6,), (5, 7), (5, 7, 8)],
        [(3,), (3, 5), (3, 5, 6), (3, 7)],
    ]
