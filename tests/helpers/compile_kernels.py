"""Every Triton kernel compiled for GPUs that are not there: `python tests/helpers/compile_kernels.py`, without TRITON_INTERPRET.

The interpreter runs what a compiler may refuse, and knows no limits. Machine code is made for NVIDIA's Ampere and Hopper, and for
AMD's CDNA 3. As at a launch, addresses and sizes are multiples of 16. It fails if a kernel needs too much shared memory, and if
attention waits for all of its copies before it computes a page: then loads and arithmetic alternate.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from foresay.decoding import sampling_kernels as sampling
from foresay.decoding import sampling_rows
from foresay.models.gpu import attention, blocks, chains, experts, growth, product, registers, rows
from foresay.models.levels import KINDS

TARGETS = (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64))
SHARED = {80: 99 << 10, 90: 227 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory that a program may have: on 8.0 as on the consumer cards of its instructions, 8.6 to 12.0."""
ACCESS = re.compile(r"\b(ld|st|red|atom)\.(?!param)|\bcp\.async\.(?!wait|commit)")
"""Instructions that read or write memory."""
CHANGES = ("num_tokens", "count", "num_pairs", "shift", "window", "width")
"""Numbers that are no multiples of 16, or not known."""
INT32 = ("rows", "positions", "slots", "firsts", "ends", "tiles", "pages", "counts")
FLOAT32 = ("sums", "stats", "cosines", "sines", "q_weight", "k_weight", "weight_after", "weight_before")
NUMBERS = {"scaling", "softcap", "scale", "eps_after", "eps_before", "q_eps", "k_eps"}
SIZES = {"window", "width", "num_tokens", "count", "size", "outputs", "inputs", "stride", "vocab", "blocks", "shift"}
OF_SAMPLING = {
    **dict.fromkeys(("tops", "masses", "probability", "temperature", "weights", "goals"), "*fp32"),
    **dict.fromkeys(("sums_before", "min_p", "probs"), "*fp32"),
    **dict.fromkeys(("best", "floors", "prefixes", "thresholds"), "*i32"),
    **dict.fromkeys(("tokens", "rows"), "*i64"),
    "uniforms": "*fp64",
    "numbers": "*fp32",
    "steps": "*i32",
}
"""Types of the arguments of the kernels that sample."""
OF_BLOCKS = {"high": "*u8", "mins": "*u8", "whole": "*fp16", "level_stride": "i32", "num_scales": "i32", "zeros": "*i8"}
OF_CHAINS = {
    **dict.fromkeys(("chosen", "ids", "drawn", "token_ids"), "*i64"),
    **dict.fromkeys(("fields", "steps", "left"), "*i32"),
}
OF_GROWTH = {
    **dict.fromkeys(("ids", "tokens", "numbers", "nodes", "parents", "indices", "bits", "sources"), "*i64"),
    **dict.fromkeys(("token_ids", "places", "above"), "*i64"),
    **dict.fromkeys(("paths", "expanded"), "*fp64"),
    **dict.fromkeys(("fields", "tiles", "depths"), "*i32"),
    "probs": "*fp32",
    "rows": "i32",
}
TREE = {"BRANCHES": 4, "NODES": 52, "EXPANDED": 16, "TILE": 4}
OF_EXPERTS = {
    **dict.fromkeys(("selected", "slots", "pairs", "counts"), "*i32"),
    **dict.fromkeys(("num_pairs", "expert_stride", "output_stride", "input_stride"), "i32"),
    **dict.fromkeys(("alpha", "limit"), "fp32"),
    "weights": "*fp32",
}
PARTS = {"PARTS": 32, "PARTS_PADDED": 32}
DIGITS = PARTS | {"DIGITS": 32}
HEADS = {"KEY_HEADS": 8, "DIM": 128, "DIM_PADDED": 128, "PAGE": attention.PAGE}
SUMS = [{"PARTS": 1, "HAS_BIAS": False}, {"PARTS": 4, "HAS_BIAS": True}]
KINDS_OF_VALUES = [{"EQUAL": equal, "UNIT": unit} for equal, unit in ((False, False), (True, True), (False, True))]


