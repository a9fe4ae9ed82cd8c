"""Drafting on the target's hidden states: heads (EAGLE-3, Li et al. 2025), MTP layers, blocks (DFlash, arXiv 2602.06036; DSpark).

A head drafts one token after the other. Its cache has the pairs of hidden states and following tokens; draft tokens are cached
with the head's own output instead, and are rewound once the hidden states of the target are known. A block drafter scores all
tokens of a block in one pass; a Markov head or a candidate selector changes them by the tokens before, so that each token is
drawn from a distribution that is known exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from foresay.checks import check_float, check_int
from foresay.decoding.processors import processes
from foresay.decoding.proposal import Proposal, Verification, depths_of
from foresay.decoding.protocols import LengthPolicy, Logits, ModelInput, ModelOutput
from foresay.decoding.rows import Rows
from foresay.decoding.stopping import CONFIDENCES, Reads, Stopping, StoppingRule
from foresay.drafters.draft_cache import MAX_CATCH_UP
from foresay.drafters.draft_chain import DraftChain
from foresay.drafters.model import ModelDrafter
from foresay.drafters.target_features import FeatureCache, ReadsStates, RowFeatures
from foresay.errors import ConfigError
from foresay.lengths.constant import MAX_DRAFT_TOKENS

if TYPE_CHECKING:  # at run time this would import transformers
    from foresay.models.drafts.block import BlockModel

_NEXT, _LAST = 0, 1
"""Keys of a pass's hidden states: NEXT replaces the target's features in the next pass, LAST is the output layer's input."""
BRANCHES = 4
"""Children of a node of a tree."""


@runtime_checkable
class DraftsAtOnce(Protocol):
    """A head that can draft several tokens in one call."""

    @property
    def drafts_at_once(self) -> bool:
        """See HeadModel."""
        ...

    def draft_at_once(
        self,
        known: torch.Tensor,
        features: torch.Tensor,
        cache: Any,
        most: int,
        ends: Sequence[int],
        rule: StoppingRule,
    ) -> tuple[list[int], list[float]] | None:
        """See HeadModel.draft_at_once."""
        ...


