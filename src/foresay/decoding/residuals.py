"""Residual distribution of the target after a rejection."""

from __future__ import annotations

import torch

from foresay.decoding.sums import row_sums


def residual(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """Residual distribution after a rejection: norm(max(0, p - q)) (Leviathan et al. 2023, Alg. 1).

    target_probs, draft_probs: [..., V] -> [..., V], rows sum to 1.
    Where p <= q everywhere up to rounding the mass is 0 and p is returned: such a rejection has probability below
    float eps, and dividing would give NaN.
    """
    excess = (target_probs - draft_probs).clamp(min=0)
    mass = row_sums(excess)[..., None]
    return torch.where(mass > 0, excess / mass.clamp(min=torch.finfo(excess.dtype).tiny), target_probs)
