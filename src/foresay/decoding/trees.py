"""Judging trees of draft tokens: a walk from the root, child after child, to where none is accepted.

METHODS: SpecInfer (Miao et al. 2023) with children drawn without replacement. Columns are visited in order, and a column's
parent always comes before it, so one pass over the columns walks all rows at once without waiting for the device. A row's walk
stands at a place: place 0 follows the committed text, place 1 + j the token of column j.
"""

from __future__ import annotations

import torch

from foresay.decoding.distributions import Distributions
from foresay.decoding.draws import draw, inverse_cdf
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.randomness import Purpose, Streams
from foresay.decoding.residuals import residual


class _Walk:
    """Where each row's walk stands, and what it has tried."""

    def __init__(self, proposal: Proposal) -> None:
        assert proposal.parents is not None
        ids = proposal.token_ids
        self._parents = proposal.parents
        self._real = torch.arange(proposal.width, device=ids.device) < torch.tensor(
            proposal.num_tokens, device=ids.device
        ).unsqueeze(1)
        self.rows = torch.arange(len(ids), device=ids.device)
        self.place = torch.zeros_like(self.rows)
        self.count = torch.zeros_like(self.rows)
        self.path = torch.full_like(ids, -1)
        self.tried = torch.zeros_like(self._real)

    def tries(self, column: int) -> torch.Tensor:
        """[B] bool: the rows whose walk stands at this column's parent."""
        here = (self._parents[:, column] + 1 == self.place) & self._real[:, column]
        self.tried[:, column] = here
        return here

    def go(self, column: int, accepted: torch.Tensor) -> None:
        """Rows where it was accepted stand behind the column now."""
        self.path[self.rows, self.count] = torch.where(accepted, column, self.path[self.rows, self.count])
        self.place = torch.where(accepted, column + 1, self.place)
        self.count = self.count + accepted

    def verification(self, token_ids: torch.Tensor) -> Verification:
        return Verification(self.count, token_ids, self.tried.sum(-1), self.path, self.tried)


def _place_depths(proposal: Proposal) -> torch.Tensor:
    """Draft tokens before each place, [B, 1 + K]."""
    return torch.nn.functional.pad(proposal.depths() + 1, (1, 0))


def match_tree(target: Distributions, proposal: Proposal, streams: Streams) -> Verification:
    """Draw the target's token at each place and go to the child that is it; where there is none the walk ends with it."""
    tokens = draw(target, streams, Purpose.TARGET, depths=_place_depths(proposal))
    walk = _Walk(proposal)
    for column in range(proposal.width):
        here = walk.tries(column)
        walk.go(column, here & (tokens[walk.rows, walk.place] == proposal.token_ids[:, column]))
    return walk.verification(tokens[walk.rows, walk.place])


def speculative_tree(target: Distributions, proposal: Proposal, streams: Streams) -> Verification:
    """Try the children of each place in turn: accept c with min(1, p(c) / q(c)), after a rejection p <- norm(max(0, p - q)).

    q begins as the law the children were drawn from and loses each child that was tried, since they were drawn without
    replacement. The child that was not sampled is taken when it is the token that the rest of p writes at its position, which
    is also the token that the walk ends with. Sampled children must come before the others of their parent.
    """
    walk = _Walk(proposal)
    ids, device = proposal.token_ids, proposal.token_ids.device
    vocab = _vocab(target, proposal)
    p, sampled = _dense(target, walk, vocab)
    spent = torch.zeros(len(ids), vocab, dtype=torch.bool, device=device)  # siblings that were tried and drawn
    uniform = streams.uniform(Purpose.ACCEPT, torch.arange(proposal.width, device=device))
    written = _write(p, sampled, target, streams, walk)
    for column in range(proposal.width):
        here = walk.tries(column)
        token = ids[:, column]
        q, drawn = _draft_distribution(proposal, column, vocab)
        q = torch.where(spent, 0.0, q)
        q = q / q.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
        ratio_holds = uniform[:, column] * q[walk.rows, token] < p[walk.rows, token]
        accepted = here & torch.where(drawn, ratio_holds, written == token)
        rejected = here & drawn & ~accepted
        p = torch.where(rejected[:, None], residual(p, q), p)
        spent[walk.rows, token] |= rejected
        walk.go(column, accepted)
        fresh, at_sampled = _dense(target, walk, vocab)
        p = torch.where(accepted[:, None], fresh, p)
        sampled = torch.where(accepted, at_sampled, sampled)
        spent &= ~accepted[:, None]
        written = torch.where(accepted | rejected, _write(p, sampled, target, streams, walk), written)
    return walk.verification(written)


def _vocab(target: Distributions, proposal: Proposal) -> int:
    for held in (target.probs, proposal.distributions, target.scores):
        if held is not None:
            return int(held.shape[-1])
    return int(torch.maximum(target.greedy_ids.max(), proposal.token_ids.max())) + 1


def _dense(target: Distributions, walk: _Walk, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's laws where the walks stand, [B, V], and whether they are more than a point mass, [B] bool."""
    greedy = target.greedy_ids[walk.rows, walk.place]
    point = torch.nn.functional.one_hot(greedy.clamp(max=vocab - 1), vocab).to(torch.float32)
    if target.probs is None or target.probs_row is None:
        return point, torch.zeros_like(walk.rows, dtype=torch.bool)
    row = target.probs_row[walk.rows, walk.place]
    return torch.where((row >= 0)[:, None], target.probs[row.clamp(min=0)], point), row >= 0


def _write(
    p: torch.Tensor, sampled: torch.Tensor, target: Distributions, streams: Streams, walk: _Walk
) -> torch.Tensor:
    """The token that p writes at the walk's position, [B]; a point mass's own token."""
    own = target.greedy_ids[walk.rows, walk.place]
    drawn = inverse_cdf(p, streams.writing(walk.count[:, None])[:, 0])
    return torch.where(sampled, drawn, own)


def _draft_distribution(proposal: Proposal, column: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q of a column, [B, V], and whether its token was drawn from it, [B] bool."""
    if proposal.distributions is None or proposal.distribution_index is None:
        none = torch.zeros(len(proposal.token_ids), vocab, device=proposal.token_ids.device)
        return none, torch.zeros(len(none), dtype=torch.bool, device=none.device)
    row = proposal.distribution_index[:, column]
    return proposal.distributions[row.clamp(min=0)], row >= 0
