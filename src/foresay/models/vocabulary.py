"""A draft model over the target's vocabulary: foreign ids are read as some known one, missing ids score nothing.

Embeddings are padded to different sizes even where tokenizers agree, so a draft's logits may be wider or narrower than the
target's. Both ways its laws stay laws over the target's ids, from which its tokens are really drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from foresay.decoding.protocols import KVCache, LanguageModel, Logits, ModelOutput
from foresay.decoding.rows import Rows


class VocabularyAdapter:
    """`model` as a LanguageModel over ids 0 to vocab_size - 1."""

    def __init__(self, model: LanguageModel, vocab_size: int) -> None:
        self.inner, self.vocab_size = model, vocab_size
        self.max_length, self.device = model.max_length, model.device
        self.reads_source: bool = getattr(model, "reads_source", False)

    def new_cache(self) -> KVCache:
        """A cache without rows."""
        return self.inner.new_cache()

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Give rows from place `first` on empty cache rows."""
        self.inner.admit(rows, first, cache)

    def forward(
        self,
        token_ids: torch.Tensor,
        num_tokens: Sequence[int],
        cache: KVCache,
        *,
        first_row: int = 0,
        logits: Logits = Logits.ALL,
        hidden_layers: Sequence[int] = (),
    ) -> ModelOutput:
        """One pass; see LanguageModel.forward."""
        token_ids = token_ids.clamp(max=self.inner.vocab_size - 1)
        out = self.inner.forward(
            token_ids, num_tokens, cache, first_row=first_row, logits=logits, hidden_layers=hidden_layers
        )
        return out if out.logits is None else ModelOutput(self.aligned(out.logits), out.hidden)

    def aligned(self, scores: torch.Tensor) -> torch.Tensor:
        """Logits of any width, [B, T, ...] -> [B, T, V]."""
        missing = self.vocab_size - scores.shape[-1]
        if missing < 0:
            return scores[..., : self.vocab_size]
        return F.pad(scores, (0, missing), value=-torch.inf) if missing else scores
