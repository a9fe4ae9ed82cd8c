"""Mixture-of-experts layers of transformers models: which ones have the common layout, and their weights.

The common layout is two parameters, gate_up_proj [experts, 2 * inner, hidden] and down_proj [experts, hidden, inner], without
biases, and the usual gate: down(activation(gate) * up).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from foresay.models.huggingface.frozen import FrozenExperts

_LAYOUT = {
    "has_gate": True,
    "is_concatenated": True,
    "is_transposed": False,
    "has_bias": False,
    "has_post_expert_norm": False,
}
"""Attributes that transformers gives the experts of the common layout."""


def is_experts(module: Any) -> bool:
    """True for the experts of a layer in the common layout, frozen or not."""
    return isinstance(module, FrozenExperts) or expert_weights(module) is not None


def expert_weights(module: Any) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None:
    """Return the weights of each expert, [2 * inner, hidden] and [hidden, inner]; None for a module of another kind."""
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not isinstance(gate_up, nn.Parameter) or not isinstance(down, nn.Parameter) or gate_up.dim() != 3:
        return None
    experts, outputs, hidden = gate_up.shape
    if down.shape != (experts, hidden, outputs // 2) or outputs % 2:
        return None
    if any(getattr(module, name, None) is not value for name, value in _LAYOUT.items() if hasattr(module, name)):
        return None
    gate = getattr(type(module), "_apply_gate", None)
    if gate is None or gate.__module__ != "transformers.integrations.moe" or not hasattr(module, "act_fn"):
        return None
    return list(gate_up.detach()), list(down.detach())


def active_share(model: Any) -> float:
    """Return the share of a layer's experts that one token selects."""
    config = model.config.get_text_config(decoder=True)
    count = max(int(part.num_experts) for part in model.modules() if is_experts(part))
    return min(1.0, int(getattr(config, "num_experts_per_tok", 0) or count) / count)
