"""Two drafters, one of which drafts for each row: an n-gram drafter if its match is long, else a model (SuffixDecoding, 2024).

Continuations of long matches are nearly always accepted and cost nothing; without a long match a head or a draft model drafts.
The choice depends on the context alone, never on a draft token, so that each token keeps the distribution it was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foresay.checks import check_int
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import (
    Drafter,
    KVCache,
    LengthPolicy,
    ModelOutput,
    Move,
    ProposesTrees,
    Remembers,
    UsesTargetCache,
    learned_by,
)
from foresay.decoding.rows import Rows
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.proposal_builder import ProposalBuilder
from foresay.errors import ConfigError
from foresay.lengths.constant import MAX_DRAFT_TOKENS, ConstantLength

_ALL = ConstantLength(MAX_DRAFT_TOKENS)
"""Policy that keeps every token that the n-gram drafter finds."""


class Hybrid(Drafter):
    """Draft with an n-gram drafter where it matches at least `min_match` tokens of context, else with another drafter."""

    def __init__(self, lookup: NgramDrafter[Any], other: Drafter, *, min_match: int = 3, k: int = 5) -> None:
        """lookup: the n-gram drafter. other: the fallback, which drafts at most `k` tokens.

        Raises ConfigError if the first is no n-gram drafter or either always proposes trees; a HeadDrafter with `nodes` does so
        where rule and target take them.
        """
        if not isinstance(lookup, NgramDrafter):
            text = "must be an n-gram drafter, such as suffix, as the first of a hybrid"
            raise ConfigError(text, param="lookup", value=type(lookup).__name__)
        for one in (lookup, other):
            if isinstance(one, ProposesTrees) and one.branches > 1:
                text = "proposes trees, and a hybrid takes drafters of chains; set branches=1 or replace it"
                raise ConfigError(text, param="drafters", value=type(one).__name__)
        self.min_match = check_int("min_match", min_match, 1, 1 << 20)
        self.k = check_int("k", k, 1, MAX_DRAFT_TOKENS)
        self._lookup, self._other = lookup, other
        self.samples = other.samples
        self.hidden_layers = other.hidden_layers

    @property
    def learned(self) -> bytes:
        """Digests of both drafters."""
        return learned_by(self._lookup, self._other)

    def repeats_seeds(self) -> bool:
        """Return True if the n-gram drafter keeps requests and the other one samples, or if the other one returns True."""
        other = self._other
        keeps = self._lookup.keeps_requests and self.samples
        return keeps or (isinstance(other, Remembers) and other.repeats_seeds())

    def use_cache_of_target(self, cache: KVCache) -> None:
        """Give the target's cache to a fallback that drafts in it."""
        if isinstance(self._other, UsesTargetCache):
            self._other.use_cache_of_target(cache)

    def admit(self, rows: Rows, first: int) -> None:
        """Forward to both drafters."""
        self._lookup.admit(rows, first)
        self._other.admit(rows, first)

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Forward to both drafters."""
        self._lookup.rearrange(moves, count)
        self._other.rearrange(moves, count)

    def reset(self) -> None:
        """Forward to both drafters."""
        self._lookup.reset()
        self._other.reset()

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Forward to both drafters."""
        self._lookup.observe(rows, verification, target)
        self._other.observe(rows, verification, target)

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draft for each row with one of the two drafters."""
        proposal = self._lookup.propose(rows, budget, _ALL)
        builder = ProposalBuilder(len(rows), proposal.token_ids.device)
        with builder.keeping():
            self._extend(builder, proposal, rows, budget, policy)
        return builder.proposal(confidence=rows.needs.confidence)

    def _extend(
        self, builder: ProposalBuilder, proposal: Proposal, rows: Rows, budget: Sequence[int], policy: LengthPolicy
    ) -> None:
        matched = proposal.matched or [0] * len(rows)
        found = zip(proposal.num_tokens, matched, strict=True)
        counts: Sequence[int] = [n if m >= self.min_match else 0 for n, m in found]
        if any(counts):
            counts = policy.num_to_score(rows, counts, matched)
            builder.add(proposal, counts)
        for i, count in enumerate(counts):
            if not count:
                self._lookup.unused(i)
        most = [0 if count else min(n, self.k) for n, count in zip(budget, counts, strict=True)]
        fallback = policy.fallback_budget(rows, most) if any(most) else most
        if any(fallback):
            builder.add(self._other.propose(rows, fallback, policy))
