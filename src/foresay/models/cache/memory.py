"""How much memory keys and values will take, and how much there is.

Owns the sizes by configuration and what the machine, its container or its GPU has left. Decides nothing.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")
_KEPT_FREE = 0.1
"""Share of what is left that is left: a pass needs room for its own numbers."""


def kv_bytes(config: Any, element_size: int) -> int:
    """Keys and values of one token over all layers, in bytes."""
    layers = int(getattr(config, "num_hidden_layers", 0))
    heads = int(getattr(config, "num_attention_heads", 1))
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    size = int(getattr(config, "head_dim", None) or math.ceil(getattr(config, "hidden_size", 0) / heads))
    return 2 * layers * kv_heads * size * element_size


def free_bytes(device: torch.device) -> int:
    """Bytes that may still be taken on a device: nine tenths of what is left."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((1 - _KEPT_FREE) * (free + held))
    left = psutil.virtual_memory().available
    bound = _container_left()
    return int((1 - _KEPT_FREE) * (left if bound is None else min(left, bound)))


def trim() -> None:
    """Give memory that was freed back to the system; glibc keeps much of it otherwise. Does nothing with another C library."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return


def _container_left() -> int | None:
    """What the limit of a container leaves; None without one."""
    try:
        most = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        reclaimable = next(
            (
                int(line.split()[1])
                for line in (_CGROUP / "memory.stat").read_text().splitlines()
                if line.startswith("inactive_file ")
            ),
            0,
        )
        return None if most == "max" else max(0, int(most) - used + reclaimable)
    except (OSError, ValueError, IndexError):
        return None
