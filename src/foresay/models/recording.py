"""Recorded outputs of a target as a LanguageModel: it gives the next token, and no logits.

Request i of an engine over it is recorded text i. A pass returns the recorded token after each position; after a draft token
that differs from the recording its value is meaningless, and no exact rule reads it. Knows no file format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foresay.decoding.proposal import depths_of
from foresay.decoding.protocols import Capabilities, KVCache, LanguageModel, Logits, ModelInput, ModelOutput, Move
from foresay.decoding.rows import IntArray, Rows
from foresay.errors import ConfigError

MAX_VOCAB_SIZE = 1 << 24
"""More tokens than any tokenizer has: a recording with a higher id is damaged."""


@dataclass(frozen=True, slots=True)
class RecordedText:
    """One request's token ids: prompt (for an encoder-decoder its decoder start tokens), output, and encoder source if any."""

    prompt: Sequence[int]
    output: Sequence[int]
    source: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class SavedSize:
    """Bytes of what the recorded model keeps of a row."""

    nbytes: int


class RecordingCache:
    """A cache of lengths alone: a recording computes nothing. `texts`: the index of each row's text, [rows] int64."""

    def __init__(self, token_bytes: float = 0.0) -> None:
        """token_bytes: what a token takes in the recorded model's cache, which bounds what is kept of rows that ended."""
        self.token_bytes = token_bytes
        self.lengths: list[int] = []
        self.texts: IntArray = np.zeros(0, dtype=np.int64)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Rewind."""
        for i, length in enumerate(lengths):
            self.lengths[i] = min(self.lengths[i], length)

    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Rewind to the end of each path: a recording holds no columns to move."""
        self.truncate([start + len(path) for start, path in zip(starts, paths, strict=True)])

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Row `target` begins with the first `length` tokens of row `source`, which are its own."""
        self.lengths[target] = length

    def save_prefix(self, row: int, length: int) -> SavedSize:
        """What so much of a row takes."""
        return SavedSize(round(length * self.token_bytes))

    def load_prefix(self, row: int, saved: SavedSize, length: int) -> None:
        """Row `row` begins with the first `length` tokens of what was there."""
        self.lengths[row] = length

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        self.lengths[one], self.lengths[other] = self.lengths[other], self.lengths[one]
        self.texts[[one, other]] = self.texts[[other, one]]

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Carry out the moves, then drop the rows from `count` on."""
        for source, target in moves:
            self.lengths[target], self.texts[target] = self.lengths[source], self.texts[source]
        del self.lengths[count:]
        self.texts = self.texts[:count]


class RecordingModel(LanguageModel):
    """A LanguageModel that returns recorded tokens. Request i of an engine must be texts[i].

    Raises ConfigError without texts.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        texts: Sequence[RecordedText],
        vocab_size: int,
        *,
        max_length: int = 1 << 30,
        ragged: bool = False,
        column_cost: float | None = None,
    ) -> None:
        """ragged, column_cost: what the recorded model says of its passes, see Capabilities."""
        if not texts:
            raise ConfigError("a recording without texts: there is nothing to replay")
        self.vocab_size, self.max_length = vocab_size, max_length
        self._capabilities = Capabilities(
            trees=True,
            scores=False,
            reads_source=texts[0].source is not None,
            ragged=ragged,
            column_cost=column_cost,
        )
        self._sizes: IntArray = np.array([len(text.prompt) + len(text.output) for text in texts], dtype=np.int64)
        self._starts: IntArray = np.concatenate([[0], np.cumsum(self._sizes + 1)])
        self._tokens: IntArray = np.zeros(self._starts[-1], dtype=np.int64)
        """The texts one after the other, each with a 0 after its end: a long text does not widen the others."""
        for start, size, text in zip(self._starts, self._sizes, texts, strict=False):
            self._tokens[start : start + size] = [*text.prompt, *text.output]
        self._texts = texts

    @property
    def capabilities(self) -> Capabilities:
        """Trees and, for an encoder-decoder's recording, encoder sources; no logits."""
        return self._capabilities

    def new_cache(self) -> RecordingCache:
        """A cache without rows."""
        return RecordingCache()

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Add rows. Prefill computes nothing, but takes as many passes as live, so that batches are the same.

        Raises ConfigError for a request that is not the recording's.
        """
        assert isinstance(cache, RecordingCache) and len(cache.lengths) == first
        new = [rows[i] for i in range(first, len(rows))]
        for row in new:
            if row.request_id >= len(self._texts) or list(self._texts[row.request_id].prompt) != row.tokens.tolist():
                raise ConfigError(f"request {row.request_id} is not the recording's text {row.request_id}")
            cache.lengths.append(0)
        cache.texts = np.append(cache.texts, [row.request_id for row in new])

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """One pass, which gives token_ids [B, T]; see LanguageModel.forward. Raises ConfigError for hidden layers."""
        assert isinstance(cache, RecordingCache)
        if model_input.hidden_layers:
            raise ConfigError("a recording has no hidden states, and this drafter asks for some")
        batch, columns = model_input.token_ids.shape
        rows = slice(model_input.first_row, model_input.first_row + batch)
        depths = (
            np.arange(columns)[None] if model_input.parents is None else depths_of(model_input.parents).cpu().numpy()
        )
        after = np.asarray(cache.lengths[rows])[:, None] + 1 + depths
        for i, count in enumerate(model_input.num_tokens):
            cache.lengths[model_input.first_row + i] += count
        if model_input.logits is Logits.NONE:
            return ModelOutput(None)
        if model_input.logits is Logits.LAST:
            after = np.take_along_axis(after, model_input.last_columns().cpu().numpy()[:, None], 1)
        texts = cache.texts[rows][:, None]
        known = self._starts[texts] + np.minimum(after, self._sizes[texts])
        return ModelOutput(None, token_ids=torch.from_numpy(self._tokens[known]))
