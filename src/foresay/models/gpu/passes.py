"""Passes over flat tokens and pages, captured once per size and replayed.

Owns the pool, the page table, the sizes that were captured and the way from rows of tokens to a flat list and back. The capture
function is an argument: CUDA graphs, or a replacement in tests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from foresay.decoding.protocols import Logits, ModelInput
from foresay.models.gpu.attention import PAGE, tokens_per_tile
from foresay.models.gpu.flat import Buffers, FlatTokens, PageTable, size_of
from foresay.models.gpu.layers import PagedLayers, Turns
from foresay.models.gpu.pages import PagedCache, PagePool

logger = logging.getLogger("foresay")

SHARE = 0.5
"""Share of the free memory that a pool takes."""
MAX_ROWS = 256
"""Most rows of a cache."""
Outputs = tuple[torch.Tensor | None, Mapping[int, torch.Tensor]]
"""Scores [N, V] or None, and hidden states [N, H] by layer."""
Replay = Callable[[], Outputs]
Capture = Callable[[Replay], Replay]
"""Turn a pass into a function that repeats it with the current contents of its buffers; may run the pass a few times first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The parts of a model around its layers."""

    embed: Callable[[torch.Tensor], torch.Tensor]
    """Token ids [N] -> states [N, H] that the layers may overwrite."""
    layers: PagedLayers
    turns: Mapping[str, Turns]
    scores: Callable[[torch.Tensor], torch.Tensor]
    """Normalized states [N, H] -> logits [N, V]."""
    heads: tuple[int, int]
    """Number of query heads and of key heads."""


@dataclass(frozen=True, slots=True)
class _Recording:
    buffers: Buffers
    replay: Replay


def passes_on(
    device: torch.device, decoder: Decoder, dtype: torch.dtype, *, max_length: int, free_bytes: int, capture: Capture
) -> PagedPasses:
    """Return the passes of a decoder over a pool of its own. free_bytes: memory of the device that is not in use."""
    layers = decoder.layers.shapes
    bytes_each = sum(2 * layer.heads * layer.dim for layer in layers) * PAGE * dtype.itemsize
    longest = -(-max_length // PAGE)
    pages = min(max(int(SHARE * free_bytes) // bytes_each, longest), MAX_ROWS * longest)
    pool = PagePool(layers, pages, dtype, device)
    return PagedPasses(decoder, pool, rows=MAX_ROWS, max_length=max_length, device=device, capture=capture)


class PagedPasses:
    """Passes of one decoder over a pool of pages."""

    def __init__(
        self, decoder: Decoder, pool: PagePool, *, rows: int, max_length: int, device: torch.device, capture: Capture
    ) -> None:
        """rows, max_length: most rows of a cache, and most tokens of a row."""
        self._decoder, self.pool, self._capture = decoder, pool, capture
        self._table = PageTable(rows, max_length, device)
        self._recordings: dict[tuple[int, tuple[int, ...]], _Recording] = {}
        self._tile = tokens_per_tile(*decoder.heads)
        self.captures = self.replays = 0

    def new_cache(self) -> PagedCache:
        """Return a cache without rows."""
        return PagedCache(self.pool)

    def __call__(
        self, model_input: ModelInput, cache: PagedCache
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Run one pass and append its tokens to the cache; scores and hidden states as ModelOutput has them.

        Raises OutOfMemoryError if the pool has too few pages.
        """
        batch, width = model_input.token_ids.shape
        if not any(model_input.num_tokens):
            return self._empty(model_input)
        tokens = FlatTokens.of(model_input, cache, self._tile)
        self._table.update(cache.pages)
        size = None if model_input.logits is Logits.NONE else size_of(len(tokens))
        if size is None:
            buffers = Buffers(len(tokens), self._table.pages)
            buffers.fill(tokens, model_input.token_ids)
            scores, hidden = self._run(buffers, model_input.hidden_layers, model_input.logits is not Logits.NONE)
        else:
            recording = self._recording(size, model_input.hidden_layers)
            recording.buffers.fill(tokens, model_input.token_ids)
            scores, hidden = recording.replay()
            self.replays += 1
        for i, count in enumerate(model_input.num_tokens):
            cache.lengths[model_input.first_row + i] += count
        columns = torch.from_numpy(tokens.columns)
        shape = (batch, width)
        states = {layer: _rows(one, columns, shape) for layer, one in hidden.items()}
        if scores is None or model_input.logits is Logits.NONE:
            return None, states
        return model_input.scored(_rows(scores, columns, shape)), states

    def _recording(self, size: int, hidden: tuple[int, ...]) -> _Recording:
        """Return the captured pass of a size, which is captured when it first occurs and kept from then on."""
        found = self._recordings.get((size, hidden))
        if found is None:
            buffers = Buffers(size, self._table.pages)
            found = _Recording(buffers, self._capture(lambda: self._run(buffers, hidden, True)))
            self._recordings[size, hidden] = found
            self.captures += 1
        return found

    def _run(self, buffers: Buffers, hidden: Sequence[int], scored: bool) -> Outputs:
        decoder = self._decoder
        states, found = decoder.layers.run(decoder.embed(buffers.token_ids), buffers, self.pool, decoder.turns, hidden)
        return (decoder.scores(states) if scored else None), found

    def _empty(self, model_input: ModelInput) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Return the outputs of a pass in which no row continues: zeros."""
        states = self._decoder.embed(model_input.token_ids.to(self._table.pages.device).reshape(-1)).zero_()
        states = states.view(*model_input.token_ids.shape, -1)
        hidden = dict.fromkeys(model_input.hidden_layers, states)
        if model_input.logits is Logits.NONE:
            return None, hidden
        scored = model_input.scored(states)
        return self._decoder.scores(scored.reshape(-1, scored.shape[-1])).view(*scored.shape[:2], -1), hidden


def _rows(flat: torch.Tensor, columns: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return values of flat tokens [N or more, ...] in rows, [B, T, ...], with zeros elsewhere; a copy."""
    count, whole = len(columns), shape[0] * shape[1]
    if count == whole:
        return flat[:count].clone().view(*shape, *flat.shape[1:])
    out = flat.new_zeros(whole, *flat.shape[1:])
    out[columns.to(flat.device, non_blocking=True)] = flat[:count]
    return out.view(*shape, *flat.shape[1:])
