"""A GGUF file computed by llama.cpp, as a LanguageModel.

Owns the conversion of a pass's input and output. Supports neither hidden states nor draft trees. llama.cpp's summation order
depends on the number of tokens per pass, so the last bits of the logits depend on the rest of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.protocols import KVCache, LanguageModel, Logits, ModelInput, ModelOutput
from foresay.decoding.rows import Rows
from foresay.models.cache.memory import free_bytes
from foresay.models.llama_cpp.binding import Weights, library
from foresay.models.llama_cpp.cache import MAX_PASS_TOKENS, MAX_SEQUENCES, LlamaCache

_NUMBER_BYTES = 2
"""Size of a float16 number of a key or value."""
_COLUMN_COST = 0.55
"""Cost of one more token per pass on a CPU, where llama.cpp multiplies a few tokens one by one; 0.4 to 0.7 was measured."""


class LlamaCppModel(LanguageModel):
    """A decoder computed by llama.cpp, over rows of different lengths."""

    device = torch.device("cpu")

    def __init__(self, weights: Weights, *, head_size: int | None = None) -> None:
        """head_size: key size of one attention head; None for hidden size / heads."""
        c, pointer = library(), weights.pointer
        self.weights = weights
        self.vocab_size = int(c.llama_vocab_n_tokens(weights.vocab))
        self.max_length = int(c.llama_model_n_ctx_train(pointer))
        self.num_parameters = int(c.llama_model_n_params(pointer))
        size = head_size or c.llama_model_n_embd(pointer) // c.llama_model_n_head(pointer)
        self._token_bytes = 2 * c.llama_model_n_layer(pointer) * c.llama_model_n_head_kv(pointer) * size * _NUMBER_BYTES

    @property
    def capabilities(self) -> Capabilities:
        """See LanguageModel: ragged rows without draft trees, on llama.cpp's own threads."""
        cost = None if self.weights.offloaded else _COLUMN_COST
        return Capabilities(
            prefill_chunk=MAX_PASS_TOKENS,
            prefill_in_any_pieces=False,
            ragged=True,
            own_threads=True,
            max_rows=MAX_SEQUENCES,
            column_cost=cost,
        )

    def new_cache(self) -> LlamaCache:
        """Return a cache without rows."""
        return LlamaCache(self.weights, self._token_bytes)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See LanguageModel. Estimates every row at the length of the longest."""
        return int(len(lengths) * max(lengths, default=0) * self._token_bytes)

    def free_bytes(self) -> int:
        """See LanguageModel. Counts the machine's memory, not that of its GPUs."""
        return free_bytes(self.device)

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Add an empty cache row for each row from index `first` on."""
        assert isinstance(cache, LlamaCache) and len(cache.lengths) == first
        cache.add_rows(len(rows) - first)

    @torch.inference_mode()
    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """Run one pass; see LanguageModel.forward. Logits are [B, T, V], or [B, 1, V] with Logits.LAST, and 0 at padding."""
        assert isinstance(cache, LlamaCache) and model_input.parents is None and not model_input.hidden_layers
        batch, columns = model_input.token_ids.shape
        counts, cache_rows = np.array(model_input.num_tokens, dtype=np.int64), model_input.first_row + np.arange(batch)
        lengths = np.array(cache.lengths, dtype=np.int64)[cache_rows]
        real = np.arange(columns) < counts[:, None]
        wanted = real & (model_input.logits is not Logits.NONE)
        if model_input.logits is Logits.LAST:
            wanted = real & (np.arange(columns) == counts[:, None] - 1)
        rows, column = real.nonzero()
        tokens = model_input.token_ids.numpy()[real]
        scores = torch.from_numpy(cache.decode(cache_rows[rows], tokens, lengths[rows] + column, wanted[real]))
        for cache_row, count in zip(cache_rows.tolist(), counts.tolist(), strict=True):
            cache.lengths[cache_row] += count
        if model_input.logits is Logits.NONE:
            return ModelOutput(None)
        shown = wanted if model_input.logits is Logits.ALL else wanted.any(1, keepdims=True)
        if shown.all():
            return ModelOutput(scores.view(*shown.shape, self.vocab_size))
        logits = torch.zeros(*shown.shape, self.vocab_size)
        logits[torch.from_numpy(shown)] = scores
        return ModelOutput(logits)
