"""The processes of a distributed training run, as `accelerate launch` starts them: one per device.

Owns their identity and communication: sums, a common clock, the writing process. Knows nothing of the training itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from accelerate import PartialState
from accelerate.utils import broadcast, reduce


def own_device(device: str | None) -> str | None:
    """Return the device of this process: with several processes on "cuda", each takes its own GPU."""
    rank = os.environ.get("LOCAL_RANK")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if rank is None or not several or device not in (None, "cuda") or not torch.cuda.is_available():
        return device
    return f"cuda:{rank}"


def is_first() -> bool:
    """True if this is the process that writes messages to the user."""
    return int(os.environ.get("RANK", "0")) == 0


class Processes:
    """This process and the others of the run. Without a launcher there is one."""

    def __init__(self, device: torch.device) -> None:
        """device: the device of this process; the first call selects the communication backend."""
        self._state = PartialState(cpu=device.type == "cpu")
        self._device = device
        self.index, self.count = int(self._state.process_index), int(self._state.num_processes)

    @property
    def is_main(self) -> bool:
        """True if this process writes files and reports progress."""
        return self.index == 0

    def wait(self) -> None:
        """Wait for all processes."""
        if self.count > 1:
            self._state.wait_for_everyone()

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes, on the CPU."""
        if self.count == 1:
            return values.cpu()
        out: torch.Tensor = reduce(values.to(self._device), "sum")
        return out.cpu()

    def sum_in_place(self, values: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all processes."""
        if self.count > 1:
            flat: torch.Tensor = reduce(torch.cat([one.flatten() for one in values]), "sum")
            for one, new in zip(values, torch.split(flat, [one.numel() for one in values]), strict=True):
                one.copy_(new.view_as(one))

    def broadcast_first(self, value: float) -> float:
        """Return the first process's value, since clocks differ."""
        if self.count == 1:
            return value
        return float(broadcast(torch.tensor([value], dtype=torch.float32, device=self._device)).item())
