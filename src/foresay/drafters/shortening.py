"""A reviewing model whose pass fails on draft tokens: the positions that fail are left out, and have no distribution.

In a cascade a token exists only after its reviewer's pass. If that pass failed because of an inner draft token and the review
were lost, tokens would exist or not by their own values. So the pass is repeated with one token fewer until it succeeds. The
positions left out score NaN, which ends the draft in front of them (see `decoding.proposal_checks`). Knows no cascade.
"""

from __future__ import annotations

import dataclasses

import torch.nn.functional as F

from foresay.decoding.protocols import KVCache, LanguageModel, ModelInput, ModelOutput
from foresay.models.vocabulary import VocabularyAdapter


class Shortening(VocabularyAdapter):
    """A model that scores as many of the tokens it is fed as it can."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model, model.vocab_size)
        self.failure: BaseException | None = None
        """The last exception of a pass."""

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """One pass of a chain, logits [B, T, V]. Raises what the model raises if it fails on a single token, too."""
        before, columns = list(cache.lengths), int(model_input.token_ids.shape[1])
        for width in range(columns, 0, -1):
            counts = [min(n, width) for n in model_input.num_tokens]
            part = dataclasses.replace(model_input, token_ids=model_input.token_ids[:, :width], num_tokens=counts)
            try:
                output = self.inner.forward(part, cache)
                if output.logits is None:  # a recording has tokens and no scores
                    return output
                if output.logits.shape[:2] != part.token_ids.shape:
                    shapes = tuple(output.logits.shape), tuple(part.token_ids.shape)
                    raise ValueError("scores of shape {} for tokens of {}".format(*shapes))
                break
            except (Exception, SystemExit) as error:
                self.failure = error
                cache.truncate(before)
                if width == 1:
                    raise
        if width == columns:
            return output
        missing = F.pad(output.scores().float(), (0, 0, 0, columns - width), value=float("nan"))
        return dataclasses.replace(output, logits=missing, subset=None)
