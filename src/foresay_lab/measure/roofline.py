"""The roofline of a forward pass: the bytes that it must read / the memory bandwidth of this machine.

Owns the measurement of bandwidth and the count of bytes (weights, keys and values). Times no forward pass.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from foresay.models.cache.memory import kv_bytes
from foresay.models.huggingface.linears import weight_bytes
from foresay.records.profile import Floor

_BLOCK_BYTES = 1 << 28
"""Far larger than any processor cache."""


def bandwidth(device: torch.device, repeats: int = 5) -> float:
    """Measure the memory bandwidth in bytes per second: the best of `repeats` sums over a large block."""
    block = torch.ones(_BLOCK_BYTES // 4, dtype=torch.float32, device=device)
    best = 0.0
    for _ in range(repeats):
        _synchronize(device)
        start = perf_counter()
        block.sum()
        _synchronize(device)
        best = max(best, _BLOCK_BYTES / (perf_counter() - start))
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def floor(model: Any) -> Floor | None:
    """Return the Floor of a transformers model on its device, or None for other models, such as a table."""
    inner = getattr(model, "model", None)
    if not isinstance(inner, torch.nn.Module):
        return None
    config: Any = inner.config
    cache = kv_bytes(config.get_text_config(decoder=True), model.cache_dtype)
    return Floor(weight_bytes(inner), cache, bandwidth(model.device))
