"""Drafting with a draft model, which has its own slot cache and drafts for ragged rows in one batch.

Each proposal first feeds the tokens that the cache lacks, so a full acceptance, after which the draft model has not seen its own
last token, is no special case.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from foresay.decoding.chains import TreeLimits, sampling_of
from foresay.decoding.devices import moved
from foresay.decoding.processors import processes
from foresay.decoding.proposal import Proposal, Verification
from foresay.decoding.protocols import (
    Drafter,
    LanguageModel,
    LengthPolicy,
    Logits,
    ModelInput,
    ModelOutput,
    Move,
    learned_by,
)
from foresay.decoding.rows import Rows
from foresay.decoding.stopping import Reads, Stopping, StoppingRule
from foresay.drafters.draft_cache import DraftCache
from foresay.drafters.draft_chain import DraftChain, up_to_end
from foresay.drafters.tree import Grower, Tree
from foresay.errors import UnsupportedModelError
from foresay.lengths.constant import MAX_DRAFT_TOKENS
from foresay.models.vocabulary import VocabularyAdapter


class ModelDrafter(Drafter):
    """Draft with a smaller model that has the target's token ids.

    Wider logits of the draft model are cut to the target's width; with narrower ones the missing ids are never proposed. Either
    way tokens are drawn from the recorded distribution, so the output stays exact.
    """

    def __init__(
        self, model: LanguageModel, target_vocab_size: int, *, context: DraftCache | None = None, sample: bool = True
    ) -> None:
        """target_vocab_size: width of the target's logits. context: cache to draft with; None creates one.

        sample: True draws tokens for sampled rows with the row's parameters. False proposes the likeliest tokens: fewer of them
        are accepted, but the sampled text does not depend on the draft length.
        """
        self.context, self.samples = context or DraftCache(model, target_vocab_size), sample

    def admit(self, rows: Rows, first: int) -> None:
        """Give the new rows empty cache rows; their prompts are prefilled at their first proposal."""
        self.context.admit(rows, first)

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Apply the engine's moves to the cache rows."""
        self.context.rearrange(moves, count)

    def reset(self) -> None:
        """Forget every row."""
        self.context.reset()

    def observe(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Rewind the cache to the committed tokens."""
        self.context.rewind(rows)

    @property
    def learned(self) -> bytes:
        """Digest of the draft model's weights."""
        return learned_by(self.context.model.inner)

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draw up to `budget` tokens for each row, each from the distribution recorded with it; drafts end at an end token."""
        model = self.context.model
        viewed = self.context.view(rows)
        room = self.context.room(viewed, budget)
        if max(room) <= 0:
            return Proposal.empty(len(rows), model.device)
        # rows beyond the draft model's context length are fed padding only
        fed = [b > 0 for b in room]
        self.context.prepare(viewed, fed)
        stopping = policy.stopping(rows)
        drawn = self._draw_on_device(rows, viewed, room, stopping)
        if drawn is not None:
            return drawn
        chain = DraftChain(rows, room, model.device)
        at_once = self._draw_at_once(chain, rows, stopping)
        if at_once is not None:
            return at_once
        layers = hidden_layers(model, stopping.rule)
        output = self.context.catch_up(viewed, fed, layers)
        with chain.keeping():
            self._draw(chain, output, rows, stopping, layers)
            if rows.level:
                each = zip(chain.ids.tolist(), chain.counts.tolist(), strict=True)
                self.context.remember(viewed, [ids[: max(0, n - 1)] for ids, n in each])
        return chain.proposal()

    def _draw(
        self, chain: DraftChain, output: ModelOutput, rows: Rows, stopping: Stopping, layers: tuple[int, ...]
    ) -> None:
        """Draw one token after the other. output: the draft model's catch-up pass."""
        while True:
            distributions = output.draft_distributions(rows, chain.ids, greedy=not self.samples)
            hidden = output.hidden[layers[0]][:, -1] if layers else None
            if not chain.add(distributions, stopping, hidden, self._continues):
                break
            output = self.context.forward(
                ModelInput(chain.ids[:, -1:], chain.fed, logits=Logits.LAST, hidden_layers=layers)
            )

    def _draw_on_device(self, rows: Rows, viewed: Rows, room: Sequence[int], stopping: Stopping) -> Proposal | None:
        """Draw whole chains without reading a token; return None if they must be drawn one by one."""
        needs, room = rows.needs, [max(0, n) for n in room]
        if not self.context.draws_chains or not is_plain(rows, stopping) or needs.confidence or needs.shares_noise:
            return None
        device = self.context.model.device
        sampling = sampling_of(rows, device, max(room)) if self.samples else None
        drawn = self.context.draw_chains(viewed, room, sampling)
        if drawn is None:
            return None
        ends = up_to_end(rows, drawn.token_ids)
        if drawn.probs is None or sampling is None:
            return Proposal(drawn.token_ids, room, ends=ends)
        drafting = [i for i, n in enumerate(room) if n]
        index = np.full((len(rows), max(room)), -1)
        for at, i in enumerate(drafting):
            if not sampling.greedy[i]:
                index[i, : room[i]] = np.arange(room[i]) * len(drafting) + at
        return Proposal(drawn.token_ids, room, drawn.probs, moved(torch.from_numpy(index), device), ends=ends)

    def _draw_at_once(self, chain: DraftChain, rows: Rows, stopping: Stopping) -> Proposal | None:
        """Draw all tokens in one call; return None if they must be drawn one by one."""
        return None

    def _continues(self, token_ids: torch.Tensor, index: int) -> torch.Tensor | None:
        """Return the rows that the draft itself continues after tokens [B] at an index of the draft, [B] bool; None for all."""
        return None

    def propose_trees(
        self, rows: Rows, budget: Sequence[int], policy: LengthPolicy, *, branches: int, width: int
    ) -> Proposal:
        """Draft a tree of at most `budget` nodes for each row. branches: children of a node. width: see `Grower`."""
        context, device = self.context, self.context.model.device
        viewed = context.view(rows)
        depths = context.room(viewed, [MAX_DRAFT_TOKENS] * len(rows))
        fed = [min(n, depth) > 0 for n, depth in zip(budget, depths, strict=True)]
        if not any(fed):
            return Proposal.empty(len(rows), device)
        context.prepare(viewed, fed)
        stopping = policy.stopping(rows)
        trees = [
            Tree(row, n * on, depth, row.params.greedy or not self.samples)
            for row, n, depth, on in zip(rows, budget, depths, fed, strict=True)
        ]
        if is_plain(rows, stopping) and all(tree.chosen for tree in trees):
            limits = TreeLimits([tree.budget for tree in trees], depths, branches, width)
            grown = context.draw_trees(viewed, limits)
            if grown is not None:
                return Proposal(grown.token_ids, grown.num_tokens, parents=grown.parents)
        output = context.catch_up(viewed, fed)
        starts = list(context.cache.lengths)

        def score(model_input: ModelInput, scored: torch.Tensor) -> ModelOutput:
            """Feed the whole trees, then rewind the cache."""
            context.keep_nodes(scored)
            out = context.forward(model_input)
            context.cache.truncate(starts)
            return out

        grower = Grower(trees, rows, device, branches=branches, width=width)
        with grower.keeping():
            grower.grow(output, score, stopping)
        return grower.proposal()


def is_plain(rows: Rows, stopping: Stopping) -> bool:
    """Return True if drafts depend on nothing but the rows' sampling parameters and budgets, and at most on confidences."""
    if rows.level or not stopping.is_data or stopping.rule.reads not in (Reads.NOTHING, Reads.CONFIDENCE):
        return False
    return all(row.committed is row and not processes(row) for row in rows)


def hidden_layers(model: VocabularyAdapter, rule: StoppingRule) -> tuple[int, ...]:
    """Return the draft model's last layer if the rule reads its hidden states, else ().

    Raises UnsupportedModelError if the model does not output hidden states.
    """
    if rule.reads is not Reads.HIDDEN:
        return ()
    layers = model.capabilities.num_layers
    if layers is None:
        raise UnsupportedModelError(
            f"this length policy reads the draft model's hidden states, which {type(model.inner).__name__} does not output; "
            "choose another length or draft model"
        )
    return (layers,)
