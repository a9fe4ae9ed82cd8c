"""Protocols of models, caches, drafters, length policies and rules.

Owns the protocols; passes.py has the values that models exchange. Knows no implementation. A class that names a protocol as its
base inherits the defaults defined here. Letters in docstrings: B rows, K draft tokens, T tokens per row in a pass, V vocabulary,
H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.distributions import Distributions
from foresay.decoding.outcome import Step
from foresay.decoding.passes import Logits, ModelInput, ModelOutput
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.randomness import Streams
from foresay.decoding.rows import NO_NEEDS, Row, Rows, RuleNeeds
from foresay.decoding.sampling_params import SamplingParams
from foresay.decoding.stopping import Stopping, StoppingRule

Move = tuple[int, int]
"""(from, to): the row at index `from` moves to index `to`, whose row has left."""


class KVCache(Protocol):
    """Keys and values of each row, or whatever else a model keeps."""

    lengths: list[int]
    """Number of tokens in each row."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Set the length of row i to min(its length, lengths[i]).

        Args:
            lengths: Maximum length of each row; rows after the given ones keep theirs.
        """
        ...

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep some tokens of the last pass: row i's slots from starts[i] on become those of its tokens paths[i].

        For prefixes this is `truncate`; only models that accept trees need more.

        Args:
            starts: The lengths before that pass.
            paths: Ascending indices of tokens; row i's length becomes starts[i] + len(paths[i]).
        """
        self.truncate([start + len(path) for start, path in zip(starts, paths, strict=True)])

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Carry out the moves, then drop the rows from index `count` on.

        Args:
            moves: (from, to): the row at index `from` moves to index `to`, whose row has left.
            count: Number of rows that remain.
        """
        ...


@runtime_checkable
class FeedsAgain(Protocol):
    """A cache whose rows rewind further than requested: the next pass feeds the tokens in between again, before its draft."""

    def shortened(self, budget: Sequence[int], sizes: Sequence[int], free: Sequence[bool]) -> list[int]:
        """Return the numbers of draft tokens that rows may have after the tokens that are fed again.

        Args:
            budget: The most draft tokens of each row.
            sizes: Its committed tokens.
            free: True for rows that may have fewer draft tokens, so that the rows of a batch share passes of one length.
        """
        ...


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt in a model's terms."""

    prompt: Sequence[int]
    """Token ids that the output continues."""
    params: SamplingParams
    """The request's parameters, as the model can honour them."""
    source: Sequence[int] | None = None
    """Token ids of the encoder's source; None without an encoder."""


class LanguageModel(Protocol):
    """A model that scores tokens of ragged rows over a cache with absolute lengths."""

    vocab_size: int
    """Number of token ids."""
    max_length: int
    """Maximum length of a row, prompt and output together."""
    device: torch.device
    """Device of the logits."""

    @property
    def capabilities(self) -> Capabilities:
        """Features beyond scoring chains."""
        return Capabilities()

    def new_cache(self) -> KVCache:
        """Return a cache without rows."""
        ...

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """Size of a cache in bytes; 0 if unknown.

        Args:
            lengths: Length of each of its rows.
        """
        return 0

    def free_bytes(self) -> int:
        """Memory available for caches to grow, in bytes."""
        return 1 << 62

    def prepare_prompt(self, prompt: Sequence[int], params: SamplingParams) -> PreparedPrompt:
        """Return the prompt in this model's terms; an encoder-decoder takes it as its source.

        Args:
            prompt: Token ids.
            params: The request's parameters.
        """
        return PreparedPrompt(prompt, params)

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Add empty cache rows for new rows (an encoder-decoder encodes their sources here).

        Args:
            rows: The batch, new rows included.
            first: Index of the first new row.
            cache: A cache of this model.
        """
        ...

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """Run one pass. Real tokens are appended to the cache; padding is overwritten by later passes.

        Args:
            model_input: Tokens of some rows of the cache, and what to return.
            cache: A cache of this model.
        """
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


@runtime_checkable
class BeginsEarly(Protocol):
    """A logits processor that can begin its work before the scores are known, next to the target's pass."""

    def begin(self, token_ids: Sequence[int], draft: Sequence[int]) -> None:
        """Begin the work for the positions after a row's tokens and after each of its draft tokens, on another thread."""
        ...


