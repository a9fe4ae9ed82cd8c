"""Products by matrix instructions (AMX), emulated: the bits of those without them, or bits that depend on the depth alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from foresay.models.cpu import build
from foresay.models.cpu.product import BLOCKS, NativeProduct
from helpers.broken_kernels import Broken
from helpers.families import make
from helpers.guarantees import fused
from helpers.passes import in_pieces, scores

ROWS = (1, 2, 5, 9, 12, 13, 16, 17, 31, 32, 33, 40, 45, 65)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def blocks(kind: str) -> NativeProduct:
    """A product of random blocks of a GGUF type: 38 outputs, 512 deep."""
    weights, size, _, _ = BLOCKS[kind]
    stored = np.random.default_rng(3).integers(0, 256, (38, 512 // weights * size), np.uint8)
    own = stored.reshape(38, -1, size)
    own[:, :, 1::2] &= 0x3F  # so that scales are finite wherever they lie
    if kind == "MXFP4":
        own[:, :, 0] = 120 + own[:, :, 0] % 8
    return NativeProduct.of_blocks(kind, [stored])


INTEGERS: dict[str, Callable[[], NativeProduct]] = {
    **{kind: (lambda kind=kind: blocks(kind)) for kind in BLOCKS},
    "int8": lambda: NativeProduct.int8(numbers(70, 75), None),
    "int4": lambda: NativeProduct.int4(numbers(70, 544), numbers(70)),
}


def outputs(product: NativeProduct) -> dict[int, torch.Tensor]:
    """The product of different numbers of rows, the same ones first."""
    x = numbers(max(ROWS), product.in_features)
    return {rows: product(x[:rows]) for rows in ROWS}


if "VNNI" not in build.instructions():  # levels of 8 bits are signed there, as on no processor with matrix instructions
    INTEGERS = {kind: one for kind, one in INTEGERS.items() if kind not in ("Q8_0", "int8")}


@pytest.fixture(scope="module")
def without() -> dict[str, dict[int, torch.Tensor]]:
    """Outputs by the kernels of this machine."""
    return {kind: outputs(make_product()) for kind, make_product in INTEGERS.items()}


@pytest.fixture
def tiles(broken_kernels: Broken, without: dict[str, dict[int, torch.Tensor]]) -> Iterator[None]:
    """Kernels over emulated instructions, which are used wherever they can be."""
    with broken_kernels(tiles=True):
        library = build.library()
        assert library is not None and library.foresay_tiles()
        yield


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("kind", INTEGERS)
def test_products_of_integers_have_the_bits_that_they_have_without(
    kind: str, without: dict[str, dict[int, torch.Tensor]]
) -> None:
    for rows, out in outputs(INTEGERS[kind]()).items():
        assert out.isfinite().all() and torch.equal(out, without[kind][rows]), rows


def differing(found: dict[int, torch.Tensor]) -> list[int]:
    """Numbers of rows for which a row has other bits than among the most rows."""
    return [rows for rows, out in found.items() if not torch.equal(out, found[max(ROWS)][:rows])]


@pytest.mark.parametrize("kind", INTEGERS)
def test_bits_of_integer_products_do_not_depend_on_the_rows(
    kind: str, without: dict[str, dict[int, torch.Tensor]]
) -> None:
    """By tiles of any size, and by levels that are decoded in registers or before."""
    assert differing(without[kind]) == []


def test_bits_that_depend_on_a_tile_are_noticed(broken_kernels: Broken) -> None:
    """Control: sums that are multiplied by the number of rows of their tile."""
    with broken_kernels():
        assert not differing(outputs(INTEGERS["Q4_1"]()))
    with broken_kernels("sums that depend on the rows of their tile"):
        assert differing(outputs(INTEGERS["Q4_1"]()))


def pairs(weight: torch.Tensor) -> NativeProduct:
    product = NativeProduct.of_numbers(weight, None)
    product.activations = "bf16"
    return product


@pytest.mark.parametrize("depth", [1, 2, 31, 32, 33, 64, 75, 576])
def test_bits_of_bfloat16_products_do_not_depend_on_the_rows(depth: int, request: pytest.FixtureRequest) -> None:
    """Where the processor has the instructions, they are also those that it computes."""
    weight, library = numbers(70, depth).to(torch.bfloat16), build.library()
    weight[:, ::7] *= 1e-30  # sums of the smallest numbers too
    real = outputs(pairs(weight)) if library is not None and library.foresay_tiles() else None
    request.getfixturevalue("tiles")
    found = outputs(pairs(weight))
    whole = found[max(ROWS)]
    for rows, out in found.items():
        assert torch.equal(out, whole[:rows]), rows
        assert real is None or torch.equal(out, real[rows]), rows
    x = numbers(max(ROWS), depth).to(torch.bfloat16)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().t(), atol=2e-4, rtol=2e-5)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_has_its_bits_in_any_pass(threads: int) -> None:
    model = fused(make("llama"), "bfloat16")
    ids = torch.randint(2, 90, (2, 70), generator=torch.Generator().manual_seed(1))
    torch.set_num_threads(threads)
    try:
        whole = scores(model, ids)
        for row in range(2):
            assert torch.equal(in_pieces(model, ids[row], (1, 33, 4, 32)), whole[row])
    finally:
        torch.set_num_threads(2)


PAIRS = ["the second block of rows is the first", "depths of two panels"]
BYTES = ["every group reads the first", "scales of the first block", "rows of the first block"]
BYTES += ["a group adds to the one before"]
SUPERS = [
    "rows of the first block for 256",
    "the first group's multiple by tiles",
    "the scale of the first row by tiles",
]
SUPERS += ["upper bytes as lower ones", "a zero of every second level"]


@pytest.mark.parametrize("fault", ["", *PAIRS, *BYTES, *SUPERS])
def test_faults_are_noticed(fault: str, broken_kernels: Broken, without: dict[str, dict[int, torch.Tensor]]) -> None:
    """Control: the same comparisons with one fault in products by tiles, and with none."""
    with broken_kernels(fault, tiles=True):
        product = INTEGERS["Q4_1"]()
        error = (product(numbers(max(ROWS), product.in_features)[:33]) - without["Q4_1"][33]).abs().max()
        assert (error > 0.1) == (fault in BYTES)
        same = torch.equal(outputs(INTEGERS["Q6_K"]())[65], without["Q6_K"][65])
        assert same == (fault not in SUPERS)
        weight, x = numbers(70, 64).to(torch.bfloat16), numbers(40, 64).to(torch.bfloat16)
        error = (pairs(weight)(x.float()).double() - x.double() @ weight.double().t()).abs().max()
        assert (error > 0.1) == (fault in PAIRS)


def test_a_process_that_may_not_use_them(broken_kernels: Broken, without: dict[str, dict[int, torch.Tensor]]) -> None:
    """The bits of bfloat16 products are those of a machine without them, too."""
    weight, x, library = numbers(70, 576).to(torch.bfloat16), numbers(40, 576), build.library()
    wanted = None if library is None or library.foresay_tiles() else pairs(weight)(x)
    with broken_kernels():
        assert "AMX" not in build.instructions()
        assert torch.equal(outputs(INTEGERS["int4"]())[33], without["int4"][33])
        assert wanted is None or torch.equal(pairs(weight)(x), wanted)
