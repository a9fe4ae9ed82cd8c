"""Draft models on a sampled recording: their draft tokens, conditioned on the tokens that the target generated.

Speculative sampling is a maximal coupling of the draft token x ~ q and the output token y ~ p: they are equal with the
greatest possible probability. Conditioned on y, the draft token is y with probability min(1, q(y) / p(y)), and a different
token otherwise. p(y) is in the recording, and q(y) comes from the draft model's distribution after the recorded tokens before y.
A replay accepts each recorded token with that probability, using one uniform number per position of each text, so the number
of accepted tokens has the same distribution as live. This does not apply to the rule `coupled`, which shares Gumbel noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foresay.decoding.distributions import build_distributions
from foresay.decoding.protocols import Drafter, KVCache, LanguageModel, Logits, ModelInput, ModelOutput, Move
from foresay.decoding.randomness import Purpose, Streams
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, ModelDrafter
from foresay.drafters.cross_tokenizer import CrossTokenizerDrafter
from foresay.errors import ConfigError
from foresay.models.vocabulary import VocabularyAdapter
from foresay.records.recording import Recording

PROBABILITY_FIELDS = ("temperature", "top_k", "top_p", "min_p")
"""Parameters that may shape the distribution; a recording with others cannot be replayed with a draft model."""


class _TextCache(KVCache):
    """A draft model's cache with the text index of each row."""

    def __init__(self, inner: KVCache) -> None:
        self.inner = inner
        self.texts: list[int] = []

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return self.inner.lengths

    def truncate(self, lengths: Sequence[int]) -> None:
        self.inner.truncate(lengths)

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        self.inner.rearrange(moves, count)
        for source, target in moves:
            self.texts[target] = self.texts[source]
        del self.texts[count:]


class SampledReplayModel(VocabularyAdapter):
    """A draft model whose argmax at each position is the token it would have drafted live, conditioned on the recorded one.

    Other logits are unchanged, for policies that use them. Request i of an engine must be the recording's text i.
    Raises ConfigError for a recording without token probabilities.
    """

    def __init__(self, inner: LanguageModel, recording: Recording) -> None:
        if any(record.token_probs is None for record in recording.records):
            text = "lacks token probabilities, which the replay of a draft model needs; record it again"
            raise ConfigError(text, param="recording")
        super().__init__(inner, inner.vocab_size)
        self._records = recording.records
        known = {k: v for k, v in recording.params.items() if k in PROBABILITY_FIELDS}
        self._params = SamplingParams(**known)

    def new_cache(self) -> KVCache:
        """Return a cache without rows."""
        return _TextCache(super().new_cache())

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Add empty cache rows for the rows from index `first` on, and store their text indices."""
        assert isinstance(cache, _TextCache)
        super().admit(rows, first, cache.inner)
        cache.texts += [rows[i].request_id for i in range(first, len(rows))]

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """Run one forward pass with logits [B, T, V]; see LanguageModel.forward."""
        assert isinstance(cache, _TextCache)
        before = list(cache.lengths[model_input.first_row : model_input.first_row + len(model_input.num_tokens)])
        out = super().forward(model_input, cache.inner)
        if out.logits is None:
            return out
        last = model_input.logits is Logits.LAST
        scores = out.scores().to(torch.float32, copy=True)  # in bf16 the maximum logit plus 1e-3 may round to itself
        for i, (start, count) in enumerate(zip(before, model_input.num_tokens, strict=True)):
            columns = range(count - 1, count) if last else range(count)
            for index, column in enumerate(columns):
                self._choose(scores[i, index], cache.texts[model_input.first_row + i], start + column + 1)
        return ModelOutput(scores, out.hidden)

    def _choose(self, scores: torch.Tensor, text: int, position: int) -> None:
        """Make the draft token at an absolute position of a text the argmax. scores: [V], modified in place."""
        record = self._records[text]
        reads_source = self.capabilities.reads_source
        lead = 0 if reads_source or record.source is None else len(record.source) - len(record.prompt)
        index = position - lead - len(record.prompt)
        if not 0 <= index < len(record.output) or record.token_probs is None:
            return
        token, p = record.output[index], max(record.token_probs[index], 1e-12)
        distribution = build_distributions(scores[None, None], Rows([Row(text, [0], self._params, limit=1 << 40)]))
        ids = torch.tensor([[token]], device=scores.device)
        q = float(distribution.prob_of(ids)[0, 0]) if token < len(scores) else 0.0
        keys = torch.tensor([0]), torch.tensor([text])
        number = Streams(*keys).uniform(Purpose.ACCEPT, torch.tensor([position]))
        if float(number) * p < q:
            scores[token] = scores.max() + 1e-3
        elif token < len(scores) and int(scores.argmax()) == token:
            scores[token] = -torch.inf


def members(drafter: Drafter | None) -> list[Any]:
    """Return the drafters of a cascade, including nested ones, or the drafter itself; [] for None."""
    if isinstance(drafter, Cascade):
        return [one for inner in drafter.drafters for one in members(inner)]
    return [] if drafter is None else [drafter]


def replay_sampled(drafter: Drafter, recording: Recording) -> None:
    """Replace every draft model in a drafter by a SampledReplayModel, in place; n-gram drafters are unchanged.

    Raises ConfigError for a draft model with another tokenizer, and for sampling parameters beyond PROBABILITY_FIELDS.
    """

    def make(model: LanguageModel) -> LanguageModel:
        return SampledReplayModel(model.inner if isinstance(model, SampledReplayModel) else model, recording)

    no_effect = {"max_new_tokens", "ignore_eos", "logprobs", "stop", "stop_token_ids"}  # on the distribution
    others = set(recording.params) - {*PROBABILITY_FIELDS, *no_effect}
    for one in members(drafter):
        if isinstance(one, CrossTokenizerDrafter):
            text = "with another tokenizer cannot be replayed on a sampled recording; run it live"
            raise ConfigError(text, param="draft")
        if isinstance(one, ModelDrafter):
            if others:
                text = f"cannot be replayed on a recording sampled with {min(others)}; run it live"
                raise ConfigError(text, param="draft")
            one.context.replace_model(make)
