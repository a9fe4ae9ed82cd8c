"""Passes over one text that generate nothing: log-probabilities of its tokens, and its embedding.

Owns a cache for one text. Knows no engine: its passes run between an engine's steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from time import perf_counter

import torch

from foresay.decoding.outcome import TokenLogprob
from foresay.decoding.protocols import KVCache, LanguageModel, Logits, ModelInput, ModelOutput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.decoding.step import token_logprobs
from foresay.errors import ConfigError, ContextLengthError, OutOfMemoryError, PromptError
from foresay.threads import single_threaded

_MAX_SCORES = 1 << 24
"""Approximate number of scores per pass: 64 MiB in float32."""
_FIRST_CHUNK, _MIN_CHUNK = 64, 16
"""Tokens of an embedding's first pass, whose time sets those of the others, and of its smallest pass."""


def scoring_chunk(model: LanguageModel) -> int:
    """Return the number of tokens of a pass that scores all of them: at most a prefill's, of about _MAX_SCORES scores."""
    return max(1, min(model.capabilities.prefill_chunk, _MAX_SCORES // model.vocab_size))


class _TextPasses:
    """Forward passes over the tokens of one text."""

    def __init__(self, model: LanguageModel, token_ids: Sequence[int]) -> None:
        """Raises PromptError for ids outside the model's vocabulary, and ContextLengthError."""
        if min(token_ids) < 0 or max(token_ids) >= model.vocab_size:
            raise PromptError(f"a prompt token id is not in the vocabulary (0 to {model.vocab_size - 1})")
        if len(token_ids) > model.max_length:
            raise ContextLengthError(f"the prompt has {len(token_ids)} tokens; the context is {model.max_length}")
        self._model, self._ids = model, list(token_ids)
        self._cache: KVCache | None = None

    def _run(self, ids: Sequence[int], logits: Logits, hidden_layers: tuple[int, ...] = ()) -> ModelOutput:
        """Run a pass over the next tokens. Raises OutOfMemoryError."""
        with single_threaded() if self._model.capabilities.own_threads else nullcontext():
            cache = self._cache = self._cache or self._prepared()
            tokens = torch.tensor([ids], device=self._model.device)
            model_input = ModelInput(tokens, [len(ids)], logits=logits, hidden_layers=hidden_layers)
            return self._model.forward(model_input, cache)

    def _prepared(self) -> KVCache:
        needed, free = self._model.cache_bytes([len(self._ids)]), self._model.free_bytes()
        if needed > free:
            raise OutOfMemoryError(
                f"a text of {len(self._ids)} tokens takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
            )
        cache = self._model.new_cache()
        row = Row(0, self._ids, SamplingParams(), limit=self._model.max_length)
        self._model.admit(Rows([row]), 0, cache)
        return cache


class PromptScorer(_TextPasses):
    """Computes the log-probability of each token of one text under the target's raw logits, pass by pass."""

    def __init__(self, model: LanguageModel, token_ids: Sequence[int], top: int) -> None:
        """top: number of likeliest tokens to report at each position.

        Raises ConfigError for a model that cannot score texts, PromptError for ids outside its vocabulary, and
        ContextLengthError.
        """
        features = model.capabilities
        if features.reads_source or not features.scores:
            raise ConfigError("with logprobs needs a decoder-only model that computes scores", param="echo")
        super().__init__(model, token_ids)
        self._top = top
        self._chunk = scoring_chunk(model)
        self.logprobs: list[TokenLogprob | None] = [None]
        """One per token scored so far; the first has no score, since nothing comes before it."""

    @torch.inference_mode()
    def step(self) -> bool:
        """Score the next tokens in one forward pass; return True while more remain. Raises OutOfMemoryError."""
        start = len(self.logprobs) - 1
        ids = self._ids[start : min(start + self._chunk, len(self._ids) - 1)]
        if ids:
            scores = self._run(ids, Logits.ALL).scores()[0, : len(ids)]
            self.logprobs += token_logprobs(scores, self._ids[start + 1 : start + 1 + len(ids)], self._top)
        more = len(self.logprobs) < len(self._ids)
        self._cache = self._cache if more else None  # only one prompt of a batch has a cache at a time
        return more


class TextEmbedder(_TextPasses):
    """Computes the embedding of one text, pass by pass: a hidden state of the last layer, after the final norm, as a unit vector.

    The bits depend on neither the length nor the number of passes, if the model's own do not: the mean is a sum in float64 from
    the first token to the last.
    """

    def __init__(
        self, model: LanguageModel, token_ids: Sequence[int], pooling: str = "mean", wait_s: float = 0.3
    ) -> None:
        """pooling: "mean" of all tokens' states, or "last", that of the last token. wait_s: approximate duration of a pass in
        seconds, which sets its number of tokens.

        Raises ConfigError for a model without hidden states, PromptError for ids outside its vocabulary, and
        ContextLengthError.
        """
        features = model.capabilities
        if features.reads_source or not features.num_layers:
            raise ConfigError("need a decoder-only model whose hidden states can be read", param="embeddings")
        super().__init__(model, token_ids)
        self._layer, self._pooling, self._wait_s = features.num_layers, pooling, wait_s
        self._max_chunk = features.prefill_chunk
        self._chunk = min(_FIRST_CHUNK, self._max_chunk) if features.prefill_in_any_pieces else self._max_chunk
        self._done = 0
        self._pooled = torch.zeros(0)

    @torch.inference_mode()
    def step(self) -> bool:
        """Read the next tokens in one forward pass; return True while more remain. Raises OutOfMemoryError."""
        began, ids = perf_counter(), self._ids[self._done : self._done + self._chunk]
        output = self._run(ids, Logits.NONE, (self._layer,))
        states = output.hidden[self._layer][0, : len(ids)].double().cpu()
        if self._pooling == "mean" and self._done:
            states = torch.cat([self._pooled[None], states])
        self._pooled = states.cumsum(0)[-1] if self._pooling == "mean" else states[-1]
        self._done += len(ids)
        if self._model.capabilities.prefill_in_any_pieces:
            speed = len(ids) / max(perf_counter() - began, 1e-9)
            self._chunk = int(min(max(speed * self._wait_s, _MIN_CHUNK), self._max_chunk))
        more = self._done < len(self._ids)
        self._cache = self._cache if more else None
        return more

    def embedding(self) -> torch.Tensor:
        """Return the embedding after the last pass, [H] float32 of length 1; zeros if the state is zero."""
        unit: torch.Tensor = self._pooled / self._pooled.norm().clamp(min=1e-30)
        return unit.float()
