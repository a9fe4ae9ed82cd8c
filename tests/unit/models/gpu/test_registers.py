"""Levels as they become numbers in registers: in each dtype of states, and by the PTX that the interpreter does not run."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from foresay.models.gpu import blocks, registers
from foresay.models.gpu.blocks import BlockProduct
from foresay.models.levels import Levels
from helpers.gguf_files import random_blocks

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q5_0", "Q5_K", "Q6_K", "Q8_0"])
def test_levels_are_exact_in_two_bytes(kind: str) -> None:
    """In float16: the interpreter does not compute in bf16, which differs by two constants."""
    dtype = torch.float16
    data, weight = random_blocks(kind, 24, 512, 3)
    found = BlockProduct(Levels.of_file(kind, data), dtype, CPU, None)
    x = torch.eye(512)[[0, 31, 32, 97, 130, 255, 300, 511]].to(dtype)
    wanted = weight[:, [0, 31, 32, 97, 130, 255, 300, 511]].T
    torch.testing.assert_close(found.sums_of(x).outputs().float(), wanted.to(dtype).float(), rtol=1e-2, atol=1e-6)
    ones = torch.ones(1, 512, dtype=dtype)
    torch.testing.assert_close(found(ones).float()[0], weight.sum(1), rtol=2e-2, atol=2e-2 * float(weight.std()) * 22)


def run_ptx(code: str, registers: dict[str, int]) -> dict[str, int]:
    """Run a few instructions over registers of 32 bits."""
    found = dict(registers)
    for line in re.sub(r"\.reg[^;]*;", "", code.strip("{} ")).split(";"):
        if not (words := line.replace(",", " ").split()):
            continue
        name, to, *sources = words
        a, b, *rest = (found[one] if one in found else int(one, 0) for one in sources)
        if name == "lop3.b32":
            assert rest[1] == 0xEA, "(a & b) | c"
            out = (a & b) | rest[0]
        elif name == "prmt.b32":
            picked = [(a | b << 32) >> 8 * (rest[0] >> 4 * i & 15) & 255 for i in range(4)]
            out = sum(one << 8 * i for i, one in enumerate(picked))
        else:
            out = {"shr.u32": a >> b, "shr.b32": a >> b, "shl.b32": a << b, "and.b32": a & b}[name] & 0xFFFFFFFF
        found[to] = out
    return found


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_ptx_of_levels_gives_their_numbers(index: int, dtype: torch.dtype) -> None:
    """Control: the code of another group."""
    half = int(dtype == torch.float16)
    rng = np.random.default_rng(index)
    low, upper = rng.integers(0, 1 << 16, 4), rng.integers(0, 1 << 8, 4)

    def numbers(code: int, bits: int) -> list[float]:
        if bits == 4:
            found = run_ptx(registers._LOW.value[4 * half + code], {"$1": int(low[0] | low[1] << 16)})
            words = [found["$0"]]
        else:
            packed = int(sum(int(one) << 8 * i for i, one in enumerate(upper)))
            given = {"$2": int(low[0] | low[1] << 16), "$3": int(low[2] | low[3] << 16), "$4": packed}
            found = run_ptx(registers._BOTH.value[4 * half + code], given)
            words = [found["$0"], found["$1"]]
        halves = np.array([word >> shift & 0xFFFF for word in words for shift in (0, 16)], np.uint16)
        return (torch.from_numpy(halves.view(np.int16)).view(dtype).float() - (1024 if half else 128)).tolist()

    four = [int(one >> 4 * index & 15) for one in low]
    six = [value | int(one >> 2 * index & 3) << 4 for value, one in zip(four, upper, strict=True)]
    assert numbers(index, 4) == four[:2] and numbers(index, 6) == six
    assert numbers((index + 1) % 4, 4) != four[:2] and numbers((index + 1) % 4, 6) != six


def test_sides_with_other_bits_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: each format is tried once."""
    found = BlockProduct(Levels.of_file("Q4_K", random_blocks("Q4_K", 24, 256)[0]), torch.float32, CPU, None)
    equal, tried = blocks.equal, []

    def other(sums: Any, sides: Any) -> Any:
        return equal(lambda side: tried.append(side) or sums(side) + (side == 128), sides)

    monkeypatch.setattr(blocks, "equal", other)
    monkeypatch.setattr(blocks, "_EQUAL", {})
    before = torch.get_rng_state()
    assert found._sides(torch.ones(1, 256)) == (16, 64)
    assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers"
    found._sides(torch.ones(1, 256))
    assert len(tried) == 4
