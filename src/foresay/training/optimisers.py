"""Optimisers by name: which of a draft's weights each of them changes.

Muon (Jordan et al. 2024) makes each step's matrices orthogonal, which is worth several times as many steps of AdamW where a draft
has seen little; what is no matrix between hidden states (norms, embeddings, output layers) is AdamW's. Knows no schedule.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from foresay.errors import ConfigError

OPTIMISERS = ("muon", "adamw")
_BETAS = (0.9, 0.95)
_OUTPUTS = ("lm_head", "embed_out")


def make_optimisers(
    name: str, model: nn.Module, learned: Mapping[str, nn.Parameter], rate: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """What changes the weights `learned` of a model; each weight is one optimiser's. Raises ConfigError for an unknown name."""
    if name not in OPTIMISERS:
        raise ConfigError(f"optimiser={name!r} must be one of {', '.join(OPTIMISERS)}")
    hidden = _between_hidden_states(model) if name == "muon" else frozenset()
    matrices = [weight for weight in learned.values() if id(weight) in hidden]
    others = [weight for weight in learned.values() if id(weight) not in hidden]
    out: list[torch.optim.Optimizer] = []
    if matrices:  # its rate is AdamW's: steps are scaled to have the same root mean square
        out.append(torch.optim.Muon(matrices, lr=rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
    if others:
        out.append(torch.optim.AdamW(others, lr=rate, betas=_BETAS, weight_decay=weight_decay))
    return out


def _between_hidden_states(model: nn.Module) -> frozenset[int]:
    """Identities of the matrices that neither take nor give tokens."""
    tokens = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    tokens |= {id(weight) for name, weight in model.named_parameters() if any(part in name for part in _OUTPUTS)}
    return frozenset(id(weight) for weight in model.parameters() if weight.ndim == 2) - tokens
