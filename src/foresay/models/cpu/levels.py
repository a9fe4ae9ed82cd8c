"""Kernels that are precompiled for named instruction sets, for machines without a compiler, such as containers.

Owns the instruction sets, the processor features that each requires, and the names of the files. Does not compile.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

FOLDER = "FORESAY_KERNELS"
"""Environment variable: a folder of precompiled kernels, which are used if they match the source and the processor."""
PREBUILT = Path(__file__).with_name("prebuilt")
"""Folder of the installed package with precompiled kernels; not in every distribution."""
_AVX2 = frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512_BF16 = _AVX512 | {"avx512_vnni", "avx512_bf16"}
_LEVELS: dict[str, dict[str, tuple[str, frozenset[str]]]] = {
    "x86_64": {
        "avx512-amx": (
            "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16",
            _AVX512_BF16 | {"amx_tile", "amx_int8", "amx_bf16"},
        ),
        "avx512-bf16": ("-march=x86-64-v4 -mavx512vnni -mavx512bf16", _AVX512_BF16),
        "avx512-vnni": ("-march=x86-64-v4 -mavx512vnni", _AVX512 | {"avx512_vnni"}),
        "avx512": ("-march=x86-64-v4", _AVX512),
        "avx2-vnni": ("-march=x86-64-v3 -mavxvnni", _AVX2 | {"avx_vnni"}),
        "avx2": ("-march=x86-64-v3", _AVX2),
    },
    "aarch64": {
        "i8mm-bf16": ("-march=armv8.2-a+dotprod+bf16+i8mm", frozenset({"asimd", "asimddp", "bf16", "i8mm"})),
        "dotprod-bf16": ("-march=armv8.2-a+dotprod+bf16", frozenset({"asimd", "asimddp", "bf16"})),
        "dotprod": ("-march=armv8.2-a+dotprod", frozenset({"asimd", "asimddp"})),
        "neon": ("-march=armv8-a", frozenset({"asimd"})),
    },
}
"""Instruction sets by machine, the best first: the compiler's arguments, and the flags in /proc/cpuinfo that each requires."""


def levels() -> list[str]:
    """Return the instruction sets of this kind of machine, the best first."""
    return list(_LEVELS.get(platform.machine(), {}))


def arguments(level: str) -> list[str]:
    """Return the compiler's arguments for an instruction set of this kind of machine."""
    return _LEVELS[platform.machine()][level][0].split()


def supported(level: str, processor: str) -> bool:
    """Return True if a processor can run an instruction set. processor: its line of flags in /proc/cpuinfo."""
    return _LEVELS[platform.machine()][level][1] <= set(processor.split())


def precompiled(source: str, processor: str, *, prebuilt: bool = True) -> Path | None:
    """Return the best kernels for this source and processor in $FORESAY_KERNELS, or None.

    prebuilt: search the installed package too, if there are none.
    """
    given = os.environ.get(FOLDER)
    folders = [*([Path(given)] if given else ()), *([PREBUILT] if prebuilt else ())]
    names = [level for level in levels() if supported(level, processor)]
    paths = (path_of(folder, level, source) for folder in folders for level in names)
    return next((path for path in paths if path.is_file()), None)


def unmatched() -> str:
    """Return a sentence that $FORESAY_KERNELS has no kernels for this source and processor; "" if the variable is not set."""
    folder = os.environ.get(FOLDER)
    return f"{FOLDER}={folder} has no kernels for this version of foresay and this processor" if folder else ""


def path_of(folder: Path, level: str, source: str) -> Path:
    """Return the path for an instruction set. source: digest of the sources and the compiler's arguments."""
    return folder / f"kernels-{level}-{source}.so"
