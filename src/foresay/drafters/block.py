"""Drafting a block of tokens in one pass (DFlash, arXiv 2602.06036; DSpark, DeepSpec 2026).

One pass gives the scores of all tokens of a block. A Markov head adds scores that depend on the token before, so that tokens are
drawn one after the other, each from a distribution that is then known exactly. Owns the block of each row and where its tokens
are; draws them as a draft model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from foresay.checks import check_float
from foresay.decoding.outcome import Step
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import DraftStep, LengthPolicy, ModelInput, ModelOutput
from foresay.decoding.rows import Rows
from foresay.drafters.target_features import FeatureCache, ReadsTarget
from foresay.errors import ConfigError

if TYPE_CHECKING:  # at run time this would import transformers
    from foresay.models.blocks.model import BlockModel

_LAST = 1
"""Key of the hidden states that the output layer reads."""


class BlockCache(FeatureCache):
    """A block drafter's cache over ragged rows, and the blocks of the current proposal."""

    def __init__(self, block: BlockModel, vocab_size: int) -> None:
        self.block = block
        self._outputs: torch.Tensor | None = None
        """[B, T, D], the outputs of the current blocks, one for each draft token."""
        self._scores: torch.Tensor | None = None
        """[B, T, K], their logits without those of the Markov head."""
        self._first: torch.Tensor | None = None
        """[B] int64, the index in its block of each row's first token of this proposal."""
        self._drawn = 0
        """Number of tokens of this proposal before the next one, in a chain."""
        super().__init__(block, vocab_size)

    def reset(self) -> None:
        """Forget every row."""
        super().reset()
        self._outputs = self._scores = self._first = None

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
        self._first = torch.tensor([_num_drafted(rows, i) for i in range(len(rows))], device=device)
        self._drawn = 0
        last = torch.tensor([[int(row.tokens[-1])] for row in rows], device=device)
        return self._output(last, self._first[:, None])

    def forward(self, model_input: ModelInput) -> ModelOutput:
        """Return the scores after the last token of each chain."""
        assert self._first is not None and model_input.parents is None
        self._drawn += 1
        return self._output(model_input.token_ids[:, -1:], self._first[:, None] + self._drawn)

    def scores_at(self, rows: torch.Tensor, previous: torch.Tensor, index: torch.Tensor) -> ModelOutput:
        """Return the scores [n, 1, K] of rows' tokens after previous tokens. index: of the tokens in this proposal. [n] int64
        each."""
        assert self._first is not None
        device = self._first.device
        rows = rows.to(device)
        return self._output(
            previous.to(device)[:, None], (self._first[rows] + index.to(device))[:, None], rows[:, None]
        )

    def _output(self, previous: torch.Tensor, index: torch.Tensor, batch: torch.Tensor | None = None) -> ModelOutput:
        """Return the scores [B, n, K] at indices of the blocks after previous tokens, [B, n] int64 each.

        batch: the row of each, [B, 1] int64; None for all rows in order.
        """
        assert self._scores is not None and self._outputs is not None
        if batch is None:
            batch = torch.arange(len(index), device=index.device)[:, None]
        index = index.clamp(max=self._scores.shape[1] - 1)
        scores, hidden = self._scores[batch, index], self._outputs[batch, index]
        markov = self.block.after(previous)
        logits = scores if markov is None else scores + markov
        return ModelOutput(logits, {_LAST: hidden}, subset=self.block.subset)

    def expected(self, tokens: torch.Tensor, index: torch.Tensor) -> torch.Tensor | None:
        """Return the predicted acceptance [B] of the token after each of `tokens`; None without a confidence head.

        index: [B], its index in this proposal. After the last token of a block it is 0.
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


class _EndsBlocks(LengthPolicy):
    """A length policy that also ends a draft where the block drafter expects a rejection.

    The predicted acceptance of a token depends on the tokens before it alone, so that no token is dropped for its own value.
    """

    def __init__(self, inner: LengthPolicy, context: BlockCache, least: float) -> None:
        self._inner, self._context, self._least = inner, context, least
        self.needs_hidden, self.remembers = inner.needs_hidden, inner.remembers

    def budget(self, rows: Rows) -> list[int]:
        return self._inner.budget(rows)

    def keep_drafting(self, step: DraftStep) -> torch.Tensor | None:
        mask = self._inner.keep_drafting(step)
        found = self._context.expected(step.token_ids, step.index + 1)
        if found is None:
            return mask
        likely = found >= self._least
        return likely if mask is None else mask & likely

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        self._inner.observe(rows, steps)


class BlockDrafter(ReadsTarget):
    """Draft chains with a block drafter.

    A row gets no drafts if the target's hidden states are unknown for a part of its text, for example because the drafter failed
    for some steps.
    """

    context: BlockCache

    def __init__(
        self, block: BlockModel, target_vocab_size: int, *, sample: bool = True, confidence: float = 0.0
    ) -> None:
        """target_vocab_size: width of the target's logits. sample: see ModelDrafter. confidence: a draft ends before a token
        whose predicted acceptance is below this; 0 drafts whole blocks.

        Raises ConfigError for a confidence above 0 if the drafter does not predict it.
        """
        super().__init__(block, target_vocab_size, context=BlockCache(block, target_vocab_size), sample=sample)
        self.hidden_layers = tuple(sorted(set(block.hidden_layers)))
        self._least = check_float("confidence", confidence, 0.0, 1.0)
        if self._least and not block.config.has_confidence:
            raise ConfigError(f"confidence={confidence} has no effect: this block drafter has no confidence head")

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        """Draw up to `budget` tokens for each row, at most a block."""
        return super().propose(rows, budget, _EndsBlocks(policy, self.context, self._least) if self._least else policy)
