"""Bits on a GPU: whether scores and drafts depend on what else a pass contains.

Owns the comparison of a token alone with the same token in chains and trees of a batch, and of one request's drafts alone and in
a batch. Times nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from common import Figures, filled, random_prompt

from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.rows import Rows
from foresay.engine import Engine

CHAINS, TREES = ((8, 2), (32, 2), (13, 5), (32, 6), (32, 16)), ((13, 5), (32, 6), (32, 16))
"""Rows of a pass and tokens of each: 16 to 512 tokens, also one more than 64."""
STEPS = 32
"""Drafts that are compared."""


def same_bits(model: Any, device: torch.device) -> Figures:
    """Shares of tokens whose scores have the same bits alone and in a pass of a batch."""
    chains = [share for size in CHAINS for share in in_one_pass(model, device, *size)]
    trees = [in_one_pass(model, device, *size, tree=True) for size in TREES]
    return {
        "same_bits_share": statistics.fmean(chains),
        "same_bits_tree_share": statistics.fmean(one[0] for one in trees),
        "same_bits_nodes_share": statistics.fmean(share for one in trees for share in one[1:]),
    }


def in_one_pass(model: Any, device: torch.device, rows: int, width: int, tree: bool = False) -> list[float]:
    """Share of rows with the same scores token by token as in one pass: of each token on the path to the last one.

    tree: a binary tree instead of a chain.
    """
    prompt, whole = random_prompt(rows, device, 1000), model.new_cache()
    whole.add_rows(rows)
    for i in range(rows):
        one = ModelInput(prompt[i : i + 1], [prompt.shape[1]], first_row=i, logits=Logits.NONE)
        model.forward(one, whole)
    above = [(node - 1) // 2 if tree else node - 1 for node in range(width)]
    ids, path = prompt[:, :width].contiguous(), [width - 1]
    while above[path[0]] >= 0:
        path.insert(0, above[path[0]])
    parents = torch.tensor([above] * rows, device=device) if tree else None
    together = model.forward(ModelInput(ids, [width] * rows, parents=parents), whole).scores()
    same = [0] * len(path)
    for i in range(rows):
        cache = filled(model, prompt[i : i + 1])
        for depth, node in enumerate(path):
            alone = model.forward(ModelInput(ids[i : i + 1, node : node + 1].contiguous(), [1]), cache).scores()
            same[depth] += torch.equal(alone[0, 0], together[i, node])
    return [count / rows for count in same]


def same_drafts(engines: Mapping[int, Callable[..., Engine]], submit: Callable[[Engine, int], None]) -> float:
    """Share of the first request's drafts that have the same bits alone, and while other requests join.

    engines: by the number of rows, first 1. submit: gives an engine as many requests.
    """
    runs: list[dict[int, list[torch.Tensor]]] = []
    for rows, make in engines.items():
        seen: dict[int, list[torch.Tensor]] = {}

        def observe(batch: Rows, proposal: Proposal, *_: Any, seen: dict[int, list[torch.Tensor]] = seen) -> None:
            for i, row in enumerate(batch):
                if row.request_id == 0:
                    drawn, index = proposal.distributions, proposal.distribution_index
                    given = None if drawn is None or index is None else drawn[index[i]]
                    found = (proposal.token_ids[i], None if proposal.parents is None else proposal.parents[i], given)
                    seen[row.num_new] = [one.clone() for one in found if one is not None]

        engine = make(observers=[observe])
        submit(engine, rows)
        while engine.has_work and len(seen) < STEPS:
            engine.step()
        runs.append(seen)
    alone, among = runs
    return statistics.fmean(n in among and all(map(torch.equal, alone[n], among[n])) for n in alone)
