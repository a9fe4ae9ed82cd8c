"""Acceptance rules for chains of draft tokens: pure functions of distributions and uniforms. trees.py has those for trees.

Exact rules keep the output distribution equal to the target's, however bad the proposal; lossy rules, chosen by name, trade that
for longer accepted prefixes. p is the target's distribution, q the draft's. A draft token that was not sampled is a point mass,
and so is a greedy target's distribution, so that one rule serves greedy decoding and sampling. Rows are ragged. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from foresay.checks import check_float
from foresay.decoding.devices import selected
from foresay.decoding.distributions import Distributions, entropy
from foresay.decoding.draws import draw, inverse_cdf
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import Rule
from foresay.decoding.randomness import Purpose, Streams
from foresay.decoding.residuals import residual
from foresay.decoding.rows import RuleNeeds
from foresay.decoding.sums import row_sums
from foresay.decoding.trees import match_tree, speculative_tree
from foresay.errors import ConfigError, UnknownNameError


def _valid(proposal: Proposal) -> torch.Tensor:
    """[B, K] bool: True for draft tokens, False for padding."""
    counts = proposal.counts
    return torch.arange(proposal.width, device=counts.device) < counts[:, None]


def _leading(accepted: torch.Tensor) -> torch.Tensor:
    """[B, K] bool -> [B], length of the leading run of True."""
    return accepted.long().cumprod(-1).sum(-1)


def _extra_uniform(streams: Streams, num_accepted: torch.Tensor) -> torch.Tensor:
    """Uniforms of the tokens after the accepted ones, [B]."""
    return streams.position_uniform(num_accepted[:, None])[:, 0]


def _tested_up_to_first_rejection(num_accepted: torch.Tensor, proposal: Proposal) -> torch.Tensor:
    """[B]: number of accepted tokens, plus one if a token was rejected."""
    return torch.minimum(num_accepted + 1, proposal.counts)


def _refuse_tree(rule: Rule, proposal: Proposal) -> None:
    if proposal.parents is not None:
        raise ConfigError("verifies chains of draft tokens, and this proposal is a tree", param="rule", value=rule.name)


def _draft_probs(proposal: Proposal) -> torch.Tensor:
    """q(x) of each draft token, [B, K]; 1 for a point mass."""
    if proposal.distributions is None or proposal.distribution_index is None:
        return torch.ones(proposal.token_ids.shape, device=proposal.token_ids.device)
    dense = proposal.distributions[proposal.distribution_index.clamp(min=0), proposal.token_ids]
    return torch.where(proposal.distribution_index >= 0, dense, 1.0)


def _draft_rows(proposal: Proposal, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor | None:
    """q at positions (rows, columns), [N, V]; a row of zeros for a point mass (see `_without_draft`)."""
    if proposal.distributions is None or proposal.distribution_index is None:
        return None
    index = proposal.distribution_index[rows, columns]
    return proposal.distributions[index.clamp(min=0)] * (index >= 0)[:, None]


def _is_point(proposal: Proposal, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    if proposal.distribution_index is None:
        return torch.ones_like(rows, dtype=torch.bool)
    return proposal.distribution_index[rows, columns] < 0


def _extra_tokens(
    target: Distributions,
    proposal: Proposal,
    num_accepted: torch.Tensor,
    uniform: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Token after the accepted ones, [B]: from the residual after a rejection, else from p.

    uniform: [B]. scale: [B] or None, the factor on p in the residual of block verification and lenience (default 1).
    """
    batch = torch.arange(len(num_accepted), device=num_accepted.device)
    if not proposal.width or target.probs is None or target.probs_row is None:
        return _from_target(target, num_accepted, uniform)
    out = target.greedy_ids[batch, num_accepted]
    index = target.probs_row[batch, num_accepted]
    dense = selected(index >= 0)
    column = num_accepted[dense]
    rejected = column < proposal.counts[dense]
    column = column.clamp(max=proposal.width - 1)
    factor = None if scale is None else scale[dense]
    probs = target.probs[index[dense].clamp(min=0)]
    distribution = _without_draft(probs, proposal, dense, column, rejected, factor)
    out[dense] = torch.where(index[dense] >= 0, inverse_cdf(distribution, uniform[dense]), out[dense])
    return out


