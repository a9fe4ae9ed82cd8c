"""Verification of trees of draft tokens: a walk from the root, child after child, until no child is accepted.

SpecInfer (Miao et al. 2023) with children drawn without replacement. A parent always precedes its children. Where no child was
drawn, all nodes are compared at once; else one loop over the nodes walks all rows. Neither waits for the device. The position of
a walk is 0 after the committed text and 1 + j after the token of node j.
"""

from __future__ import annotations

import torch

from foresay.decoding.devices import to_device
from foresay.decoding.distributions import Distributions
from foresay.decoding.draws import draw, inverse_cdf
from foresay.decoding.proposal import Proposal, Verification, ancestors_of
from foresay.decoding.randomness import Purpose, Streams
from foresay.decoding.residuals import residual
from foresay.decoding.sums import row_sums


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
    assert proposal.parents is not None
    tokens = draw(target, streams, Purpose.TARGET, depths=_position_depths(proposal))
    parents, ids = proposal.parents, proposal.token_ids
    nodes = torch.arange(proposal.width, device=ids.device)
    counts = to_device(proposal.num_tokens, ids.device)[:, None]
    real = (nodes < counts) & (parents < nodes)  # a node below itself is never reached
    siblings = (parents[:, :, None] == parents[:, None]) & (nodes < nodes[:, None])  # the earlier ones of each node
    matches = real & (ids == tokens.gather(1, parents + 1))
    matches &= ~(siblings & matches[:, None]).any(-1)
    accepted = ~(ancestors_of(parents) & ~matches[:, None]).any(-1)
    position = torch.where(accepted, nodes + 1, 0)
    last = torch.nn.functional.pad(position, (1, 0)).amax(-1)
    path = torch.where(accepted, nodes, proposal.width).sort(-1).values
    followed = torch.nn.functional.pad(accepted, (1, 0), value=True).gather(1, parents + 1)
    tried = real & followed & ~(siblings & accepted[:, None]).any(-1)
    return Verification(
        accepted.sum(-1),
        tokens.gather(1, last[:, None])[:, 0],
        tried.sum(-1),
        torch.where(path < proposal.width, path, -1),
        tried,
    )


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
        q = q / row_sums(q)[:, None].clamp(min=torch.finfo(q.dtype).tiny)
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
