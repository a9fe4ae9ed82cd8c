"""The compiled kernels against their definitions; the bits of a token whatever else a pass holds; machines without them."""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from typing import Any, NamedTuple

import pytest
import torch

from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.models.cache.stores import RowStores
from foresay.models.cpu import build, structs
from foresay.models.cpu.layers import CACHES
from foresay.models.cpu.product import NativeProduct
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import freeze_linears
from foresay.models.huggingface.self_check import use_fused_layers
from foresay.models.layer import ClampedGate
from helpers.broken_kernels import Broken
from helpers.families import make
from helpers.guarantees import fused
from helpers.passes import in_pieces, scores, started
from helpers.support import run

Q, K, D = 6, 2, 16
SEEDED = torch.Generator()


def kernel(name: str) -> Any:
    found = build.library()
    assert found is not None, "the tests need a C++ compiler"
    return getattr(found, f"foresay_{name}")


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=SEEDED).to(dtype)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    SEEDED.manual_seed(5)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.double(), b.double(), atol=2e-6, rtol=2e-6)


# -- definitions -------------------------------------------------------------------------------------------------------


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize(("added", "after", "before"), [(0, 0, 1), (1, 0, 1), (1, 1, 1), (1, 1, 0), (1, 0, 0)])
def test_add_and_norm(added: int, after: int, before: int) -> None:
    x, more, one, two = numbers(5, 100), numbers(5, 100), numbers(100), numbers(100)
    wanted = x.double()
    if added:
        grown = rms(more.double(), one.double(), 1e-5) if after else more.double()
        wanted = wanted + 0.25 * grown
    out, pointers = torch.empty_like(x), [more.data_ptr() if added else None, one.data_ptr() if after else None]
    last = two.data_ptr() if before else None
    kernel("add_norm")(x.data_ptr(), *pointers, 0.25, last, out.data_ptr(), 5, 100, 1e-5)
    close(x, wanted)
    close(out, rms(wanted, two.double(), 1e-5) if before else wanted)


def gated(kind: int, joint: torch.Tensor) -> torch.Tensor:
    out = torch.empty(joint.shape[0], joint.shape[1] // 2)
    kernel("gate")(ctypes.byref(structs.GateStruct(kind, 1.7, 2.5)), joint.data_ptr(), out.data_ptr(), *out.shape)
    return out


@pytest.mark.parametrize("kind", [0, 1, 2, 3])
def test_gates(kind: int) -> None:
    joint = numbers(3, 100) * 6
    joint[0, :4] = torch.tensor([-1e4, 1e4, -90.0, 90.0])
    gates, ups = joint.double().chunk(2, -1)
    names: list[Any] = [
        torch.nn.functional.silu,
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        torch.nn.functional.gelu,
    ]
    wanted = names[kind](gates) * ups if kind < 3 else ClampedGate(1.7, 2.5)(gates, ups)
    torch.testing.assert_close(gated(kind, joint).double(), wanted, atol=1e-4, rtol=1e-4)


def test_the_clamped_gate() -> None:
    """gpt-oss's, by hand: each clamp alone, and neither."""
    for gate, up, wanted in [
        (9.0, 1.0, 2.5 / (1 + math.exp(-1.7 * 2.5)) * 2),
        (-9.0, 1.0, -9.0 / (1 + math.exp(1.7 * 9)) * 2),
        (1.0, 9.0, 1 / (1 + math.exp(-1.7)) * 3.5),
        (1.0, -9.0, 1 / (1 + math.exp(-1.7)) * -1.5),
        (1.0, 0.5, 1 / (1 + math.exp(-1.7)) * 1.5),
    ]:
        assert gated(3, torch.tensor([[gate, up]])).item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("kind", "limit"), [(4, 1.0), (-1, 1.0), (3, -1.0), (3, math.nan)])
