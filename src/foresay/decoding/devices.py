"""Transfers that do not wait for a device, and what differs where waiting costs more than computing.

A step reads one small tensor back. All else that the host knows is copied from pinned memory, and all that only the device knows
stays there: numbers of elements that a condition selects, for example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def is_gpu(device: torch.device) -> bool:
    """Return True for a GPU of NVIDIA or AMD, which has streams and events."""
    return device.type == "cuda"


def to_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return numbers, which may be nested, as a tensor on a device."""
    return moved(torch.tensor(values, dtype=dtype), device)


def moved(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor, of the host or of a device, on a device."""
    is_sent = not is_remote(values.device) and is_gpu(device)
    return (values.pin_memory() if is_sent else values).to(device, non_blocking=True)


def later(values: torch.Tensor) -> Callable[[], list[Any]]:
    """Begin to copy values to the host; return a function that waits for them alone, and not for what is requested after them."""
    if not is_gpu(values.device):
        return values.tolist
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(values.device))

    def read() -> list[Any]:
        copied.synchronize()
        return host.tolist()

    return read


def is_remote(device: torch.device) -> bool:
    """Return True if reading a value of a device waits for all that was requested of it before."""
    return device.type != "cpu"


def selected(mask: torch.Tensor) -> torch.Tensor:
    """Return the indices [n] where a mask [N] is True; all of them if counting would wait for a device.

    So results at these indices must be combined with the mask.
    """
    if is_remote(mask.device):
        return torch.arange(len(mask), device=mask.device)
    return torch.nonzero(mask)[:, 0]


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Let Triton launch its kernels on a device: it takes the current one, wherever their tensors are."""
    return torch.cuda.device(device) if is_gpu(device) else nullcontext()
