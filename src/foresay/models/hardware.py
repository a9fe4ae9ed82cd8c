"""A device, and which of our kernels run there.

Owns the answers to questions about processors, GPUs and compilers for everything that scores tokens. Which layers the kernels
compute is their own answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foresay.decoding.devices import is_remote
from foresay.decoding.kernels import uses_kernels
from foresay.errors import ConfigError
from foresay.models.cpu.build import failure_reason, library

_WIDE = ("AVX512", "AMX")
"""Instruction sets of processors that compute in bf16 as fast as in float32, by PyTorch's names."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device, and the kernels that run there, which are compiled and tried at the first question of a process."""

    device: torch.device

    @property
    def on_cpu(self) -> bool:
        """True for a CPU, with or without compiled kernels."""
        return not is_remote(self.device)

    @property
    def cpu_kernels(self) -> bool:
        """True for a CPU for which our kernels were compiled."""
        return self.on_cpu and library() is not None

    @property
    def gpu_kernels(self) -> bool:
        """True for a GPU for which Triton compiles our kernels, and a trial of them was right."""
        return uses_kernels(self.device)

    @property
    def has_kernels(self) -> bool:
        """True if kernels of ours run on the device."""
        return self.cpu_kernels or self.gpu_kernels

    @property
    def native_dtype(self) -> torch.dtype:
        """bf16 if the device computes in it natively, else float32 (float16 on older GPUs)."""
        if self.device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        is_wide = any(name in torch.backends.cpu.get_cpu_capability() for name in _WIDE)
        return torch.bfloat16 if is_wide and self.packs(torch.bfloat16) else torch.float32

    def packs(self, dtype: torch.dtype) -> bool:
        """Return True if products of packed weights are faster: on a CPU with compiled kernels, or in bf16 with oneDNN's."""
        if not self.on_cpu or dtype not in (torch.float32, torch.bfloat16):
            return False
        if self.cpu_kernels or dtype == torch.float32:
            return self.cpu_kernels
        found = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        return bool(found and torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def check_compiled(self, what: str, instead: str) -> None:
        """Raise ConfigError if there are no compiled kernels. what: the setting that needs them. instead: what to do without."""
        if not self.cpu_kernels:
            reason = f"and there are none ({failure_reason()}); install a C++ compiler, or {instead}"
            raise ConfigError(f"{what} needs the compiled CPU kernels, {reason}")


CPU = Hardware(torch.device("cpu"))
