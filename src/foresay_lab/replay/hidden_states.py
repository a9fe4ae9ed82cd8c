"""A target's hidden states for recorded texts, which draft heads, block drafters and MTP layers read in a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from foresay.decoding.protocols import LanguageModel, Logits, ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.models.recording import RecordedText


class RecordedStates:
    """Hidden states at every position of some texts, computed by the target when a text is first read."""

    def __init__(self, target: LanguageModel, texts: Sequence[RecordedText], layers: Sequence[int]) -> None:
        """layers: see ModelInput.hidden_layers."""
        self._target, self._texts, self._layers = target, texts, tuple(layers)
        self._known: dict[int, Mapping[int, torch.Tensor]] = {}

    def __call__(self, text: int) -> Mapping[int, torch.Tensor]:
        """Return the states of a text by layer, [S, D] each."""
        if text not in self._known:
            self._known[text] = self._computed(self._texts[text])
        return self._known[text]

    @torch.inference_mode()
    def _computed(self, text: RecordedText) -> dict[int, torch.Tensor]:
        """Run the target over a text in pieces, as a prefill does."""
        target, tokens = self._target, [*text.prompt, *text.output]
        cache = target.new_cache()
        source = None if text.source is None else list(text.source)
        target.admit(Rows([Row(0, tokens, SamplingParams(), limit=len(tokens) + 1, source=source)]), 0, cache)
        parts, size = [], target.capabilities.prefill_chunk
        for start in range(0, len(tokens), size):
            ids = torch.tensor([tokens[start : start + size]], device=target.device)
            fed = ModelInput(ids, [ids.shape[1]], logits=Logits.NONE, hidden_layers=self._layers)
            parts.append(target.forward(fed, cache).hidden)
        return {layer: torch.cat([part[layer][0] for part in parts]) for layer in self._layers}
