"""Protocols of models, caches, drafters, length policies and rules.

Owns the protocols and the values that they exchange (`ModelInput`, `ModelOutput`); knows no implementation. A class
that names a protocol as its base inherits the defaults defined here. Letters in docstrings: B rows, K draft tokens, T tokens per
row in a pass, V vocabulary, H hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

import torch

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.distributions import Distributions, VocabularySubset, build_distributions, subset_distributions
from foresay.decoding.outcome import Step
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.randomness import Streams
from foresay.decoding.rows import NO_NEEDS, Row, Rows, RuleNeeds
from foresay.decoding.sampling_params import SamplingParams
from foresay.decoding.stopping import Stopping, StoppingRule

Move = tuple[int, int]
"""(from, to): the row at index `from` moves to index `to`, whose row has left."""


class Logits(StrEnum):
    """Logits that a pass returns."""

    ALL = "all"
    """After every token: [B, T, V]."""
    LAST = "last"
    """After the last real token of each row: [B, 1, V]."""
    NONE = "none"
    """None: the pass only fills the cache."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Input of one forward pass.

    token_ids: [B, T] int64, right-padded to num_tokens[i] real tokens; row i belongs to cache row `first_row + i`.
    parents: [B, T] int64, the node that each token follows, always an earlier one, -1 for the end of the cached row; None for
    chains. hidden_layers: layers whose hidden states are returned, 0 for the embeddings, l for the output of the l-th layer.
    features: [B, T, F], further input of draft heads, made of the target's hidden states. mtp_layer: the layer that runs, of
    several for multi-token prediction.
    """

    token_ids: torch.Tensor
    num_tokens: Sequence[int]
    first_row: int = 0
    parents: torch.Tensor | None = None
    logits: Logits = Logits.ALL
    hidden_layers: tuple[int, ...] = ()
    features: torch.Tensor | None = None
    mtp_layer: int = 0

    def last_columns(self) -> torch.Tensor:
        """Index of the last real token of each row, [B] int64; 0 for a row without tokens."""
        return torch.tensor(self.num_tokens, device=self.token_ids.device).clamp(min=1) - 1

    def of_last(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states of each row's last real token, [B, T, ...] -> [B, 1, ...]."""
        if min(self.num_tokens) == states.shape[1]:
            return states[:, -1:]
        batch, last = torch.arange(len(states), device=states.device), self.last_columns().to(states.device)
        return states[batch, last][:, None]

    def scored(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states whose logits are wanted: [B, T, ...], or [B, 1, ...] for `Logits.LAST`."""
        return self.of_last(states) if self.logits is Logits.LAST and states.shape[1] > 1 else states

    def part(self, start: int, end: int) -> ModelInput:
        """Return the rows from `start` to `end` as a separate input."""
        parents = None if self.parents is None else self.parents[start:end]
        rows = self.token_ids[start:end], self.num_tokens[start:end], self.first_row + start
        features = None if self.features is None else self.features[start:end]
        return ModelInput(*rows, parents, self.logits, self.hidden_layers, features, self.mtp_layer)


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Output of one forward pass: logits, or token ids from a model that has a text and no logits (a recording).

    logits: [B, T, V], or [B, T, K] of the tokens in `subset`. hidden: layer -> [B, T, H]. token_ids: [B, T] int64, instead of
    logits.
    num_before: in the target's pass of a step, the number of tokens fed before each row's last committed one. `logits` then begin
    after the last committed token, `hidden` at the first token fed.
    starts: in the target's pass of a step, the position of the first token fed of each row.
    """

    logits: torch.Tensor | None
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
    token_ids: torch.Tensor | None = None
    num_before: tuple[int, ...] | None = None
    subset: VocabularySubset | None = None
    starts: tuple[int, ...] | None = None

    def scores(self) -> torch.Tensor:
        """Logits [B, T, V] of a pass that returns logits."""
        assert self.logits is not None
        return self.logits if self.subset is None else self.subset.widened(self.logits)

    def distributions(self, rows: Rows, proposal: Proposal) -> Distributions:
        """Distributions of a step, [B, 1 + K]: after each row's last token and after each draft token."""
        if self.token_ids is not None:
            return Distributions(self.token_ids)
        return build_distributions(
            self.scores(), rows, proposal.token_ids, counts=proposal.num_tokens, parents=proposal.parents
        )

    def draft_distributions(self, rows: Rows, drafted: torch.Tensor, *, greedy: bool) -> Distributions:
        """Distributions [B, T] that the next draft tokens are drawn from, after those already drafted, [B, n].

        greedy: see `build_distributions`.
        """
        if self.subset is not None and self.logits is not None:
            distributions = subset_distributions(self.logits, self.subset, rows, greedy=greedy)
            if distributions is not None:
                return distributions
        return build_distributions(self.scores(), rows, drafted, num_before=drafted.shape[1], greedy=greedy)

    def at(self, columns: torch.Tensor, num_before: Sequence[int]) -> ModelOutput:
        """Return the logits, or token ids, at some indices of each row, [B, n]; hidden states stay complete."""
        batch = torch.arange(len(columns), device=columns.device)[:, None]
        logits = None if self.logits is None else self.logits[batch, columns]
        tokens = None if self.token_ids is None else self.token_ids[batch, columns]
        return dataclasses.replace(self, logits=logits, token_ids=tokens, num_before=tuple(num_before))


class KVCache(Protocol):
    """Keys and values of each row, or whatever else a model keeps."""

    lengths: list[int]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Set the length of row i to min(its length, lengths[i]); rows after the given ones keep theirs."""
        ...

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep some tokens of the last pass: row i's slots from starts[i] on become those of its tokens paths[i].

        starts: the lengths before that pass. paths: ascending indices of tokens; row i's length becomes starts[i] +
        len(paths[i]). For prefixes this is `truncate`; only models that accept trees need more.
        """
        self.truncate([start + len(path) for start, path in zip(starts, paths, strict=True)])

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Carry out the moves, then drop the rows from index `count` on."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt in a model's terms: the tokens that the output continues, the parameters, and the encoder's source."""

    prompt: Sequence[int]
    params: SamplingParams
    source: Sequence[int] | None = None


class LanguageModel(Protocol):
    """A model that scores tokens of ragged rows over a cache with absolute lengths."""

    vocab_size: int
    """Number of token ids."""
    max_length: int
    """Maximum length of a row, prompt and output together."""
    device: torch.device

    @property
    def capabilities(self) -> Capabilities:
        """Features beyond scoring chains."""
        return Capabilities()

    def new_cache(self) -> KVCache:
        """Return a cache without rows."""
        ...

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """Size of a cache whose rows have these lengths, in bytes; 0 if unknown."""
        return 0

    def free_bytes(self) -> int:
        """Memory available for caches to grow, in bytes."""
        return 1 << 62

    def prepare_prompt(self, prompt: Sequence[int], params: SamplingParams) -> PreparedPrompt:
        """Return the prompt in this model's terms; an encoder-decoder takes it as its source."""
        return PreparedPrompt(prompt, params)

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Add empty cache rows for the rows from index `first` on (an encoder-decoder encodes their sources here)."""
        ...

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """Run one pass. Real tokens are appended to the cache; padding is overwritten by later passes."""
        ...


@runtime_checkable
class ForcesTokens(Protocol):
    """A logits processor that may leave one continuation: a grammar, a limit on reasoning.

    A text `source` is part of the request's key.
    """

    def forced_tokens(self, output: Sequence[int]) -> list[int] | None:
        """Return the only possible next tokens after the tokens of an output, as far as they are known; often none.

        None if they are no beginning of an output.
        """
        ...


class LengthPolicy(Protocol):
    """Number of tokens to draft."""

    remembers: bool = True
    """Draft lengths of a sampled row may depend on other requests or on measured time; False if they depend on the row alone.

    If True, a repeated seed gets other random numbers: its own numbers would be used with lengths that were learned from them."""

    needs_probabilities: bool = False
    """True if drafts end by what only a draft model has: the probabilities of its tokens, or its hidden states."""

    def budget(self, rows: Rows) -> list[int]:
        """Maximum number of tokens to draft for each row in this step."""
        ...

    def rule(self, rows: Rows) -> StoppingRule:
        """When the drafts of a draft model end before their budgets. Called once for a draft, after the budgets."""
        return StoppingRule()

    def stopping(self, rows: Rows) -> Stopping:
        """The evaluation of the rule over one draft; override it for a rule that numbers do not state."""
        return Stopping(self.rule(rows), rows)

    def num_to_score(self, rows: Rows, counts: Sequence[int], matched: Sequence[int]) -> Sequence[int]:
        """Number of tokens found by an n-gram drafter that shall be scored, for each row; by default all.

        counts: [B] tokens found. matched: [B] length of the n-gram match, 0 if unknown. The tokens were not sampled, so the
        choice may depend on anything.
        """
        return counts

    def fallback_budget(self, rows: Rows, most: Sequence[int]) -> Sequence[int]:
        """Number of tokens that the slower drafter of a hybrid shall draft for rows without n-gram tokens to score.

        most: [B] upper bounds, 0 for all other rows. Called after `num_to_score`, if that is called; the result may depend on
        anything but the draft tokens of that drafter.
        """
        return most

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        """Called after each step with its result for each row."""
        return


class Drafter(Protocol):
    """A drafting method. Rows are identified by their index in the batch; `rearrange` reports changes of indices."""

    samples: bool = True
    """Tokens for sampled rows may be drawn from a distribution; False if all are point masses."""
    hidden_layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states the drafter needs, 0 for the embeddings: of prompts in `Row.prompt_hidden` at
    admission, of every later pass in `observe`."""

    def admit(self, rows: Rows, first: int) -> None:
        """Called when the rows from index `first` on are new."""
        ...

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draft up to `budget` tokens for each row."""
        ...

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Called after each step: the committed tokens are already in `rows`, `target` is the output of the target's pass."""
        ...

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Carry out the engine's moves of rows, then drop the rows from index `count` on."""
        ...

    def reset(self) -> None:
        """Drop every row."""
        ...


@runtime_checkable
class UsesTargetCache(Protocol):
    """A drafter that drafts in the target's own cache."""

    def use_cache_of_target(self, cache: KVCache) -> None:
        """Called once, before anything is admitted."""
        ...


@runtime_checkable
class ProposesTrees(Protocol):
    """A drafter that proposes trees; rule and target must support them."""

    branches: int
    """Maximum number of children of one node."""


@runtime_checkable
class Remembers(Protocol):
    """A drafter that may keep state between requests."""

    def repeats_seeds(self) -> bool:
        """True if that state may decide how sampled tokens are drafted.

        Then a seed must not be used twice: its random numbers would test draft tokens that were made of them.
        """
        ...


class Rule(Protocol):
    """An acceptance rule."""

    name: str
    exact: bool
    """The output distribution is the target's."""
    needs: RuleNeeds = NO_NEEDS
    """Requirements on drafters."""
    trees: bool = False
    """The rule verifies trees."""

    def __init__(self) -> None:
        """Without settings; rules with settings take them here."""
        return

    def verify(self, target: Distributions, proposal: Proposal, streams: Streams) -> Verification:
        """Decide how many tokens of the proposal are accepted, and draw the token after them."""
        ...


class Observer(Protocol):
    """Called in each step after verification, before anything is committed."""

    def __call__(
        self,
        rows: Rows,
        proposal: Proposal,
        distributions: Distributions,
        verification: Verification,
        output: ModelOutput,
    ) -> None:
        """Read the step's data; must not change anything."""
        ...


__all__ = [
    "Drafter",
    "KVCache",
    "LanguageModel",
    "LengthPolicy",
    "Logits",
    "ModelInput",
    "ModelOutput",
    "Move",
    "Observer",
    "PreparedPrompt",
    "ProposesTrees",
    "Remembers",
    "Row",
    "Rule",
    "UsesTargetCache",
]
