"""Every Triton kernel compiled for GPUs that are not there: `python tests/helpers/compile_kernels.py`, without TRITON_INTERPRET.

The interpreter runs what a compiler may refuse. Machine code is made for NVIDIA's Ampere and Hopper; for AMD's CDNA 3 too.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from foresay.models.gpu import attention, product, rows

TARGETS = (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64))
INT32 = ("rows", "positions", "slots", "firsts", "ends", "tiles", "pages")
FLOAT32 = ("sums", "stats", "cosines", "sines", "q_weight", "k_weight", "weight_after", "weight_before")
NUMBERS = {"scaling", "softcap", "scale", "eps_after", "eps_before", "q_eps", "k_eps"}
SIZES = {"window", "width", "num_tokens", "size", "outputs", "inputs", "stride"}
HEADS = {"KEY_HEADS": 8, "DIM": 128, "DIM_PADDED": 128, "PAGE": attention.PAGE}
KERNELS: list[tuple[Any, dict[str, Any]]] = [
    *(
        (
            attention._partial,
            HEADS
            | {"GROUP": group, "GROUP_PADDED": 4, "TOKENS": 4, "SPLITS": attention.SPLITS, "NODES": attention.NODES}
            | {"HAS_CAP": capped, "HAS_WINDOW": capped},
        )
        for group, capped in ((4, False), (3, True))
    ),
    *(
        (attention._combine, {"HEADS": 32, "DIM": 128, "DIM_PADDED": 128, "SPLITS": attention.SPLITS, "HAS_SINKS": on})
        for on in (False, True)
    ),
    *((rows._add_norm, {"BLOCK": 4096, "ADDS": on, "AFTER": on, "BEFORE": True}) for on in (False, True)),
    *((rows._place, HEADS | {"QUERY_HEADS": 32, "ROTATED": turned, "NORMS": turned > 0}) for turned in (0, 128)),
    *((rows._gate, {"BLOCK": 1024, "KIND": kind}) for kind in range(len(rows.GATES))),
    (product._product, {"TOKENS": product.TOKENS, "OUTPUTS": product.OUTPUTS, "INNER": product.INNER, "PARTS": 4}),
    (product._reduce, {"BLOCK": 1024, "PARTS": 4, "HAS_BIAS": True}),
]


def kind_of(name: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in NUMBERS:
        return "fp32"
    if name in SIZES:
        return "i32"
    return "*i32" if name in INT32 else "*i64" if name == "seen" else "*fp32" if name in FLOAT32 else "*bf16"


def main() -> int:
    for target in TARGETS:
        for kernel, constants in KERNELS:
            signature = {name: kind_of(name, constants) for name in kernel.arg_names}
            made = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants), target=target)
            print(
                target.backend, target.arch, kernel.__name__, made.metadata.shared, "bytes of shared memory", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
