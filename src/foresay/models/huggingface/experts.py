"""Mixture-of-experts layers of transformers models: the layouts that can be read, and their weights.

In the common layout there are two parameters, gate_up_proj [experts, 2 * inner, hidden] and down_proj [experts, hidden, inner],
without biases, and the usual gate: down(activation(gate) * up). gpt-oss's are transposed, with biases, alternating rows of gate
and up, and a clamped gate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from foresay.models.huggingface.frozen import FrozenExperts, UsualGate
from foresay.models.layer import ClampedGate, StackedExperts

Linear = tuple[torch.Tensor, torch.Tensor | None]
"""A weight [out, in] and its bias [out]."""
_ATTRIBUTES = ("has_gate", "is_concatenated", "is_transposed", "has_bias", "has_post_expert_norm")
_COMMON, _GPT_OSS = (True, True, False, False, False), (True, False, True, True, False)
"""Values that transformers gives these attributes of experts, by layout."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of a layer's experts."""

    count: int
    in_place: bool
    """True if the weights are those of the model; False for copies of them in another order."""
    gate_up: Callable[[int], Linear]
    """An expert's weights by its index, [2 * inner, hidden]: rows of the gate, then those of up."""
    down: Callable[[int], Linear]
    """The same, [hidden, inner]."""
    gate: UsualGate | ClampedGate


def is_experts(module: Any) -> bool:
    """True for the experts of a layer in the common layout, frozen or not."""
    return isinstance(module, FrozenExperts) or expert_weights(module) is not None


def expert_weights(module: Any) -> ExpertWeights | None:
    """Return the weights of a layer's experts; None for a module of another kind."""
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    gate = getattr(type(module), "_apply_gate", None)
    if (
        not isinstance(gate_up, nn.Parameter)
        or not isinstance(down, nn.Parameter)
        or gate_up.dim() != 3
        or gate is None
    ):
        return None
    layout = tuple(getattr(module, name, common) for name, common in zip(_ATTRIBUTES, _COMMON, strict=True))
    if layout == _COMMON and gate.__module__ == "transformers.integrations.moe" and hasattr(module, "act_fn"):
        return _common(module, gate_up.detach(), down.detach())
    if layout == _GPT_OSS and gate.__module__ == "transformers.models.gpt_oss.modeling_gpt_oss":
        return _gpt_oss(module, gate_up.detach(), down.detach())
    return None


def _common(module: Any, gate_up: torch.Tensor, down: torch.Tensor) -> ExpertWeights | None:
    experts, outputs, hidden = gate_up.shape
    if down.shape != (experts, hidden, outputs // 2) or outputs % 2:
        return None
    return ExpertWeights(
        experts, True, lambda i: (gate_up[i], None), lambda i: (down[i], None), UsualGate(module.act_fn)
    )


def _gpt_oss(module: Any, gate_up: torch.Tensor, down: torch.Tensor) -> ExpertWeights | None:
    experts, hidden, outputs = gate_up.shape
    biases = module.gate_up_proj_bias.detach(), module.down_proj_bias.detach()
    if down.shape != (experts, outputs // 2, hidden) or outputs % 2:
        return None

    def ordered(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[::2], x[1::2]])

    return ExpertWeights(
        experts,
        False,
        lambda i: (ordered(gate_up[i].T), ordered(biases[0][i])),
        lambda i: (down[i].T.contiguous(), biases[1][i]),
        ClampedGate(float(module.alpha), float(module.limit)),
    )


def stacked_weights(module: Any) -> tuple[StackedExperts, ClampedGate | None] | None:
    """Return the weights of a layer's experts as the model has them in memory, and gpt-oss's gate; None for another kind."""
    if isinstance(module, FrozenExperts) and module.stacked is not None:
        return module.stacked, module.gate if isinstance(module.gate, ClampedGate) else None
    found = expert_weights(module)
    if found is None:
        return None
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    if found.in_place:
        return StackedExperts(gate_up, down), None
    assert isinstance(found.gate, ClampedGate)
    biases = module.gate_up_proj_bias.detach(), module.down_proj_bias.detach()
    return StackedExperts(gate_up.transpose(1, 2), down.transpose(1, 2), *biases, alternates=True), found.gate


def set_expert_weights(module: Any, gate_up: torch.Tensor, down: torch.Tensor, *biases: torch.Tensor) -> None:
    """Set the weights of a layer's experts. gate_up: [experts, 2 * inner, hidden], the rows of the gate first.

    down: [experts, hidden, inner]. biases: those of gate_up and of down, [experts, out] each, in layouts that have them.
    """
    if getattr(module, "is_transposed", False):
        gate_up, down = _alternating(gate_up).transpose(1, 2), down.transpose(1, 2)
    found = {"gate_up_proj": gate_up, "down_proj": down}
    if biases:
        found |= {"gate_up_proj_bias": _alternating(biases[0]), "down_proj_bias": biases[1]}
    for name, weight in found.items():
        setattr(module, name, nn.Parameter(weight.contiguous(), requires_grad=False))


def _alternating(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [experts, 2 * inner, ...], first those of the gate, as rows of gate and up in turn."""
    return torch.stack(rows.chunk(2, 1), 2).flatten(1, 2)


def active_experts(config: Any) -> int:
    """Return the number of experts that a token selects; 0 for a configuration that does not state it."""
    found = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)  # Gemma 4's name
    return int(found or 0)


def active_share(model: Any) -> float:
    """Return the share of a layer's experts that one token selects."""
    config = model.config.get_text_config(decoder=True)
    count = max(int(part.num_experts) for part in model.modules() if is_experts(part))
    return min(1.0, (active_experts(config) or count) / count)
