"""What the step asks of models, caches, drafters, length policies and rules.

Owns the protocols and the values that pass between them (`Feed`, `ModelOutput`, `DraftStep`). Knows none of those who fulfil
them. Letters in docstrings: B rows, K draft tokens, T columns of a pass, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

import torch

from foresay.decoding.laws import Laws
from foresay.decoding.outcome import Step
from foresay.decoding.proposal import Proposal, Verdict
from foresay.decoding.randomness import Streams
from foresay.decoding.rows import Rows

Move = tuple[int, int]
"""(from, to): the row at `from` takes the place `to`, whose row is gone."""


class KVCache(Protocol):
    """What a model remembers of each row."""

    lengths: list[int]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Set row i to min(its length, lengths[i]); rows behind the given ones stay as they are."""
        ...

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Carry out the moves; rows from `count` on are gone."""
        ...


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One token that a draft model has just added to each row's draft, and what it thought.

    token_ids: [B] int64. laws: the laws [B, 1] they were drawn from, with the raw scores. hidden: [B, H] or None, the draft's
    last hidden state.
    """

    token_ids: torch.Tensor
    laws: Laws
    hidden: torch.Tensor | None = None


class LengthPolicy(Protocol):
    """How many tokens to guess."""

    def budget(self, rows: Rows) -> list[int]:
        """Most tokens to guess for each row in this step."""
        ...

    def keep_drafting(self, index: int, guess: DraftStep) -> torch.Tensor | None:
        """[B] bool after a draft model's token `index`: which rows draft on; None lets all of them.

        A token stays in the draft whatever it is: dropping it for its own value would condition its law.
        """
        ...

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        """See what a step did to each row, after it."""
        ...


class Drafter(Protocol):
    """What guesses tokens. Rows are named by their place in the batch; `rearrange` keeps the places true."""

    hidden_layers: tuple[int, ...]
    """Layers of the target whose hidden states `observe` wants to see."""

    def admit(self, rows: Rows, first: int) -> None:
        """Rows from place `first` on are new."""
        ...

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """DraftStep up to `budget` tokens for each row."""
        ...

    def observe(self, rows: Rows, verdict: Verdict | None, target: ModelOutput | None) -> None:
        """See what was committed (already in `rows`) and what the target computed."""
        ...

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Follow the engine's moves of rows."""
        ...

    def reset(self) -> None:
        """Forget every row."""
        ...


@runtime_checkable
class UsesTargetCache(Protocol):
    """A drafter that drafts in the target's own cache."""

    def use_cache_of_target(self, cache: KVCache) -> None:
        """Called once, before anything is admitted."""
        ...


class Rule(Protocol):
    """An acceptance rule."""

    name: str
    exact: bool
    """Whether the output's law is the target's."""
    coupled: bool
    """Whether drafter and target share noise keyed by position alone."""
    confident: bool
    """Whether it looks at the draft's confidence, and not at its laws alone."""

    def judge(self, target: Laws, proposal: Proposal, streams: Streams) -> Verdict:
        """Decide how much of the proposal stays, and the token after it."""
        ...


class Logits(StrEnum):
    """Which logits a pass is asked for."""

    ALL = "all"
    """Every column: [B, T, V]."""
    LAST = "last"
    """The last real column of each row: [B, 1, V]."""
    NONE = "none"
    """None: the pass only fills the cache."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What a pass computed: logits as asked for, and the hidden states [B, T, H] of the layers asked for.

    token_ids: [B, T] int64 in place of logits, from a model that knows its tokens and not their scores (a recording).
    """

    logits: torch.Tensor | None
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
    token_ids: torch.Tensor | None = None

    def scores(self) -> torch.Tensor:
        """The logits of a pass that was asked for some."""
        assert self.logits is not None
        return self.logits


class LanguageModel(Protocol):
    """A model that scores tokens of ragged rows over a cache of absolute lengths."""

    vocab_size: int
    """Ids it takes, 0 to vocab_size - 1."""
    max_length: int
    """Most tokens of a row, prompt and output together."""
    device: torch.device

    def new_cache(self) -> KVCache:
        """A cache without rows."""
        ...

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Rows from place `first` on are new: give them empty cache rows (an encoder-decoder encodes here)."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        num_tokens: Sequence[int],
        cache: KVCache,
        *,
        first_row: int = 0,
        logits: Logits = Logits.ALL,
        hidden_layers: Sequence[int] = (),
    ) -> ModelOutput:
        """One pass. token_ids: [B, T], right-padded; row i of it is cache row `first_row + i`, of which num_tokens[i] count.

        The real tokens are appended to the cache; pads are overwritten by whatever comes next.
        """
        ...
