"""A reviewing model whose pass fails on draft tokens: the columns that fail are left out, and have no distribution.

In a cascade a token exists only after its reviewer's pass. If that pass failed because of an inner draft token and the review
were lost, tokens would exist or not by their own values. So the pass is repeated with one column fewer until it succeeds. The
columns left out score NaN, which ends the draft in front of them (see `decoding.proposal_checks`). Knows no cascade.
"""

from __future__ import annotations

import dataclasses

import torch.nn.functional as F

from foresay.decoding.protocols import Capabilities, Feed, KVCache, LanguageModel, ModelOutput
from foresay.decoding.rows import Rows


class Shortening(LanguageModel):
    """A model that scores as many columns as it can."""

    def __init__(self, inner: LanguageModel) -> None:
        self._inner = inner
        self.vocab_size, self.max_length, self.device = inner.vocab_size, inner.max_length, inner.device
        self.failure: BaseException | None = None
        """The last exception of a pass."""

    @property
    def capabilities(self) -> Capabilities:
        """See LanguageModel."""
        return self._inner.capabilities

    def new_cache(self) -> KVCache:
        """See LanguageModel."""
        return self._inner.new_cache()

    def admit(self, rows: Rows, first: int, cache: KVCache) -> None:
        """See LanguageModel."""
        self._inner.admit(rows, first, cache)

    def forward(self, feed: Feed, cache: KVCache) -> ModelOutput:
        """One pass of a chain, logits [B, T, V]. Raises what the model raises when it fails on one column, too."""
        before, columns = list(cache.lengths), int(feed.token_ids.shape[1])
        for width in range(columns, 0, -1):
            counts = [min(n, width) for n in feed.num_tokens]
            try:
                part = dataclasses.replace(feed, token_ids=feed.token_ids[:, :width], num_tokens=counts)
                output = self._inner.forward(part, cache)
                if output.logits is None:  # a recording has tokens and no scores
                    return output
                scores = output.scores()
                if scores.shape[:2] != part.token_ids.shape:
                    raise ValueError(
                        f"scores of shape {tuple(scores.shape)} for tokens of {tuple(part.token_ids.shape)}"
                    )
                break
            except (Exception, SystemExit) as error:
                self.failure = error
                cache.truncate(before)
                if width == 1:
                    raise
        if width == columns:
            return output
        missing = F.pad(scores.float(), (0, 0, 0, columns - width), value=float("nan"))
        return dataclasses.replace(output, logits=missing, columns=None)