class LengthPolicy(Protocol):
    """Number of tokens to draft."""

    remembers: bool = True
    """Draft lengths of a sampled row may depend on other requests or on measured time; False if they depend on the row alone.

    If True, a repeated seed gets other random numbers: its own numbers would be used with lengths that were learned from them."""

    needs_probabilities: bool = False
    """True if drafts end by what only a draft model has: the probabilities of its tokens, or its hidden states."""

    def budget(self, rows: Rows) -> list[int]:
        """Maximum number of tokens to draft for each row in this step.

        Args:
            rows: The rows of the step.
        """
        ...

    def rule(self, rows: Rows) -> StoppingRule:
        """When the drafts of a draft model end before their budgets. Called once for a draft, after the budgets.

        Args:
            rows: The rows of the step.
        """
        return StoppingRule()

    def stopping(self, rows: Rows) -> Stopping:
        """The evaluation of the rule over one draft; override it for a rule that numbers do not state.

        Args:
            rows: The rows of the step.
        """
        return Stopping(self.rule(rows), rows)

    def num_to_score(self, rows: Rows, counts: Sequence[int], matched: Sequence[int]) -> Sequence[int]:
        """Number of tokens found by an n-gram drafter that shall be scored, for each row; by default all.

        The tokens were not sampled, so the choice may depend on anything.

        Args:
            rows: The rows of the step.
            counts: [B] tokens found.
            matched: [B] length of the n-gram match, 0 if unknown.
        """
        return counts

    def fallback_budget(self, rows: Rows, most: Sequence[int]) -> Sequence[int]:
        """Number of tokens that the slower drafter of a hybrid shall draft for rows without n-gram tokens to score.

        Called after `num_to_score`, if that is called; the result may depend on anything but the draft tokens of that drafter.

        Args:
            rows: The rows of the step.
            most: [B] upper bounds, 0 for all other rows.
        """
        return most

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        """Called after each step.

        Args:
            rows: The rows of the step.
            steps: Its result for each row.
        """
        return


class Drafter(Protocol):
    """A drafting method. Rows are identified by their index in the batch; `rearrange` reports changes of indices."""

    samples: bool = True
    """Tokens for sampled rows may be drawn from a distribution; False if all are point masses."""
    hidden_layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states the drafter needs, 0 for the embeddings: of prompts in `Row.prompt_hidden` at
    admission, of every later pass in `observe`."""

    def admit(self, rows: Rows, first: int) -> None:
        """Called when rows are new.

        Args:
            rows: The batch, new rows included.
            first: Index of the first new row.
        """
        ...

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draft tokens for each row.

        Args:
            rows: The rows of the step.
            budget: Maximum number of tokens of each row.
            policy: May end a row's draft after any token.
        """
        ...

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Called after each step.

        Args:
            rows: The rows of the step, with its committed tokens.
            verification: The result of the acceptance rule; None if the step failed.
            target: Output of the target's pass; None if the step failed.
        """
        ...

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Carry out the engine's moves of rows, then drop the rows from index `count` on.

        Args:
            moves: (from, to): the row at index `from` moves to index `to`, whose row has left.
            count: Number of rows that remain.
        """
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


def learned_by(*parts: object) -> bytes:
    """Return the digests of the files that models, tables, drafters or length policies were read from, joined.

    Such files may have been made of a seed's own answers. What has no `learned`, or an empty one, was made by the caller.
    """
    return b"".join(getattr(one, "learned", b"") for one in parts)


class Rule(Protocol):
    """An acceptance rule."""

    name: str
    """The rule's name in expressions."""
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
        """Decide how many tokens of the proposal are accepted, and draw the token after them.

        Args:
            target: The target's distributions after each row's last token and after each draft token.
            proposal: The draft tokens, with the distributions they were drawn from.
            streams: The rows' random numbers.
        """
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
        """Read the step's data; must not change anything.

        Args:
            rows: The rows of the step, before the commit.
            proposal: The draft tokens.
            distributions: The target's distributions.
            verification: The result of the acceptance rule.
            output: Output of the target's pass.
        """
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
