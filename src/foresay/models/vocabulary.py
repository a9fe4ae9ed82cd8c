"""A draft model with its logits cut or padded to the target's vocabulary.

Models with the same tokenizer may pad their embeddings to different sizes, so a draft's logits may be wider or narrower than
the target's. Cut or padded with -inf, they give distributions over the target's ids, and draft tokens are sampled from these.
An input id that the draft model lacks is replaced by its last id. Does not compare tokenizers (text/tokenizer.py does).
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.distributions import VocabularySubset
from foresay.decoding.protocols import KVCache, LanguageModel, Logits, ModelInput, ModelOutput
from foresay.decoding.rows import Rows
from foresay.threads import all_threads


class VocabularyAdapter(LanguageModel):
    """Expose `model` as a LanguageModel over ids 0 to vocab_size - 1."""

    def __init__(self, model: LanguageModel, vocab_size: int) -> None:
        self.inner, self.vocab_size = model, vocab_size
        self.max_length, self.device = model.max_length, model.device
        self.row_passes = 0
        """Number of rows scored over all forward passes, without prefill and without rows that were fed no token."""

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the adapted model."""
        return self.inner.capabilities

    def new_cache(self) -> KVCache:
        """Return a cache without rows."""
        return self.inner.new_cache()

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Add an empty cache row for each row from index `first` on."""
        with self._threads():
            self.inner.admit(rows, first, cache)

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """Run one forward pass, logits [B, T, V]; see LanguageModel.forward."""
        if model_input.logits is not Logits.NONE:
            self.row_passes += sum(count > 0 for count in model_input.num_tokens)
        known = model_input.token_ids.clamp(max=self.inner.vocab_size - 1)
        with self._threads():
            out = self.inner.forward(dataclasses.replace(model_input, token_ids=known), cache)
        if out.logits is None or (out.subset is not None and self._covers(out.subset)):
            return out
        return ModelOutput(self.adapted(out.scores()), out.hidden)

    def _threads(self) -> AbstractContextManager[None]:
        """Let PyTorch's operations use all cores, unless the model brings its own threads."""
        return nullcontext() if self.inner.capabilities.own_threads else all_threads()

    def _covers(self, subset: VocabularySubset) -> bool:
        """True if scores over `subset` can be returned unchanged."""
        return len(subset.of_token) == self.vocab_size

    def adapted(self, scores: torch.Tensor) -> torch.Tensor:
        """Cut logits [B, T, any width] to [B, T, V], or pad them with -inf."""
        missing = self.vocab_size - scores.shape[-1]
        if missing < 0:
            return scores[..., : self.vocab_size]
        return F.pad(scores, (0, missing), value=-torch.inf) if missing else scores
