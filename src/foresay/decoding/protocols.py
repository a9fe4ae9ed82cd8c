"""Protocols of models, caches, drafters, length policies and rules.

Owns the protocols and the values that they exchange (`ModelInput`, `ModelOutput`, `DraftStep`); knows no implementation. A class
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

from foresay.decoding.distributions import Distributions, VocabularySubset, build_distributions, subset_distributions
from foresay.decoding.outcome import Step
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.randomness import Streams
from foresay.decoding.rows import NO_NEEDS, Row, Rows, RuleNeeds
from foresay.decoding.sampling_params import SamplingParams

Move = tuple[int, int]
"""(from, to): the row at `from` takes the place `to`, whose row is gone."""


class Logits(StrEnum):
    """Which logits a pass is asked for."""

    ALL = "all"
    """Every column: [B, T, V]."""
    LAST = "last"
    """The last real column of each row: [B, 1, V]."""
    NONE = "none"
    """None: the pass only fills the cache."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What one pass feeds.

    token_ids: [B, T] int64, right-padded; row i of it is cache row `first_row + i`, of which num_tokens[i] count.
    parents: [B, T] int64, the column that each token follows, always an earlier one, -1 for the end of the cached row; None
    for chains, where each follows the one before. hidden_layers: whose hidden states are wanted, 0 the embeddings and l what
    the l-th layer put out. features: [B, T, F], what is read beside the tokens by a model that reads the target's hidden states.
    """

    token_ids: torch.Tensor
    num_tokens: Sequence[int]
    first_row: int = 0
    parents: torch.Tensor | None = None
    logits: Logits = Logits.ALL
    hidden_layers: tuple[int, ...] = ()
    features: torch.Tensor | None = None

    def last_columns(self) -> torch.Tensor:
        """The last real column of each row, [B] int64; 0 of a row that is fed nothing."""
        return torch.tensor(self.num_tokens, device=self.token_ids.device).clamp(min=1) - 1

    def part(self, start: int, end: int) -> ModelInput:
        """The rows from `start` to `end` as a pass of their own."""
        parents = None if self.parents is None else self.parents[start:end]
        rows = self.token_ids[start:end], self.num_tokens[start:end], self.first_row + start
        features = None if self.features is None else self.features[start:end]
        return ModelInput(*rows, parents, self.logits, self.hidden_layers, features)


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What a pass computed: scores, or the tokens of a model that knows its text and no scores (a recording).

    logits: [B, T, V] as asked for, or [B, T, K] of the tokens in `subset`. hidden: layer -> [B, T, H]. token_ids: [B, T] int64
    in place of logits.
    num_before: of the target's pass in a step, how many columns of each row lie before its last committed token (which the
    target had not seen); `logits` then begin with that token's column, `hidden` with the first of the pass.
    """

    logits: torch.Tensor | None
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
    token_ids: torch.Tensor | None = None
    num_before: tuple[int, ...] | None = None
    subset: VocabularySubset | None = None

    def scores(self) -> torch.Tensor:
        """The logits [B, T, V] of a pass that was asked for some."""
        assert self.logits is not None
        return self.logits if self.subset is None else self.subset.widened(self.logits)

    def distributions(self, rows: Rows, proposal: Proposal) -> Distributions:
        """The laws at each place of a step, [B, 1 + K]: after each row's last token, and after each of its draft tokens."""
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
        """The scores, or tokens, of some columns of each row, [B, n]; hidden states stay whole."""
        batch = torch.arange(len(columns), device=columns.device)[:, None]
        logits = None if self.logits is None else self.logits[batch, columns]
        tokens = None if self.token_ids is None else self.token_ids[batch, columns]
        return dataclasses.replace(self, logits=logits, token_ids=tokens, num_before=tuple(num_before))


PREFILL_CHUNK = 256
"""Columns of a pass that fills prompts, unless a model wants others."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a model can do beside scoring chains, and how its cache is best filled."""

    trees: bool = False
    """Takes `ModelInput.parents`."""
    num_layers: int | None = None
    """Layers whose hidden states can be asked for, 0 to num_layers; None: none can."""
    scores: bool = True
    """Gives logits, and not only the tokens it knows."""
    reads_source: bool = False
    """Each row has a source, which an encoder reads."""
    max_source_length: int | None = None
    """Most tokens of a source; None without a bound."""
    prefill_chunk: int = PREFILL_CHUNK
    """Columns of a pass that fills prompts."""
    prefill_together: bool = True
    """Whether rows share such a pass. Where products over more rows sum in another order, they must not."""
    prefill_in_any_pieces: bool = True
    """Whether prompts filled in pieces of any size, up to `prefill_chunk`, give the same bits."""
    ragged: bool = False
    """Whether a pass takes the time of its real tokens: pads cost nothing."""
    column_cost: float | None = None
    """What one more token of one row adds to a pass, as a share of it, where that is known before any pass was timed; of
    ragged passes."""
    max_rows: int | None = None
    """Most rows of a cache; None without a bound."""
    own_threads: bool = False
    """Whether passes run on threads of their own, in whose way PyTorch's would be between them."""


class KVCache(Protocol):
    """What a model remembers of each row."""

    lengths: list[int]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Set row i to min(its length, lengths[i]); rows after the given ones stay as they are."""
        ...

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep some columns of the last pass: row i's slots from starts[i] on become those of its columns paths[i].

        starts: the lengths before that pass. paths: ascending columns; row i's length becomes starts[i] + len(paths[i]). A
        prefix of the columns is a `truncate`; only a model that takes trees needs more.
        """
        self.truncate([start + len(path) for start, path in zip(starts, paths, strict=True)])

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Carry out the moves; rows from `count` on are gone."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt as a model begins with it: what the output continues, the parameters, and what its encoder reads."""

    prompt: Sequence[int]
    params: SamplingParams
    source: Sequence[int] | None = None


