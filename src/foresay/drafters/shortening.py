"""A verifying model that survives draft tokens on which its forward pass fails: the failing positions get no distribution.

In a cascade a token exists only after the verifying model's pass. If the pass failed because of an inner draft token and the
whole verification were lost, the existence of tokens would depend on their values. So the pass is repeated with one token fewer
until it succeeds. Positions left out score NaN, which ends the draft before them (see `decoding.proposal_checks`).
"""

from __future__ import annotations

import dataclasses

import torch.nn.functional as F

from foresay.decoding.protocols import KVCache, LanguageModel, ModelInput, ModelOutput
from foresay.models.vocabulary import VocabularyAdapter


class Shortening(VocabularyAdapter):
    """A model that scores as many of the given tokens as possible."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model, model.vocab_size)
        self.failure: BaseException | None = None
        """The last exception raised in a pass; None if there is none."""

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        """Run one pass over chains and return logits [B, T, V]. Raises what the model raises if even one token per row fails."""
        lengths, size = list(cache.lengths), int(model_input.token_ids.shape[1])
        for width in range(size, 0, -1):
            counts = [min(n, width) for n in model_input.num_tokens]
            part = dataclasses.replace(model_input, token_ids=model_input.token_ids[:, :width], num_tokens=counts)
            try:
                output = self.inner.forward(part, cache)
                if output.logits is None:  # a recording has tokens and no scores
                    return output
                if output.logits.shape[:2] != part.token_ids.shape:
                    shapes = tuple(output.logits.shape), tuple(part.token_ids.shape)
                    raise ValueError("the model returned scores of shape {} for tokens of shape {}".format(*shapes))
                break
            except (Exception, SystemExit) as error:
                self.failure = error
                cache.truncate(lengths)
                if width == 1:
                    raise
        if width == size:
            return output
        padded = F.pad(output.scores().float(), (0, 0, 0, size - width), value=float("nan"))
        return dataclasses.replace(output, logits=padded, subset=None)
