"""The cache of several multi-token-prediction layers, each of which reads the output of the one before (DeepSeek-V3).

Layer k at pair i reads layer k - 1's output at pair i and the embedding of token i + 1 + k, so that draft token k + 1 is the
prediction of layer k at the last pair. All layers keep pair i in slot i. The last K - 1 pairs of K layers have draft tokens in
some layer: they stay pending, and every proposal feeds them again. Draft tokens after the K-th are predictions of the last
layer, which then reads its own output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from foresay.decoding.protocols import Logits, ModelInput, ModelOutput
from foresay.decoding.rows import Rows
from foresay.drafters.draft_cache import MAX_CATCH_UP, DraftCache
from foresay.drafters.feature_cache import NEXT, FeatureCache
from foresay.drafters.target_features import ReadsStates, RowFeatures


@runtime_checkable
class MtpLayers(Protocol):
    """A head of multi-token-prediction layers; `ModelInput.mtp_layer` chooses the one that a pass runs."""

    @property
    def num_mtp_layers(self) -> int:
        """Number K of layers."""
        ...


def num_mtp_layers(head: ReadsStates) -> int:
    """Return the number of layers that draft one after the other; 1 for heads of other kinds."""
    return head.num_mtp_layers if isinstance(head, MtpLayers) else 1


class MtpCache(FeatureCache):
    """The cache of K > 1 layers over ragged rows."""

    def __init__(self, head: ReadsStates, vocab_size: int) -> None:
        super().__init__(head, vocab_size)
        self._num_layers = num_mtp_layers(head)
        self._parts: list[RowFeatures | None] = []
        """[B], the rows of the current proposal, None for rows that are not fed."""
        self._starts: list[int] = []
        """[B], slots of their first pending pairs."""
        self._counts: Sequence[int] = []
        """[B], numbers of their pending pairs."""
        self._depths: list[int] = []
        """[B], numbers of draft tokens that were fed."""
        self._tokens = torch.empty(0)
        """[B, P] int64, the tokens of the pending pairs in the layer that ran last for each row."""
        self._states = torch.empty(0)
        """[B, P, D], its output."""

    def prepare(self, rows: Rows, wanted: Sequence[bool]) -> None:
        """Run all layers over pairs whose tokens they all know, in separate passes, until few pairs are pending."""
        again = self._num_layers - 1
        for index, (row, one) in enumerate(zip(rows, self._rewound(rows, wanted), strict=True)):
            while one is not None and len(one.pending) > MAX_CATCH_UP + again:
                count = min(self.reader.capabilities.prefill_chunk, len(one.pending) - again)
                features = one.pending[None, :count]
                for layer in range(self._num_layers):
                    first = one.cached + 1 + layer
                    tokens = torch.from_numpy(row.tokens[first : first + count])[None].to(self.reader.device)
                    self.cache.lengths[index] = one.cached
                    given = ModelInput(tokens, [count], index, logits=Logits.NONE, features=features, mtp_layer=layer)
                    features = DraftCache.forward(self, given).hidden[NEXT]
                one.mark_cached(count)

    def _feed_pending(self, rows: Rows, fed: Sequence[bool]) -> ModelOutput:
        """Run the first layer over the pending pairs."""
        self._parts, given = self._pending(rows, fed)
        self._starts, self._counts, self._depths = list(self.cache.lengths), given.num_tokens, [0] * len(rows)
        output = DraftCache.forward(self, given)
        self._tokens, self._states = given.token_ids, output.hidden[NEXT]
        output = _of_last(given, output)
        self._last_output = output.hidden[NEXT]
        return output

    def forward(self, model_input: ModelInput) -> ModelOutput:
        """Run one pass over the next draft token of each row that has one: the layer after the one before, or the last again.

        Inside a cascade, rows may be at different layers.
        """
        self._depths = [n + (count > 0) for n, count in zip(self._depths, model_input.num_tokens, strict=True)]
        layers = [min(n, self._num_layers) * (k > 0) for n, k in zip(self._depths, model_input.num_tokens, strict=True)]
        before, output = self._last_output, None
        for layer in sorted(set(layers) - {0}):
            self._last_output, on = before, [one == layer for one in layers]
            new = self._repeat(model_input, on) if layer == self._num_layers else self._run(layer, model_input, on)
            output = new if output is None else self._merged(output, new, on)
        assert output is not None
        self._last_output = output.hidden[NEXT]
        return output

    def _run(self, layer: int, model_input: ModelInput, on: Sequence[bool]) -> ModelOutput:
        """Run a layer over the pending pairs of some rows, whose last token is their next draft token."""
        device = self._tokens.device
        counts = [n if one else 0 for n, one in zip(self._counts, on, strict=True)]
        last = torch.tensor(self._counts, device=device)[:, None].clamp(min=1) - 1
        tokens = self._tokens.roll(-1, 1).scatter_(1, last, model_input.token_ids[:, -1:])
        which = torch.tensor(on, device=device)[:, None]
        tokens = torch.where(which, tokens, self._tokens)
        for index, one in enumerate(on):
            if one:
                self.cache.lengths[index] = self._starts[index]
        given = ModelInput(tokens, counts, logits=Logits.LAST, features=self._states, mtp_layer=layer)
        output = DraftCache.forward(self, given)
        self._tokens, self._states = tokens, torch.where(which[..., None], output.hidden[NEXT], self._states)
        if layer == self._num_layers - 1:
            self._settle(on)
        return _of_last(given, output)

    def _settle(self, on: Sequence[bool]) -> None:
        """Mark the pairs of some rows as cached that all layers have, with tokens that stay."""
        for one, count, flag in zip(self._parts, self._counts, on, strict=True):
            if flag and one is not None and count >= self._num_layers:
                one.mark_cached(count - self._num_layers + 1)

    def _repeat(self, model_input: ModelInput, on: Sequence[bool]) -> ModelOutput:
        """Run the last layer over one more pair of some rows: its own output and their next draft token."""
        assert self._last_output is not None
        given = dataclasses.replace(
            model_input, num_tokens=[int(one) for one in on], features=self._last_output, mtp_layer=self._num_layers - 1
        )
        return _of_last(given, DraftCache.forward(self, given))


def _of_last(given: ModelInput, output: ModelOutput) -> ModelOutput:
    """Return a pass's output with the hidden states [B, 1, D] of each row's last token."""
    return dataclasses.replace(output, hidden={n: given.of_last(states) for n, states in output.hidden.items()})
