"""The Triton kernels against a few lines of PyTorch, in Triton's interpreter."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from triton.runtime import interpreter

from foresay.models.gpu import attention, overlap, product, rows
from foresay.models.gpu.attention import PAGE, Visible, attend
from helpers.paged import of_rows, reference, sum_products_in_order


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the interpreter takes a millisecond."""
    monkeypatch.setattr(attention, "SPLITS", 3)
    monkeypatch.setattr(attention, "PROMPT_SPLITS", 1)


CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "one head a group, a window": ((6, 6, 32), {"window": 70}),
    "chains": ((4, 1, 16), {}),
    "trees deeper than a window": ((4, 2, 16), {"tree": True, "window": 2}),
    "trees": ((8, 2, 64), {"tree": True}),
    "seven heads a group, odd sizes, a cap": ((7, 1, 48), {"tree": True, "softcap": 5.0}),
    "sinks": ((4, 4, 16), {"sinks": torch.linspace(-1, 1, 4)}),
    "a prompt": ((4, 1, 16), {"is_prompt": True}),
    "a prompt with a window, three heads a group": ((6, 2, 32), {"is_prompt": True, "window": 20}),
}


def inputs(
    seed: int, sizes: tuple[int, int, int], tree: bool, is_prompt: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Visible]:
    """Rows of random lengths around the borders of pages, and random numbers of tokens."""
    (heads, key_heads, dim), rng = sizes, random.Random(seed)
    starts = [rng.choice([0, 1, PAGE - 1, PAGE, PAGE + 1, 130]) for _ in range(3)]
    counts = [rng.choice([0, 1, 3, 5]), 1, 70 if is_prompt else rng.choice([4, 7])]
    parents = [[rng.randrange(-1, column) for column in range(count)] if tree else None for count in counts]
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm(12, generator=generator).view(3, 4)
    tile = attention.tokens_per_tile(heads, key_heads, 4 * dim, is_prompt=is_prompt)
    at = of_rows(starts, counts, parents, pages, tile, padding=2, is_prompt=is_prompt)
    query, key, value = (
        torch.randn(*shape, dim, generator=generator)
        for shape in ((len(at.rows), heads), (12, key_heads, PAGE), (12, key_heads, PAGE))
    )
    return query, key, value, at


@pytest.mark.parametrize("case", CASES)
def test_attention_over_pages(case: str) -> None:
    sizes, options = CASES[case]
    options = dict(options)
    tree, is_prompt = options.pop("tree", False), options.pop("is_prompt", False)
    query, key, value, at = inputs(len(case), sizes, tree, is_prompt)
    found = attend(query.clone(), key, value, at, sizes[2] ** -0.5, **options)
    expected = reference(query, key, value, at, sizes[2] ** -0.5, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not at.counts.any(), "the next layer counts from 0"


def test_tiles_are_powers_of_two_that_fit() -> None:
    for dim, heads, is_prompt in itertools.product(
        (16, 64, 128, 160, 192, 256, 512), ((32, 8), (8, 8), (24, 8), (64, 1)), (False, True)
    ):
        tile = attention.tokens_per_tile(*heads, 4 * dim, is_prompt=is_prompt)
        assert tile & (tile - 1) == 0
        assert tile == 1 or tile * heads[0] // heads[1] * 4 * dim <= attention.PROMPT_LINES * attention.SHORT


def test_wrong_pages_and_masks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: another page, all nodes of a tree as ancestors, and results that are combined before all programs have ended."""
    monkeypatch.setattr(torch, "empty", torch.zeros)  # what such results are combined of
    query, key, value, at = inputs(3, (4, 1, 16), True)
    expected = reference(query, key, value, at, 0.25)
    every = torch.where(at.seen > 0, (at.ends - at.firsts).long().exp2().long() - 1, 0)
    changes: list[dict[str, torch.Tensor]] = [{}, {"pages": at.pages.roll(1, 1)}, {"seen": every}]
    changes.append({"counts": torch.full_like(at.counts, 2)})
    for more, change in enumerate(changes):  # values of their own, since memory is used again
        seen = Visible(**{name: getattr(at, name) for name in Visible.__slots__} | change)
        found = attend(query.clone(), key, value + more, seen, 0.25)
        real = (at.ends > 0)[:, None, None]
        assert torch.allclose(found, torch.where(real, expected + more, query), atol=1e-2) == (not change)


def test_a_token_has_the_same_bits_alone_and_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the pages of a row are divided by the number of tokens."""

    def one_by_one() -> tuple[torch.Tensor, torch.Tensor]:
        pages = torch.arange(12).view(3, 4)
        whole = of_rows([130, 5, 190], [4, 1, 3], [None] * 3, pages, 4)
        generator = torch.Generator().manual_seed(0)
        query, key, value = (torch.randn(*s, 16, generator=generator) for s in ((8, 4), (12, 1, PAGE), (12, 1, PAGE)))
        together, alone, at = attend(query.clone(), key, value, whole, 0.25), [], 0
        for row, (start, count) in enumerate(((130, 4), (5, 1), (190, 3))):
            for i in range(count):
                single = of_rows([start + i], [1], [None], pages[row : row + 1], 4)
                alone.append(attend(query[at : at + 1], key, value, single, 0.25))
                at += 1
        return together, torch.cat(alone)

    together, alone = one_by_one()
    assert torch.equal(together, alone)
    known = attention.attend

    def by_tokens(query: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        monkeypatch.setattr(attention, "SPLITS", 1 + len(query) % 3)
        return known(query, *given, **options)

    monkeypatch.setitem(globals(), "attend", by_tokens)
    together, alone = one_by_one()
    assert not torch.equal(together, alone) and torch.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(40, 1300, True), (33, 1100, False)])
