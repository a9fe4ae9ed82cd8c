"""Proposals made of parts, chains and trees."""

from __future__ import annotations

import torch

from foresay.decoding.proposal import Proposal
from foresay.drafters.proposal_builder import ProposalBuilder

CPU = torch.device("cpu")


def proposal(ids: list[list[int]], counts: list[int], parents: list[list[int]] | None = None) -> Proposal:
    return Proposal(torch.tensor(ids), counts, parents=None if parents is None else torch.tensor(parents))


def test_chains_stay_chains() -> None:
    builder = ProposalBuilder(2, CPU)
    builder.add(proposal([[5, 6, 7], [0, 0, 0]], [3, 0]), [2, 0])
    builder.add(proposal([[0, 0], [8, 9]], [0, 2]))
    builder.add(proposal([[4], [3]], [1, 1]))
    out = builder.proposal()
    assert out.parents is None and out.num_tokens == [3, 3]
    assert out.token_ids.tolist() == [[5, 6, 4], [8, 9, 3]]


def test_a_tree_beside_a_chain_and_after_one() -> None:
    """Its roots follow the last token before it."""
    builder = ProposalBuilder(3, CPU)
    builder.add(proposal([[1, 2], [0, 0], [3, 0]], [2, 0, 1]))
    tree = [[0] * 4, [5, 6, 7, 8], [5, 6, 7, 8]]
    builder.add(proposal(tree, [0, 4, 3], [[-1] * 4, [-1, -1, 0, 2], [-1, 0, -1, 1]]))
    out = builder.proposal()
    assert out.num_tokens == [2, 4, 4] and out.parents is not None
    assert out.token_ids.tolist() == [[1, 2, 0, 0], [5, 6, 7, 8], [3, 5, 6, 7]]
    kept = [line[:n] for line, n in zip(out.parents.tolist(), out.num_tokens, strict=True)]
    assert kept == [[-1, 0], [-1, -1, 0, 2], [-1, 0, 1, 0]]
