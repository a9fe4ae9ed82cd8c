"""Recorded outputs of a target as a LanguageModel that returns the next token instead of logits.

Request i of the engine must be recorded text i. A forward pass returns the recorded token after each position. After a draft
token that differs from the recording, that value is meaningless and no exact rule reads it. Knows no file format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.proposal import depths_of
from foresay.decoding.protocols import KVCache, LanguageModel, Logits, ModelInput, ModelOutput, Move
from foresay.decoding.rows import IntArray, Rows
from foresay.errors import ConfigError

_CPU = torch.device("cpu")
MAX_VOCAB_SIZE = 1 << 24
"""Upper bound on the vocabulary size, above any real tokenizer's: a recording with a higher token id is damaged."""


@dataclass(frozen=True, slots=True)
class RecordedText:
    """Token ids of one request: prompt (an encoder-decoder's decoder start tokens), output, and encoder source if any."""

    prompt: Sequence[int]
    output: Sequence[int]
    source: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class SavedSize:
    """Size in bytes of a saved prefix in the recorded model's cache."""

    nbytes: int


class RecordingCache:
    """A cache that stores only lengths, since a recording computes nothing.

    `texts`: the index of each row's text, [rows] int64.
    """

    def __init__(self, token_bytes: float = 0.0) -> None:
        """token_bytes: bytes per token in the recorded model's cache; it limits how many prefixes of finished rows are kept."""
        self.token_bytes = token_bytes
        self.lengths: list[int] = []
        self.texts: IntArray = np.zeros(0, dtype=np.int64)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Rewind the first rows."""
        for i, length in enumerate(lengths):
            self.lengths[i] = min(self.lengths[i], length)

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Rewind to the end of each path; a recording stores no columns to move."""
        self.truncate([start + len(path) for start, path in zip(starts, paths, strict=True)])

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Set the length of row `target`, whose first `length` tokens equal those of row `source`."""
        self.lengths[target] = length

    def save_prefix(self, row: int, length: int) -> SavedSize:
        """Return the size of the first `length` tokens of a row."""
        return SavedSize(round(length * self.token_bytes))

    def load_prefix(self, row: int, saved: SavedSize, length: int) -> None:
        """Set the length of row `row`, which begins with the first `length` tokens of the saved prefix."""
        self.lengths[row] = length

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        self.lengths[one], self.lengths[other] = self.lengths[other], self.lengths[one]
        self.texts[[one, other]] = self.texts[[other, one]]

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Apply the moves, then drop the rows from index `count` on."""
        for source, target in moves:
            self.lengths[target], self.texts[target] = self.lengths[source], self.texts[source]
        del self.lengths[count:]
        self.texts = self.texts[:count]


class RecordingModel(LanguageModel):
    """A LanguageModel that returns recorded tokens. Request i of the engine must be texts[i].

    Raises ConfigError if there are no texts.
    """

    def __init__(
        self,
        texts: Sequence[RecordedText],
        vocab_size: int,
        *,
        max_length: int = 1 << 30,
        ragged: bool = False,
        column_cost: float | None = None,
        states: Callable[[int], Mapping[int, torch.Tensor]] | None = None,
        device: torch.device = _CPU,
    ) -> None:
        """ragged, column_cost: capabilities of the recorded model; see Capabilities.

        states: returns the hidden states of a text by layer, [S, D] each, on `device`; None if there are none.
        """
        if not texts:
            raise ConfigError("has no texts; there is nothing to replay", param="recording")
        self.vocab_size, self.max_length = vocab_size, max_length
        self._capabilities = Capabilities(
            trees=True, scores=False, reads_source=texts[0].source is not None, ragged=ragged, column_cost=column_cost
        )
        self._sizes: IntArray = np.array([len(text.prompt) + len(text.output) for text in texts], dtype=np.int64)
        self._starts: IntArray = np.concatenate([[0], np.cumsum(self._sizes + 1)])
        self._tokens: IntArray = np.zeros(self._starts[-1], dtype=np.int64)
        """All texts concatenated, each followed by a 0; shorter texts need no padding to the longest."""
        for start, size, text in zip(self._starts, self._sizes, texts, strict=False):
            self._tokens[start : start + size] = [*text.prompt, *text.output]
        self._texts, self._states, self.device = texts, states, device

    @property
    def capabilities(self) -> Capabilities:
        """Draft trees, encoder sources if the recorded model was an encoder-decoder, and no logits."""
        return self._capabilities

    def new_cache(self) -> RecordingCache:
        """Return a cache without rows."""
        return RecordingCache()

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Add rows. Prefill computes nothing but takes as many passes as in a live run, so that the batches are the same.

        Raises ConfigError for a request whose prompt differs from the recorded text of the same index.
        """
        assert isinstance(cache, RecordingCache) and len(cache.lengths) == first
        new = [rows[i] for i in range(first, len(rows))]
        for row in new:
            if row.request_id >= len(self._texts) or list(self._texts[row.request_id].prompt) != row.tokens.tolist():
                raise ConfigError("is not that text of the recording", param="request", value=row.request_id)
            cache.lengths.append(0)
        cache.texts = np.append(cache.texts, [row.request_id for row in new])

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """Run one forward pass, which returns token_ids [B, T]; see LanguageModel.forward.

        Raises ConfigError if hidden states are requested and there are none.
        """
        assert isinstance(cache, RecordingCache)
        if model_input.hidden_layers and self._states is None:
            text = "has no hidden states, which this drafter needs; replay it with another drafter"
            raise ConfigError(text, param="recording")
        batch, columns = model_input.token_ids.shape
        rows = slice(model_input.first_row, model_input.first_row + batch)
        depths = (
            np.arange(columns)[None] if model_input.parents is None else depths_of(model_input.parents).cpu().numpy()
        )
        after = np.asarray(cache.lengths[rows])[:, None] + 1 + depths
        hidden = {} if self._states is None else self._hidden(model_input.hidden_layers, after, cache.texts[rows])
        for i, count in enumerate(model_input.num_tokens):
            cache.lengths[model_input.first_row + i] += count
        if model_input.logits is Logits.NONE:
            return ModelOutput(None, hidden)
        if model_input.logits is Logits.LAST:
            after = np.take_along_axis(after, model_input.last_columns().cpu().numpy()[:, None], 1)
        texts = cache.texts[rows][:, None]
        known = self._starts[texts] + np.minimum(after, self._sizes[texts])
        return ModelOutput(None, hidden, token_ids=torch.from_numpy(self._tokens[known]).to(self.device))

    def _hidden(self, layers: Sequence[int], after: IntArray, texts: IntArray) -> dict[int, torch.Tensor]:
        """Return the states of the recorded tokens before positions `after` [B or 1, T], [B, T, D] by layer."""
        assert self._states is not None
        found: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        for text, positions in zip(texts, np.broadcast_to(after, (len(texts), after.shape[1])), strict=True):
            known = self._states(int(text)) if layers else {}
            index = torch.from_numpy(np.minimum(positions - 1, self._sizes[text] - 1)).to(self.device)
            for layer in layers:
                found[layer].append(known[layer][index])
        return {layer: torch.stack(parts) for layer, parts in found.items()}