class HeadCache(FeatureCache):
    """A head's cache over ragged rows, fed with the target's hidden states.

    The head's input is a token and, in `ModelInput.features`, the features before it; its hidden states _NEXT replace them.
    """

    def __init__(self, head: ReadsStates, vocab_size: int) -> None:
        self.head = head
        self._last_output: torch.Tensor | None = None
        """[B, 1, D], the head's output for each row's last token, which the next pass reads."""
        self._outputs: torch.Tensor | None = None
        """[B, K, D], the head's outputs of the last pass."""
        super().__init__(head, vocab_size)

    def prepare(self, rows: Rows, wanted: Sequence[bool]) -> None:
        """Prefill long contexts in separate passes, until at most MAX_CATCH_UP pairs are pending."""
        self._rewind()
        self._compute([one if on else None for one, on in zip(self._features, wanted, strict=True)])
        for index, (row, one) in enumerate(zip(rows, self._features, strict=True)):
            while one is not None and wanted[index] and len(one.pending) > MAX_CATCH_UP:
                count = min(self.head.capabilities.prefill_chunk, len(one.pending) - 1)
                tokens = torch.from_numpy(row.tokens[one.cached + 1 : one.cached + 1 + count])[None]
                model_input = ModelInput(tokens.to(self.head.device), [count], index, logits=Logits.NONE)
                super().forward(dataclasses.replace(model_input, features=one.pending[None, :count]))
                one.mark_cached(count)

    def catch_up(self, rows: Rows, fed: Sequence[bool], layers: tuple[int, ...] = ()) -> ModelOutput:
        """Feed the pending pairs, then the rows' draft tokens one by one; see `DraftCache.catch_up`."""
        output = self._feed_pending(rows, fed)
        drafted = [row.tokens[row.committed.size :] if row.committed is not row else row.tokens[:0] for row in rows]
        for step in range(max(len(draft) if on else 0 for draft, on in zip(drafted, fed, strict=True))):
            on = [flag and len(draft) > step for draft, flag in zip(drafted, fed, strict=True)]
            tokens = [[int(draft[step]) if flag else 0] for draft, flag in zip(drafted, on, strict=True)]
            model_input = ModelInput(
                torch.tensor(tokens, device=self.head.device), [int(flag) for flag in on], logits=Logits.LAST
            )
            output = self._merged(output, self.forward(model_input), on)
        return output

    def _feed_pending(self, rows: Rows, fed: Sequence[bool]) -> ModelOutput:
        """Run a pass over the pending pairs; a row without any feeds its last pair again."""
        parts = [one if on else None for one, on in zip(self._features, fed, strict=True)]
        self._compute(parts)
        self._repeat_last(parts)
        counts = [0 if one is None else len(one.pending) for one in parts]
        tokens = torch.zeros(len(rows), max(counts), dtype=torch.int64)
        features = torch.zeros(*tokens.shape, self.head.width, dtype=self.head.dtype, device=self.head.device)
        for i, (row, one) in enumerate(zip(rows, parts, strict=True)):
            if one is not None:
                tokens[i, : counts[i]] = torch.from_numpy(row.tokens[one.cached + 1 : one.count + 1])
                features[i, : counts[i]] = one.pending
                one.mark_cached(counts[i])
        model_input = ModelInput(tokens.to(self.head.device), counts, logits=Logits.LAST, features=features)
        output = super().forward(model_input)
        hidden = {n: model_input.of_last(states) for n, states in output.hidden.items()}
        self._last_output = self._outputs = hidden[_NEXT]
        return dataclasses.replace(output, hidden=hidden)

    def _repeat_last(self, parts: Sequence[RowFeatures | None]) -> None:
        """Make the last pair of rows without a pending one pending again."""
        for index, one in enumerate(parts):
            if one is not None and not len(one.pending):
                one.pending, one.cached = one.last, one.cached - 1
                self.cache.lengths[index] = one.cached

    def _merged(self, old: ModelOutput, new: ModelOutput, on: Sequence[bool]) -> ModelOutput:
        """Return the new output for rows that were fed, the old one for the others."""
        which = torch.tensor(on, device=self.head.device)[:, None, None]
        hidden = {n: torch.where(which, new.hidden[n], old.hidden[n]) for n in old.hidden}
        self._last_output = self._outputs = hidden[_NEXT]
        assert new.logits is not None and old.logits is not None
        return dataclasses.replace(new, logits=torch.where(which, new.logits, old.logits), hidden=hidden)

    def keep_nodes(self, index: torch.Tensor) -> None:
        """Order the outputs of the last pass as the nodes are ordered now; see `DraftCache.keep_nodes`."""
        assert self._outputs is not None
        batch = torch.arange(len(index), device=index.device)[:, None]
        self._outputs = self._outputs[batch, index.clamp(min=0)]

    def forward(self, model_input: ModelInput) -> ModelOutput:
        """Run one pass over draft tokens: the next token of each chain, or a whole tree after the rows' last tokens."""
        assert self._last_output is not None and self._outputs is not None
        features = self._outputs[:, -1:]
        if model_input.parents is not None:
            batch = torch.arange(len(model_input.parents), device=model_input.parents.device)[:, None]
            of_parents = self._outputs[batch, model_input.parents.clamp(min=0, max=self._outputs.shape[1] - 1)]
            features = torch.where(model_input.parents[..., None] < 0, self._last_output, of_parents)
        output = super().forward(dataclasses.replace(model_input, features=features))
        self._outputs = output.hidden[_NEXT]
        return output

    @property
    def drafts_at_once(self) -> bool:
        """True if the head can draft several tokens in one call."""
        head = self.head
        return isinstance(head, DraftsAtOnce) and head.drafts_at_once and self.model.vocab_size == head.vocab_size

    def draft_at_once(self, rows: Rows, most: int, rule: StoppingRule) -> tuple[list[int], list[float]] | None:
        """Feed the only row's pending pairs and draft after them, in one call; None if it is not possible."""
        one = self._features[0]
        if one is None or not self.drafts_at_once:
            return None
        assert isinstance(self.head, DraftsAtOnce)
        self._compute([one])
        self._repeat_last([one])
        known = torch.from_numpy(rows[0].tokens[one.cached + 1 : one.count + 1])
        drawn = self.head.draft_at_once(known, one.pending, self.cache, most, tuple(rows[0].eos), rule)
        if drawn is not None:
            one.mark_cached(len(known))
            self.model.row_passes += len(drawn[0])
        return drawn


