"""Frozen products: what rounding costs, what is kept, and that a row's product is its own."""

from __future__ import annotations

import itertools
import math
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foresay.errors import ConfigError
from foresay.models.cpu import build
from foresay.models.cpu.product import NativeProduct, PackedProduct
from foresay.models.cpu.rounding import q4_1_blocks, quantize_int4
from foresay.models.hardware import CPU, Hardware
from foresay.models.huggingface import linears
from foresay.models.huggingface.linears import (
    FrozenLinear,
    JointLinear,
    freeze_linears,
    product_of,
    quantizer,
    weight_bytes,
)
from helpers.broken_kernels import Broken

SEEDED = torch.Generator()
KINDS: dict[str, tuple[Any, float]] = {
    "native": (NativeProduct.of_numbers, 1e-9),
    "native int8": (NativeProduct.int8, 0.012),
    "native int4": (NativeProduct.int4, 0.1),
    "native in place": (lambda weight, bias: NativeProduct.in_place([weight], [bias]), 1e-9),
}
"""Maker of a product, and its greatest error."""
if torch.ops.mkldnn._is_mkldnn_bf16_supported():
    KINDS["packed"] = (PackedProduct, 1e-9)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    SEEDED.manual_seed(3)


def weights(rows: int = 96, columns: int = 128) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=SEEDED) * torch.rand(rows, 1, generator=SEEDED)).to(torch.bfloat16)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    levels, scales, offsets = quantize_int4(weight, torch.bfloat16)
    groups = levels.float().view(len(levels), -1, 32)
    return (groups * scales[..., None].float() + offsets[..., None].float()).flatten(1)


def as_float32(product: Any) -> Any:
    """The same product without a rounding of its inputs."""
    if isinstance(product, NativeProduct):
        product.activations = "float32"
    return product


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).square().mean().sqrt() / b.float().square().mean().sqrt())


def test_four_bits_round_each_group_by_itself() -> None:
    weight = weights()
    weight[:, :32] *= 100  # a group of large weights costs the others nothing
    ours = rounded(weight)
    assert error(ours[:, 32:], weight[:, 32:]) < 0.1
    low, high = (op(weight.float().view(96, -1, 32), 2) for op in (torch.amin, torch.amax))
    step = ((high - low) / 15)[..., None]
    nearest = ((weight.float().view(96, -1, 32) - low[..., None]) / step).round() * step + low[..., None]
    assert error(ours, weight) < error(nearest.flatten(1), weight), "narrower ranges round more finely"


def test_rows_that_are_packed_in_pieces_are_packed_as_a_whole() -> None:
    weight, x = weights(640, 128), torch.randn(3, 128, generator=SEEDED).to(torch.bfloat16)
    blocks, native = q4_1_blocks(weight), NativeProduct.int4(weight, None)
    pieces = [blocks[a:b] for a, b in itertools.pairwise([0, 100, 350, 351, 600, 640])]
    cut = NativeProduct.of_blocks("Q4_1", pieces)
    assert torch.equal(cut(x), native(x))
    assert torch.equal(cut.dense(), native.dense())
    assert (cut.in_features, cut.out_features) == (128, 640)


def test_groups_of_equal_weights_are_kept() -> None:
    weight = torch.full((64, 64), 0.75, dtype=torch.bfloat16)
    torch.testing.assert_close(rounded(weight), weight.float())
    assert torch.equal(rounded(torch.zeros(64, 64)), torch.zeros(64, 64))


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_weights_kept(kind: str) -> None:
    make, most = KINDS[kind]
    for rows in (96, 128, 50):
        weight, x = weights(rows), torch.randn(2, 5, 128, generator=SEEDED).to(torch.bfloat16)
        bias = torch.randn(rows, generator=SEEDED).to(torch.bfloat16)
        product = as_float32(make(weight, bias))
        kept = product.dense()
        assert kept.shape == weight.shape and error(kept, weight) < most
        wanted = x.float() @ kept.float().t() + bias.float()
        assert product(x).shape == (2, 5, rows)
        torch.testing.assert_close(product(x).float(), wanted, atol=0.1, rtol=2e-2)


