"""Compiled kernels with faults that a test switches on, and with emulated matrix instructions: compiled once for all workers."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

from foresay.models.cpu import build

SWITCHES = "extern int foresay_fault, foresay_emulates;\n"
EMULATED = ("amx.h", "tiles_allowed() { return true; }", "tiles_allowed() { return foresay_emulates; }")

FAULTS: dict[str, tuple[str, ...]] = {
    # experts
    "rows of other experts": ("experts.h", "products + i, «FAULT ? 0 : »at.first[i],"),
    "weights divided by their sum or not, the other way": ("experts.h", "if («bool(»e.renormalized«) != FAULT»)"),
    "corrections that count as weights": (
        "experts.h",
        "choice[i] = «(FAULT ? scores[i] = scores[i] + e.correction[i] : »scores[i]«)» +",
    ),
    "groups that are not selected": ("experts.h", "if («FAULT || »e.active_groups == e.groups) return"),
    "a shared expert without its gate": ("experts.h", "if («!FAULT && »e.shared_gate != nullptr) {"),
    "no shared expert": ("experts.h", "if («!FAULT && »e.shared_gate_up != nullptr) add_shared"),
    "weights without their scale": ("experts.h", "/ sum * «(FAULT ? 1.0f : »e.scale«)»"),
    # Gemma 4
    "values that are not normalized": ("attention.h", "if («!FAULT && »a.value_norm) unit"),
    "values that are rotated as keys are": (
        "attention.h",
        "rotate_heads(key.data(), a.keys, a, n);« if (FAULT && a.source == EQUAL) value = key;»",
    ),
    "experts without factors of their own": ("experts.h", "j < e.active && scales != nullptr« && !FAULT»;"),
    "a router that reads what experts read": ("experts.h", "multiply(e.router, «FAULT || »by.x == nullptr ?"),
    "a dense output with the norm of experts": ("kernels.cpp", "out + n * hidden, «FAULT ? after : »dense, 1.0f"),
    "inputs of the first layer for all": ("kernels.cpp", "«(FAULT ? 0 : »one.index«)» * width, width *"),
    "outputs without their scale": ("kernels.cpp", "*= «FAULT ? 1.0f : »layer.scale;"),
    "no clamped gate": ("layer.h", "if («!FAULT && »kind == CLAMPED)"),
    "a gate without its limit": ("layer.h", "limit = «FAULT ? 1e9f : »gate.limit;"),
    "no sinks": ("attention.h", "(«FAULT || »sink == nullptr ?"),
    # attention
    "sums that begin anew wherever a span looks next": (
        "attention.h",
        "from = «FAULT ? first_in_sight(a, n) : »first_in_sight(a, n) / POSITIONS * POSITIONS",
        "sum[r][v] = «FAULT ? Floats{} : »load<Floats>(sums[r] + d + v * LANES)",
        "store(sums[r] + d + v * LANES, «FAULT ? load<Floats>(sums[r] + d + v * LANES) + sum[r][v] : »sum[r][v]);",
    ),
    # states
    "a state restored one token off": (
        "recurrent.h",
        "repeat(base, row.base, row.next« - (FAULT && row.next > row.base)»);",
    ),
    "inputs of convolutions one token off": (
        "recurrent.h",
        "row.ring + «(»position« - (FAULT && position > row.from))» % states.slots * states.entry_size",
    ),
    "inputs before the base of the token after": ("recurrent.h", "row.next - states.tail + i« + FAULT»);"),
    # products
    "rows beyond the first four are added in parts": (
        "inputs.h",
        "«bool parts = FAULT && rows > 4;\n»"
        "group_products(kind, levels, block.scales, to - from, in.groups(first, from), «parts ? 4 : »rows, sums, block.levels);"
        """«if (parts) {
            float part[ROWS_AT_ONCE * PANEL] = {};
            group_products(kind, levels, block.scales, to - from, in.groups(first + 4, from), rows - 4, part, block.levels);
            for (int64_t i = 0; i < (rows - 4) * PANEL; i++) sums[4 * PANEL + i] += part[i];
        }»""",
    ),
    "inputs are rounded for the whole row": (
        "rounded.h",
        "«if (FAULT) scales[g] = scales[0];\n»sums[g] = scales[g] *",
    ),
    "sums that depend on the rows of their tile": ("integers.h", "x_scale = «(FAULT ? ROWS : 1) * »*by"),
    "the first group's multiple for all": ("integers.h", "by[v] = scales.multiple(«FAULT ? 0 : »g, FIRST + v)"),
    "the offset of the first of two groups": ("integers.h", "one(2 * pair + «(FAULT ? 0 : »1«)») << 16"),
    "256 inputs with the scale of the first": (
        "rounded.h",
        "scales[g] = round_numbers<SUPER>(x + «(FAULT ? 0 : »from«)»,",
    ),
    "256 products that depend on the rows of their tile": (
        "integers.h",
        "scales.scale(FIRST + v), «(FAULT ? ROWS : 1) * »x.scales[r * x.scale_stride]",
    ),
    "third bits of the other depths": ("quantized.h", "- 2 * odd - 4 * «(FAULT ? 1 - later : »later«)») & 0x04"),
    "codes of the next table entry": ("quantized.h", "table_levels<BITS>(out[i]« + (FAULT ? 0x01010101u : 0)»)"),
    "a task that throws": (
        "kernels.cpp",
        "«if (FAULT && panel == 3) throw std::bad_alloc();\n»int64_t first = panel * PANEL, count",  # of foresay_pack
    ),
    # products by matrix instructions
    "the second block of rows is the first": ("tiles.h", "(«(FAULT ? some : »more«)» + k,"),
    "depths of two panels": ("tiles.h", "k * PANEL + «(FAULT ? 0 : »PANEL«)»,"),
    "scales of the first block": ("integers.h", "x.scales[«(FAULT ? r % TILE_ROWS : »r«)» * x.scale_stride + g]"),
    "rows of the first block": ("tiles.h", "(x + «(FAULT ? 0 : »first«)» * stride + g"),
    "every group reads the first": ("tiles.h", "stride + «(FAULT ? 0 : »g * GROUP«)», stride"),
    "rows of the first block for 256": ("tiles.h", "(x + «(FAULT ? 0 : »first«)» * stride + k,"),
    "the first group's multiple by tiles": ("integers.h", "Ints one = scales.multiple(«FAULT ? 0 : »g, v);"),
    "the scale of the first row by tiles": ("integers.h", "some.scales[«(FAULT ? 0 : »r«)» *"),
    "upper bytes as lower ones": ("integers.h", "of_high + at) << «(FAULT ? 0 : »8«)»"),
    "a zero of every second level": ("integers.h", "odd -= «FAULT ? Shorts{} : »zero;"),
    "a group adds to the one before": (
        "tiles.h",
        "«if (!FAULT || g == 0) »tile_zero<0>(), tile_zero<1>();\n            tile_load<4>",
    ),
}
"""Changes of the sources by fault: a file, and pieces of it with what is added between « and ».