class BlockCache(FeatureCache):
    """A block drafter's cache over ragged rows, and the blocks of the current proposal."""

    def __init__(self, block: BlockModel, vocab_size: int) -> None:
        self.block = block
        self._outputs: torch.Tensor | None = None
        """[B, T, D], the outputs of the current blocks, one for each draft token."""
        self._scores: torch.Tensor | None = None
        """[B, T, K], their logits, which know nothing of the tokens before."""
        self._root: torch.Tensor | None = None
        """[B, 1, R], the state of paths before the first token of this proposal."""
        self._states: torch.Tensor | None = None
        """[B, n, R], the states after the nodes of the last pass."""
        self._first: torch.Tensor | None = None
        """[B] int64, the index in its block of each row's first token of this proposal."""
        self._drawn = 0
        """Number of tokens of this proposal before the next one, in a chain."""
        super().__init__(block, vocab_size)

    def reset(self) -> None:
        """Forget every row."""
        super().reset()
        self._outputs = self._scores = self._first = self._root = self._states = None

    def room(self, rows: Rows, budget: Sequence[int]) -> list[int]:
        """Return how many tokens each row may draft: those of its block that are not drafted yet."""
        room, most = super().room(rows, budget), self.block.config.num_draft_tokens
        return [min(n, most - _num_drafted(rows, i)) for i, n in enumerate(room)]

    def prepare(self, rows: Rows, wanted: Sequence[bool]) -> None:
        """Cache the keys and values of the hidden states that are known."""
        self._rewind()
        some = [one if on else None for one, on in zip(self._features, wanted, strict=True)]
        self._compute(some)
        self.block.add_context([None if one is None else one.pending for one in some], self.cache)
        for one in some:
            if one is not None and len(one.pending):
                one.mark_cached(len(one.pending))

    def catch_up(self, rows: Rows, fed: Sequence[bool], layers: tuple[int, ...] = ()) -> ModelOutput:
        """Compute the blocks, and return the scores of each row's next token; see `DraftCache.catch_up`."""
        config = self.block.config
        lengths = [
            min(config.block_size, self.block.max_length - row.committed.size + 1) if on else 0
            for row, on in zip(rows, fed, strict=True)
        ]
        outputs = self.block.run_block([int(row.committed.tokens[-1]) for row in rows], lengths, self.cache)
        skipped = config.block_size - config.num_draft_tokens
        self._outputs = outputs[:, skipped:]
        self._scores = self.block.scores(self._outputs)
        device = outputs.device
        drafted = [_num_drafted(rows, i) for i in range(len(rows))]
        self._first = torch.tensor(drafted, device=device)
        self._drawn = 0
        self._states = torch.zeros(len(rows), 1, self.block.state_size, device=device)
        output = self._output(self._previous(rows, drafted, 0), torch.zeros_like(self._first)[:, None], self._states)
        for step in range(1, max(drafted) + 1):  # inside a cascade, over the tokens of its drafts
            before, more = self._states, torch.tensor([n >= step for n in drafted], device=device)[:, None, None]
            index = self._first[:, None].clamp(max=step)
            new = self._output(self._previous(rows, drafted, step), index, before)
            self._states = torch.where(more, self._states, before)
            assert new.logits is not None and output.logits is not None
            hidden = {n: torch.where(more, states, output.hidden[n]) for n, states in new.hidden.items()}
            output = dataclasses.replace(new, logits=torch.where(more, new.logits, output.logits), hidden=hidden)
        self._root = self._states
        return output

    def _previous(self, rows: Rows, drafted: Sequence[int], step: int) -> torch.Tensor:
        """Return the token before that at an index of each row's block, [B, 1] int64. drafted: tokens of its block it has."""
        tokens = [[int(row.tokens[-1 - max(0, n - step)])] for row, n in zip(rows, drafted, strict=True)]
        return torch.tensor(tokens, device=self.block.device)

    def keep_nodes(self, index: torch.Tensor) -> None:
        """Order the states of the last pass as the nodes are ordered now; see `DraftCache.keep_nodes`."""
        assert self._states is not None
        batch = torch.arange(len(index), device=index.device)[:, None]
        self._states = self._states[batch, index.clamp(min=0)]

    def forward(self, model_input: ModelInput) -> ModelOutput:
        """Return the scores after the last token of each chain, or after each node of trees."""
        assert self._first is not None and self._root is not None and self._states is not None
        parents = model_input.parents
        if parents is None:
            self._drawn += 1
            return self._output(model_input.token_ids[:, -1:], self._first[:, None] + self._drawn, self._states)
        batch = torch.arange(len(parents), device=parents.device)[:, None]
        of_parents = self._states[batch, parents.clamp(min=0, max=self._states.shape[1] - 1)]
        states = torch.where(parents[..., None] < 0, self._root, of_parents)
        return self._output(model_input.token_ids, self._first[:, None] + depths_of(parents) + 1, states)

    def _output(self, previous: torch.Tensor, index: torch.Tensor, states: torch.Tensor) -> ModelOutput:
        """Return the scores [B, n, K] at indices of the blocks after previous tokens, [B, n] int64 each; keep the new states.

        states: [B, n, R], of the paths before the previous tokens.
        """
        assert self._scores is not None and self._outputs is not None
        batch = torch.arange(len(index), device=index.device)[:, None]
        at = index.clamp(max=self._scores.shape[1] - 1)
        scores, hidden = self._scores[batch, at], self._outputs[batch, at]
        logits, self._states = self.block.after(scores, hidden, previous, index, states)
        return ModelOutput(logits, {_LAST: hidden}, subset=self.block.subset)

    def expected(self, tokens: torch.Tensor, index: int) -> torch.Tensor | None:
        """Return the predicted acceptance [B] of the token after each of `tokens`; None without a confidence head.

        index: its index in this proposal. After the last token of a block it is 0.
        """
        assert self._first is not None and self._outputs is not None
        at, count = self._first + index, self._outputs.shape[1]
        batch = torch.arange(len(at), device=at.device)
        found = self.block.acceptance(self._outputs[batch, at.clamp(max=count - 1)], tokens)
        return None if found is None else torch.where(at < count, found, 0.0)


