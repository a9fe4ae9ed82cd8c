"""Log-probabilities of a prompt's tokens, for requests that score texts instead of generating them.

Owns a cache for one text. Knows no engine: its passes run between an engine's steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from foresay.decoding.outcome import TokenLogprob
from foresay.decoding.protocols import KVCache, LanguageModel, ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.decoding.step import token_logprobs
from foresay.errors import ConfigError, ContextLengthError, OutOfMemoryError, PromptError
from foresay.threads import single_threaded

_MAX_SCORES = 1 << 24
"""Approximate number of scores per pass: 64 MiB in float32."""


class PromptScorer:
    """Computes the log-probability of each token of one text under the target's raw logits, pass by pass."""

    def __init__(self, model: LanguageModel, token_ids: Sequence[int], top: int) -> None:
        """top: number of likeliest tokens to report at each position.

        Raises ConfigError for a model that cannot score texts, PromptError for ids outside its vocabulary, and
        ContextLengthError.
        """
        features = model.capabilities
        if features.reads_source or not features.scores:
            raise ConfigError("echo with logprobs needs a decoder-only model that computes scores")
        if min(token_ids) < 0 or max(token_ids) >= model.vocab_size:
            raise PromptError(f"a prompt token id is not in the vocabulary (0 to {model.vocab_size - 1})")
        if len(token_ids) > model.max_length:
            raise ContextLengthError(f"the prompt has {len(token_ids)} tokens; the context is {model.max_length}")
        self._model, self._ids, self._top = model, list(token_ids), top
        self._chunk = max(1, min(features.prefill_chunk, _MAX_SCORES // model.vocab_size))
        self._cache: KVCache | None = None
        self.logprobs: list[TokenLogprob | None] = [None]
        """One per token scored so far; the first has no score, since nothing comes before it."""

    @torch.inference_mode()
    def step(self) -> bool:
        """Score the next tokens in one forward pass; return True while more remain. Raises OutOfMemoryError."""
        start = len(self.logprobs) - 1
        ids = self._ids[start : min(start + self._chunk, len(self._ids) - 1)]
        if ids:
            with single_threaded() if self._model.capabilities.own_threads else nullcontext():
                cache = self._cache = self._cache or self._prepared()
                model_input = ModelInput(torch.tensor([ids], device=self._model.device), [len(ids)])
                scores = self._model.forward(model_input, cache).scores()[0, : len(ids)]
                self.logprobs += token_logprobs(scores, self._ids[start + 1 : start + 1 + len(ids)], self._top)
        more = len(self.logprobs) < len(self._ids)
        self._cache = self._cache if more else None  # only one prompt of a batch has a cache at a time
        return more

    def _prepared(self) -> KVCache:
        needed, free = self._model.cache_bytes([len(self._ids)]), self._model.free_bytes()
        if needed > free:
            raise OutOfMemoryError(
                f"scoring {len(self._ids)} tokens takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
            )
        cache = self._model.new_cache()
        row = Row(0, self._ids, SamplingParams(), limit=self._model.max_length)
        self._model.admit(Rows([row]), 0, cache)
        return cache