NATIVE = [kind for kind in KINDS if "native" in kind]


@pytest.mark.parametrize("kind", NATIVE)
def test_compiled_products_in_float32(kind: str) -> None:
    """To the last digits: whole panels and not, deeper than is decoded at once; and depths that are no multiple of 4."""
    for rows, columns in ((70, 64), (32, 544), (1, 32)):
        weight, x = weights(rows, columns), torch.randn(130, columns, generator=SEEDED)
        product = as_float32(KINDS[kind][0](weight, None))
        out, wanted = product(x), x.double() @ product.dense().double().t()
        torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=2e-5)
        odd, short = weight.float()[:, : columns - 3].contiguous(), x[:, : columns - 3]
        wide = NativeProduct.of_numbers(odd, None)
        torch.testing.assert_close(wide(short), short @ odd.t(), atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", NATIVE)
def test_a_row_of_a_compiled_product_has_its_bits_whatever_is_beside_it(kind: str, dtype: torch.dtype) -> None:
    """Alone too, and whatever the number of threads: rows are taken in tiles of different sizes."""
    product = KINDS[kind][0](weights(70, 288), None)
    for activations in getattr(product, "allowed", ("float32",)):
        product.activations = activations
        assert not other_bits(product, dtype)


def other_bits(product: Any, dtype: torch.dtype) -> int:
    """How often rows of a product are not those of a product of more rows."""
    x, count = torch.randn(130, product.in_features, generator=SEEDED).to(dtype), 0
    whole = product(x)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (1, 2, 3, 5, 7, 8, 9, 16, 17, 33, 49, 97, 129):
            count += not torch.equal(product(x[:rows]), whole[:rows])
            count += not torch.equal(product(x[-rows:]), whole[-rows:])
    return count


def rounded_inputs(x: torch.Tensor, activations: str) -> torch.Tensor:
    """x [N, depth] as a product with these activations reads it, in float64."""
    if activations == "bf16":
        return x.to(torch.bfloat16).double()
    if activations == "float32":
        return x.double()
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    top = groups.abs().amax(2, keepdim=True)
    levels = (groups * (127 / top)).nan_to_num(0, 0, 0).round()
    return (levels.double() * (top / 127).double()).flatten(1)[:, : x.shape[1]]


def check_exactly(make: Callable[..., NativeProduct]) -> None:
    """Compare with the product of the weights kept and the rounded inputs, to the last digits of float32."""
    product, x = make(weights(70, 288), None), torch.randn(130, 288, generator=SEEDED)
    for activations in product.allowed:
        product.activations = activations
        inputs, dense = rounded_inputs(x, activations), product.dense().double()
        torch.testing.assert_close(product(x).double(), inputs @ dense.t(), atol=1e-4, rtol=2e-5)
        if activations != "float32":
            assert error(product(x), x.double() @ dense.t()) > 1e-4, "control: inputs are rounded"
        assert not other_bits(product, torch.float32)


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in ("native", "native int8", "native int4")])
def test_inputs_are_rounded_as_stated(kind: str) -> None:
    check_exactly(KINDS[kind][0])


@pytest.mark.parametrize("kind", ["native int8", "native int4"])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_inputs_that_are_no_numbers_stay_noticed(kind: str, odd: float) -> None:
    x = torch.randn(5, 128, generator=SEEDED)
    x[1, 70] = odd
    out = KINDS[kind][0](weights(), None)(x)
    assert bool(out[1].isnan().all()) and bool(out[[0, 2, 3, 4]].isfinite().all())


def test_inputs_of_any_size_and_of_no_whole_group() -> None:
    for columns, scale in ((75, 1.0), (128, 0.0), (128, 1e-42), (128, 1e-30), (128, 1e30)):
        x, product = torch.randn(9, columns, generator=SEEDED) * scale, NativeProduct.int8(weights(40, columns), None)
        wanted = rounded_inputs(x, "int8") @ product.dense().double().t()
        torch.testing.assert_close(product(x).double(), wanted, atol=1e-4 if scale == 1 else 1e-38, rtol=1e-4)
        assert product.dense().shape == (40, columns)


