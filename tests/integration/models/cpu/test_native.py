"""The compiled kernels against their definitions; the bits of a token whatever else a pass holds; machines without them."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
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
    threads: int = 1,
    only: int | None = None,
    dim: int = D,
    sinks: bool = False,
    query_scale: tuple[float, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values that the kernel gathers after rows of some lengths, and those of the definition, [rows, columns, Q * D] each.

    only: give the kernel this row alone.
    """
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
    some = slice(None) if only is None else slice(only, only + 1)
    place = torch.arange(rows)[some, None].expand(-1, columns).contiguous()
    tokens = place.numel()
    starts = slots[:, :1].expand(-1, columns)
    held = [x.contiguous() for x in (slots[some], positions[some], cos[some], sin[some], joint[some], starts[some])]
    seen = None if ancestors is None else ancestors[some].to(torch.uint8).contiguous()
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
        ctypes.byref(asked), held[4].data_ptr(), scratch.data_ptr(), out.data_ptr(), CACHES[dtype], threads
    )  # fmt: skip
    return out.view(-1, columns, Q * dim), reference[some]


class Case(NamedTuple):
    """Attention by its definition, one token and head at a time."""

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

    def seen(self, i: int, t: int) -> list[int]:
        """Slots in sight of a token."""
        start, at = int(self.slots[i, 0]), self.positions[i] - self.window
        tree = [j for j in range(t + 1) if self.ancestors is None or bool(self.ancestors[i, t, j])]
        near = [start + j for j in tree if not self.window or int(self.positions[i, j]) > int(at[t])]
        return [n for n in range(start) if not self.window or n > int(at[t])] + near

    def gathered(self, stores: torch.Tensor, joint: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        (keys, values), dim, shape = stores.clone(), self.dim, self.slots.shape
        query, key, value = joint.split([Q * dim, K * dim, K * dim], -1)
        c, s = cos.double()[:, :, None], sin.double()[:, :, None]

        def turned(x: torch.Tensor, heads: int) -> torch.Tensor:
            part, rest = x.view(*shape, heads, dim).split([dim // 2, dim - dim // 2], -1)
            half = torch.cat([-part[..., dim // 4 :], part[..., : dim // 4]], -1)
            return torch.cat([part * c + half * s, rest], -1)

        query, key = turned(self.normed(query, Q, self.norms[0]), Q), turned(self.normed(key, K, self.norms[1]), K)
        out = torch.zeros(*shape, Q, dim, dtype=torch.double)
        for i, t in itertools.product(*map(range, shape)):
            if t == 0:
                keys[i, self.slots[i]], values[i, self.slots[i]] = key[i], value.view(*shape, K, dim)[i]
            seen = self.seen(i, t)
            for h in range(Q):
                scores = 0.3 * keys[i, seen, h // (Q // K)] @ query[i, t, h]
                if self.query_scale is not None:
                    rate, length = self.query_scale
                    scores = scores * (1 + rate * math.log(1 + int(self.positions[i, t]) // length))
                if self.softcap:
                    scores = self.softcap * torch.tanh(scores / self.softcap)
                if self.sinks is not None:
                    scores = torch.cat([scores, self.sinks[h : h + 1]])
                out[i, t, h] = scores.softmax(0)[: len(seen)] @ values[i, seen, h // (Q // K)]
        return out.flatten(-2)


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


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("row", [0, 1, 2])
def test_the_bits_of_a_row_are_those_it_has_alone(dtype: torch.dtype, row: int) -> None:
    together, _ = attend([3, 70, 200], 9, dtype, threads=2)
    SEEDED.manual_seed(5)
    alone, _ = attend([3, 70, 200], 9, dtype, only=row)
    assert torch.equal(together[row], alone[0])


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
        model, count = compiled("mistral", sliding_window=100), 0  # spans begin anywhere
        tokens = torch.randint(2, 90, (1, 230), generator=SEEDED)
        other = started(model)
        whole = model.forward(ModelInput(tokens[:, :200], (200,)), started(model)).scores()[0]
        start = 0
        for size in (1, 3, 60, 5, 1, 16, 17, 2, 95):
            part = model.forward(ModelInput(tokens[:, start : start + size], (size,)), other).scores()[0]
            count += int((part != whole[start : start + size]).any(1).sum())
            start += size
        return count

    assert different() == 0
    with broken_kernels():
        assert different() == 0
    with broken_kernels("sums that begin anew wherever a span looks next"):
        assert different() > 0


def test_a_branch_of_a_tree_has_the_bits_of_a_chain() -> None:
    """Though its tokens lie in other slots."""
    model = compiled("llama", torch.bfloat16)
    before, chain = torch.randint(2, 90, (1, 61), generator=SEEDED), torch.tensor([[5, 9, 17, 3]])
    caches = started(model), started(model)
    for cache in caches:
        model.forward(ModelInput(before, (61,)), cache)
    wanted = model.forward(ModelInput(chain, (4,)), caches[0]).scores()[0]
    tree = torch.tensor([[5, 8, 9, 7, 17, 2, 3]])
    parents = torch.tensor([[-1, 0, 0, 1, 2, 4, 4]])
    ours = model.forward(ModelInput(tree, (7,), parents=parents), caches[1]).scores()[0]
    assert torch.equal(ours[[0, 2, 4, 6]], wanted)
    assert not torch.equal(ours[5], wanted[3]), "control"


# -- the whole model ---------------------------------------------------------------------------------------------------


def started(model: CausalModel, rows: int = 1) -> Any:
    cache = model.new_cache()
    cache.add_rows(rows)
    return cache


def compiled(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> CausalModel:
    weights = make(family, **changes).to(dtype)
    freeze_linears(weights)
    model = CausalModel(weights)
    assert use_fused_layers(model) is None
    assert model.fused is not None
    assert model.fused.is_native
    return model


@pytest.mark.parametrize("logits", Logits)
def test_pads_are_zeros_and_the_last_is_each_rows_own(logits: Logits) -> None:
    """A pass over no token is one, too."""
    model = compiled("llama")
    cache = started(model, 3)
    empty = ModelInput(torch.zeros(3, 3, dtype=torch.int64), (0, 0, 0), logits=logits, hidden_layers=(1,))
    out = model.forward(empty, cache)
    assert out.hidden[1].shape[:2] == (3, 3) and cache.lengths == [0, 0, 0]
    if logits is Logits.NONE:
        return
    columns = 1 if logits is Logits.LAST else 3
    assert out.scores().shape[:2] == (3, columns)
    scores = model.forward(ModelInput(torch.tensor([[5, 9, 17]] * 3), (3, 1, 2), logits=logits), cache).scores()
    assert scores.shape[1] == columns and not scores[1, 1:].any()
    own = model.forward(ModelInput(torch.tensor([[5, 9]]), (2,)), started(model)).scores()[0, 1]
    assert torch.equal(own, scores[2, 1 if logits is Logits.ALL else 0])


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
    assert compiled("llama").capabilities.prefill_together, "control"


def found(model: CausalModel) -> bool:
    """Whether the kernels are given the stores that a cache has after it grew, in length and in rows."""
    assert model.fused is not None
    native = model.fused._native
    assert native is not None
    cache, tokens = started(model), torch.arange(2, 62)[None]
    model.forward(ModelInput(tokens, (60,)), cache)
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
    model = compiled("llama")
    cache = started(model)
    model.forward(ModelInput(torch.arange(2, 62)[None], (60,)), cache)
    assert isinstance(cache.tensors, RowStores)
    old = [weakref.ref(block) for block in cache.tensors.blocks if block is not None]
    cache.begin_pass(0, 1, 600, torch.device("cpu"), None)
    assert old
    assert all(one() is None for one in old)


def test_a_cache_that_grows_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled("llama")
    assert found(model)
    cache, tokens = started(model), torch.arange(2, 92).repeat(4)[None]
    parts = [model.forward(ModelInput(part, (60,)), cache).scores() for part in tokens.split(60, 1)]
    assert torch.equal(torch.cat(parts, 1), model.forward(ModelInput(tokens, (360,)), started(model)).scores())
    monkeypatch.setattr(RowStores, "version", property(lambda self: 1, lambda self, count: None), raising=False)
    assert not found(model), "control: what does not count its stores is not looked at again"


def test_threads_may_share_a_model() -> None:
    """Passes by four threads, each over a cache of its own."""
    model, tokens = compiled("llama"), [torch.randint(2, 90, (1, 40), generator=SEEDED) for _ in range(4)]

    def scores(ids: torch.Tensor) -> torch.Tensor:
        cache = model.new_cache()
        cache.add_rows(1)
        return model.forward(ModelInput(ids, (40,)), cache).scores()

    alone = [scores(ids) for ids in tokens]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda n: torch.equal(scores(tokens[n % 4]), alone[n % 4]), range(400)))


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
