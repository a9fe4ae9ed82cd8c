"""Optimisers by name, and the weights that each one updates.

Muon (Jordan et al. 2024) orthogonalizes the update of each matrix, which is worth several times as many AdamW steps early in
training. Weights that are not matrices between hidden states (norms, embeddings, output layers) use AdamW. Knows no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from foresay.errors import ConfigError

OPTIMISERS = ("muon", "adamw")
_BETAS = (0.9, 0.95)
_OUTPUTS = ("lm_head", "embed_out", "markov_w2", "embed_proj.2", "codebook", "confidence_head")
_QUINTIC = (3.4445, -4.7750, 2.0315)
"""a x + b x^3 + c x^5, which moves singular values of (0, 1] towards 1 when applied a few times."""


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices.

    Updates have the root mean square of AdamW's, 0.2 (Liu et al. 2025, "Muon is scalable"), so that both use one learning rate.
    On a CPU the iteration runs in float32, since not every processor multiplies in 16 bits.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, *, weight_decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        """matrices: parameters of shape [A, B]."""
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight.grad)
                momentum = state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(momentum, group["momentum"]))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update.to(weight.dtype), alpha=-group["lr"] * 0.2 * max(weight.shape) ** 0.5)


def orthogonal(matrix: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Approximate U V^T of a matrix U S V^T [A, B] by a Newton-Schulz iteration: singular values end between 0.7 and 1.2."""
    a, b, c = _QUINTIC
    x = matrix.float() if matrix.device.type == "cpu" else matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def make_optimisers(
    name: str, model: nn.Module, trainable: Mapping[str, nn.Parameter], rate: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Return the optimisers of the parameters `learned`; each parameter has one. Raises ConfigError for an unknown name."""
    if name not in OPTIMISERS:
        raise ConfigError(f"must be one of {', '.join(OPTIMISERS)}", param="optimiser", value=name)
    hidden = _between_hidden_states(model) if name == "muon" else frozenset()
    matrices = [weight for weight in trainable.values() if id(weight) in hidden]
    others = [weight for weight in trainable.values() if id(weight) not in hidden]
    out: list[torch.optim.Optimizer] = []
    if matrices:
        out.append(Muon(matrices, rate, weight_decay=weight_decay))
    if others:
        out.append(torch.optim.AdamW(others, lr=rate, betas=_BETAS, weight_decay=weight_decay))
    return out


def _between_hidden_states(model: nn.Module) -> frozenset[int]:
    """Return the ids of the matrices whose input and output are both hidden states."""
    tokens = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    tokens |= {id(weight) for name, weight in model.named_parameters() if any(part in name for part in _OUTPUTS)}
    return frozenset(id(weight) for weight in model.parameters() if weight.ndim == 2) - tokens