SCALES = torch.tensor([math.inf, -math.inf, math.nan, 65504.0, -1.5, 2.0**-24, 3 * 2.0**-20, 0.0])


def widened() -> torch.Tensor:
    """SCALES by a product: the weights of an output are all its scale."""
    halves = torch.stack([SCALES.half(), torch.zeros(len(SCALES), dtype=torch.float16)], 1).view(torch.uint8)
    blocks = torch.cat([halves, torch.full((len(SCALES), 16), 0x11, dtype=torch.uint8)], 1).numpy()
    found: torch.Tensor = as_float32(NativeProduct.of_blocks("Q4_1", [blocks]))(torch.full((1, 32), 1 / 32))[0]
    return found


def test_scales_are_widened_as_they_are() -> None:
    """Infinite ones and those that are no numbers too."""
    assert torch.equal(widened().nan_to_num(7), SCALES.nan_to_num(7))


WITHOUT: list[Any] = [["avx512f", "avxvnni", "avx2", "f16c"]]
OTHERS = (["avx512f", "avxvnni"], ["avx512vnni", "avx512bf16"], ["avx512f"])
WITHOUT += [pytest.param(one, marks=pytest.mark.long) for one in OTHERS]
"""Instructions of this machine that other processors may lack. `scripts/test_kernels` compiles for each instruction set."""


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize("without", WITHOUT if platform.machine() in ("x86_64", "AMD64") else [], ids="+".join)
def test_fewer_instructions_than_this_machine_has(
    without: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Panels are cut otherwise there, levels multiplied and scales widened otherwise."""
    compiler, known, script = build._compiler(), widened(), tmp_path / "quick"
    fewer = " ".join(f"-mno-{one}" for one in without)
    script.write_text(f'#!/usr/bin/env bash\nexec {compiler[0]} {fewer} "${{@/#-O3/-O0}}"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("FORESAY_CACHE", str(tmp_path))
    build.library.cache_clear()
    try:
        for make in (NativeProduct.int4, NativeProduct.int8, NativeProduct.of_numbers):
            check_exactly(make)
        # sums of two products in 16 bits are at their ends
        extreme = NativeProduct.int8(torch.full((32, 576), 127.0), None)
        torch.testing.assert_close(extreme(torch.ones(2, 576)), torch.full((2, 32), 127.0 * 576), atol=0, rtol=1e-6)
        assert torch.equal(widened().view(torch.int32), known.view(torch.int32))
    finally:
        build.library.cache_clear()
    assert len(list(tmp_path.rglob("*.so"))) == 1, "they were compiled for this"


@pytest.mark.usefixtures("_threads_as_before")
def test_broken_kernels_are_noticed(broken_kernels: Broken) -> None:
    """Control: the same sources with one fault."""
    with broken_kernels():
        check_exactly(NativeProduct.int4)
    for fault in ("rows beyond the first four are added in parts", "inputs are rounded for the whole row"):
        with broken_kernels(fault), pytest.raises(AssertionError):
            check_exactly(NativeProduct.int4)


@pytest.mark.parametrize("kind", ["native int8", "native int4", "native"])
def test_rows_are_looked_up(kind: str) -> None:
    product, ids = KINDS[kind][0](weights(70, 64), None), torch.tensor([[3, 69], [0, 3]])
    found = product.rows(ids, torch.bfloat16)
    assert (found.dtype, found.shape) == (torch.bfloat16, (2, 2, 64))
    one = torch.eye(64)  # the weights, as products with unit vectors have them
    torch.testing.assert_close(found, as_float32(product)(one).t()[ids].to(torch.bfloat16))


def test_bytes() -> None:
    weight = weights(128, 256)
    assert NativeProduct.of_numbers(weight, None).nbytes == 128 * 256 * 2
    assert NativeProduct.int8(weight, None).nbytes == 128 * 256 + 128 * 8 * 2
    four = NativeProduct.int4(weight, None)
    assert four.nbytes == 128 * 256 // 2 + 128 * 8 * 2 * 2 and four.bits == 5.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_bits_it_has_among_others(kind: str) -> None:
    """The basis of decoding where there are no compiled kernels: 2 to 64 rows."""
    product, x = KINDS[kind][0](weights(1536, 576), None), torch.randn(64, 576, generator=SEEDED).to(torch.bfloat16)
    whole = product(x)
    for count in (2, 3, 4, 5, 8, 16, 17, 33):
        assert torch.equal(product(x[:count]), whole[:count])


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
        self.k_proj = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
        self.v_proj = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
        self.odd = torch.nn.Linear(40, 16, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [self.q_proj(x), self.k_proj(x), self.v_proj(y), self.q_proj(y), self.q_proj(x)]


def test_layers_that_read_one_input_are_one_product() -> None:
    """Rows that are not whole groups take eight bits."""
    block, x = Block(), torch.randn(3, 64, generator=SEEDED).to(torch.bfloat16)
    assert freeze_linears(block, quantizer(4), all_dtypes=True) == 4
    together = product_of(block.q_proj, block.k_proj, block.v_proj)
    assert isinstance(together, NativeProduct) and together.bits == 5.0
    assert torch.equal(together(x), torch.cat([block.q_proj(x), block.k_proj(x), block.v_proj(x)], -1))
    assert isinstance(block.k_proj, JointLinear)
    two = product_of(block.q_proj, block.k_proj)  # not all of them: each by itself
    assert torch.equal(two(x), together(x)[:, :96])
    assert isinstance(block.odd, FrozenLinear) and 8 <= block.odd.product.bits < 16  # of 40 weights in two groups
    assert weight_bytes(block) == block.q_proj.product.nbytes + block.odd.product.nbytes


@pytest.mark.parametrize("kernels", [True, False], ids=["compiled", "PyTorch's"])
def test_joint_linear_layers_equal_separate_ones(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr(Hardware, "cpu_kernels", False)
        with pytest.raises(
            ConfigError, match=r"weights='int4' needs the compiled CPU kernels.*install a C\+\+ compiler"
        ):
            quantizer(4)
    block: Any = Block()
    x, y = (torch.randn(3, 64, dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        wanted = block(x, y)
        count = linears.freeze_linears(block)
        for a, b in zip(block(x, y), wanted, strict=True):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
    assert count == (4 if CPU.packs(torch.bfloat16) else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_place_are_read_where_they_lie(dtype: torch.dtype) -> None:
    """Parts of other tensors, one below the other, deep to no multiple of a vector; and what is written to them later."""
    whole, biases = weights(90, 100).to(dtype), torch.randn(90, generator=SEEDED).to(dtype)
    parts, shifts = [whole[3:40, 1:94], whole[41:, 2:95]], [biases[3:40], biases[41:]]
    product, x = NativeProduct.in_place(parts, shifts), torch.randn(7, 93, generator=SEEDED)
    for _ in range(2):
        wanted = x.double() @ torch.cat(parts).double().t() + torch.cat(shifts).double()
        torch.testing.assert_close(product(x).double(), wanted, atol=2e-5, rtol=2e-5)
        whole *= -2
        biases += 1
    copied = NativeProduct.in_place([part.clone() for part in parts], shifts)
    whole *= 0
    assert not torch.equal(product(x), copied(x)), "control: a copy stays"


def test_weights_that_lie_otherwise_are_left_alone() -> None:
    one = torch.ones(4, 4)
    for some, biases in (
        ([one.half()], [None]),
        ([one, one.bfloat16()], [None, None]),
        ([one, one], [torch.ones(4), None]),
        ([torch.ones(4, 5).t()], [None]),
        ([one.to_sparse()], [None]),
        ([torch.ones(4, 4, device="meta")], [None]),
    ):
        with pytest.raises(LookupError):
            NativeProduct.in_place(some, biases)
