"""Source files of a library in place of the compiled kernels: all functions, without contents, which compile at once."""

from __future__ import annotations

import ctypes

from foresay.models.cpu import structs

FUNCTIONS = ["message", "check", "pass", "chain", "multiply", "pack", "rows"]
FUNCTIONS += ["bf16_dots", "tiles", "instructions", "add_norm", "gate", "attend", "mix"]


def source(*names: str, larger: int = 0) -> str:
    """A library of these functions. larger: bytes that its structs have more than ours."""
    sizes = ", ".join(str(ctypes.sizeof(kind) + larger) for kind in structs.STRUCTS)
    size_of = f'extern "C" long foresay_struct_size(long i) {{ long sizes[] = {{{sizes}}}; return sizes[i]; }}\n'
    return size_of + "".join(f'extern "C" long foresay_{name}() {{ return 0; }}\n' for name in names)
