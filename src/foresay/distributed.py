"""The processes that compute one model together, as torchrun starts them: what one of them must not decide alone.

Each runs the same loop and computes a share of every pass, so that they must ask for the same passes: what hangs on a clock,
on chance or on a machine's memory is said by the first, or agreed on. Knows no models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def broadcast_first(values: Sequence[int]) -> list[int]:
    """The first process's numbers, in every one; all call it with as many."""
    told = torch.tensor(list(values), dtype=torch.int64, device=_device())
    dist.broadcast(told, 0)
    out: list[int] = told.tolist()
    return out


def minimum(value: int) -> int:
    """The smallest of all processes' numbers."""
    told = torch.tensor([value], dtype=torch.int64, device=_device())
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return int(told.item())


def is_first() -> bool:
    """Whether this is the process whose word counts, and the one that speaks to the user."""
    return dist.get_rank() == 0


def _device() -> torch.device:
    """Where the processes' way of talking takes numbers from."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
