"""Agreement of the processes that compute one model together (tensor parallelism under torchrun).

Each process runs the same loop and computes a share of every pass, so all must run the same passes: values that depend on a
clock, on random numbers or on a machine's memory are broadcast by the first process or reduced. Knows no models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def broadcast_first(values: Sequence[int]) -> list[int]:
    """Return the first process's integers in every process; all must pass equally many."""
    tensor = torch.tensor(list(values), dtype=torch.int64, device=_device())
    dist.broadcast(tensor, 0)
    out: list[int] = tensor.tolist()
    return out


def minimum(value: int) -> int:
    """Return the smallest of all processes' integers."""
    tensor = torch.tensor([value], dtype=torch.int64, device=_device())
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return int(tensor.item())


def is_first() -> bool:
    """True in the process whose values are broadcast, which also writes the output."""
    return dist.get_rank() == 0


def _device() -> torch.device:
    """Device of tensors that the processes' backend can send."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