def test_gates_that_are_none(kind: int, limit: float) -> None:
    joint, out = torch.ones(1, 8), torch.ones(1, 4)
    with pytest.raises(ValueError, match="gate" if kind != 3 else "limit"):
        kernel("gate")(ctypes.byref(structs.GateStruct(kind, 1.0, limit)), joint.data_ptr(), out.data_ptr(), 1, 4)


def in_8_bits(x: torch.Tensor) -> torch.Tensor:
    """Levels and the bytes of a scale, [..., dim] -> [..., dim + 4] int8."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.cat([(x / scale).round().to(torch.int8), scale.view(torch.int8)], -1).contiguous()


def attend(
    lengths: list[int],
    columns: int,
    dtype: torch.dtype = torch.float32,
    *,
    window: int = 0,
    softcap: float = 0.0,
    wide: bool | None = None,
    ancestors: torch.Tensor | None = None,
    dim: int = D,
    sinks: bool = False,
    query_scale: tuple[float, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values that the kernel gathers after rows of some lengths, and those of the definition, [rows, columns, Q * D] each."""
    rows, room = len(lengths), max(lengths) + columns + 3
    stored = numbers(2, rows, room, K, dim, dtype=torch.float32 if dtype is torch.int8 else dtype)
    stored = stored.transpose(0, 1).contiguous()  # a block for each row
    stores = in_8_bits(stored) if dtype is torch.int8 else stored
    joint = numbers(rows, columns, (Q + 2 * K) * dim)
    cos, sin = numbers(rows, columns, dim // 2), numbers(rows, columns, dim // 2)
    norms = (numbers(Q * dim), numbers(K * dim)) if wide else (numbers(dim), numbers(dim))
    sink = torch.linspace(-3, 30, Q) if sinks else None
    slots = torch.tensor(lengths)[:, None] + torch.arange(columns)
    positions = slots if ancestors is None else torch.tensor(lengths)[:, None] + ancestors.sum(-1) - 1
    case = Case(norms, wide, slots, positions, window, softcap, ancestors, dim, sink, query_scale)
    reference = case.gathered(stored.transpose(0, 1).double(), joint.double(), cos, sin)
    place = torch.arange(rows)[:, None].expand(-1, columns).contiguous()
    tokens = place.numel()
    starts = slots[:, :1].expand(-1, columns)
    held = [x.contiguous() for x in (slots, positions, cos, sin, joint, starts)]
    seen = None if ancestors is None else ancestors.to(torch.uint8).contiguous()
    blocks = (ctypes.c_void_p * rows)(*(block.data_ptr() for block in stores))
    capacities = (ctypes.c_int64 * rows)(*[room] * rows)
    asked = structs.AttentionStruct(
        tokens=tokens, columns=columns, queries=Q, keys=K, dim=dim, rotated=dim // 2, wide=int(bool(wide)), window=window,
        offset=0, store_rows=rows, blocks=ctypes.addressof(blocks), capacities=ctypes.addressof(capacities),
        rows=place.data_ptr(), slots=held[0].data_ptr(), positions=held[1].data_ptr(),
        starts=held[5].data_ptr(),
        ancestors=None if seen is None else seen.data_ptr(), cosines=held[2].data_ptr(), sines=held[3].data_ptr(),
        query_norm=None if wide is None else norms[0].data_ptr(), key_norm=None if wide is None else norms[1].data_ptr(),
        sinks=None if sink is None else sink.data_ptr(), eps=1e-5, scaling=0.3, softcap=softcap,
        scale_rate=query_scale[0] if query_scale else 0.0, scale_length=query_scale[1] if query_scale else 0,
    )  # fmt: skip
    out, scratch = torch.empty(tokens, Q * dim), torch.empty(tokens, Q * dim)
    kernel("attend")(
        ctypes.byref(asked), held[4].data_ptr(), scratch.data_ptr(), out.data_ptr(), CACHES[dtype], 2
    )  # fmt: skip
    return out.view(-1, columns, Q * dim), reference


class Case(NamedTuple):
    """Attention by its definition."""

    norms: tuple[torch.Tensor, torch.Tensor]
    wide: bool | None
    slots: torch.Tensor
    positions: torch.Tensor
    window: int
    softcap: float
    ancestors: torch.Tensor | None
    dim: int
    sinks: torch.Tensor | None
    query_scale: tuple[float, int] | None

    def normed(self, x: torch.Tensor, heads: int, weight: torch.Tensor) -> torch.Tensor:
        if self.wide is None:
            return x
        return rms(x if self.wide else x.view(*self.slots.shape, heads, self.dim), weight.double(), 1e-5).flatten(2)

    def seen(self, room: int) -> torch.Tensor:
        """[rows, columns, room], True for the slots in sight of a token."""
        rows, columns = self.slots.shape
        tree = torch.ones(columns, columns).tril().expand(rows, -1, -1) if self.ancestors is None else self.ancestors
        at = torch.arange(room).repeat(rows, 1)
        at.scatter_(1, self.slots, self.positions)
        seen = (torch.arange(room) < self.slots[:, :1, None]).repeat(1, columns, 1)
        seen.scatter_(2, self.slots[:, None].expand(-1, columns, -1), tree.bool())
        return seen & (at[:, None] > self.positions[..., None] - (self.window or 1 << 30))

    def gathered(self, stores: torch.Tensor, joint: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        (keys, values), dim, shape = stores.clone(), self.dim, self.slots.shape
        query, key, value = joint.split([Q * dim, K * dim, K * dim], -1)
        c, s = cos.double()[:, :, None], sin.double()[:, :, None]

        def turned(x: torch.Tensor, heads: int) -> torch.Tensor:
            part, rest = x.view(*shape, heads, dim).split([dim // 2, dim - dim // 2], -1)
            half = torch.cat([-part[..., dim // 4 :], part[..., : dim // 4]], -1)
            return torch.cat([part * c + half * s, rest], -1)

        rows = torch.arange(shape[0])[:, None]
        keys[rows, self.slots] = turned(self.normed(key, K, self.norms[1]), K)
        values[rows, self.slots] = value.view(*shape, K, dim)
        keys, values = (one.repeat_interleave(Q // K, 2) for one in (keys, values))
        scores = 0.3 * torch.einsum("ithd,ishd->iths", turned(self.normed(query, Q, self.norms[0]), Q), keys)
        if self.query_scale is not None:
            rate, length = self.query_scale
            scores = scores * (1 + rate * (1 + self.positions // length).double().log())[..., None, None]
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~self.seen(keys.shape[1])[:, :, None], -torch.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None].expand(*shape, -1, 1)], -1)
        return torch.einsum("iths,ishd->ithd", scores.softmax(-1)[..., : keys.shape[1]], values).flatten(-2)


TREE = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]], dtype=torch.bool).expand(3, -1, -1)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window": {"window": 5},
    "a soft cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "scaled queries": {"query_scale": (0.1, 20)},
    "scaled queries of a tree": {"query_scale": (0.1, 20), "ancestors": TREE},
    "norms of heads": {"wide": False},
    "norms of all heads": {"wide": True},
    "a tree": {"ancestors": TREE},
    "a tree in a window": {"ancestors": TREE, "window": 4},
}


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("lengths", [[0, 7, 40], [61, 127, 200]])
@pytest.mark.parametrize("case", CASES)
def test_attention(case: str, lengths: list[int], dtype: torch.dtype) -> None:
    """Within what is looked at together, and across it."""
    ours, wanted = attend(lengths, 4, dtype, **CASES[case])
    precise = dtype == torch.float32
    torch.testing.assert_close(ours.double(), wanted, atol=1e-5 if precise else 3e-2, rtol=1e-5 if precise else 3e-2)


@pytest.mark.parametrize("dim", [8, 24, 64, 80, 128])
def test_heads_of_other_sizes(dim: int) -> None:
    ours, wanted = attend([3, 150], 20, dim=dim)
    torch.testing.assert_close(ours.double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_definition_tells_the_cases_apart(case: str) -> None:
    """Control: without what a case is about, the comparison above fails."""
    wide = {"wide": not CASES[case]["wide"]} if "wide" in CASES[case] else {"window": 5} if case == "plain" else {}
    _, wanted = attend([0, 7, 40], 4, **CASES[case])
    SEEDED.manual_seed(5)
    other, _ = attend([0, 7, 40], 4, **wide)
    assert not torch.allclose(other.double(), wanted, atol=1e-3)


def test_numbers_are_rounded_as_pytorch_rounds_them() -> None:
    """By a product with one weight of 1 a row."""
    x = torch.cat([numbers(1000) * 3, torch.tensor([math.inf, -math.inf, math.nan, 0.0, 1e-40, 3.4e38])])
    x = torch.cat([x, torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])])
    product = NativeProduct.of_numbers(x[:, None].contiguous(), None)  # so that the sums are x
    out = product(torch.ones(1, 1, dtype=torch.bfloat16))[0]
    assert torch.equal(out.nan_to_num(7), x.to(torch.bfloat16).nan_to_num(7))


@pytest.mark.parametrize("kind", [0, 1, 2, 3])
def test_activations_of_numbers_that_are_none(kind: int) -> None:
    """NaN stays NaN, and its neighbours stay as they are."""
    gates = torch.cat([numbers(40), torch.ones(40)])[None]
    before = gated(kind, gates)[0]
    gates[0, 7], gates[0, 33] = math.nan, -math.nan
    out = gated(kind, gates)[0]
    assert out.isnan().nonzero().flatten().tolist() == [7, 33]
    assert torch.equal(out[~out.isnan()], before[~out.isnan()])


def test_a_token_shares_what_is_read_and_nothing_else(broken_kernels: Broken) -> None:
    """Long rows, by tokens that look together or alone. Control: sums that begin anew wherever a span looks next."""

    def different() -> int:
        model = fused(make("mistral", sliding_window=100))  # spans begin anywhere
        tokens = torch.randint(2, 90, (200,), generator=SEEDED)
        return int((in_pieces(model, tokens, (1, 3, 60, 5, 1, 16, 17, 2, 95)) != scores(model, tokens[None])[0]).sum())

    assert different() == 0
    with broken_kernels():
        assert different() == 0
    with broken_kernels("sums that begin anew wherever a span looks next"):
        assert different() > 0


def test_a_branch_of_a_tree_has_the_bits_of_a_chain() -> None:
    """Though its tokens lie in other slots."""
    model = fused(make("llama"), "bfloat16")
    before, chain = torch.randint(2, 90, (1, 61), generator=SEEDED), torch.tensor([[5, 9, 17, 3]])
    caches = started(model), started(model)
    for cache in caches:
        scores(model, before, cache=cache)
    wanted = scores(model, chain, cache=caches[0])[0]
    tree = torch.tensor([[5, 8, 9, 7, 17, 2, 3]])
    parents = torch.tensor([[-1, 0, 0, 1, 2, 4, 4]])
    ours = model.forward(ModelInput(tree, (7,), parents=parents), caches[1]).scores()[0]
    assert torch.equal(ours[[0, 2, 4, 6]], wanted)
    assert not torch.equal(ours[5], wanted[3]), "control"


# -- the whole model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logits", Logits)
def test_pads_are_zeros_and_the_last_is_each_rows_own(logits: Logits) -> None:
    """A pass over no token is one, too."""
    model = fused(make("llama"))
    cache = started(model, 3)
    empty = ModelInput(torch.zeros(3, 3, dtype=torch.int64), (0, 0, 0), logits=logits, hidden_layers=(1,))
    out = model.forward(empty, cache)
    assert out.hidden[1].shape[:2] == (3, 3) and cache.lengths == [0, 0, 0]
    if logits is Logits.NONE:
        return
    columns = 1 if logits is Logits.LAST else 3
    assert out.scores().shape[:2] == (3, columns)
    found = model.forward(ModelInput(torch.tensor([[5, 9, 17]] * 3), (3, 1, 2), logits=logits), cache).scores()
    assert found.shape[1] == columns and not found[1, 1:].any()
    assert torch.equal(scores(model, torch.tensor([[5, 9]]))[0, 1], found[2, 1 if logits is Logits.ALL else 0])


def test_a_head_by_another_kernel_is_not_trusted_with_single_rows() -> None:
    weights = make("llama")
    freeze_linears(weights)
    head = torch.nn.Linear(32, 97, bias=False)
    head.weight = torch.nn.Parameter(head.weight.detach().t().contiguous().t())  # no row of it lies in one piece
    weights.lm_head = head
    model = CausalModel(weights)
    assert use_fused_layers(model) is None
    assert model.fused is not None
    assert not model.batch_invariant
    assert not model.capabilities.prefill_together
    assert fused(make("llama")).capabilities.prefill_together, "control"


def found(model: CausalModel) -> bool:
    """Whether the kernels are given the stores that a cache has after it grew, in length and in rows."""
    native = model.fused and model.fused._native
    assert native is not None
    cache = started(model)
    scores(model, torch.arange(2, 62)[None], cache=cache)
    stores = native._stores_of(cache)
    assert native._stores_of(cache) is stores, "looked for once"
    seen = []
    for rows, length in ((0, 600), (2, 64)):
        cache.add_rows(rows)
        cache.begin_pass(0, 1, length, torch.device("cpu"), None)
        stores = native._stores_of(cache)
        assert isinstance(cache.tensors, RowStores)
        blocks = [None if block is None else block.data_ptr() for block in cache.tensors.blocks]
        seen.append(list(stores.blocks) == blocks)
    return all(seen)


def test_a_cache_that_grows_lets_go_of_what_it_had() -> None:
    """Else a growing cache would be there twice."""
    model = fused(make("llama"))
    cache = started(model)
    scores(model, torch.arange(2, 62)[None], cache=cache)
    assert isinstance(cache.tensors, RowStores)
    old = [weakref.ref(block) for block in cache.tensors.blocks if block is not None]
    cache.begin_pass(0, 1, 600, torch.device("cpu"), None)
    assert old and all(one() is None for one in old)


def test_a_cache_that_grows_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = fused(make("llama")), torch.arange(2, 92).repeat(4)
    assert found(model)
    assert torch.equal(in_pieces(model, tokens, [60] * 6), scores(model, tokens[None])[0])
    monkeypatch.setattr(RowStores, "version", property(lambda self: 1, lambda self, count: None), raising=False)
    assert not found(model), "control: what does not count its stores is not looked at again"


def test_a_child_process_has_threads_of_its_own() -> None:
    """A forked child has none of its parent's threads; it must not wait for them. (PyTorch's it does wait for.)"""
    product = NativeProduct.of_numbers(numbers(640, 64), None)
    x, outs = numbers(200, 64), [torch.zeros(200, 640) for _ in range(2)]

    def multiply(out: torch.Tensor) -> None:
        kernel("multiply")(ctypes.byref(product.struct), x.data_ptr(), out.data_ptr(), 200, 0, 2)

    multiply(outs[0])
    child = os.fork()
    if child == 0:
        multiply(outs[1])
        os._exit(0 if bytes(outs[0].numpy()) == bytes(outs[1].numpy()) else 1)
    assert os.waitpid(child, 0)[1] == 0


# -- machines without them ---------------------------------------------------------------------------------------------


def test_passes_go_on_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing compilers are in test_library_files.py."""
    prompts, params = [[5, 9, 17], [7]], SamplingParams(max_new_tokens=8)
    wanted = run(CausalModel(make("llama")), prompts, params, gamma=0)[0]
    monkeypatch.setenv(build.SWITCH, "0")
    build.library.cache_clear()
    try:
        model = CausalModel(make("llama"))
        assert use_fused_layers(model) is None
        assert model.fused is not None and not model.fused.is_native
        assert run(model, prompts, params, gamma=0)[0] == wanted
    finally:
        build.library.cache_clear()