def _num_drafted(rows: Rows, index: int) -> int:
    """Return the number of draft tokens that a row has already, inside a cascade."""
    row = rows[index]
    return 0 if row.committed is row else len(row.tokens) - row.committed.size


class HiddenStateDrafter(ModelDrafter):
    """Base of drafters on the target's hidden states, for chains and trees.

    A row gets no drafts if the target's hidden states are unknown for a part of its text, for example because the drafter failed
    for some steps.
    """

    context: FeatureCache
    width: int
    """Most nodes of a level of a tree that get children."""

    def __init__(
        self, draft: ReadsStates, target_vocab_size: int, context: FeatureCache, *, sample: bool, nodes: int
    ) -> None:
        """target_vocab_size: width of the target's logits. sample: see ModelDrafter.

        nodes: most nodes of a tree; 0 drafts chains alone. Under a rule or for a target that take no trees, and inside a
        cascade, a chain of a quarter as many tokens is drafted.
        """
        super().__init__(draft, target_vocab_size, context=context, sample=sample)
        self.hidden_layers = tuple(sorted(set(draft.hidden_layers)))
        self.nodes = check_int("nodes", nodes, 0, MAX_DRAFT_TOKENS)

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Add the target's hidden states of committed tokens."""
        self.context.add_target(rows, verification, target)

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draft a tree or a chain of at most `budget` tokens for each row."""
        if self.nodes and rows.capabilities.trees and not rows.level:
            budget = [min(n, self.nodes) for n in budget]
            return self.propose_trees(rows, budget, policy, branches=BRANCHES, width=self.width)
        if self.nodes and not rows.level:  # a cascade fixes its lengths
            budget = [min(n, -(-self.nodes // BRANCHES)) for n in budget]
        return super().propose(rows, budget, policy)


class HeadDrafter(HiddenStateDrafter):
    """Draft with a head or a multi-token-prediction layer, one token after the other."""

    context: HeadCache
    width = 4

    def __init__(self, head: ReadsStates, target_vocab_size: int, *, sample: bool = True, nodes: int = 0) -> None:
        """See HiddenStateDrafter."""
        context = HeadCache(head, target_vocab_size)
        super().__init__(head, target_vocab_size, context, sample=sample, nodes=nodes)

    def _draw_at_once(self, chain: DraftChain, rows: Rows, stopping: Stopping) -> Proposal | None:
        """Draw the likeliest tokens of a single row whose draft is ended by nothing but the confidence in them, in one call."""
        row = rows[0]
        is_plain = len(rows) == 1 and row.committed is row and self.context.drafts_at_once
        is_plain = is_plain and (row.params.greedy or not self.samples)
        is_plain = is_plain and stopping.is_data and stopping.rule.reads in (Reads.NOTHING, Reads.CONFIDENCE)
        if not is_plain or rows.level or rows.needs.confidence or processes(row):
            return None
        most = chain.room[0]
        rule = StoppingRule() if any(stopping.rule.always) else stopping.rule
        drawn = self.context.draft_at_once(self.context.view(rows), most, rule)
        if drawn is None:
            return None
        token_ids, confidences = drawn
        CONFIDENCES.put(rows, [confidences[: most - 1]])  # of a last token for want of room nothing is decided
        return Proposal.of_lists([token_ids], torch.device("cpu"))


class BlockDrafter(HiddenStateDrafter):
    """Draft with a block drafter, at most the tokens of a block."""

    context: BlockCache
    width = MAX_DRAFT_TOKENS

    def __init__(
        self,
        block: BlockModel,
        target_vocab_size: int,
        *,
        sample: bool = True,
        confidence: float = 0.0,
        nodes: int = 0,
    ) -> None:
        """confidence: a chain ends before a token whose predicted acceptance is below this; 0 drafts whole blocks. The
        prediction depends on the tokens before it alone, so that no token is dropped for its own value.

        Others: see HiddenStateDrafter. Raises ConfigError for a confidence above 0 if the drafter does not predict it.
        """
        context = BlockCache(block, target_vocab_size)
        super().__init__(block, target_vocab_size, context, sample=sample, nodes=nodes)
        self._least = check_float("confidence", confidence, 0.0, 1.0)
        if self._least and not block.config.has_confidence:
            raise ConfigError(f"confidence={confidence} has no effect: this block drafter has no confidence head")

    def _continues(self, token_ids: torch.Tensor, index: int) -> torch.Tensor | None:
        expected = self.context.expected(token_ids, index + 1) if self._least else None
        return None if expected is None else expected >= self._least