def partial_attention(
    group: int, dim: int, capped: bool, is_prompt: bool
) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """Attention over heads of `dim` numbers in bf16."""
    tokens = attention.tokens_per_tile(8 * group, 8, 2 * dim, is_prompt=is_prompt)
    sizes = {
        "GROUP": group,
        "GROUP_PADDED": max(triton.next_power_of_2(group), attention.LINES // tokens),
        "TOKENS": tokens,
    }
    fixed = {"SPLITS": attention.PROMPT_SPLITS if is_prompt else attention.SPLITS, "NODES": attention.NODES}
    fixed |= {"HAS_CAP": capped, "HAS_WINDOW": capped, "HAS_SINKS": group == 4}
    options = {"num_warps": 8 if is_prompt else 4, "num_stages": attention.stages(2 * dim)}
    return attention._partial, HEADS | {"DIM": dim, "DIM_PADDED": dim} | sizes | fixed, options


def of_kind(kind: str) -> dict[str, Any]:
    """Constants of products over a quantized type of GGUF files."""
    bits, group, zero, shared = KINDS[kind]
    has_mins = kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
    sizes = {"GROUP": group, "BITS": bits, "ZERO": zero, "SHARED": shared, "PER": 1, "QUAD": registers.QUAD}
    return sizes | {"HAS_MINS": has_mins, "HAS_ZEROS": False, "FLOATS": kind == "MXFP4", "PTX": None}


KERNELS: list[tuple[Any, ...]] = [
    *(
        partial_attention(group, dim, capped, is_prompt)
        for group, dim, capped in ((4, 64, False), (4, 128, False), (3, 128, True), (1, 256, True), (2, 512, False))
        for is_prompt in (False, True)
    ),
    *((rows._add_norm, SUMS[on] | {"BLOCK": 4096, "ADDS": on, "AFTER": on, "BEFORE": True}) for on in (False, True)),
    *(
        (rows._place, HEADS | placing | kind | {"ROTATED": turned, "NORMS": turned > 0})
        for placing, kind, turned in (
            (SUMS[0] | {"QUERY_HEADS": 32}, KINDS_OF_VALUES[0], 0),
            (SUMS[1] | {"QUERY_HEADS": 32}, KINDS_OF_VALUES[0], 128),
            *((SUMS[1] | {"QUERY_HEADS": 0}, kind, 128) for kind in KINDS_OF_VALUES),
            (SUMS[0] | {"QUERY_HEADS": 8, "KEY_HEADS": 0}, KINDS_OF_VALUES[0], 128),
        )
    ),
    *((rows._gate, SUMS[kind % 2] | {"BLOCK": 1024, "KIND": kind}) for kind in range(len(product.GATES))),
    *(
        (
            product._product,
            {"TOKENS": side, "OUTPUTS": product.LONG, "INNER": min(128, 128 * 128 // side), "PARTS": parts}
            | {"HAS_BIAS": parts == 1, "KIND": kind, "UNIT": product.INNER},
            {"num_warps": 8 if side > 128 else 4},
        )
        for parts, kind in ((1, -1), (4, -1), (1, 0), (1, 2))
        for side in product.SIDES
    ),
    *(
        (
            blocks._product,
            {"TOKENS": side, "OUTPUTS": product.LONG, "PARTS": 4, "HAS_BIAS": False} | of_kind(kind),
            blocks.options(side),
        )
        for kind in KINDS
        for side in blocks.SIDES
    ),
    *(
        (
            blocks._product,
            {"TOKENS": product.TOKENS, "OUTPUTS": product.LONG, "GROUP": 32, "BITS": bits, "ZERO": 0, "SHARED": 0}
            | {"HAS_MINS": not zeros, "PARTS": 4, "QUAD": registers.QUAD, "PTX": None}
            | {"PER": 4, "HAS_ZEROS": zeros, "FLOATS": floats, "HAS_BIAS": True},
        )
        for bits, zeros, floats in ((4, True, False), (8, True, False), (4, False, False), (8, False, True))
    ),
    (experts._list, {"ACTIVE": 8, "CHUNK": 1024}),
    *(
        (
            experts._grouped,
            {
                "ACTIVE": 8,
                "OF_TOKENS": first,
                "HAS_BIAS": first,
                "TOKENS": tokens,
                "OUTPUTS": product.LONG,
                "INNER": 128,
            }
            | how,
        )
        for first, tokens in ((True, experts.TOKENS), (False, experts.PROMPT_TOKENS))
        for how in (experts._NUMBERS, *map(of_kind, KINDS))
    ),
    *((experts._clamped, {"BLOCK": 1024, "ALTERNATES": on}) for on in (False, True)),
    (experts._mix, {"ACTIVE": 8, "BLOCK": 1024}),
    (product._reduce, {"BLOCK": 1024, "PARTS": 4, "HAS_BIAS": True}),
    (sampling._peaks, {"SPAN": sampling.SPAN, "GREATEST": 3e38}),
    (sampling._likeliest, PARTS),
    (sampling._weigh, PARTS | {"SPAN": sampling.SPAN}),
    *(
        (
            sampling._search,
            DIGITS | {"LEVEL": level, "BY_MASS": by_mass, "SPAN": sampling.SPAN, "CHUNK": sampling._CHUNK, "DIGIT": 5},
        )
        for level in (0, 1, 2)
        for by_mass in (False, True)
    ),
    *((sampling._threshold, DIGITS | {"LEVEL": 5, "BY_MASS": by_mass}) for by_mass in (False, True)),
    (sampling._cut, {"SPAN": sampling.SPAN, "PARTS": 32}),
    (sampling._divide, PARTS | {"SPAN": sampling.SPAN}),
    (sampling._block_sums, {"SPAN": sampling.SPAN, "BLOCK": 128}),
    *((chains._settle, {"MOST": chains.MOST, "MAPS": maps}) for maps in (False, True)),
    *((growth.children, {"BRANCHES": 4, "CHUNK": growth.CHUNK, "MAPS": maps}) for maps in (False, True)),
    *(
        (growth.expand, TREE | {"LEVEL": level, "BASE": 4 * level, "BEFORE": 4 * level} | sizes)
        for level, sizes in (
            (0, {"LAST": 0, "COUNT": 4, "PADDED": 4, "GROWS": 4}),
            (1, {"LAST": 4, "COUNT": 16, "PADDED": 16, "GROWS": 4}),
            (2, {"LAST": 10, "COUNT": 40, "PADDED": 64, "GROWS": 0}),
        )
    ),
    (growth.prune, {"NODES": 252, "PADDED": 256, "MOST": 60, "MOST_PADDED": 64}),
    (sampling._inverse, {"BLOCK": 128, "BLOCKS_PADDED": 1024}),
    *(
        (
            sampling_rows._choose,
            {"BLOCKS": 256, "BLOCK": 128, "SAMPLES": bool(kinds), "GREATEST": 3e38}
            | {"BY_K": kinds > 1, "BY_P": kinds > 2, "BY_MIN": kinds > 3},
            {"num_warps": 16},
        )
        for kinds in range(5)
    ),
]


def of_blocks(name: str, constants: dict[str, Any]) -> str:
    """The type of an argument of kernels over quantized weights. Scales of floats of 4 bits are exponents."""
    if name in ("levels", "weight"):
        return "*i8" if constants["BITS"] == 8 else "*i16"
    if name == "mins" and not constants["SHARED"]:
        return "*fp16"
    if name == "scales" and constants["FLOATS"]:
        return "*fp32" if constants["BITS"] == 8 else "*u8"
    if name == "scales":
        return "*fp16" if not constants["SHARED"] else "*u8" if constants["BITS"] == 4 else "*i8"
    return OF_BLOCKS[name]


def kind_of(kernel: Any, name: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if constants.get("BITS") and name in ("levels", "weight", "scales", *OF_BLOCKS):
        return of_blocks(name, constants)
    tables = {
        chains: OF_CHAINS,
        experts: OF_EXPERTS,
        sampling: OF_SAMPLING,
        sampling_rows: OF_SAMPLING,
        growth: OF_GROWTH,
    }
    own = {module.__name__: table for module, table in tables.items()}.get(kernel.__module__, {})
    if name in own:
        return own[name]
    if name in NUMBERS:
        return "fp32"
    if name == "sums" and constants.get("PARTS") == 1:
        return "*bf16"
    if name in SIZES:
        return "i32"
    return "*i32" if name in INT32 else "*i64" if name == "seen" else "*fp32" if name in FLOAT32 else "*bf16"


def aligned(kernel: Any, signature: dict[str, str]) -> dict[tuple[int], list[list[Any]]]:
    """The arguments that are multiples of 16."""
    names = [n for n, kind in signature.items() if kind[0] == "*" or (kind == "i32" and n not in CHANGES)]
    return {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in names}


def problem_of(kernel: Any, made: Any, target: GPUTarget) -> str:
    """The problem of a compiled kernel; "" without one."""
    if made.metadata.shared > SHARED[target.arch]:
        return "too much"
    begin, waits, _ = made.asm.get("ptx", "").partition("griddepcontrol.wait")
    if target.arch == 90 and "OVERLAPS" in kernel.arg_names and (not waits or ACCESS.search(begin)):
        return "memory of other kernels is accessed before they have ended"
    if kernel is not attention._partial or target.backend != "cuda" or made.metadata.num_stages == 1:
        return ""
    in_flight = [int(count) for count in re.findall(r"async_wait.*num = (\d+)", made.asm["ttgir"])]
    return "" if in_flight and in_flight[0] > 0 else "no copy is in flight while a page is computed"


def main() -> int:
    """Compile every kernel for every target; 1 if one has a problem."""
    failed = 0
    for target in TARGETS:
        for kernel, fixed, *options in KERNELS:
            constants = fixed | ({"PTX": target.backend == "cuda"} if fixed.get("PTX", 0) is None else {})
            if "OVERLAPS" in kernel.arg_names:
                constants |= {"OVERLAPS": target.arch == 90}
            signature = {name: kind_of(kernel, name, constants) for name in kernel.arg_names}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned(kernel, signature))
            how = options[0] if options else {}
            if kernel is attention._partial and how["num_stages"] > 1:
                how = how | {"num_stages": attention.stages(0, target.backend)}
            made = triton.compile(source, target=target, options=how)
            problem = problem_of(kernel, made, target)
            failed |= bool(problem)
            what = (target.backend, target.arch, kernel.__name__, made.metadata.shared, "bytes of shared memory")
            print(*what, problem, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
