"""The cache of a draft on hidden states over ragged rows: pairs of features and following tokens (EAGLE-3, Li et al. 2025).

Draft tokens are cached with the head's own output instead, and are rewound once the hidden states of the target are known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from foresay.decoding.devices import moved
from foresay.decoding.proposal import Verification
from foresay.decoding.protocols import Logits, ModelInput, ModelOutput, Move
from foresay.decoding.rows import Rows
from foresay.decoding.stopping import StoppingRule
from foresay.drafters.draft_cache import MAX_CATCH_UP, DraftCache
from foresay.drafters.target_features import ReadsStates, RowFeatures, TargetFeatures

_MOST_ON_DEVICE = 64
"""Most pairs of a row of a pass on a device: what a step accepted is fed at once."""
NEXT, LAST = 0, 1
"""Keys of a pass's hidden states: NEXT replaces the target's features in the next pass, LAST is the output layer's input."""


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


class FeatureCache(DraftCache):
    """The cache of a draft over ragged rows, fed with features of the target's hidden states.

    As a head reads them: its input is a token and, in `ModelInput.features`, the features before it, and its hidden states NEXT
    replace them. Other kinds run other passes.
    """

    def __init__(self, reader: ReadsStates, vocab_size: int) -> None:
        super().__init__(reader, vocab_size)
        self.reader, self.features = reader, TargetFeatures(reader)
        self._last_output: torch.Tensor | None = None
        """[B, 1, D], the head's output for each row's last token, which the next pass reads."""
        self._outputs: torch.Tensor | None = None
        """[B, K, D], the head's outputs of the last pass."""

    def admit(self, rows: Rows, first: int) -> None:
        """Admit new rows with the target's hidden states of their prompts, except for the last position."""
        super().admit(rows, first)
        self.features.admit(rows.rows[first:])

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Apply the engine's moves to the cache rows and their features."""
        super().rearrange(moves, count)
        self.features.rearrange(moves, count)

    def reset(self) -> None:
        """Forget every row."""
        super().reset()
        self.features = TargetFeatures(self.reader)

    def add_target(self, rows: Rows, verification: Verification | None, target: ModelOutput | None) -> None:
        """Add the hidden states of a target pass at committed positions, and rewind draft tokens."""
        self.features.add(rows, verification, target)
        self.rewind(rows)

    def rewind(self, rows: Rows) -> None:
        """Rewind draft tokens."""
        self.cache.truncate([0 if one is None else one.cached for one in self.features.rows])

    def room(self, rows: Rows, budget: Sequence[int]) -> list[int]:
        """Return how many tokens each row may draft; 0 for rows with unknown hidden states."""
        room = super().room(rows, budget)
        return [n if one is not None and one.count else 0 for n, one in zip(room, self.features.rows, strict=True)]

    def prepare(self, rows: Rows, wanted: Sequence[bool]) -> None:
        """Prefill long contexts in separate passes, until at most MAX_CATCH_UP pairs are pending."""
        for index, (row, one) in enumerate(zip(rows, self._rewound(rows, wanted), strict=True)):
            while one is not None and len(one.pending) > self._most_pending:
                count = min(self.reader.capabilities.prefill_chunk, len(one.pending) - 1)
                tokens = torch.from_numpy(row.tokens[one.cached + 1 : one.cached + 1 + count])[None]
                model_input = ModelInput(tokens.to(self.reader.device), [count], index, logits=Logits.NONE)
                super().forward(dataclasses.replace(model_input, features=one.pending[None, :count]))
                one.mark_cached(count)

    def _rewound(self, rows: Rows, wanted: Sequence[bool]) -> list[RowFeatures | None]:
        """Rewind draft tokens; return the wanted rows with their features computed, None for the others."""
        self.rewind(rows)
        some = [one if on else None for one, on in zip(self.features.rows, wanted, strict=True)]
        self.features.compute(some)
        return some

    @property
    def _most_pending(self) -> int:
        """Pairs of a row that are fed together with those of other rows."""
        return _MOST_ON_DEVICE if self.draws_chains else MAX_CATCH_UP

    def _known(self, rows: Rows, fed: Sequence[bool]) -> tuple[ModelInput, Callable[[], None]]:
        parts, known = self._pending(rows, fed)
        return known, lambda: _mark_cached(parts, known)

    def catch_up(self, rows: Rows, fed: Sequence[bool], layers: tuple[int, ...] = ()) -> ModelOutput:
        """Feed the pending pairs, then the rows' draft tokens one by one; see `DraftCache.catch_up`."""
        output = self._feed_pending(rows, fed)
        drafted = [row.tokens[row.committed.size :] if row.committed is not row else row.tokens[:0] for row in rows]
        for step in range(max(len(draft) if on else 0 for draft, on in zip(drafted, fed, strict=True))):
            on = [flag and len(draft) > step for draft, flag in zip(drafted, fed, strict=True)]
            tokens = [[int(draft[step]) if flag else 0] for draft, flag in zip(drafted, on, strict=True)]
            model_input = ModelInput(
                torch.tensor(tokens, device=self.reader.device), [int(flag) for flag in on], logits=Logits.LAST
            )
            output = self._merged(output, self.forward(model_input), on)
        return output

    def _feed_pending(self, rows: Rows, fed: Sequence[bool]) -> ModelOutput:
        """Run a pass over the pending pairs; a row without any feeds its last pair again."""
        parts, model_input = self._pending(rows, fed)
        _mark_cached(parts, model_input)
        output = super().forward(model_input)
        hidden = {n: model_input.of_last(states) for n, states in output.hidden.items()}
        self._last_output = self._outputs = hidden[NEXT]
        return dataclasses.replace(output, hidden=hidden)

    def _pending(self, rows: Rows, fed: Sequence[bool]) -> tuple[list[RowFeatures | None], ModelInput]:
        """Return the rows that are fed, None for others, and a pass over their pending pairs."""
        parts = [one if on else None for one, on in zip(self.features.rows, fed, strict=True)]
        self.features.compute(parts)
        self._repeat_last(parts)
        counts = [0 if one is None else len(one.pending) for one in parts]
        tokens = torch.zeros(len(rows), max(counts), dtype=torch.int64)
        features = torch.zeros(*tokens.shape, self.reader.width, dtype=self.reader.dtype, device=self.reader.device)
        for i, (row, one) in enumerate(zip(rows, parts, strict=True)):
            if one is not None:
                tokens[i, : counts[i]] = torch.from_numpy(row.tokens[one.cached + 1 : one.count + 1])
                features[i, : counts[i]] = one.pending
        return parts, ModelInput(moved(tokens, self.reader.device), counts, logits=Logits.LAST, features=features)

    def _repeat_last(self, parts: Sequence[RowFeatures | None]) -> None:
        """Make the last pair of rows without a pending one pending again."""
        for index, one in enumerate(parts):
            if one is not None and not len(one.pending):
                one.pending, one.cached = one.last, one.cached - 1
                self.cache.lengths[index] = one.cached

    def _merged(self, old: ModelOutput, new: ModelOutput, on: Sequence[bool]) -> ModelOutput:
        """Return the new output for rows that were fed, the old one for the others."""
        which = torch.tensor(on, device=self.reader.device)[:, None, None]
        hidden = {n: torch.where(which, new.hidden[n], old.hidden[n]) for n in old.hidden}
        self._last_output = self._outputs = hidden[NEXT]
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
        self._outputs = output.hidden[NEXT]
        return output

    @property
    def drafts_at_once(self) -> bool:
        """True if the head can draft several tokens in one call."""
        head = self.reader
        return isinstance(head, DraftsAtOnce) and head.drafts_at_once and self.model.vocab_size == head.vocab_size

    def draft_at_once(self, rows: Rows, most: int, rule: StoppingRule) -> tuple[list[int], list[float]] | None:
        """Feed the only row's pending pairs and draft after them, in one call; None if it is not possible."""
        one = self.features.rows[0]
        if one is None or not self.drafts_at_once:
            return None
        assert isinstance(self.reader, DraftsAtOnce)
        self.features.compute([one])
        self._repeat_last([one])
        known = torch.from_numpy(rows[0].tokens[one.cached + 1 : one.count + 1])
        drawn = self.reader.draft_at_once(known, one.pending, self.cache, most, tuple(rows[0].eos), rule)
        if drawn is not None:
            one.mark_cached(len(known))
            self.model.row_passes += len(drawn[0])
        return drawn


def _mark_cached(parts: Sequence[RowFeatures | None], fed: ModelInput) -> None:
    """Record that a pass over pending pairs was run."""
    for one, count in zip(parts, fed.num_tokens, strict=True):
        if one is not None:
            one.mark_cached(count)
