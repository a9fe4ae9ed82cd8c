"""Drafting on the target's hidden states: heads (EAGLE-3, Li et al. 2025), MTP layers, blocks (DFlash, arXiv 2602.06036; DSpark).

A head drafts one token after the other. A block drafter scores all
tokens of a block in one pass; a Markov head or a candidate selector changes them by the tokens before, so that each token is
drawn from a distribution that is known exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from foresay.checks import check_float, check_int
from foresay.decoding.chains import Drawn, Sampling
from foresay.decoding.devices import to_device
from foresay.decoding.proposal import Proposal, Verification, depths_of
from foresay.decoding.protocols import LengthPolicy, ModelInput, ModelOutput
from foresay.decoding.rows import Rows
from foresay.decoding.stopping import CONFIDENCES, Stopping, StoppingRule
from foresay.drafters.draft_chain import DraftChain
from foresay.drafters.feature_cache import LAST, FeatureCache
from foresay.drafters.model import ModelDrafter, is_plain
from foresay.drafters.mtp_cache import MtpCache, num_mtp_layers
from foresay.drafters.target_features import ReadsStates
from foresay.errors import ConfigError
from foresay.lengths.constant import MAX_DRAFT_TOKENS

if TYPE_CHECKING:  # at run time this would import transformers
    from foresay.models.drafts.blocks import DraftsBlocks

BRANCHES = 4
"""Children of a node of a tree."""


class BlockCache(FeatureCache):
    """A block drafter's cache over ragged rows, and the blocks of the current proposal."""

    def __init__(self, block: DraftsBlocks, vocab_size: int) -> None:
        super().__init__(block, vocab_size)
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
        some = self._rewound(rows, wanted)
        self.block.add_context([None if one is None else one.pending for one in some], self.cache)
        for one in some:
            if one is not None and len(one.pending):
                one.mark_cached(len(one.pending))

    def catch_up(self, rows: Rows, fed: Sequence[bool], layers: tuple[int, ...] = ()) -> ModelOutput:
        """Compute the blocks, and return the scores of each row's next token; see `DraftCache.catch_up`."""
        self._outputs, self._scores = self._blocks(rows, fed)
        device = self._outputs.device
        drafted = [_num_drafted(rows, i) for i in range(len(rows))]
        self._first = to_device(drafted, device)
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

    def _blocks(self, rows: Rows, fed: Sequence[bool]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs [B, T, D] of each row's block that draft tokens, and their scores [B, T, K]."""
        config = self.block.config
        lengths = [
            min(config.block_size, self.block.max_length - row.committed.size + 1) if on else 0
            for row, on in zip(rows, fed, strict=True)
        ]
        outputs = self._run_blocks(rows, fed, lengths)[:, config.block_size - config.num_draft_tokens :]
        return outputs, self.block.scores(outputs)

    def _run_blocks(self, rows: Rows, fed: Sequence[bool], lengths: Sequence[int]) -> torch.Tensor:
        """Return the outputs [B, T, D] of blocks of these lengths."""
        return self.block.run_block([int(row.committed.tokens[-1]) for row in rows], lengths, self.cache)

    @property
    def draws_chains(self) -> bool:
        """See `DraftCache.draws_chains`."""
        return self.block.draws_chains and self.block.vocab_size == self.model.vocab_size

    def draw_chains(self, rows: Rows, room: Sequence[int], sampling: Sampling | None) -> Drawn | None:
        """Compute the blocks and draw their tokens on the device; see `DraftCache.draw_chains`."""
        outputs, scores = self._blocks(rows, [n > 0 for n in room])
        last = to_device([int(row.committed.tokens[-1]) for row in rows], outputs.device)
        self.model.row_passes += sum(n > 0 for n in room)
        return self.block.draw_tokens(last, outputs, scores, room, sampling)

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
        return ModelOutput(logits, {LAST: hidden}, subset=self.block.subset)

    def expected(self, tokens: torch.Tensor, index: int) -> torch.Tensor | None:
        """Return the predicted acceptance [B] of the token after each of `tokens`; None without a confidence head.

        index: its index in this proposal. After the last token of a block it is 0.
        """
        assert self._first is not None and self._outputs is not None
        at, count = self._first + index, self._outputs.shape[1]
        batch = torch.arange(len(at), device=at.device)
        found = self.block.acceptance(self._outputs[batch, at.clamp(max=count - 1)], tokens)
        return None if found is None else torch.where(at < count, found, 0.0)


class PairBlockCache(BlockCache):
    """The cache of a draft whose blocks follow pairs, which are fed in the same pass."""

    def prepare(self, rows: Rows, wanted: Sequence[bool]) -> None:
        """See FeatureCache."""
        FeatureCache.prepare(self, rows, wanted)

    def _run_blocks(self, rows: Rows, fed: Sequence[bool], lengths: Sequence[int]) -> torch.Tensor:
        known, mark_cached = self._known(rows, fed)
        outputs = self.block.run_after(known, lengths, self.cache)
        mark_cached()
        return outputs


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
    """Draft with a head or multi-token-prediction layers, one token after the other."""

    width = 4

    def __init__(self, head: ReadsStates, target_vocab_size: int, *, sample: bool = True, nodes: int = 0) -> None:
        """See HiddenStateDrafter. Several multi-token-prediction layers draft no trees."""
        is_layered = num_mtp_layers(head) > 1
        if is_layered and nodes:
            text = "must be 0: several multi-token-prediction layers draft chains"
            raise ConfigError(text, param="nodes", value=nodes)
        context = (MtpCache if is_layered else FeatureCache)(head, target_vocab_size)
        super().__init__(head, target_vocab_size, context, sample=sample, nodes=nodes)

    def _draw_at_once(self, chain: DraftChain, rows: Rows, stopping: Stopping) -> Proposal | None:
        """Draw the likeliest tokens of a single row whose draft is ended by nothing but the confidence in them, in one call."""
        is_single = len(rows) == 1 and self.context.drafts_at_once and (rows[0].params.greedy or not self.samples)
        if not is_single or not is_plain(rows, stopping) or rows.needs.confidence:
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
        block: DraftsBlocks,
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
        context = (PairBlockCache if block.reads_pairs else BlockCache)(block, target_vocab_size)
        super().__init__(block, target_vocab_size, context, sample=sample, nodes=nodes)
        self._least = check_float("confidence", confidence, 0.0, 1.0)
        if self._least and not block.config.has_confidence:
            text = "has no effect: this block drafter has no confidence head"
            raise ConfigError(text, param="confidence", value=confidence)

    def _draw_on_device(self, rows: Rows, viewed: Rows, room: Sequence[int], stopping: Stopping) -> Proposal | None:
        return None if self._least else super()._draw_on_device(rows, viewed, room, stopping)

    def _continues(self, token_ids: torch.Tensor, index: int) -> torch.Tensor | None:
        expected = self.context.expected(token_ids, index + 1) if self._least else None
        return None if expected is None else expected >= self._least