def _without_draft(
    distribution: torch.Tensor,
    proposal: Proposal,
    rows: torch.Tensor,
    columns: torch.Tensor,
    rejected: torch.Tensor,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    """norm(max(0, scale * p - q)) where `rejected`, p elsewhere. distribution: p, [N, V]; rows, columns: [N], positions of q."""
    q = _draft_rows(proposal, rows, columns)
    out = distribution
    if q is not None:
        scaled = distribution if scale is None else distribution * scale[:, None]
        out = torch.where(rejected[:, None], residual(scaled, q), distribution)
    # a point mass takes all of its token and nothing else: max(0, p - 1) there
    point = rejected & _is_point(proposal, rows, columns)
    tokens = proposal.token_ids[rows, columns][:, None]
    out = out.scatter(1, tokens, torch.where(point[:, None], 0.0, out.gather(1, tokens)))
    # the residual is empty only after a rejection of probability zero: return p
    empty = out.sum(-1, keepdim=True) <= 0
    return torch.where(empty, distribution, out)


class Speculative(Rule):
    """Speculative sampling: accept x while u < p(x) / q(x), then the residual or bonus (Leviathan et al. 2023, Alg. 1).

    A draft token that was not sampled (q a point mass) is accepted if it equals the token that p draws at its position. Its
    acceptance probability is p(x), as in Alg. 1, and the generated token does not depend on the draft.
    """

    name, exact, trees = "speculative", True, True

    def verify(self, target: Distributions, proposal: Proposal, streams: Streams) -> Verification:
        """Accept each draft token with probability min(1, p(x) / q(x)), up to the first rejection."""
        if proposal.parents is not None:
            # chosen tokens are accepted if they equal the target's own
            verify = match_tree if proposal.distributions is None else speculative_tree
            return verify(target, proposal, streams)
        batch = torch.arange(len(proposal.token_ids), device=proposal.token_ids.device)
        if not proposal.width:
            tokens, none = draw(target, streams, Purpose.TARGET)[:, 0], torch.zeros_like(batch)
            return Verification(none, tokens, none)
        valid = _valid(proposal)
        if target.probs is None and proposal.distributions is None:
            count = _leading((target.greedy_ids[:, : proposal.width] == proposal.token_ids) & valid)
            extra = target.greedy_ids[batch, count]
            return Verification(count, extra, _tested_up_to_first_rejection(count, proposal))
        point = _points(proposal)
        drawn = _target_draws(target, proposal, streams, point)
        accepted = drawn[:, : proposal.width] == proposal.token_ids
        if proposal.distributions is not None:
            uniform = streams.uniform(Purpose.ACCEPT, torch.arange(proposal.width, device=batch.device))
            p, q = target.prob_of(proposal.token_ids), _draft_probs(proposal)
            accepted = torch.where(point, accepted, uniform * q < p)
        count = _leading(accepted & valid)
        tested = _tested_up_to_first_rejection(count, proposal)
        if proposal.distributions is None:
            return Verification(count, drawn[batch, count], tested)
        extra = _extra_tokens(target, proposal, count, _extra_uniform(streams, count))
        rejected_point = F.pad(point & valid, (0, 1))[batch, count]
        return Verification(count, torch.where(rejected_point, drawn[batch, count], extra), tested)


def _points(proposal: Proposal) -> torch.Tensor:
    """[B, K] bool: True for draft tokens that were not sampled."""
    if proposal.distribution_index is None:
        return torch.ones_like(proposal.token_ids, dtype=torch.bool)
    return proposal.distribution_index < 0


def _target_draws(target: Distributions, proposal: Proposal, streams: Streams, point: torch.Tensor) -> torch.Tensor:
    """Tokens that p draws, [B, 1 + K]: at draft tokens that were not sampled, and after the last one if none was sampled."""
    counts = proposal.counts[:, None]
    columns = torch.arange(proposal.width + 1, device=point.device)
    wanted = columns <= counts if proposal.distributions is None else F.pad(point, (0, 1)) & (columns < counts)
    return draw(target, streams, Purpose.TARGET, wanted=wanted)


class Block(Rule):
    """Block verification: the longest accepted block, never shorter in expectation (Sun et al. 2024, Alg. 2).

    Greedy rows, and rows without a sampled draft token, gain nothing from it and are verified as by `speculative`.
    """

    name, exact = "block", True

    def verify(self, target: Distributions, proposal: Proposal, streams: Streams) -> Verification:
        """Accept up to the last i whose uniform is at most h_i; every draft token is tested."""
        _refuse_tree(self, proposal)
        one_by_one = Speculative().verify(target, proposal, streams)
        if target.probs is None or target.probs_row is None or proposal.distributions is None or not proposal.width:
            return one_by_one
        device = proposal.token_ids.device
        valid = _valid(proposal)
        whole = ((~_points(proposal)) & valid).any(-1) & (target.probs_row[:, 0] >= 0)
        offsets = torch.arange(proposal.width, device=device)
        uniform = streams.uniform(Purpose.ACCEPT, offsets)
        pi = _joint(target.prob_of(proposal.token_ids), _draft_probs(proposal))
        h = self._thresholds(target, proposal, pi)
        accepted = (uniform <= h) & valid & (h > 0)
        count = torch.where(whole, torch.where(accepted, offsets + 1, 0).amax(-1), one_by_one.num_accepted)
        scale = torch.cat([torch.ones(len(pi), 1, device=device, dtype=pi.dtype), pi], 1).gather(1, count[:, None])[
            :, 0
        ]
        extra = _extra_tokens(target, proposal, count, _extra_uniform(streams, count), scale)
        counts = proposal.counts
        tested = torch.where(whole, counts, one_by_one.num_tested)
        return Verification(count, torch.where(whole, extra, one_by_one.token_ids), tested)

    @staticmethod
    def _thresholds(target: Distributions, proposal: Proposal, pi: torch.Tensor) -> torch.Tensor:
        """h [B, K]: h_i = S_i / (S_i + 1 - pi_i), S_i = sum max(0, pi_i p_{i+1} - q_{i+1}); the last of a row is pi."""
        assert target.probs is not None and target.probs_row is not None
        h = pi.clone()
        counts = proposal.counts
        for i in range(proposal.width - 1):
            drawn = (counts > i + 1) & (target.probs_row[:, i + 1] >= 0)
            rows = selected(drawn)
            if not len(rows):
                continue
            columns = torch.full_like(rows, i + 1)
            p = target.probs[target.probs_row[rows, i + 1].clamp(min=0)]
            scale = pi[rows, i].to(p.dtype)
            q = _draft_rows(proposal, rows, columns)
            # q a point mass at x: sum max(0, pi p - q) = pi (1 - p(x)), because pi p(x) <= 1
            here = p.gather(1, proposal.token_ids[rows, columns][:, None])[:, 0]
            mass = scale * (1 - here)
            if q is not None:
                spread = row_sums((p * scale[:, None] - q).clamp(min=0))
                mass = torch.where(_is_point(proposal, rows, columns), mass, spread)
            mass = mass.clamp(min=0)
            rest = mass + 1 - scale
            found = torch.where(rest > 0, mass / rest.clamp(min=torch.finfo(p.dtype).tiny), 1.0).to(h.dtype)
            h[rows, i] = torch.where(drawn[rows], found, h[rows, i])
        return h


def _joint(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """pi_i = min(1, pi_{i-1} p_i(x_i) / q_i(x_i)), pi_0 = 1. p, q: [B, K] -> [B, K]."""
    ratio = p / q.clamp(min=torch.finfo(q.dtype).tiny)
    out, last = torch.empty_like(ratio), torch.ones_like(ratio[:, 0])
    for i in range(ratio.shape[1]):
        last = torch.clamp(last * ratio[:, i], max=1.0)
        out[:, i] = last
    return out


class Match(Rule):
    """Draw the target's own token at each position and accept while it equals the draft token."""

    name, exact, trees, needs = "match", True, True, RuleNeeds(ignores_drafts=True)

    def verify(self, target: Distributions, proposal: Proposal, streams: Streams) -> Verification:
        """Generate the target's draws; the draft only saves passes."""
        if proposal.parents is not None:
            return match_tree(target, proposal, streams)
        counts = proposal.counts
        columns = torch.arange(proposal.width + 1, device=counts.device)
        tokens = draw(target, streams, Purpose.TARGET, wanted=columns <= counts[:, None])
        count = _leading((tokens[:, : proposal.width] == proposal.token_ids) & _valid(proposal))
        batch = torch.arange(len(count), device=count.device)
        return Verification(count, tokens[batch, count], _tested_up_to_first_rejection(count, proposal))


class Coupled(Match):
    """Gumbel coupling: `match` with noise that drafter and target share by position (Daliri et al. 2024).

    The output is a function of (seed, target) alone: the same with any drafter and draft length, alone or in a batch.
    """

    name, needs = "coupled", RuleNeeds(shares_noise=True, ignores_drafts=True)


class Lenience(Rule):
    """Lossy speculative sampling with q / l in place of q, l >= 1 (Leviathan et al. 2023, A.5; Chen et al. 2023).

    With l > 1 a greedy row also accepts x if p(x) > q(x) / l, where p and q are softmax probabilities at temperature 1 and q = 1
    for a draft token that no model proposed.
    """

    name, exact, needs = "lenience", False, RuleNeeds(confidence=True)

    def __init__(self, lenience: float = 2.0) -> None:
        """lenience: l; 1 is exact speculative sampling."""
        self.lenience = check_float("lenience", lenience, 1.0, 1e6)

    def verify(self, target: Distributions, proposal: Proposal, streams: Streams) -> Verification:
        """Accept x while u q(x) / l < p(x); then draw from norm(max(0, p - q / l)), or take the greedy target's token."""
        _refuse_tree(self, proposal)
        ids, device = proposal.token_ids, proposal.token_ids.device
        q = _draft_probs(proposal) / self.lenience
        p = target.prob_of(ids)
        uniform = streams.uniform(Purpose.ACCEPT, torch.arange(proposal.width, device=device))
        accepted = uniform * q < p
        if proposal.width:
            sure = torch.ones_like(q) if proposal.confidence is None else proposal.confidence
            close = (target.confidence(ids) > sure / self.lenience) & (self.lenience > 1)
            greedy = (
                torch.ones_like(accepted) if target.probs_row is None else target.probs_row[:, : proposal.width] < 0
            )
            accepted = torch.where(greedy, (target.greedy_ids[:, : proposal.width] == ids) | close, accepted)
        count = _leading(accepted & _valid(proposal))
        # norm(max(0, p - q / l)) is norm(max(0, l p - q))
        scale = torch.full((len(ids),), self.lenience, device=device)
        extra = _extra_tokens(target, proposal, count, _extra_uniform(streams, count), scale)
        return Verification(count, extra, _tested_up_to_first_rejection(count, proposal))


class Typical(Rule):
    """Typical acceptance: accept x if p(x) > min(eps, delta exp(-H(p))) (Cai et al. 2024, Medusa). Lossy.

    The token after the accepted ones is drawn from p. A greedy row accepts only its argmax.
    """

    name, exact = "typical", False

    def __init__(self, eps: float = 0.3, delta: float = 0.09) -> None:
        """eps: tokens above this probability are always accepted. delta: factor on exp(-entropy)."""
        self.eps, self.delta = check_float("eps", eps, 0.0, 1.0), check_float("delta", delta, 0.0, 1.0)

    def verify(self, target: Distributions, proposal: Proposal, streams: Streams) -> Verification:
        """Accept by p alone; q has no influence."""
        _refuse_tree(self, proposal)
        ids = proposal.token_ids
        p = target.prob_of(ids)
        bar = torch.full_like(p, 0.5)  # accepts the token of a point mass only
        if target.probs is not None and target.probs_row is not None:
            index = target.probs_row[:, : proposal.width]
            spread = (self.delta * (-entropy(target.probs)).exp()).clamp(max=self.eps)
            bar = torch.where(index >= 0, spread[index.clamp(min=0)], bar)
        count = _leading((p > bar) & _valid(proposal))
        extra = _from_target(target, count, _extra_uniform(streams, count))
        return Verification(count, extra, _tested_up_to_first_rejection(count, proposal))


def _from_target(target: Distributions, num_accepted: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Token drawn from p after the accepted ones, [B]."""
    batch = torch.arange(len(num_accepted), device=num_accepted.device)
    out = target.greedy_ids[batch, num_accepted]
    if target.probs is None or target.probs_row is None:
        return out
    index = target.probs_row[batch, num_accepted]
    dense = selected(index >= 0)
    drawn = inverse_cdf(target.probs, uniform[dense], index[dense].clamp(min=0))
    out[dense] = torch.where(index[dense] >= 0, drawn, out[dense])
    return out


RULES: dict[str, Callable[..., Rule]] = {
    "speculative": Speculative,
    "block": Block,
    "match": Match,
    "coupled": Coupled,
    "lenience": Lenience,
    "typical": Typical,
}


def make_rule(name: str) -> Rule:
    """Return the rule of a name with default settings. Raises UnknownNameError, which suggests the nearest name."""
    if name not in RULES:
        raise UnknownNameError("rule", name, RULES)
    return RULES[name]()
