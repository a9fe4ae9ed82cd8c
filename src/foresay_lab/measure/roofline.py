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

BLOCK_BYTES, _GPU_BYTES = 1 << 28, 1 << 32
"""Far larger than any cache of a processor, and of a GPU, where sums also begin and end more slowly."""


def bandwidth(device: torch.device, repeats: int = 5) -> float:
    """Measure the memory bandwidth in bytes per second: the best of `repeats` sums over a large block.

    On a GPU by events of the device: the host's time includes the launch, which makes every ratio to a floor too good.
    """
    size, seconds = BLOCK_BYTES, _host_seconds
    if device.type == "cuda":
        size, seconds = min(_GPU_BYTES, torch.cuda.mem_get_info(device)[0] // 8 * 4), _device_seconds
    block = torch.ones(size // 4, dtype=torch.float32, device=device)
    return max(size / seconds(block) for _ in range(repeats))


def _host_seconds(block: torch.Tensor) -> float:
    start = perf_counter()
    block.sum()
    return perf_counter() - start


def _device_seconds(block: torch.Tensor) -> float:
    event: Any = torch.cuda.Event
    with torch.cuda.device(block.device):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        block.sum()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def floor(model: Any) -> Floor | None:
    """Return the Floor of a transformers model on its device, or None for other models, such as a table."""
    inner = getattr(model, "model", None)
    if not isinstance(inner, torch.nn.Module):
        return None
    config: Any = inner.config
    cache = kv_bytes(config.get_text_config(decoder=True), model.cache_dtype)
    return Floor(weight_bytes(inner), cache, bandwidth(model.device))
