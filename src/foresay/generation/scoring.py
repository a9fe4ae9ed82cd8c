"""Log-probabilities of a prompt's own tokens, for requests that measure texts instead of generating them.

Owns a cache of its own for one text, and how far it is filled. Knows no engine: its passes run between an engine's steps.
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
"""Scores that a pass computes, about: 64 MiB in float32."""


class PromptScorer:
    """The log-probability of each token of one text under the target's raw logits, a pass at a time."""

    def __init__(self, model: LanguageModel, token_ids: Sequence[int], top: int) -> None:
        """top: how many of the most likely tokens to report at each position.

        Raises ConfigError for a model that does not score texts, PromptError for token ids that it lacks, and
        ContextLengthError.
        """
        can = model.capabilities
        if can.reads_source or not can.scores:
            raise ConfigError("echo with logprobs needs a decoder-only model that computes scores")
        if min(token_ids) < 0 or max(token_ids) >= model.vocab_size:
            raise PromptError(f"a prompt token id is not in the vocabulary (0 to {model.vocab_size - 1})")
        if len(token_ids) > model.max_length:
            raise ContextLengthError(f"the prompt has {len(token_ids)} tokens; the context is {model.max_length}")
        self._model, self._ids, self._top = model, list(token_ids), top
        self._columns = max(1, min(can.prefill_chunk, _MAX_SCORES // model.vocab_size))
        self._cache: KVCache | None = None
        self.logprobs: list[TokenLogprob | None] = [None]
        """One per token scored so far; the first has no score, since nothing comes before it."""

    @torch.inference_mode()
    def step(self) -> bool:
        """Score the next tokens in one forward pass; return True while more remain. Raises OutOfMemoryError."""
        start = len(self.logprobs) - 1
        ids = self._ids[start : min(start + self._columns, len(self._ids) - 1)]
        if ids:
            with single_threaded() if self._model.capabilities.own_threads else nullcontext():
                cache = self._cache = self._cache or self._prepared()
                model_input = ModelInput(torch.tensor([ids], device=self._model.device), [len(ids)])
                scores = self._model.forward(model_input, cache).scores()[0, : len(ids)]
                self.logprobs += token_logprobs(scores, self._ids[start + 1 : start + 1 + len(ids)], self._top)
        more = len(self.logprobs) < len(self._ids)
        self._cache = self._cache if more else None  # one cache at a time for a batch of prompts
        return more

    def _prepared(self) -> KVCache:
        wanted, room = self._model.cache_bytes([len(self._ids)]), self._model.free_bytes()
        if wanted > room:
            raise OutOfMemoryError(
                f"scoring {len(self._ids)} tokens takes {wanted / 1e9:.1f} GB, and {room / 1e9:.1f} GB are left"
            )
        cache = self._model.new_cache()
        row = Row(0, self._ids, SamplingParams(), limit=self._model.max_length)
        self._model.admit(Rows([row]), 0, cache)
        return cache
