"""Kernels that were compiled beforehand for named instruction sets, for machines without a compiler, such as containers.

Owns the instruction sets, what a processor must have for each, and the names of the files. Does not compile.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

FOLDER = "FORESAY_KERNELS"
"""Environment variable: a folder of kernels compiled beforehand, which are used where they match source and processor."""
_AVX2 = frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_LEVELS: dict[str, dict[str, frozenset[str]]] = {
    "x86_64": {
        "x86-64-v4": _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
        "x86-64-v3": _AVX2,
    },
    "aarch64": {"armv8-a": frozenset({"asimd"})},
}
"""By machine: names that GCC's -march takes, the best first, and the flags in /proc/cpuinfo without which they do not run."""


def levels() -> list[str]:
    """The instruction sets that can be compiled for on this kind of machine, the best first."""
    return list(_LEVELS.get(platform.machine(), {}))


def supported(level: str, processor: str) -> bool:
    """True if a processor, given as its line of flags in /proc/cpuinfo, can run what was compiled for an instruction set."""
    return _LEVELS.get(platform.machine(), {})[level] <= set(processor.split())


def prepared(source: str, processor: str) -> Path | None:
    """The best kernels in $FORESAY_KERNELS that were compiled from this source and run on this processor; None without any."""
    if not (folder := os.environ.get(FOLDER)):
        return None
    paths = (place(Path(folder), level, source) for level in levels() if supported(level, processor))
    return next((path for path in paths if path.is_file()), None)


def place(folder: Path, level: str, source: str) -> Path:
    """The file for an instruction set. source: the digest of the sources and the compiler's arguments."""
    return folder / f"kernels-{level}-{source}.so"
