"""A draft model's cache, kept consistent with the context that the model drafts from.

Owns catch-up and rewinding. At the engine's level contexts only grow, and rejected tokens are rewound in `observe`. Inside a
cascade, contexts contain draft tokens that may be replaced without notice: there the cache remembers the tokens that it was fed
and keeps the longest common prefix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from foresay.decoding.ahead import lend
from foresay.decoding.chains import Drawn, DrawsChains, DrawsTrees, Grown, Sampling, TreeLimits
from foresay.decoding.devices import moved
from foresay.decoding.prefill import pending, prefill_chunk
from foresay.decoding.protocols import KVCache, LanguageModel, Logits, ModelInput, ModelOutput, Move
from foresay.decoding.rows import IntArray, Rows, common_prefix
from foresay.models.vocabulary import VocabularyAdapter

MAX_CATCH_UP = 4
"""Most missing tokens that are fed in the first drafting pass; more are prefilled in separate passes."""


class FirstLayers(LanguageModel, Protocol):
    """A model made of the first layers of another one."""

    def borrowed(self, owner: Any) -> KVCache | None:
        """Return a cache over the slots of the other model's cache; None if this model's passes do not read them."""
        ...


class DraftCache:
    """A draft model over the target's vocabulary, with a cache row for each row of the batch.

    A model made of the target's first layers drafts in the target's cache, if it is given: the target's pass has already cached
    the committed tokens, so there is no prefill and no catch-up.
    """

    def __init__(self, model: LanguageModel, vocab_size: int) -> None:
        self.model = VocabularyAdapter(model, vocab_size)
        self.cache: KVCache = self.model.new_cache()
        self._fed: list[IntArray | None] = []
        self._borrow: Callable[[Any], KVCache | None] | None = getattr(model, "borrowed", None)
        """See FirstLayers."""
        self._owner: Any = None
        """The target's cache in which the model drafts; None for a cache of its own."""

    def use_cache_of_target(self, cache: KVCache) -> None:
        """Draft in the target's cache from now on; a cache without keys and values (a recording's) cannot be shared."""
        self._owner = cache if hasattr(cache, "last_writer") else None
        lend(cache)
        self.reset()

    def replace_model(self, make: Callable[[LanguageModel], LanguageModel]) -> None:
        """Replace the model by `make(model)`, and forget every row."""
        old = self.model
        self.model = VocabularyAdapter(make(old.inner), old.vocab_size)
        self.model.row_passes = old.row_passes
        self.reset()

    def forward(self, model_input: ModelInput) -> ModelOutput:
        """Run one forward pass over the cache."""
        return self.model.forward(model_input, self.cache)

    def admit(self, rows: Rows, first: int) -> None:
        """Give new rows empty cache rows; their prompts are prefilled before their first draft."""
        self.model.admit(self.view(rows), first, self.cache)
        self._fed += [None] * (len(rows) - first)
        if self._owner is not None:  # the target has prefilled their prompts
            self.cache.lengths[first:] = self._owner.lengths[first : len(rows)]

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Apply the engine's moves to the cache rows."""
        self.cache.rearrange(moves, count)
        for source, target in moves:
            self._fed[target] = self._fed[source]
        del self._fed[count:]

    def reset(self) -> None:
        """Forget every row."""
        self._fed = []
        borrowed = None if self._owner is None or self._borrow is None else self._borrow(self._owner)
        self._owner = None if borrowed is None else self._owner
        self.cache = self.model.new_cache() if borrowed is None else borrowed

    def view(self, rows: Rows) -> Rows:
        """Return the rows as the model reads them; for a decoder-only draft model, source and output become one text."""
        if self.model.capabilities.reads_source or all(row.source is None for row in rows):
            return rows
        return rows.as_decoder_only()

    def room(self, rows: Rows, budget: Sequence[int]) -> list[int]:
        """Return how many tokens each row may draft: at most its budget, within the draft model's context length."""
        return [min(b, self.model.max_length - row.size) for b, row in zip(budget, rows, strict=True)]

    def rewind(self, rows: Rows) -> None:
        """Rewind the cache to the rows' committed tokens."""
        self._keep_common(self.view(rows))

    def prepare(self, rows: Rows, wanted: Sequence[bool]) -> None:
        """Prefill each wanted row until fewer than MAX_CATCH_UP tokens are missing. rows: a result of `view`."""
        if rows.level:
            self._keep_common(rows)
        for index in range(len(rows)):
            while wanted[index] and pending(rows, self.cache, index) >= MAX_CATCH_UP:
                prefill_chunk(self.model, self.cache, rows, index)

    def catch_up(self, rows: Rows, fed: Sequence[bool], layers: tuple[int, ...] = ()) -> ModelOutput:
        """Feed the tokens that the cache lacks; return logits [B, 1, V] and hidden states [B, 1, H] of each row's last token.

        fed: [B], rows to feed. layers: layers whose hidden states are returned.
        """
        model_input = dataclasses.replace(self._missing(rows, fed), hidden_layers=layers)
        output = self.forward(model_input)
        if not layers:
            return output
        hidden = {n: model_input.of_last(states) for n, states in output.hidden.items()}
        return dataclasses.replace(output, hidden=hidden)

    @property
    def draws_chains(self) -> bool:
        """True if the model draws chains of the target's tokens by itself."""
        model = self.model.inner
        return isinstance(model, DrawsChains) and model.draws_chains and model.vocab_size == self.model.vocab_size

    def draw_chains(self, rows: Rows, room: Sequence[int], sampling: Sampling | None) -> Drawn | None:
        """Feed the tokens that the cache lacks and draw chains after them; see DrawsChains. rows: a result of `view`."""
        model = self.model.inner
        assert isinstance(model, DrawsChains)
        known, fed = self._known(rows, [n > 0 for n in room])
        drawn = model.draw_chains(known, self.cache, room, sampling)
        if drawn is not None:
            self.model.row_passes += sum(room)
            fed()
        return drawn

    def draw_trees(self, rows: Rows, limits: TreeLimits) -> Grown | None:
        """Feed the tokens that the cache lacks and grow trees of likeliest tokens; see DrawsTrees. rows: a result of `view`.

        Returns None for a model that does not.
        """
        model = self.model.inner
        if not self.draws_chains or not isinstance(model, DrawsTrees):
            return None
        known, fed = self._known(rows, [n > 0 for n in limits.budget])
        grown = model.draw_trees(known, self.cache, limits)
        if grown is not None:
            self.model.row_passes += grown.row_passes
            fed()
        return grown

    def _known(self, rows: Rows, fed: Sequence[bool]) -> tuple[ModelInput, Callable[[], None]]:
        """Return a pass over the tokens that the cache lacks, and a function to call after it."""
        return self._missing(rows, fed), lambda: None

    def _missing(self, rows: Rows, fed: Sequence[bool]) -> ModelInput:
        """Return a pass over the tokens that the cache lacks."""
        counts = [row.size - self.cache.lengths[i] if fed[i] else 0 for i, row in enumerate(rows)]
        tokens = torch.zeros(len(rows), max(counts), dtype=torch.int64)
        for i, row in enumerate(rows):
            tokens[i, : counts[i]] = torch.from_numpy(row.tokens[row.size - counts[i] :])
        return ModelInput(moved(tokens, self.model.device), counts, logits=Logits.LAST)

    def _keep_common(self, rows: Rows) -> None:
        """Truncate each cache row to the prefix that it shares with the row's tokens without the last, which is never cached."""
        if self._owner is not None:
            self._keep_in_owner(rows)
            return
        lengths = []
        for index, row in enumerate(rows):
            length = min(self.cache.lengths[index], row.size - 1)
            fed = self._fed[index]
            if fed is not None:
                length = min(length, common_prefix(fed, row.tokens))
            lengths.append(length)
            if fed is not None or rows.level:
                self._fed[index] = row.tokens
        self.cache.truncate(lengths)

    def _keep_in_owner(self, rows: Rows) -> None:
        """Set each length to the committed tokens, plus unchanged draft tokens after them."""
        # a drafter of another depth may have overwritten this one's draft slots with padding
        undisturbed, self._owner.last_writer = self._owner.last_writer is self, self
        for index, row in enumerate(rows):
            fed, length = self._fed[index], row.committed.size - 1
            if undisturbed and fed is not None and row.committed is not row:
                cached = min(self.cache.lengths[index], common_prefix(fed, row.tokens), row.size - 1)
                length = max(length, cached)
            self.cache.lengths[index] = length
            self._fed[index] = row.tokens if rows.level else None

    def keep_nodes(self, index: torch.Tensor) -> None:
        """Called before each pass over trees, whose nodes may have been dropped since the pass before.

        index: [B, K] int64, the index of each node in that pass; -1 for a node that was not in it.
        """

    def remember(self, rows: Rows, drafted: Sequence[Sequence[int]]) -> None:
        """Record the draft tokens fed after the rows' tokens. rows: a result of `view`. drafted: B lists of token ids."""
        if rows.level:
            for index, (row, tokens) in enumerate(zip(rows, drafted, strict=True)):
                new = np.asarray(tokens, dtype=np.int64)
                self._fed[index] = np.concatenate([row.tokens, new]) if len(new) else row.tokens
