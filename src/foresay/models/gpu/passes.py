"""Passes over flat tokens and pages, captured once per size and replayed.

Owns the pool, the page table, the sizes that were captured and the way from rows of tokens to a flat list and back. The capture
function is an argument: CUDA graphs, or a replacement in tests.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foresay.checks import gigabytes
from foresay.decoding.devices import launching_on, moved, to_device
from foresay.decoding.protocols import Logits, ModelInput
from foresay.models.gpu.attention import PAGE, tokens_per_tile
from foresay.models.gpu.capture import Capture
from foresay.models.gpu.flat import Buffers, PagedTokens, PageTable, size_of
from foresay.models.gpu.pages import LayerShape, PagedCache, PagePool

logger = logging.getLogger("foresay")

LIMIT = "FORESAY_PAGES_GB"
"""Environment variable: most gigabytes of a pool."""
SHARE = 0.5
"""Share of the free memory that a pool takes."""
LEAST = 16
"""Least number of pages of a pool."""
MAX_ROWS = 1024
"""Most rows of a cache."""
States = tuple[torch.Tensor, Mapping[int, torch.Tensor]]
"""Normalized states [N, H], and hidden states [N, H] by layer."""
Outputs = tuple[torch.Tensor | None, Mapping[int, torch.Tensor]]
"""Scores [N, V] or None, and hidden states [N, H] by layer."""
Replay = Callable[[], Outputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model as passes over flat tokens compute it."""

    states: Callable[[Buffers, PagePool, Sequence[int]], States]
    """Run the layers over the tokens of some buffers; return the normalized states, and the hidden states of some layers."""
    scores: Callable[[torch.Tensor], torch.Tensor]
    """Normalized states [N, H] -> logits [N, V]."""
    layers: Sequence[LayerShape]
    heads: tuple[int, int]
    """Number of query heads and of key heads."""
    like: torch.Tensor
    """[0, H], of the states' size, dtype and device."""
    num_scores: int
    """V."""
    features: bool = False
    """True if a pass reads features [N, H] of each token, too."""


@dataclass(frozen=True, slots=True)
class _Recording:
    buffers: Buffers
    replay: Replay