class LanguageModel(Protocol):
    """A model that scores tokens of ragged rows over a cache of absolute lengths."""

    vocab_size: int
    """Ids it takes, 0 to vocab_size - 1."""
    max_length: int
    """Most tokens of a row, prompt and output together."""
    device: torch.device

    @property
    def capabilities(self) -> Capabilities:
        """What it can do beside scoring chains."""
        return Capabilities()

    def new_cache(self) -> KVCache:
        """A cache without rows."""
        ...

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """Bytes of a cache whose rows have these lengths; 0 where nobody knows."""
        return 0

    def free_bytes(self) -> int:
        """Memory that is left for caches, beside what they hold."""
        return 1 << 62

    def prepare_prompt(self, prompt: Sequence[int], params: SamplingParams) -> PreparedPrompt:
        """What a prompt comes to for this model. An encoder-decoder reads it as its source."""
        return PreparedPrompt(prompt, params)

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Rows from place `first` on are new: give them empty cache rows (an encoder-decoder encodes here)."""
        ...

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """One pass. The real tokens are appended to the cache; pads are overwritten by whatever comes next."""
        ...


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One token that a draft model has just added to each row's draft, and what it thought.

    index: [B] int64, draft tokens before it. token_ids: [B] int64. laws: the laws [B, 1] they were drawn from, with the raw
    scores. hidden: [B, H], the hidden state that the scores were made of, where the policy asks for it. rows: whose drafts
    grow, where they are chains that a model draws.
    """

    index: torch.Tensor
    token_ids: torch.Tensor
    distributions: Distributions
    hidden: torch.Tensor | None = None
    rows: Rows | None = None


class LengthPolicy(Protocol):
    """How many tokens to guess."""

    needs_hidden: bool = False
    """Whether `keep_drafting` looks at the draft model's hidden state."""
    remembers: bool = True
    """Whether lengths for a sampled row may depend on other requests or on measured time; False if they depend on the row alone.

    If so, a seed that is given again gets other random numbers: its own would meet lengths that were learned from them."""

    def budget(self, rows: Rows) -> list[int]:
        """Most tokens to guess for each row in this step."""
        ...

    def keep_drafting(self, step: DraftStep) -> torch.Tensor | None:
        """[B] bool after a draft model's token: which rows draft on; None lets all of them.

        A token stays in the draft whatever it is: dropping it for its own value would condition its law.
        """
        return None

    def num_to_score(self, rows: Rows, counts: Sequence[int], matched: Sequence[int]) -> Sequence[int]:
        """How many of the tokens that a look-up found for each row shall be scored; all of them unless a policy chooses.

        counts: [B] tokens found. matched: [B] tokens of context that they continue, 0 unknown. Nobody sampled them, so the
        choice may depend on anything.
        """
        return counts

    def fallback_budget(self, rows: Rows, most: Sequence[int]) -> Sequence[int]:
        """Number of tokens that the slower drafter of a hybrid shall draft for rows without an n-gram match.

        most: [B] upper bounds, 0 for all other rows. Called after `num_to_score`, if that is called; the result may depend on
        anything but the draft tokens of that drafter.
        """
        return most

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        """See what a step did to each row, after it."""
        return


class Drafter(Protocol):
    """What guesses tokens. Rows are named by their place in the batch; `rearrange` keeps the places true."""

    samples: bool = True
    """Whether tokens for sampled rows may be drawn from a distribution; False if all are point masses."""
    hidden_layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states it wants to see, 0 the embeddings: of prompts in `Row.prompt_hidden` when
    they are admitted, of every later pass in `observe`."""

    def admit(self, rows: Rows, first: int) -> None:
        """Rows from place `first` on are new."""
        ...

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Guess up to `budget` tokens for each row."""
        ...

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
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


@runtime_checkable
class ProposesTrees(Protocol):
    """A drafter whose proposals have parents; rule and target must take trees."""

    branches: int
    """Most tokens that follow one place."""


@runtime_checkable
class Remembers(Protocol):
    """A drafter that may keep something between requests."""

    def repeats_seeds(self) -> bool:
        """Whether what it remembers may decide how sampled tokens are drafted.

        Then a seed must not be used twice: its numbers would be tested on guesses that were made of them.
        """
        ...


class Rule(Protocol):
    """An acceptance rule."""

    name: str
    exact: bool
    """Whether the output's law is the target's."""
    needs: RuleNeeds = NO_NEEDS
    """What it asks of whoever drafts."""
    trees: bool = False
    """Whether it judges proposals with parents."""

    def __init__(self) -> None:
        """Without settings; a rule that has some takes them here."""
        return

    def verify(self, target: Distributions, proposal: Proposal, streams: Streams) -> Verification:
        """Decide how much of the proposal stays, and the token after it."""
        ...


class Observer(Protocol):
    """Sees each step as it is judged, before anything is committed."""

    def __call__(
        self,
        rows: Rows,
        proposal: Proposal,
        distributions: Distributions,
        verification: Verification,
        output: ModelOutput,
    ) -> None:
        """Look and change nothing."""
        ...


__all__ = [
    "Capabilities",
    "DraftStep",
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
