"""Frozen products: what rounding costs, what is kept, and that a row's product is its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from foresay.models.huggingface import linears, products
from foresay.models.huggingface.linears import (
    FrozenLinear,
    JointLinear,
    SingleRows,
    freeze_linears,
    in_bits,
    product_of,
    weight_bytes,
)
from foresay.models.huggingface.products import Int4Product, Int8Product, PackedProduct, rounded_int4

SEEDED = torch.Generator()
ROUNDED = [Int8Product, Int4Product]
KINDS = [*([PackedProduct] if linears.available(torch.bfloat16, torch.device("cpu")) else []), *ROUNDED]


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    SEEDED.manual_seed(3)


def weights(rows: int = 96, columns: int = 128) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=SEEDED) * torch.rand(rows, 1, generator=SEEDED)).to(torch.bfloat16)


def restored(weight: torch.Tensor) -> torch.Tensor:
    levels, scales, offsets = rounded_int4(weight)
    groups = levels.float().view(len(weight), -1, 32)
    return ((groups - 8) * scales[..., None] + offsets[..., None]).flatten(1)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).square().mean().sqrt() / b.float().square().mean().sqrt())


def test_four_bits_round_each_group_by_itself() -> None:
    weight = weights()
    weight[:, :32] *= 100  # a group of large weights costs the others nothing
    ours = restored(weight)
    assert error(ours[:, 32:], weight[:, 32:]) < 0.1
    low, high = (op(weight.float().view(96, -1, 32), 2) for op in (torch.amin, torch.amax))
    step = ((high - low) / 15)[..., None]
    nearest = ((weight.float().view(96, -1, 32) - low[..., None]) / step).round() * step + low[..., None]
    assert error(ours, weight) < error(nearest.flatten(1), weight), "narrower ranges round more finely"


def test_rows_that_are_packed_in_pieces_are_packed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights(640, 128)
    whole = Int4Product(weight, None)
    levels, scales, offsets = rounded_int4(weight)
    monkeypatch.setattr(products, "_PACKED", 1)
    assert torch.equal(Int4Product(weight, None)._weight, whole._weight)
    cuts = torch.tensor([0, 100, 350, 351, 600, 640])
    pieces = [(levels[a:b], scales[a:b], offsets[a:b]) for a, b in itertools.pairwise(cuts)]
    cut = Int4Product.of_groups(pieces, torch.bfloat16)
    assert torch.equal(cut._weight, whole._weight)
    assert torch.equal(cut._groups, whole._groups)
    assert (cut.in_features, cut.out_features) == (128, 640)


def test_groups_of_equal_weights_are_kept() -> None:
    weight = torch.full((64, 64), 0.75, dtype=torch.bfloat16)
    torch.testing.assert_close(restored(weight), weight.float())
    assert torch.equal(restored(torch.zeros(64, 64)), torch.zeros(64, 64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [96, 128, 50])
def test_products_are_those_of_the_weights_kept(kind: type, rows: int) -> None:
    weight, x = weights(rows), torch.randn(2, 5, 128, generator=SEEDED).to(torch.bfloat16)
    bias = torch.randn(rows, generator=SEEDED).to(torch.bfloat16)
    product = kind(weight, bias)
    kept = product.dense()
    assert kept.shape == weight.shape
    assert error(kept, weight) < {PackedProduct: 1e-9, Int8Product: 0.012, Int4Product: 0.1}[kind]
    wanted = x.float() @ kept.float().t() + bias.float()
    assert product(x).shape == (2, 5, rows)
    torch.testing.assert_close(product(x).float(), wanted, atol=0.1, rtol=2e-2)


def test_bytes() -> None:
    weight = weights(128, 256)
    assert PackedProduct(weight, None).nbytes == 128 * 256 * 2
    assert Int8Product(weight, None).nbytes == 128 * 256 + 128 * 2
    four = Int4Product(weight, None)
    assert four.nbytes == 128 * 256 // 2 + 128 * 8 * 2 * 2
    assert four.bits == 5.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_bits_it_has_among_others(kind: type) -> None:
    """What decoding builds on: 2 to 64 rows."""
    product, x = kind(weights(1536, 576), None), torch.randn(64, 576, generator=SEEDED).to(torch.bfloat16)
    whole = product(x)
    for count in (2, 3, 4, 5, 8, 16, 17, 33):
        assert torch.equal(product(x[:count]), whole[:count])


class Moody:
    """A product whose kernel for few rows rounds otherwise, with two threads alone."""

    in_features, out_features, bias = 64, 96, None

    def __init__(self, few: int) -> None:
        self.weight, self.few, self.asked = weights(96, 64), few, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        out = x @ self.weight.t()
        return out * (1 + 2**-7) if len(x) <= self.few and torch.get_num_threads() == 2 else out


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize("few", [1, 2])
def test_each_shape_and_each_number_of_threads_is_asked(few: int) -> None:
    calm, moody = Int8Product(weights(), None), Moody(few)
    model = torch.nn.Sequential(FrozenLinear(calm), FrozenLinear(moody))  # type: ignore[arg-type]
    single = SingleRows(model)
    torch.set_num_threads(1)
    moody.few = 0
    assert single()
    torch.set_num_threads(2)
    moody.few = few
    assert not single()
    asked = moody.asked
    assert not single()
    torch.set_num_threads(1)
    assert single()
    assert moody.asked == asked, "once for each"


def test_layers_that_are_not_frozen_are_not_trusted() -> None:
    frozen = FrozenLinear(Int8Product(weights(), None))
    assert SingleRows(torch.nn.Sequential(frozen))()
    assert not SingleRows(torch.nn.Sequential(frozen, torch.nn.Linear(96, 8)))()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
        self.k_proj = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
        self.v_proj = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
        self.odd = torch.nn.Linear(40, 16, bias=False, dtype=torch.bfloat16)


def test_layers_that_read_one_input_are_one_product() -> None:
    block, x = Block(), torch.randn(3, 64, generator=SEEDED).to(torch.bfloat16)
    assert freeze_linears(block, in_bits(4), all_dtypes=True) == 4
    together = product_of(block.q_proj, block.k_proj, block.v_proj)
    assert isinstance(together, Int4Product)
    assert torch.equal(together(x), torch.cat([block.q_proj(x), block.k_proj(x), block.v_proj(x)], -1))
    assert isinstance(block.k_proj, JointLinear)
    two = product_of(block.q_proj, block.k_proj)  # not all of them: each by itself
    assert torch.equal(two(x), together(x)[:, :96])


def test_rows_that_are_not_whole_groups_take_eight_bits() -> None:
    block = Block()
    freeze_linears(block, in_bits(4), all_dtypes=True)
    assert isinstance(block.odd, FrozenLinear)
    assert isinstance(block.odd.product, Int8Product)
    assert weight_bytes(block) == block.q_proj.product.nbytes + block.odd.product.nbytes


def test_joint_linear_layers_equal_separate_ones() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
            self.k_proj = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
            self.v_proj = torch.nn.Linear(64, 32, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
            return [self.q_proj(x), self.k_proj(x), self.v_proj(y), self.q_proj(y), self.q_proj(x)]

    block: Any = Block()
    x, y = (torch.randn(3, 64, dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        wanted = block(x, y)
        count = linears.freeze_linears(block)
        for a, b in zip(block(x, y), wanted, strict=True):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
    assert count == (3 if linears.available(torch.bfloat16, torch.device("cpu")) else 0)