def test_products_have_the_same_bits_for_any_number_of_tokens(
    outputs: int, inputs: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the inner dimension is divided by the number of tokens."""
    torch.manual_seed(outputs)
    states, weight = torch.randn(67, inputs), torch.randn(outputs, inputs)
    added = torch.randn(outputs) if bias else None
    whole = product.product(states, weight, added)
    torch.testing.assert_close(whole, F.linear(states, weight, added), rtol=1e-4, atol=1e-4)

    def parts_agree() -> bool:
        cuts = ((0, 1), (5, 8), (60, 67))
        return all(torch.equal(product.product(states[a:b], weight, added), whole[a:b]) for a, b in cuts)

    assert parts_agree()
    monkeypatch.setattr(product, "parts_of", lambda outputs, inputs: 3)
    assert not parts_agree()


def test_norms_with_a_residual() -> None:
    torch.manual_seed(0)
    states, delta, first, second = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48), torch.randn(48)
    expected = states + 0.5 * F.rms_norm(delta, (48,), first, 1e-6)
    found = rows.add_norm(states, delta, after=(first, 1e-6), before=(second, 1e-5), scale=0.5)
    torch.testing.assert_close(states, expected)
    torch.testing.assert_close(found, F.rms_norm(expected, (48,), second, 1e-5))
    assert torch.equal(rows.add_norm(states, None, after=None, before=None), states)


def test_short_sides_are_those_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest one sums in other pieces here. Control: products that add in another order from 128 tokens on."""
    sum_products_in_order(monkeypatch)
    in_order = interpreter.InterpreterBuilder.create_dot

    def reversed_from_128(self: Any, a: Any, b: Any, c: Any, *more: Any) -> Any:
        turn = -1 if b.data.shape[1] >= 128 else 1
        a, b = (interpreter.TensorHandle(one, x.dtype) for one, x in ((a.data[:, ::turn], a), (b.data[::turn], b)))
        return in_order(self, a, b, c, *more)

    with monkeypatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", reversed_from_128)
        assert product.equal_sides(torch.device("cpu"), torch.float32) == product.SIDES[:2]
    assert product.equal_sides(torch.device("cpu"), torch.float32) == product.SIDES[:3]
    monkeypatch.setattr(product, "sides_of", lambda device, dtype: product.SIDES[:3])
    torch.manual_seed(0)
    states, weight = torch.randn(270, 700), torch.randn(80, 700)
    monkeypatch.setattr(product, "parts_of", lambda outputs, inputs: 2)
    whole = product.product(states, weight)
    for first, last in ((0, 1), (3, 40), (20, 120), (70, 210)):
        assert torch.equal(product.product(states[first:last], weight), whole[first:last])
    monkeypatch.setattr(product, "sides_of", lambda device, dtype: product.SIDES[3:])
    torch.testing.assert_close(product.product(states, weight), whole, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parts_of_a_product_are_added_by_their_reader(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of the product's own outputs. Control: a bias that is left out."""
    torch.manual_seed(0)
    monkeypatch.setattr(product, "parts_of", lambda outputs, inputs: 2)
    read, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((3, 256), (48, 256), (48,)))
    apart, states, norm = product.sums_of(read, weight, bias), torch.randn(3, 48).to(dtype), (torch.rand(48), 1e-6)
    assert apart.parts.shape == (2, 3, 48)

    def readers(sums: Any) -> list[torch.Tensor]:
        keys, values = torch.zeros(2, 1, 1, PAGE, 16, dtype=dtype)
        slots, row = torch.tensor([0, 1, 5]).int(), torch.zeros(3).int()
        added = states.clone()
        placed = rows.place(sums, keys, values, None, slots, slots, row, torch.zeros(1, 1).int())
        return [rows.add_norm(added, sums, after=norm, before=norm), added, placed, keys, values]

    whole = readers(apart.outputs())
    assert all(map(torch.equal, readers(apart), whole))
    assert not any(map(torch.equal, readers(apart._replace(bias=None)), whole))


def test_heads_are_normed_turned_and_placed() -> None:
    torch.manual_seed(0)
    (query_heads, key_heads, dim, turned), count = (6, 2, 24, 16), 5
    joint = torch.randn(count, query_heads + 2 * key_heads, dim)
    keys, values = torch.zeros(2, 9, key_heads, PAGE, dim)
    positions, slots = torch.tensor([3, 70, 0, 9, 9]).int(), torch.tensor([3, 71, -1, 9, 10]).int()
    row, pages = torch.tensor([0, 1, 0, 0, 0]).int(), torch.tensor([[4, 1], [2, 8]]).int()
    angles = torch.cat([torch.arange(100)[:, None] * torch.rand(turned // 2)] * 2, 1)
    norms = (torch.rand(dim), 1e-6), (torch.rand(dim), 1e-5)
    queries = rows.place(joint, keys, values, (angles.cos(), angles.sin()), positions, slots, row, pages, norms)
    written = 0
    for n, slot in enumerate(slots.tolist()):
        cosine, sine, half = angles[positions[n]].cos(), angles[positions[n]].sin(), turned // 2

        def turn(x: torch.Tensor, cosine: torch.Tensor = cosine, sine: torch.Tensor = sine) -> torch.Tensor:
            part = x[:, :turned]
            swapped = torch.cat([-part[:, half:], part[:, :half]], 1)  # noqa: B023
            return torch.cat([part * cosine + swapped * sine, x[:, turned:]], 1)

        if slot < 0:
            assert not queries[n].any()
            continue
        page = pages[row[n], slot // PAGE]
        heads = joint[n].split((query_heads, key_heads, key_heads))
        torch.testing.assert_close(queries[n], turn(F.rms_norm(heads[0], (dim,), *norms[0])))
        torch.testing.assert_close(keys[page, :, slot % PAGE], turn(F.rms_norm(heads[1], (dim,), *norms[1])))
        torch.testing.assert_close(values[page, :, slot % PAGE], heads[2])
        written += key_heads
    assert int((keys != 0).any(-1).sum()) == written, "and nowhere else"


@pytest.mark.parametrize(
    ("name", "function"),
    [("silu", F.silu), ("gelu", F.gelu), ("gelu_pytorch_tanh", lambda x: F.gelu(x, approximate="tanh"))],
)
def test_gates(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    joint = torch.linspace(-6, 6, 240).view(3, 80)
    torch.testing.assert_close(rows.gated(joint, name), function(joint[:, :40]) * joint[:, 40:])
    torch.manual_seed(0)
    states, weight, bias = torch.randn(67, 72), torch.randn(82, 72) / 8, torch.randn(82)
    expected, found = (
        rows.gated(product.product(states, weight, bias), name),
        product.gated_product(states, weight, bias, name),
    )
    assert found is not None and torch.equal(found, expected), "by the product's own kernel: the same bits"
    other = product.gated_product(states, weight.roll(1, 0), bias, name)
    assert other is not None and not torch.allclose(other, expected)


def test_kernels_overlap_on_request_where_the_device_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = torch.device("cuda:0")

    def options(device: torch.device, switch: str, capability: int) -> dict[str, bool]:
        monkeypatch.setenv(overlap.SWITCH, switch)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
        overlap.overlapping.cache_clear()
        try:
            return overlap.overlapping(device)
        finally:
            overlap.overlapping.cache_clear()

    assert options(gpu, "1", 9) == {"OVERLAPS": True, "launch_pdl": True}
    nothing = {"OVERLAPS": False}
    assert options(torch.device("cpu"), "1", 9) == options(gpu, "0", 9) == nothing and not caplog.records
    assert options(gpu, "1", 8) == nothing and "needs compute capability 9.0" in caplog.text