FAULT is true while the fault is switched on.
"""
Broken = Callable[..., AbstractContextManager[None]]


def write_sources(folder: Path) -> None:
    """Write the kernels' sources with all faults, switched off, and with emulated matrix instructions."""
    texts = {source.name: source.read_text() for source in build.SOURCES}
    texts["amx.h"] = Path(__file__).with_name("emulated_amx.h").read_text()
    texts["kernels.cpp"] += "int foresay_fault = 0, foresay_emulates = 0;\n"
    changes = [(0, *EMULATED)]
    for number, (name, *pieces) in enumerate(FAULTS.values(), 1):
        changes += [(number, name, re.sub("«.*?»", "", one, flags=re.S), re.sub("[«»]", "", one)) for one in pieces]
    for number, name, text, wrong in changes:
        assert texts[name].count(text) == 1, (name, text)
        texts[name] = texts[name].replace(text, wrong.replace("FAULT", f"(foresay_fault == {number})"))
    for name, text in texts.items():
        (folder / name).write_text(SWITCHES + text)


@contextmanager
def broken_kernels(folder: Path, fault: str = "", *, tiles: bool = False) -> Iterator[None]:
    """Replace the kernels by those in a folder, which the first worker compiles. tiles: use the emulated instructions."""
    folder.mkdir(exist_ok=True)
    sources = build.SOURCES
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORESAY_CACHE", str(folder / "cache"))
        with FileLock(folder / "lock"):
            write_sources(folder)
            patch.setattr(build, "SOURCES", tuple(folder / source.name for source in sources))
            build.library.cache_clear()
            library = build.library()
        assert library is not None, build.failure_reason()
        fault_switch, tiles_switch = (ctypes.c_int.in_dll(library, f"foresay_{name}") for name in ("fault", "emulates"))
        fault_switch.value, tiles_switch.value = [*FAULTS].index(fault) + 1 if fault else 0, tiles
        try:
            yield
        finally:
            build.library.cache_clear()
