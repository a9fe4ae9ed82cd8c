"""Verification of trees of draft tokens: a walk from the root, child after child, until no child is accepted.

SpecInfer (Miao et al. 2023) with children drawn without replacement. Nodes are visited in order, and a parent always precedes its
children, so that one loop over the nodes walks all rows at once without waiting for the device. A walk's position is 0 after the
committed text and 1 + j after the token of node j.
"""

from __future__ import annotations

import torch

from foresay.decoding.devices import to_device
from foresay.decoding.distributions import Distributions
from foresay.decoding.draws import draw, inverse_cdf
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.randomness import Purpose, Streams
from foresay.decoding.residuals import residual


class _Walk:
    """Position of each row's walk, and the nodes it has tried."""

    def __init__(self, proposal: Proposal) -> None:
        assert proposal.parents is not None
        ids = proposal.token_ids
        self._parents = proposal.parents
        counts = to_device(proposal.num_tokens, ids.device)
        self._real = torch.arange(proposal.width, device=ids.device) < counts[:, None]
        self.rows = torch.arange(len(ids), device=ids.device)
        self.position = torch.zeros_like(self.rows)
        self.count = torch.zeros_like(self.rows)
        self.path = torch.full_like(ids, -1)
        self.tried = torch.zeros_like(self._real)

    def visit(self, node: int) -> torch.Tensor:
        """Mark the node as tried where the walk is at its parent; return these rows, [B] bool."""
        here = (self._parents[:, node] + 1 == self.position) & self._real[:, node]
        self.tried[:, node] = here
        return here

    def move_to(self, node: int, accepted: torch.Tensor) -> None:
        """Move to the node in the rows that accepted it. accepted: [B] bool."""
        self.path[self.rows, self.count] = torch.where(accepted, node, self.path[self.rows, self.count])
        self.position = torch.where(accepted, node + 1, self.position)
        self.count = self.count + accepted

    def verification(self, token_ids: torch.Tensor) -> Verification:
        return Verification(self.count, token_ids, self.tried.sum(-1), self.path, self.tried)


def _position_depths(proposal: Proposal) -> torch.Tensor:
    """Number of draft tokens before each position, [B, 1 + K]."""
    return torch.nn.functional.pad(proposal.depths() + 1, (1, 0))


def match_tree(target: Distributions, proposal: Proposal, streams: Streams) -> Verification:
    """Draw the target's token at each position and follow the child that equals it; without one the walk ends with the draw."""
    tokens = draw(target, streams, Purpose.TARGET, depths=_position_depths(proposal))
    if tokens.device.type == "cpu":  # where nothing waits for a device, lists are faster
        return _followed(tokens, proposal)
    walk = _Walk(proposal)
    for node in range(proposal.width):
        here = walk.visit(node)
        walk.move_to(node, here & (tokens[walk.rows, walk.position] == proposal.token_ids[:, node]))
    return walk.verification(tokens[walk.rows, walk.position])


def _followed(tokens: torch.Tensor, proposal: Proposal) -> Verification:
    """Follow the children that equal the drawn tokens [B, 1 + K]."""
    assert proposal.parents is not None
    counts, extra, paths, tried = [], [], [], []
    for drawn, ids, parents, n in zip(
        tokens.tolist(), proposal.token_ids.tolist(), proposal.parents.tolist(), proposal.num_tokens, strict=True
    ):
        position, path, here = 0, [], [False] * proposal.width
        for node in range(n):
            here[node] = parents[node] + 1 == position
            if here[node] and ids[node] == drawn[position]:
                path.append(node)
                position = node + 1
        counts.append(len(path))
        extra.append(drawn[position])
        paths.append(path + [-1] * (proposal.width - len(path)))
        tried.append(here)
    visited = torch.tensor(tried)
    return Verification(torch.tensor(counts), torch.tensor(extra), visited.sum(-1), torch.tensor(paths), visited)


def speculative_tree(target: Distributions, proposal: Proposal, streams: Streams) -> Verification:
    """Try the children of a node in turn: accept c with min(1, p(c) / q(c)), after a rejection p <- norm(max(0, p - q)).

    q starts as the distribution the children were drawn from and loses each tried child, because they were drawn without
    replacement. A child that was not sampled is accepted if the remaining p draws it at its position; that draw is also the token
    that the walk ends with. Sampled children must precede the others of their parent.
    """
    walk = _Walk(proposal)
    ids, device = proposal.token_ids, proposal.token_ids.device
    vocab = _vocab(target, proposal)
    p, sampled = _dense(target, walk, vocab)
    tried = torch.zeros(len(ids), vocab, dtype=torch.bool, device=device)  # sampled siblings that were rejected
    uniform = streams.uniform(Purpose.ACCEPT, torch.arange(proposal.width, device=device))
    drawn = _draw_from(p, sampled, target, streams, walk)
    for node in range(proposal.width):
        here = walk.visit(node)
        token = ids[:, node]
        q, is_sample = _draft_distribution(proposal, node, vocab)
        q = torch.where(tried, 0.0, q)
        q = q / q.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
        below_ratio = uniform[:, node] * q[walk.rows, token] < p[walk.rows, token]
        accepted = here & torch.where(is_sample, below_ratio, drawn == token)
        rejected = here & is_sample & ~accepted
        p = torch.where(rejected[:, None], residual(p, q), p)
        tried[walk.rows, token] |= rejected
        walk.move_to(node, accepted)
        fresh, at_sampled = _dense(target, walk, vocab)
        p = torch.where(accepted[:, None], fresh, p)
        sampled = torch.where(accepted, at_sampled, sampled)
        tried &= ~accepted[:, None]
        drawn = torch.where(accepted | rejected, _draw_from(p, sampled, target, streams, walk), drawn)
    return walk.verification(drawn)


def _vocab(target: Distributions, proposal: Proposal) -> int:
    for tensor in (target.probs, proposal.distributions, target.scores):
        if tensor is not None:
            return int(tensor.shape[-1])
    return int(torch.maximum(target.greedy_ids.max(), proposal.token_ids.max())) + 1


def _dense(target: Distributions, walk: _Walk, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Target distributions at the walks' positions, [B, V], and whether they are sampled (no point mass), [B] bool."""
    greedy = target.greedy_ids[walk.rows, walk.position]
    point = torch.nn.functional.one_hot(greedy.clamp(max=vocab - 1), vocab).to(torch.float32)
    if target.probs is None or target.probs_row is None:
        return point, torch.zeros_like(walk.rows, dtype=torch.bool)
    row = target.probs_row[walk.rows, walk.position]
    return torch.where((row >= 0)[:, None], target.probs[row.clamp(min=0)], point), row >= 0


def _draw_from(
    p: torch.Tensor, sampled: torch.Tensor, target: Distributions, streams: Streams, walk: _Walk
) -> torch.Tensor:
    """Token drawn from p with the uniform of the walk's position, [B]; the token of a point mass."""
    greedy = target.greedy_ids[walk.rows, walk.position]
    drawn = inverse_cdf(p, streams.position_uniform(walk.count[:, None])[:, 0])
    return torch.where(sampled, drawn, greedy)


def _draft_distribution(proposal: Proposal, node: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q of a node, [B, V], and whether its token was drawn from it, [B] bool."""
    if proposal.distributions is None or proposal.distribution_index is None:
        none = torch.zeros(len(proposal.token_ids), vocab, device=proposal.token_ids.device)
        return none, torch.zeros(len(none), dtype=torch.bool, device=none.device)
    row = proposal.distribution_index[:, node]
    return proposal.distributions[row.clamp(min=0)], row >= 0
