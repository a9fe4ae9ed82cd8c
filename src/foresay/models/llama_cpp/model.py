"""A GGUF file under llama.cpp as a LanguageModel: laws from its logits, rows as its sequences.

Owns what a pass is asked for and what it gives. Shows no hidden states and takes no trees; its kernels sum differently for
different numbers of columns, so that the last bits of a law depend on what else is in a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from foresay.decoding.protocols import Capabilities, KVCache, LanguageModel, Logits, ModelInput, ModelOutput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.models.cache.memory import free_bytes
from foresay.models.llama_cpp.binding import Weights, library
from foresay.models.llama_cpp.cache import LlamaCache
from foresay.models.llama_cpp.context import AT_ONCE, MAX_SEQUENCES

_CELL_BYTES = 2
"""Of a number of a key or value, float16."""


_COLUMN_COST = 0.55
"""Of a further token on a processor, where products of a few columns are made one by one: 0.4 to 0.7 on those that were timed."""


class LlamaCppModel(LanguageModel):
    """A decoder that llama.cpp computes, scored over ragged rows."""

    device = torch.device("cpu")

    def __init__(self, weights: Weights, *, head_size: int | None = None) -> None:
        """head_size: numbers of a key of one head, where that is not hidden size / heads."""
        c, pointer = library(), weights.pointer
        self.weights = weights
        self.vocab_size = int(c.llama_vocab_n_tokens(weights.vocab))
        self.max_length = int(c.llama_model_n_ctx_train(pointer))
        self.num_parameters = int(c.llama_model_n_params(pointer))
        size = head_size or c.llama_model_n_embd(pointer) // c.llama_model_n_head(pointer)
        self._token_bytes = 2 * c.llama_model_n_layer(pointer) * c.llama_model_n_head_kv(pointer) * size * _CELL_BYTES

    @property
    def capabilities(self) -> Capabilities:
        """Chains of ragged rows, on threads of its own."""
        cost = None if self.weights.offloaded else _COLUMN_COST
        return Capabilities(
            prefill_chunk=AT_ONCE,
            prefill_in_any_pieces=False,
            ragged=True,
            own_threads=True,
            max_rows=MAX_SEQUENCES,
            column_cost=cost,
        )

    def new_cache(self) -> LlamaCache:
        """A cache without rows."""
        return LlamaCache(self.weights, self._token_bytes)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See LanguageModel. The slots of the longest row are every row's."""
        return int(len(lengths) * max(lengths, default=0) * self._token_bytes)

    def free_bytes(self) -> int:
        """See LanguageModel; of the machine's memory, not of its GPUs'."""
        return free_bytes(self.device)

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Add an empty cache row for each row from place `first` on."""
        assert isinstance(cache, LlamaCache) and len(cache.lengths) == first
        cache.add_rows(len(rows) - first)

    @torch.inference_mode()
    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """One pass over the real tokens, logits [B, T, V] ([B, 1, V] with Logits.LAST), 0 of pads; see LanguageModel.forward."""
        assert isinstance(cache, LlamaCache) and model_input.parents is None and not model_input.hidden_layers
        batch, columns = model_input.token_ids.shape
        counts, places = np.array(model_input.num_tokens, dtype=np.int64), model_input.first_row + np.arange(batch)
        lengths = np.array(cache.lengths, dtype=np.int64)[places]
        real = np.arange(columns) < counts[:, None]
        wanted = real & (model_input.logits is not Logits.NONE)
        if model_input.logits is Logits.LAST:
            wanted = real & (np.arange(columns) == counts[:, None] - 1)
        rows, column = real.nonzero()
        tokens = model_input.token_ids.numpy()[real]
        scores = torch.from_numpy(cache.decode(places[rows], tokens, lengths[rows] + column, wanted[real]))
        for place, count in zip(places.tolist(), counts.tolist(), strict=True):
            cache.lengths[place] += count
        if model_input.logits is Logits.NONE:
            return ModelOutput(None)
        shown = wanted if model_input.logits is Logits.ALL else wanted.any(1, keepdims=True)
        if shown.all():
            return ModelOutput(scores.view(*shown.shape, self.vocab_size))
        logits = torch.zeros(*shown.shape, self.vocab_size)
        logits[torch.from_numpy(shown)] = scores
        return ModelOutput(logits)


def compared(model: LlamaCppModel, *, tokens: int = 16, rows: int = 8) -> tuple[float, int]:
    """How scores of so many tokens, one by one, differ from those of all in one pass, and of each beside other rows.

    (the greatest difference, over their spread; places whose bits agree): whoever wants the same text in every batch looks
    here first.
    """
    prompt = [(5 + i) % model.vocab_size for i in range(tokens)]
    ids = torch.tensor([prompt] * rows)
    alone, together, beside = (
        _scores(model, fed, widths)
        for fed, widths in ((ids[:1], [1] * tokens), (ids[:1], [tokens]), (ids, [1] * tokens))
    )
    apart = torch.maximum((together - alone).abs(), (beside - alone).abs()).amax(-1)
    return float(apart.max() / alone.std()), int((apart == 0).sum())


def _scores(model: LlamaCppModel, token_ids: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    """The first row's scores [T, V] of rows [B, T] that are fed in passes of these widths."""
    limit = model.max_length
    rows = Rows([Row(i, one.tolist(), SamplingParams(), limit=limit) for i, one in enumerate(token_ids)])
    cache, out = model.new_cache(), []
    model.admit(rows, 0, cache)
    for width, part in zip(widths, torch.split(token_ids, list(widths), 1), strict=True):
        out.append(model.forward(ModelInput(part, [width] * len(part)), cache).scores()[0])
    return torch.cat(out)
