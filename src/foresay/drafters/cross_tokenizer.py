"""A draft model whose tokenizer differs from the target's.

The draft model reads the committed text in its own tokens. A greedy row's draft is decoded to text and tokenized with the
target's tokenizer; its tokens are point masses. A sampled row's draft is drawn from the draft model's distribution over the
tokens that both vocabularies share, so that each token has a distribution over the target's ids. Both are exact. A Retokenizer
converts tokens.
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
"""Separates this drafter's random keys from those of other drafters for the same rows."""


class Retokenizer(Protocol):
    """Converter between the tokens of the target and of the draft model."""

    shared: tuple[torch.Tensor, torch.Tensor]
    """Ids of the tokens in both vocabularies: the draft model's ids and the target's ids, [S] int64 each."""

    def reader(self) -> Reader:
        """Return a reader for one row's growing text."""
        ...

    def to_target(self, context: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """Return the target's tokens for the text of `drafted` (draft model's ids) after `context` (target's ids)."""
        ...


class Reader(Protocol):
    """Incremental converter of one row's text."""

    def read(self, tokens: Sequence[int], committed: int) -> list[int]:
        """Return the draft model's tokens for the whole text. tokens: all target tokens; the first `committed` are final."""
        ...


class _Restricted(VocabularyAdapter):
    """The draft model, restricted to shared tokens in some rows."""

    def __init__(self, model: LanguageModel, shared: torch.Tensor) -> None:
        super().__init__(model, model.vocab_size)
        self._others = torch.ones(model.vocab_size, dtype=torch.bool, device=model.device)
        self._others[shared.to(model.device)] = False
        self.rows: torch.Tensor | None = None
        """[B] bool, True for restricted rows; None if there are none."""

    def _covers(self, subset: VocabularySubset) -> bool:
        return self.rows is None and super()._covers(subset)

    def adapted(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores [B, T, V] with -inf for tokens that are not shared, in restricted rows."""
        if self.rows is None or len(self.rows) != len(scores):
            return scores
        return scores.masked_fill(self.rows[:, None, None] & self._others, -torch.inf)


class CrossTokenizerDrafter(Drafter):
    """Draft with a model whose tokenizer differs from the target's."""

    def __init__(self, model: LanguageModel, target_vocab_size: int, retokenizer: Retokenizer) -> None:
        """target_vocab_size: width of the target's logits. retokenizer: converts between the tokens of the target and `model`."""
        self._retokenizer, self._vocab_size = retokenizer, target_vocab_size
        draft_ids, target_ids = (ids.to(model.device) for ids in retokenizer.shared)
        fits = (draft_ids < model.vocab_size) & (target_ids < target_vocab_size)
        self._shared = (draft_ids[fits], target_ids[fits])
        self._model = _Restricted(model, self._shared[0])
        self._drafter = ModelDrafter(self._model, model.vocab_size)
        self._to_target = torch.zeros(model.vocab_size, dtype=torch.int64, device=model.device)
        self._to_target[self._shared[0]] = self._shared[1]
        self._readers: list[Reader] = []

    @property
    def learned(self) -> bytes:
        """Digest of the draft model's weights."""
        return self._drafter.learned

    def admit(self, rows: Rows, first: int) -> None:
        """Start a reader for each new row."""
        self._drafter.admit(rows, first)
        self._readers += [self._retokenizer.reader() for _ in range(len(rows) - first)]

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Apply the engine's moves to the draft model's rows and the readers."""
        self._drafter.rearrange(moves, count)
        for source, target in moves:
            self._readers[target] = self._readers[source]
        del self._readers[count:]

    def reset(self) -> None:
        """Forget every row."""
        self._drafter.reset()
        self._readers = []

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Do nothing: the next proposal compares the draft model's cache with the text."""

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draft in the draft model's tokens and convert them to the target's."""
        device = self._model.device
        greedy = [row.params.greedy or not len(self._shared[0]) for row in rows]
        draft_rows = Rows(
            [self._in_draft_tokens(i, row, greedy[i]) for i, row in enumerate(rows)],
            needs=replace(rows.needs, shares_noise=False),
            level=rows.level + 1,
        )
        self._model.rows = torch.tensor([not g for g in greedy], device=device)
        draft = self._drafter.propose(draft_rows, budget, policy)
        builder = ProposalBuilder(len(rows), device)
        with builder.keeping():
            sampled = [0 if g else n for g, n in zip(greedy, draft.num_tokens, strict=True)]
            builder.add(self._in_target_ids(draft), sampled)
            builder.add(self._retokenized(rows, budget, greedy, draft))
        return builder.proposal(confidence=rows.needs.confidence)

    def _retokenized(self, rows: Rows, budget: Sequence[int], greedy: Sequence[bool], draft: Proposal) -> Proposal:
        """Return the greedy rows' drafts, tokenized again with the target's tokenizer."""
        ids = draft.token_ids.tolist()
        tokens = [
            self._retokenizer.to_target(row.full_context[-32:].tolist(), ids[i][: draft.num_tokens[i]])[:n]
            if greedy[i]
            else []
            for i, (row, n) in enumerate(zip(rows, budget, strict=True))
        ]
        return Proposal.of_lists([self._known(row_tokens) for row_tokens in tokens], torch.device("cpu"))

    def _in_draft_tokens(self, index: int, row: Row, greedy: bool) -> Row:
        """Return a row in the draft model's tokens, without parameters that name target ids (penalties, biases, processors)."""
        tokens = np.asarray(
            self._readers[index].read(row.full_context.tolist(), len(row.committed.full_context)), dtype=np.int64
        )
        params = row.params
        own = SamplingParams(
            temperature=0.0 if greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )
        out = Row(row.request_id, tokens, own, seed=row.seed, limit=len(tokens) + 1, committed=row.committed)
        out.rng_key = derive(row.rng_key, row.size, _TAG)
        return out

    def _known(self, tokens: list[int]) -> list[int]:
        """Return the tokens before the first one beyond the width of the target's logits."""
        return tokens[: next((i for i, token in enumerate(tokens) if token >= self._vocab_size), len(tokens))]

    def _in_target_ids(self, draft: Proposal) -> Proposal:
        """Return a proposal of shared tokens with the target's ids and distributions over the target's vocabulary."""
        distributions = draft.distributions
        if distributions is not None:
            draft_ids, target_ids = self._shared
            distributions = distributions.new_zeros(len(distributions), self._vocab_size).index_copy_(
                1, target_ids, distributions[:, draft_ids]
            )
        ids = self._to_target[draft.token_ids]
        return replace(draft, token_ids=ids, distributions=distributions)
