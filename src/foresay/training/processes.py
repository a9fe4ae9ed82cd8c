"""The processes of one training run, as `accelerate launch` starts them: one beside the others on each device.

Owns who they are, and what they must agree on: sums, clocks, who writes. Knows nothing of what is trained.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from accelerate import PartialState
from accelerate.utils import broadcast, reduce


def own_device(device: str | None) -> str | None:
    """A process's share of what the user named: of several processes on one kind of GPU, each takes its own."""
    rank = os.environ.get("LOCAL_RANK")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if rank is None or not several or device not in (None, "cuda") or not torch.cuda.is_available():
        return device
    return f"cuda:{rank}"


def is_first() -> bool:
    """Whether this is the process of a launch that speaks to the user."""
    return int(os.environ.get("RANK", "0")) == 0


class Processes:
    """This process and those beside it; a run that nobody launched in parts is one."""

    def __init__(self, device: torch.device) -> None:
        """device: where this one computes; the first call decides how they talk."""
        self._state = PartialState(cpu=device.type == "cpu")
        self._device = device
        self.index, self.count = int(self._state.process_index), int(self._state.num_processes)

    @property
    def writes(self) -> bool:
        """Whether this is the one that writes files and says how far the run is."""
        return self.index == 0

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            self._state.wait_for_everyone()

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all, on the CPU."""
        if self.count == 1:
            return values.cpu()
        out: torch.Tensor = reduce(values.to(self._device), "sum")
        return out.cpu()

    def add_up(self, values: Sequence[torch.Tensor]) -> None:
        """Put in each tensor's place the sum of all processes' tensors there."""
        if self.count > 1:
            flat: torch.Tensor = reduce(torch.cat([one.flatten() for one in values]), "sum")
            for one, new in zip(values, torch.split(flat, [one.numel() for one in values]), strict=True):
                one.copy_(new.view_as(one))

    def broadcast_first(self, value: float) -> float:
        """The first process's number: no two clocks are alike."""
        if self.count == 1:
            return value
        return float(broadcast(torch.tensor([value], dtype=torch.float32, device=self._device)).item())
