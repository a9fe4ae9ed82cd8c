"""Drafting with a head on the target's hidden states (EAGLE-3, Li et al. 2025).

Owns which pairs of hidden states and following tokens are in the head's cache. Draft tokens are cached with the head's own output
instead, and are rewound once the target's hidden states are known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from foresay.checks import check_int
from foresay.decoding.continuation import Branching, Continuation, Drawn
from foresay.decoding.processors import processes
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy, Logits, ModelInput, ModelOutput
from foresay.decoding.rows import Rows
from foresay.drafters.draft_cache import MAX_CATCH_UP
from foresay.drafters.draft_chain import DraftChain
from foresay.drafters.model_tree import ModelTreeDrafter
from foresay.drafters.target_features import FeatureCache, ReadsStates, ReadsTarget, RowFeatures
from foresay.lengths.constant import MAX_DRAFT_TOKENS
from foresay.models.cpu.chain import Limits
from foresay.models.heads.config import NEXT

BRANCHES, WIDTH, LEVELS = 4, 4, 8
"""Shape of a tree: children of a node, nodes of a level that get children, and the most levels."""


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
        limits: Limits,
        rule: Continuation | Branching,
    ) -> Drawn | None:
        """See HeadModel.draft_at_once."""
        ...


class HeadCache(FeatureCache):
    """A head's cache over ragged rows, fed with the target's hidden states.

    The head's input is a token and, in `ModelInput.features`, the features before it; its hidden states NEXT replace them.
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
        self._last_output = self._outputs = hidden[NEXT]
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
        self._last_output = self._outputs = hidden[NEXT]
        assert new.logits is not None and old.logits is not None
        return dataclasses.replace(new, logits=torch.where(which, new.logits, old.logits), hidden=hidden)

    def forward(self, model_input: ModelInput) -> ModelOutput:
        """Run one pass over draft tokens: the next token of each chain, or a whole tree after the rows' last tokens."""
        assert self._last_output is not None and self._outputs is not None
        features = self._outputs[:, -1:]
        if model_input.parents is not None:
            batch = torch.arange(len(model_input.parents), device=model_input.parents.device)[:, None]
            of_parents = self._outputs[batch, model_input.parents.clamp(min=0, max=self._outputs.shape[1] - 1)]
            features = torch.where(model_input.parents[..., None] < 0, self._last_output, of_parents)
        output = super().forward(dataclasses.replace(model_input, features=features))
        self._outputs = output.hidden[NEXT]
        return output

    @property
    def drafts_at_once(self) -> bool:
        """True if the head can draft several tokens in one call."""
        head = self.head
        return isinstance(head, DraftsAtOnce) and head.drafts_at_once and self.model.vocab_size == head.vocab_size

    def draft_at_once(self, rows: Rows, limits: Limits, rule: Continuation | Branching) -> Drawn | None:
        """Feed the only row's pending pairs and draft after them, in one call; None if it is not possible."""
        one = self._features[0]
        if one is None or not self.drafts_at_once:
            return None
        assert isinstance(self.head, DraftsAtOnce)
        self._compute([one])
        self._repeat_last([one])
        known = torch.from_numpy(rows[0].tokens[one.cached + 1 : one.count + 1])
        drawn = self.head.draft_at_once(known, one.pending, self.cache, limits, rule)
        if drawn is not None:
            one.mark_cached(len(known))
            self.model.row_passes += drawn.passes
        return drawn


class HeadDrafter(ReadsTarget):
    """Draft chains with a head on the target's hidden states, or trees for a single row.

    A row gets no drafts if the target's hidden states are unknown for a part of its text, for example because the drafter failed
    for some steps.
    """

    context: HeadCache

    def __init__(self, head: ReadsStates, target_vocab_size: int, *, sample: bool = True, nodes: int = 0) -> None:
        """target_vocab_size: width of the target's logits. sample: see ModelDrafter.

        nodes: most nodes of a tree; 0 drafts chains alone. A tree is drafted for a single row whose output does not depend on its
        draft, by the compiled kernels, under a rule and for a target that take trees; else a chain of a quarter as many tokens.
        """
        super().__init__(head, target_vocab_size, context=HeadCache(head, target_vocab_size), sample=sample)
        self.hidden_layers = tuple(sorted(set(head.hidden_layers)))
        self.nodes = check_int("nodes", nodes, 0, MAX_DRAFT_TOKENS)

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draft a tree or chains of at most `budget` tokens."""
        if self.nodes and not rows.level and self._tree_rule(rows, policy) is None:  # a cascade fixes its lengths
            budget = [min(n, -(-self.nodes // BRANCHES)) for n in budget]
        return super().propose(rows, budget, policy)

    def _tree_rule(self, rows: Rows, policy: LengthPolicy) -> Branching | None:
        """Return the rule of the rows' tree; None if they get chains."""
        if self.nodes <= 1 or not rows.capabilities.trees or not self._is_plain(rows, policy):
            return None
        return policy.branching(rows) if rows[0].params.greedy or rows.needs.ignores_drafts else None

    def _is_plain(self, rows: Rows, policy: LengthPolicy) -> bool:
        """Return True for a single row whose draft is ended by nothing but the confidence in its likeliest tokens."""
        row = rows[0]
        is_plain = len(rows) == 1 and row.committed is row and self.context.drafts_at_once
        is_plain = is_plain and (row.params.greedy or not self.samples)
        return is_plain and not (rows.level or rows.needs.confidence or processes(row) or policy.needs_hidden)

    def _draw_at_once(self, chain: DraftChain, rows: Rows, policy: LengthPolicy) -> Proposal | None:
        """Draft a single row's likeliest tokens in one call."""
        if not self._is_plain(rows, policy):
            return None
        tree = self._tree_rule(rows, policy)
        rule = tree or policy.continuation(rows)
        most = chain.room[0] if tree is None else min(chain.room[0], self.nodes)
        limits = Limits(most, tuple(rows[0].eos), BRANCHES, WIDTH, LEVELS)
        drawn = rule and self.context.draft_at_once(self.context.view(rows), limits, rule)
        if not drawn:
            return None
        policy.drawn(rows, drawn)
        ids, parents = drawn.token_ids, drawn.parents
        above = None if parents in (None, list(range(-1, len(ids) - 1))) else torch.tensor([parents])
        return Proposal(torch.tensor([ids], dtype=torch.int64), [len(ids)], parents=above)


class HeadTreeDrafter(ReadsTarget, ModelTreeDrafter):
    """Draft trees with a head on the target's hidden states; budgets count nodes."""

    def __init__(self, head: ReadsStates, target_vocab_size: int, *, branches: int = 2, width: int = 1) -> None:
        """branches: children per node. width: nodes per level that get children; each level takes one draft pass."""
        ModelTreeDrafter.__init__(
            self, head, target_vocab_size, branches=branches, width=width, context=HeadCache(head, target_vocab_size)
        )
        self.hidden_layers = tuple(sorted(set(head.hidden_layers)))
