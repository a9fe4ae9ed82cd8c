"""Memory that keys and values need, and memory that is free.

Owns cache sizes by configuration and the free memory of the machine, its container or its GPU. Makes no decisions.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import psutil
import torch

from foresay.errors import ConfigError, OutOfMemoryError

CGROUP = Path("/sys/fs/cgroup")
"""Folder in which Linux states what a container may use, and uses."""
_RESERVED_SHARE = 0.1
"""Share of the free memory that caches may not use: a forward pass needs room for its activations."""
_MIN_SLACK = 16 << 20
_IDLE_SHARE, _BUSY_SHARE = 32, 4
"""Parts of the resident memory that the allocator may keep: trimming delays threads that allocate."""


def kv_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values over all layers; in int8 each head has a scale."""
    layers = int(getattr(config, "num_hidden_layers", 0))
    if (
        modes := getattr(config, "kv_sharing_modes", None)
    ) is not None:  # sizes differ; some layers have none of their own
        return sum(_layer_bytes(config.per_layer_config[i], dtype) for i, mode in enumerate(modes) if mode != "reuse")
    return layers * _layer_bytes(config, dtype)


def _layer_bytes(config: Any, dtype: torch.dtype) -> int:
    heads = int(getattr(config, "num_attention_heads", 1))
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    size = int(getattr(config, "head_dim", None) or math.ceil(getattr(config, "hidden_size", 0) / heads))
    return 2 * kv_heads * (size + 4 if dtype is torch.int8 else size * dtype.itemsize)


def limit_memory(limit: int | None) -> None:
    """Bound this process's memory on the CPU: caches grow, and long texts are read (`check_limit`), only as far as the resident
    memory stays below it. None: no bound.

    limit: bytes. Raises ConfigError if the process already takes more.
    """
    global _limit
    if limit is not None and limit <= (used := resident_bytes()):
        text = f"leaves nothing for requests: {used / 1e6:,.0f} MB are in use"
        raise ConfigError(text, param="memory_limit", value=f"{limit / 1e6:,.0f} MB")
    _limit = limit


_limit: int | None = None


def left_bytes() -> int | None:
    """Return the bytes that are left below the limit of `limit_memory`, negative above it; None without a limit."""
    return None if _limit is None else _limit - resident_bytes()


def check_limit(needed: int) -> None:
    """Raise OutOfMemoryError if less than `needed` bytes are left below the limit of `limit_memory`."""
    if _limit is not None and (used := resident_bytes()) + needed > _limit:
        trim()
        if resident_bytes() + needed > _limit:
            text = f"the request may take {needed / 1e6:,.0f} MB, and {used / 1e6:,.0f} of {_limit / 1e6:,.0f} MB are in use"
            raise OutOfMemoryError(f"{text}; try again later")


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that caches may still allocate on a device: nine tenths of its free memory, within the limit."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((1 - _RESERVED_SHARE) * (free + unused))
    left, bound = psutil.virtual_memory().available, _container_left()
    found = int((1 - _RESERVED_SHARE) * (left if bound is None else min(left, bound)))
    if _limit is None:
        return found
    if _limit - resident_bytes() < _limit // 4:
        trim()
    return min(found, max(0, _limit - resident_bytes()))


class _MallInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def slack_bytes() -> int:
    """Return the free bytes in the allocator's heaps, some of which `trim` has returned; 0 where they are not reported."""
    try:
        call = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return 0
    call.restype = _MallInfo
    return int(call().fordblks)


def trim() -> None:
    """Return freed memory to the system, much of which glibc keeps otherwise. Does nothing with another C library."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return


class Trimmer:
    """Trims the allocator's heaps when their free memory has grown: most of it stays with the process otherwise."""

    def __init__(self) -> None:
        self._rest = 0
        """Slack that trimming has left: free pages are returned, but the C library counts them on."""
        self._resident = resident_bytes()
        """Resident memory after the last trim: memory that was used and freed again fills the slack that is counted on."""

    def check(self, *, idle: bool) -> bool:
        """Trim if the slack has passed a bound, which is low for an idle process; return True if it has."""
        slack, resident = slack_bytes(), resident_bytes()
        self._rest, self._resident = min(self._rest, slack), min(self._resident, resident)
        bound = max(_MIN_SLACK, resident // (_IDLE_SHARE if idle else _BUSY_SHARE))
        if max(slack - self._rest, min(slack, resident - self._resident)) <= bound:
            return False
        trim()
        self._rest, self._resident = slack_bytes(), resident_bytes()
        return True


def _container_left() -> int | None:
    """Return the bytes left below the container's memory limit, or None without a limit."""
    try:
        most = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        reclaimable = next(
            (
                int(line.split()[1])
                for line in (CGROUP / "memory.stat").read_text().splitlines()
                if line.startswith("inactive_file ")
            ),
            0,
        )
        return None if most == "max" else max(0, int(most) - used + reclaimable)
    except (OSError, ValueError, IndexError):
        return None
