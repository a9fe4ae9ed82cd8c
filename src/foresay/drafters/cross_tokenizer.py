"""A draft model with another tokenizer than the target's.

The draft reads the committed text in its own tokens. A greedy row's draft is written out as text and read back in the
target's tokens, which are then point masses. A sampled row's draft is drawn from the draft's law over the tokens both
vocabularies have, so that each token has a law over the target's ids. Both are exact; how text becomes tokens is told
by a Retokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from foresay.decoding.distributions import VocabularySubset
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import Drafter, LanguageModel, LengthPolicy, ModelOutput, Move
from foresay.decoding.randomness import derive
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters.model import ModelDrafter
from foresay.drafters.proposal_builder import ProposalBuilder
from foresay.models.vocabulary import VocabularyAdapter

_TAG = 0x7A
"""Tells this drafter's random keys from those of others that draft from the same rows."""


class Retokenizer(Protocol):
    """How the tokens of two tokenizers become each other's."""

    shared: tuple[torch.Tensor, torch.Tensor]
    """Ids of the tokens that both have, in the draft's and in the target's numbers: two [S] int64."""

    def reader(self) -> Reader:
        """A reader of one row's growing text."""
        ...

    def to_target(self, context: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """The target's tokens of the text of `drafted`, the draft's tokens, behind `context`, the target's."""
        ...


class Reader(Protocol):
    """Follows one row's text."""

    def read(self, tokens: Sequence[int], committed: int) -> list[int]:
        """The draft's tokens of the whole text, given all of the target's so far, of which `committed` will stay."""
        ...


class _Restricted(VocabularyAdapter):
    """The draft, able to score nothing but shared tokens for the rows that ask for it."""

    def __init__(self, model: LanguageModel, shared: torch.Tensor) -> None:
        super().__init__(model, model.vocab_size)
        self._others = torch.ones(model.vocab_size, dtype=torch.bool, device=model.device)
        self._others[shared.to(model.device)] = False
        self.rows: torch.Tensor | None = None
        """[B] bool: the rows to restrict."""

    def _takes(self, subset: VocabularySubset) -> bool:
        return self.rows is None

    def adapted(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores of shared tokens alone where a row is restricted."""
        if self.rows is None or len(self.rows) != len(scores):
            return scores
        return scores.masked_fill(self.rows[:, None, None] & self._others, -torch.inf)


class CrossTokenizerDrafter(Drafter):
    """Guesses with a model that has other tokens than the target."""

    def __init__(self, model: LanguageModel, target_vocab_size: int, retokenizer: Retokenizer) -> None:
        """retokenizer: between the target's tokens and those of `model`."""
        self._translator, self._vocab = retokenizer, target_vocab_size
        ours, theirs = (ids.to(model.device) for ids in retokenizer.shared)
        fits = (ours < model.vocab_size) & (theirs < target_vocab_size)
        self._shared = (ours[fits], theirs[fits])
        self._model = _Restricted(model, self._shared[0])
        self._drafter = ModelDrafter(self._model, model.vocab_size)
        self._to_target = torch.zeros(model.vocab_size, dtype=torch.int64, device=model.device)
        self._to_target[self._shared[0]] = self._shared[1]
        self._readers: list[Reader] = []

    def admit(self, rows: Rows, first: int) -> None:
        """Start reading the new rows."""
        self._drafter.admit(rows, first)
        self._readers += [self._translator.reader() for _ in range(len(rows) - first)]

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Follow the engine's moves."""
        self._drafter.rearrange(moves, count)
        for source, target in moves:
            self._readers[target] = self._readers[source]
        del self._readers[count:]

    def reset(self) -> None:
        """Forget every row."""
        self._drafter.reset()
        self._readers = []

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Nothing to do: the draft's cache is compared with the text when it is next asked."""

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draft in the draft's own tokens, then say it in the target's."""
        device = self._model.device
        greedy = [row.params.greedy or not len(self._shared[0]) for row in rows]
        theirs = Rows(
            [self._in_draft_tokens(i, row, greedy[i]) for i, row in enumerate(rows)],
            needs=replace(rows.needs, shares_noise=False),
            level=rows.level + 1,
        )
        self._model.rows = torch.tensor([not g for g in greedy], device=device)
        draft = self._drafter.propose(theirs, budget, policy)
        grown = ProposalBuilder(len(rows), device)
        with grown.keeping():
            sampled = [0 if g else n for g, n in zip(greedy, draft.num_tokens, strict=True)]
            grown.add(self._same_tokens(draft), sampled)
            grown.add(self._read_back(rows, budget, greedy, draft))
        return grown.proposal(confidence=rows.needs.confidence)

    def _read_back(self, rows: Rows, budget: Sequence[int], greedy: Sequence[bool], draft: Proposal) -> Proposal:
        """The text of the greedy rows' drafts in the target's tokens."""
        ids = draft.token_ids.tolist()
        retold = [
            self._translator.to_target(row.full_context[-32:].tolist(), ids[i][: draft.num_tokens[i]])[:n]
            if greedy[i]
            else []
            for i, (row, n) in enumerate(zip(rows, budget, strict=True))
        ]
        retold = [self._known(tokens) for tokens in retold]
        width = max(map(len, retold))
        padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in retold]
        return Proposal(torch.tensor(padded, dtype=torch.int64).view(len(rows), width), [len(t) for t in retold])

    def _in_draft_tokens(self, place: int, row: Row, greedy: bool) -> Row:
        """A row in the draft's tokens; what depends on the target's ids (penalties, biases, processors) is left out."""
        tokens = np.asarray(
            self._readers[place].read(row.full_context.tolist(), len(row.committed.full_context)), dtype=np.int64
        )
        params = row.params
        own = SamplingParams(
            temperature=0.0 if greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )
        out = Row(row.request_id, tokens, own, seed=row.seed, limit=len(tokens) + 1)
        out.rng_key, out.committed = derive(row.rng_key, row.size, _TAG), row.committed
        return out

    def _known(self, tokens: list[int]) -> list[int]:
        """The tokens before the first that the target's logits lack."""
        return tokens[: next((i for i, token in enumerate(tokens) if token >= self._vocab), len(tokens))]

    def _same_tokens(self, draft: Proposal) -> Proposal:
        """A proposal of shared tokens in the target's numbers, its laws over the target's vocabulary."""
        distributions = draft.distributions
        if distributions is not None:
            ours, theirs = self._shared
            distributions = distributions.new_zeros(len(distributions), self._vocab).index_copy_(
                1, theirs, distributions[:, ours]
            )
        ids = self._to_target[draft.token_ids]
        return replace(draft, token_ids=ids, distributions=distributions)
