"""Whether foresay's kernels for GPUs run on a device."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec

import torch

logger = logging.getLogger("foresay")

SWITCH = "FORESAY_PAGES"
"""Environment variable: "0" turns the kernels off."""
_OLDEST = (8, 0)
"""Least compute capability: NVIDIA's GPUs before Ampere multiply no bf16."""


def uses_kernels(device: torch.device) -> bool:
    """Return True if our kernels for GPUs are used on a device: if Triton compiles them there, and a trial is right."""
    return device.type == "cuda" and os.environ.get(SWITCH) != "0" and _works(device.index)


@cache
def _works(index: int | None) -> bool:
    """index: of a GPU; None for the current one."""
    reason, device = "", torch.device("cuda" if index is None else f"cuda:{index}")
    try:
        if find_spec("triton") is None:
            reason = "there is no Triton"
        elif torch.version.hip is None and torch.cuda.get_device_capability(device) < _OLDEST:
            reason = f"its compute capability is below {_OLDEST[0]}.{_OLDEST[1]}"
        else:
            check(device)
    except Exception as error:  # Triton needs a C compiler, a driver that fits, and more
        reason = f"{type(error).__name__}: {error}"
    if reason:
        logger.warning("foresay's kernels are not used on the GPU, which costs speed: %s", reason)
    return not reason


def check(device: torch.device) -> None:
    """Run kernels on a device. Raises ValueError if their results are not PyTorch's, and any error of Triton."""
    from foresay.decoding import sampling_kernels  # Triton

    generator = torch.Generator().manual_seed(0)
    scores, count, mass, least = torch.randn(4, 1000, generator=generator), 20, 0.8, 0.02
    kept = scores.masked_fill(scores < scores.topk(count).values[:, -1:], -torch.inf).softmax(-1)
    ordered = kept.sort(-1, descending=True).values
    fewest = ordered.masked_fill(ordered.cumsum(-1) - ordered >= mass, torch.inf).amin(-1, keepdim=True)
    kept = torch.where((kept >= fewest) & (kept >= least * ordered[:, :1]), kept, 0.0)
    expected = kept / kept.sum(-1, keepdim=True)
    numbers = (torch.full((4,), one, device=device) for one in (count, mass, least))
    found = sampling_kernels.probabilities(
        scores.to(device), torch.ones(4, device=device), sampling_kernels.Cuts(*numbers)
    )
    uniforms = torch.tensor([0.1, 0.4, 0.6, 0.9], dtype=torch.float64)
    drawn = sampling_kernels.inverse_cdf(found, uniforms.to(device), torch.arange(4, device=device))
    tokens = (expected.double().cumsum(-1) <= uniforms[:, None]).sum(-1)
    if not torch.allclose(found.cpu(), expected, rtol=1e-3, atol=1e-6) or not torch.equal(drawn.cpu(), tokens):
        raise ValueError("probabilities or tokens differ from those of PyTorch")
