"""A draft model's cache, kept true to whatever context the model is asked to draft from.

Owns catching up and rewinding. At the engine's level a context only grows, and what was rejected is rewound when it is
observed. Deeper, inside a cascade, a drafter is asked about contexts that were guessed and may be taken back without a
word; there the cache remembers what it was fed, and keeps the longest common prefix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from foresay.decoding.prefill import pending, prefill_chunk
from foresay.decoding.protocols import KVCache, LanguageModel, Logits, ModelInput, ModelOutput, Move
from foresay.decoding.rows import IntArray, Rows, common_prefix
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.vocabulary import VocabularyAdapter

MAX_CATCH_UP = 4
"""Missed tokens that ride in a drafting pass; more are filled in passes of their own."""


class DraftCache:
    """A draft model over the target's vocabulary, with a cache row for each row of the batch."""

    def __init__(self, model: LanguageModel, vocab_size: int) -> None:
        self.model = VocabularyAdapter(model, vocab_size)
        self.cache: KVCache = self.model.new_cache()
        self._fed: list[IntArray | None] = []

    def replace_model(self, make: Callable[[LanguageModel], LanguageModel]) -> None:
        """Draft with what `make` makes of the model from now on; forgets every row."""
        before = self.model
        self.model = VocabularyAdapter(make(before.inner), before.vocab_size)
        self.model.row_passes = before.row_passes
        self.reset()

    def forward(self, model_input: ModelInput) -> ModelOutput:
        """One pass of the model over the cache."""
        return self.model.forward(model_input, self.cache)

    def admit(self, rows: Rows, first: int) -> None:
        """Give new rows empty cache rows; their prompts are filled when they are first drafted for."""
        self.model.admit(self.view(rows), first, self.cache)
        self._fed += [None] * (len(rows) - first)

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Follow the engine's moves."""
        self.cache.rearrange(moves, count)
        for source, target in moves:
            self._fed[target] = self._fed[source]
        del self._fed[count:]

    def reset(self) -> None:
        """Forget every row."""
        self.cache = self.model.new_cache()
        self._fed = []

    def view(self, rows: Rows) -> Rows:
        """The rows as the model reads them: a decoder-only draft of an encoder-decoder reads source and output as one."""
        if self.model.capabilities.reads_source or all(row.source is None for row in rows):
            return rows
        return rows.as_decoder_only()

    def room(self, rows: Rows, budget: Sequence[int]) -> list[int]:
        """How many tokens each row may draft: positions past the draft's own context cannot be scored by it."""
        return [min(b, self.model.max_length - row.size) for b, row in zip(budget, rows, strict=True)]

    def rewind(self, rows: Rows) -> None:
        """Rewind to the rows' committed tokens."""
        self._keep_common(self.view(rows))

    def prepare(self, rows: Rows, wanted: Sequence[bool]) -> None:
        """Bring the cache to within MAX_CATCH_UP tokens of each wanted row. rows: as `view` gave them."""
        if rows.level:
            self._keep_common(rows)
        for place in range(len(rows)):
            while wanted[place] and pending(rows, self.cache, place) >= MAX_CATCH_UP:
                prefill_chunk(self.model, self.cache, rows, place)

    def catch_up(self, rows: Rows, fed: Sequence[bool], layers: tuple[int, ...] = ()) -> ModelOutput:
        """Feed what the cache lacks; gives the logits after each row's last token, [B, 1, V], and its hidden states [B, 1, H]."""
        counts = [row.size - self.cache.lengths[i] if fed[i] else 0 for i, row in enumerate(rows)]
        tokens = torch.zeros(len(rows), max(counts), dtype=torch.int64)
        for i, row in enumerate(rows):
            tokens[i, : counts[i]] = torch.from_numpy(row.tokens[row.size - counts[i] :])
        model_input = ModelInput(tokens.to(self.model.device), counts, logits=Logits.LAST, hidden_layers=layers)
        output = self.forward(model_input)
        if not layers:
            return output
        batch, last = torch.arange(len(rows), device=tokens.device), model_input.last_columns()
        hidden = {n: states[batch, last][:, None] for n, states in output.hidden.items()}
        return dataclasses.replace(output, hidden=hidden)

    def _keep_common(self, rows: Rows) -> None:
        """Cut each cache row to what it shares with the row's tokens, the last of which is never cached."""
        lengths = []
        for place, row in enumerate(rows):
            length = min(self.cache.lengths[place], row.size - 1)
            fed = self._fed[place]
            if fed is not None:
                length = min(length, common_prefix(fed, row.tokens))
            lengths.append(length)
            if fed is not None or rows.level:
                self._fed[place] = row.tokens
        self.cache.truncate(lengths)

    def remember(self, rows: Rows, drafted: Sequence[Sequence[int]]) -> None:
        """Note what the cache was fed behind the rows' tokens. rows: as `view` gave them. drafted: B lists of tokens."""
        if rows.level:
            for place, (row, tokens) in enumerate(zip(rows, drafted, strict=True)):
                new = np.asarray(tokens, dtype=np.int64)
                self._fed[place] = np.concatenate([row.tokens, new]) if len(new) else row.tokens


class FirstLayers(LanguageModel, Protocol):
    """A model that is another's first layers."""

    def borrowed(self, owner: SlotCache) -> SlotCache:
        """A cache over the slots of the other's cache."""
        ...


class SharedDraftCache(DraftCache):
    """The context of a draft made of the target's first layers: it drafts in the target's own cache.

    All that is committed is already there, so there is nothing to prefill and never anything to catch up on. Until an
    engine lends its cache it has one of its own.
    """

    def __init__(self, model: FirstLayers, vocab_size: int) -> None:
        super().__init__(model, vocab_size)
        self._owner: SlotCache | None = None
        self._borrow = model.borrowed

    def use_cache_of_target(self, cache: KVCache) -> None:
        """Draft in this cache from now on, the target's; one that holds no keys (a recording's) cannot be lent."""
        self._owner = cache if isinstance(cache, SlotCache) else None
        self.reset()

    def reset(self) -> None:
        """Forget every row."""
        super().reset()
        if self._owner is not None:
            self.cache = self._borrow(self._owner)

    def admit(self, rows: Rows, first: int) -> None:
        """New rows, whose prompts the target has filled."""
        super().admit(rows, first)
        if self._owner is not None:
            self.cache.lengths[first:] = self._owner.lengths[first : len(rows)]

    def _keep_common(self, rows: Rows) -> None:
        """All that is committed is cached, and what was guessed behind it as far as it is the same."""
        if self._owner is None:
            super()._keep_common(rows)
            return
        # another depth's pass may have put pads where this one's guesses were
        alone, self._owner.guest = self._owner.guest is self, self
        for place, row in enumerate(rows):
            fed, length = self._fed[place], row.committed.size - 1
            if alone and fed is not None and row.committed is not row:
                held = min(self.cache.lengths[place], common_prefix(fed, row.tokens), row.size - 1)
                length = max(length, held)
            self.cache.lengths[place] = length
            self._fed[place] = row.tokens if rows.level else None
