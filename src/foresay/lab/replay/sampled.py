"""Draft models against a sampled recording: what they would have drafted, given what the target wrote.

Speculative sampling couples a draft token x ~ q with the written token y ~ p so that they are equal as often as can be.
Read backwards: given y, the draft token was y with probability min(1, q(y) / p(y)), and some other token else. Under
the recorded text each of these is known, so that the number accepted is drawn from its own law, with one number for each
place of each text. p(y) is recorded; q(y) is what the draft model says behind the recorded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foresay.decoding.laws import build_laws
from foresay.decoding.protocols import Drafter, Feed, KVCache, LanguageModel, Logits, ModelOutput, Move
from foresay.decoding.randomness import Purpose, Streams
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, ModelDrafter
from foresay.drafters.cross_tokenizer import CrossTokenizerDrafter
from foresay.errors import ConfigError
from foresay.models.vocabulary import VocabularyAdapter
from foresay.records.recording import Recording

LAW_FIELDS = ("temperature", "top_k", "top_p", "min_p")
"""Parameters that make a law of scores; all of a sampled recording's that a draft model can be held against."""


class _TextCache(KVCache):
    """A draft's cache that knows which text each row is."""

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
    """A draft model whose likeliest token is what it would have drafted under the recorded text.

    Its other scores stay as they are, for policies that look at them. One text per request, in the recording's order.
    """

    def __init__(self, inner: LanguageModel, recording: Recording, *, seed: int = 0) -> None:
        if any(record.token_probs is None for record in recording.records):
            raise ConfigError(
                "the recording lacks the probabilities of its tokens, which a draft model is held against"
            )
        super().__init__(inner, inner.vocab_size)
        self._records, self._seed = recording.records, seed
        known = {k: v for k, v in recording.params.items() if k in LAW_FIELDS}
        self._params = SamplingParams(**known)

    def new_cache(self) -> KVCache:
        """A cache without rows."""
        return _TextCache(super().new_cache())

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """Give rows from place `first` on empty cache rows, and note which texts they are."""
        assert isinstance(cache, _TextCache)
        super().admit(rows, first, cache.inner)
        cache.texts += [rows[i].request_id for i in range(first, len(rows))]

    def forward(self, feed: Feed, cache: KVCache) -> ModelOutput:
        """One pass; see LanguageModel.forward."""
        assert isinstance(cache, _TextCache)
        before = list(cache.lengths[feed.first_row : feed.first_row + len(feed.num_tokens)])
        out = super().forward(feed, cache.inner)
        if out.logits is None:
            return out
        last = feed.logits is Logits.LAST
        scores = out.logits.to(torch.float32, copy=True)  # a little more than the greatest is the same in bf16
        for i, (start, count) in enumerate(zip(before, feed.num_tokens, strict=True)):
            columns = range(count - 1, count) if last else range(count)
            for place, column in enumerate(columns):
                self._choose(scores[i, place], cache.texts[feed.first_row + i], start + column + 1)
        return ModelOutput(scores, out.hidden)

    def _choose(self, scores: torch.Tensor, text: int, position: int) -> None:
        """Make the token drafted at an absolute position of a text the likeliest one. scores: [V], changed in place."""
        record = self._records[text]
        reads_source = self.capabilities.reads_source
        lead = 0 if reads_source or record.source is None else len(record.source) - len(record.prompt)
        place = position - lead - len(record.prompt)
        if not 0 <= place < len(record.output) or record.token_probs is None:
            return
        written, p = record.output[place], max(record.token_probs[place], 1e-12)
        law = build_laws(scores[None, None], Rows([Row(text, [0], self._params, limit=1 << 40)]))
        q = float(law.prob_of(torch.tensor([[written]], device=scores.device))[0, 0]) if written < len(scores) else 0.0
        keys = torch.tensor([self._seed]), torch.tensor([text])
        number = Streams(*keys).uniform(Purpose.ACCEPT, torch.tensor([position]))
        if float(number) * p < q:
            scores[written] = scores.max() + 1e-3
        elif written < len(scores) and int(scores.argmax()) == written:
            scores[written] = -torch.inf


def members(drafter: Drafter | None) -> list[Any]:
    """Who drafts: a cascade's drafters, or the one there is."""
    if isinstance(drafter, Cascade):
        return [one for inner in drafter.drafters for one in members(inner)]
    return [] if drafter is None else [drafter]


def replay_sampled(drafter: Drafter, recording: Recording) -> None:
    """Hold every draft model in a drafter against a sampled recording; look-ups need nothing, they match or do not."""
    others = set(recording.params) - {
        *LAW_FIELDS,
        "max_new_tokens",
        "ignore_eos",
        "logprobs",
        "stop",
        "stop_token_ids",
    }
    for one in members(drafter):
        if isinstance(one, CrossTokenizerDrafter):
            raise ConfigError("a draft with another tokenizer cannot be held against a sampled recording; run it live")
        if isinstance(one, ModelDrafter):
            if others:
                raise ConfigError(
                    f"a draft model cannot be held against a recording sampled with {min(others)}; run it live"
                )
            _wrap(one, recording)


def _wrap(drafter: ModelDrafter, recording: Recording) -> None:
    def make(model: LanguageModel) -> LanguageModel:
        return SampledReplayModel(model.inner if isinstance(model, SampledReplayModel) else model, recording)

    drafter.context.replace_model(make)
