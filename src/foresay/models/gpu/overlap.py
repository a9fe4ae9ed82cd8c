"""Kernels that begin while the one before them ends: programmatic dependent launch, compute capability 9.0 and newer.

A kernel waits before it reads or writes what others do. Before that it prefetches its first weights, which no kernel writes,
so that the memory works while the last programs of the kernel before end.
"""

from __future__ import annotations

import logging
import os
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foresay.decoding.devices import is_gpu

logger = logging.getLogger("foresay")
SWITCH = "FORESAY_OVERLAP"
"""Environment variable: "1" lets kernels overlap, which no GPU has measured yet."""


@cache
def overlapping(device: torch.device) -> dict[str, bool]:
    """Return the options by which kernels that call `wait` are launched on a device."""
    if os.environ.get(SWITCH) != "1" or not is_gpu(device):
        return {"OVERLAPS": False}
    if torch.version.hip or torch.cuda.get_device_capability(device) < (9, 0):
        logger.warning("%s=1 has no effect on %s: it needs compute capability 9.0", SWITCH, device)
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}


@triton.jit
def wait(OVERLAPS: tl.constexpr):
    """Wait until the results of all kernels before are written, and let the next kernel begin."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Prefetch the cache lines at some addresses into the L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
