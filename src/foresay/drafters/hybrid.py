"""Two drafters, of which one drafts each row: a look-up where its match is long, else a model (SuffixDecoding, 2024).

A look-up that continues a long match is nearly always right and costs nothing; where it has none, a head or a draft model
guesses. Which of the two drafts depends on the context alone, never on what either guessed, so that each token has the law it
came from.
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
)
from foresay.decoding.rows import Rows
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.proposal_builder import ProposalBuilder
from foresay.errors import ConfigError
from foresay.lengths.constant import MAX_DRAFT_TOKENS


class Hybrid(Drafter):
    """A look-up where it continues at least `min_match` tokens of context, else another drafter."""

    def __init__(self, lookup: NgramDrafter[Any], other: Drafter, *, min_match: int = 3, k: int = 5) -> None:
        """other: drafts chains, of at most `k` tokens. Raises ConfigError for a first drafter that looks nothing up."""
        if not isinstance(lookup, NgramDrafter):
            raise ConfigError(f"the first drafter of a hybrid looks guesses up, and {type(lookup).__name__} does not")
        for one in (lookup, other):
            if isinstance(one, ProposesTrees) and one.branches > 1:
                raise ConfigError(f"a hybrid drafts chains, and {type(one).__name__} proposes trees")
        self.min_match = check_int("min_match", min_match, 1, 1 << 20)
        self.k = check_int("k", k, 1, MAX_DRAFT_TOKENS)
        self._lookup, self._other = lookup, other
        self.samples = other.samples
        self.hidden_layers = other.hidden_layers

    def repeats_seeds(self) -> bool:
        """Whether the look-up keeps requests, beside a drafter that may sample, or the other drafter says so."""
        other = self._other
        keeps = self._lookup.keeps_requests and self.samples
        return keeps or (isinstance(other, Remembers) and other.repeats_seeds())

    def use_cache_of_target(self, cache: KVCache) -> None:
        """Pass on to a drafter that drafts in the target's cache."""
        if isinstance(self._other, UsesTargetCache):
            self._other.use_cache_of_target(cache)

    def admit(self, rows: Rows, first: int) -> None:
        """Pass on."""
        self._lookup.admit(rows, first)
        self._other.admit(rows, first)

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Pass on."""
        self._lookup.rearrange(moves, count)
        self._other.rearrange(moves, count)

    def reset(self) -> None:
        """Pass on."""
        self._lookup.reset()
        self._other.reset()

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Pass on."""
        self._lookup.observe(rows, verification, target)
        self._other.observe(rows, verification, target)

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Each row's draft by one of the two."""
        found = _Matches()
        looked_up = self._lookup.propose(rows, budget, found)
        grown = ProposalBuilder(len(rows), looked_up.token_ids.device)
        with grown.keeping():
            self._grow(grown, looked_up, found, rows, budget, policy)
        return grown.proposal(confidence=rows.needs.confidence)

    def _grow(
        self,
        grown: ProposalBuilder,
        looked_up: Proposal,
        found: _Matches,
        rows: Rows,
        budget: Sequence[int],
        policy: LengthPolicy,
    ) -> None:
        sure = [n > 0 and m >= self.min_match for n, m in zip(looked_up.num_tokens, found.of(len(rows)), strict=True)]
        if any(sure):
            counts = [n if on else 0 for n, on in zip(looked_up.num_tokens, sure, strict=True)]
            grown.add(looked_up, policy.num_to_score(rows, counts, found.of(len(rows))))
        rest = [0 if on else min(n, self.k) for n, on in zip(budget, sure, strict=True)]
        afforded = policy.fallback_budget(rows, rest) if any(rest) else rest
        if any(afforded):
            grown.add(self._other.propose(rows, afforded, policy))


class _Matches(LengthPolicy):
    """Remembers how much context each guess continues, and keeps all of it."""

    def __init__(self) -> None:
        self._matched: Sequence[int] = ()

    def budget(self, rows: Rows) -> list[int]:
        return [MAX_DRAFT_TOKENS] * len(rows)

    def num_to_score(self, rows: Rows, counts: Sequence[int], matched: Sequence[int]) -> Sequence[int]:
        self._matched = matched
        return counts

    def of(self, count: int) -> Sequence[int]:
        """By row; zeros where nothing was found."""
        return self._matched or [0] * count
