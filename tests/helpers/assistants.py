"""Tiny assistants of Gemma 4, as transformers builds them, and as they are read from files."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig
from transformers.models.gemma4_assistant.configuration_gemma4_assistant import Gemma4AssistantConfig
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantForCausalLM
from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedTextConfig
from transformers.models.gemma4_unified_assistant.configuration_gemma4_unified_assistant import (
    Gemma4UnifiedAssistantConfig,
)
from transformers.models.gemma4_unified_assistant.modeling_gemma4_unified_assistant import (
    Gemma4UnifiedAssistantForCausalLM,
)

from foresay.models.drafts.assistant import AssistantModule
from foresay.models.sources.assistants import load_assistant
from helpers.families import FAMILIES

_CLASSES: dict[str, tuple[Any, Any, Any]] = {
    "gemma4": (Gemma4TextConfig, Gemma4AssistantConfig, Gemma4AssistantForCausalLM),
    "gemma4_unified": (Gemma4UnifiedTextConfig, Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM),
}


def assistant_model(
    kind: str = "gemma4", *, ordered: bool = False, vocab_size: int = 7, gain: float = 4.0, **changes: Any
) -> Any:
    """An assistant for the tiny target of the family gemma4. gain: of its weights, so that draft tokens differ."""
    own = {
        **FAMILIES["gemma4"][1],
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "tie_word_embeddings": True,
        "vocab_size": vocab_size,
        **changes,
    }
    text, whole, built = _CLASSES[kind]
    with pytest.MonkeyPatch.context() as patch:
        # transformers 5.23 refuses a configuration in which all layers share keys, which is every assistant's
        patch.setattr(text, "kv_sharing_modes", property(lambda self: ["reuse"] * self.num_hidden_layers))
        config = whole(
            text_config=text(**own),
            backbone_hidden_size=FAMILIES["gemma4"][1]["hidden_size"],
            use_ordered_embeddings=ordered,
            num_centroids=vocab_size,
            centroid_intermediate_top_k=3,
        )
        torch.manual_seed(5)
        model = built(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight *= gain
        if ordered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(vocab_size))
    return model


def read(theirs: Any) -> AssistantModule:
    """The assistant by way of files."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        found: AssistantModule = load_assistant(Path(folder), json.loads((Path(folder) / "config.json").read_text()))
    return found
