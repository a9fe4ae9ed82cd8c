"""A target's hidden states for recorded texts, which draft heads, block drafters and MTP layers read in a replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from foresay.decoding.protocols import LanguageModel, Logits, ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.models.recording import RecordedText


def recorded_states(
    target: LanguageModel, texts: Sequence[RecordedText], layers: Sequence[int]
) -> Callable[[int], Mapping[int, torch.Tensor]]:
    """Return a function from a text's index to its hidden states by layer, [S, D] each, computed when a text is first read.

    layers: see ModelInput.hidden_layers. The target runs over a text in pieces, as a prefill does.
    """

    @cache
    @torch.inference_mode()
    def states(index: int) -> Mapping[int, torch.Tensor]:
        text, kv_cache = texts[index], target.new_cache()
        tokens = [*text.prompt, *text.output]
        source = None if text.source is None else list(text.source)
        target.admit(Rows([Row(0, tokens, SamplingParams(), limit=len(tokens) + 1, source=source)]), 0, kv_cache)
        parts, size = [], target.capabilities.prefill_chunk
        for start in range(0, len(tokens), size):
            ids = torch.tensor([tokens[start : start + size]], device=target.device)
            fed = ModelInput(ids, [ids.shape[1]], logits=Logits.NONE, hidden_layers=tuple(layers))
            parts.append(target.forward(fed, kv_cache).hidden)
        return {layer: torch.cat([part[layer][0] for part in parts]) for layer in layers}

    return states