def passes_on(
    device: torch.device,
    decoder: Decoder,
    dtype: torch.dtype,
    *,
    max_length: int,
    free_bytes: int,
    capture: Capture,
    most_pages: int | None = None,
) -> PagedPasses:
    """Return the passes of a decoder over a pool of its own.

    free_bytes: memory of the device that is not in use. most_pages: pages beyond which it needs none; None for the most that
    MAX_ROWS rows fill. Raises LookupError if there is no memory for LEAST pages, or a row of max_length tokens if that is
    shorter, and ConfigError for an invalid $FORESAY_PAGES_GB.
    """
    bytes_each = sum(2 * layer.heads * layer.dim for layer in decoder.layers) * PAGE * dtype.itemsize
    longest = -(-max_length // PAGE)
    room = min(SHARE * free_bytes, gigabytes(LIMIT, math.inf))
    pages = min(int(room) // bytes_each, most_pages or MAX_ROWS * longest)
    if pages < min(LEAST, longest):
        raise LookupError(f"the {room / 1e9:.2f} GB that they may take hold {pages} pages of {PAGE} tokens")
    pool = PagePool(decoder.layers, pages, dtype, device)
    return passes_over(pool, device, decoder, max_length=max_length, capture=capture)


def passes_over(
    pool: PagePool, device: torch.device, decoder: Decoder, *, max_length: int, capture: Capture
) -> PagedPasses:
    """Return the passes of a decoder over a pool, whose layers begin with the decoder's."""
    return PagedPasses(decoder, pool, rows=MAX_ROWS, max_length=max_length, device=device, capture=capture)


class PagedPasses:
    """Passes of one decoder over a pool of pages."""

    def __init__(
        self, decoder: Decoder, pool: PagePool, *, rows: int, max_length: int, device: torch.device, capture: Capture
    ) -> None:
        """rows, max_length: most rows of a cache, and most tokens of a row."""
        self.decoder, self.pool, self._capture = decoder, pool, capture
        self.table = PageTable(rows, max_length, device)
        self._recordings: dict[tuple[int, tuple[int, ...], bool], _Recording] = {}
        longest = max(layer.dim for layer in decoder.layers) * pool.keys[0].element_size()
        self._tiles = [tokens_per_tile(*decoder.heads, longest, is_prompt=is_prompt) for is_prompt in (False, True)]
        self.captures = self.replays = 0
        self.prompts_as_steps = False
        """True computes prompts in captured passes, whose sums have the order of those of steps."""

    def new_cache(self, owner: PagedCache | None = None) -> PagedCache:
        """Return a cache without rows. owner: a cache over this pool whose pages it shares; see PagedCache."""
        return PagedCache(self.pool, owner)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See LanguageModel."""
        return self.pool.bytes_of(lengths)

    def free_bytes(self) -> int:
        """See LanguageModel."""
        return self.pool.free_bytes

    def __call__(
        self, model_input: ModelInput, cache: PagedCache
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Run one pass and append its tokens to the cache; scores and hidden states as ModelOutput has them.

        Raises OutOfMemoryError if the pool has too few pages. Passes of several threads follow each other.
        """
        shape = (len(model_input.token_ids), model_input.token_ids.shape[1])
        if not any(model_input.num_tokens):
            return self._empty(model_input)
        scored = model_input.logits is not Logits.NONE
        is_prompt = (model_input.is_prompt or not scored) and not self.prompts_as_steps
        with self.pool.lock:
            columns, (scores, hidden) = self.flat(model_input, cache, scored=scored, captured=not is_prompt)
            states = {layer: in_rows(one, columns, shape) for layer, one in hidden.items()}
            if scores is None or is_prompt:
                return (None if scores is None else scores[:, None]), states
            return model_input.scored(in_rows(scores, columns, shape)), states

    def flat(
        self, model_input: ModelInput, cache: PagedCache, *, scored: bool, captured: bool
    ) -> tuple[torch.Tensor, Outputs]:
        """Run one pass; return the index [N] of each real token in the flattened token ids, and the outputs, [N or more, ...].

        The outputs of a captured pass are overwritten by the next one, until which the caller holds the pool's lock. scored: True
        for scores, in a prompt after each row's last token alone. captured: False for a prompt, whose sums have another order;
        those of larger passes, too.
        """
        size = size_of(sum(model_input.num_tokens)) if captured else None
        tokens = PagedTokens.of(model_input, cache, self._tiles[size is None])
        self.table.update(cache.pages)
        with launching_on(self.table.pages.device):
            if size is None:
                buffers = self.buffers(len(tokens), tokens.num_tiles)
                buffers.fill(tokens, model_input.token_ids, model_input.features)
                ends = None
                if model_input.is_prompt and scored and not self.prompts_as_steps:
                    ends = to_device((np.cumsum(model_input.num_tokens) - 1).clip(0).tolist(), self.table.pages.device)
                out = self._run(buffers, model_input.hidden_layers, scored, ends)
            else:
                recording = self._recording(size, model_input.hidden_layers, scored)
                recording.buffers.fill(tokens, model_input.token_ids, model_input.features)
                out = recording.replay()
                self.replays += 1
        for i, count in enumerate(model_input.num_tokens):
            cache.lengths[model_input.first_row + i] += count
        return torch.from_numpy(tokens.columns), out

    def buffers(self, size: int, num_tiles: int | None = None) -> Buffers:
        """Return the inputs of passes of a size. num_tiles: see Buffers."""
        features, heads = (
            self.decoder.like if self.decoder.features else None,
            max(one.heads for one in self.decoder.layers),
        )
        tile = self._tiles[num_tiles is not None]
        return Buffers(size, self.table.pages, tile, features, key_heads=heads, num_tiles=num_tiles)

    def captured(self, run: Replay) -> Replay:
        """Capture a pass."""
        self.captures += 1
        return self._capture(run)

    def _recording(self, size: int, hidden: tuple[int, ...], scored: bool) -> _Recording:
        """Return the captured pass of a size, which is captured when it first occurs and kept from then on."""
        found = self._recordings.get((size, hidden, scored))
        if found is None:
            buffers = self.buffers(size)
            found = _Recording(buffers, self.captured(lambda: self._run(buffers, hidden, scored)))
            self._recordings[size, hidden, scored] = found
        return found

    def _run(self, buffers: Buffers, hidden: Sequence[int], scored: bool, ends: torch.Tensor | None = None) -> Outputs:
        """ends: the tokens whose scores are wanted; None for all."""
        states, found = self.decoder.states(buffers, self.pool, hidden)
        return (self.decoder.scores(states if ends is None else states[ends]) if scored else None), found

    def _empty(self, model_input: ModelInput) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """Return the outputs of a pass in which no row continues: zeros."""
        like, shape = self.decoder.like, model_input.token_ids.shape
        hidden = dict.fromkeys(model_input.hidden_layers, like.new_zeros(*shape, like.shape[1]))
        if model_input.logits is Logits.NONE:
            return None, hidden
        return model_input.scored(like.new_zeros(*shape, self.decoder.num_scores)), hidden


def in_rows(flat: torch.Tensor, columns: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return values of flat tokens [N or more, ...] in rows, [B, T, ...], with zeros elsewhere; a copy."""
    count, whole = len(columns), shape[0] * shape[1]
    if count == whole:
        return flat[:count].clone().view(*shape, *flat.shape[1:])
    out = flat.new_zeros(whole, *flat.shape[1:])
    out[moved(columns, flat.device)] = flat[:count]
    return out.view(*shape, *flat.shape[1:])
