"""The compiled kernels against their definitions; the bits of a token whatever else a pass holds; machines without them."""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.models.cache.stores import RowStores
from foresay.models.cpu import build, structs
from foresay.models.cpu.product import NativeProduct
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import freeze_linears
from foresay.models.huggingface.self_check import fused_difference, use_fused_layers
from foresay.models.layer import ClampedGate
from helpers.broken_kernels import Broken
from helpers.families import make
from helpers.passes import in_pieces, scores, started
from helpers.support import run

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


GATES: list[Any] = [
    torch.nn.functional.silu,
    lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    torch.nn.functional.gelu,
]


@pytest.mark.parametrize("kind", [0, 1, 2, 3])
def test_gates(kind: int) -> None:
    """NaN stays NaN, and its neighbours stay as they are."""
    joint = numbers(3, 100) * 6
    joint[0, :4] = torch.tensor([-1e4, 1e4, -90.0, 90.0])
    gates, ups = joint.double().chunk(2, -1)
    wanted = GATES[kind](gates) * ups if kind < 3 else ClampedGate(1.7, 2.5)(gates, ups)
    before = gated(kind, joint)
    torch.testing.assert_close(before.double(), wanted, atol=1e-4, rtol=1e-4)
    joint[1, 7], joint[1, 33] = math.nan, -math.nan
    out = gated(kind, joint)
    assert out.isnan().nonzero().tolist() == [[1, 7], [1, 33]]
    assert torch.equal(out[~out.isnan()], before[~out.isnan()])


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


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "ministral3", "qwen3", "olmo2"])
def test_attention_over_long_rows(family: str) -> None:
    """As transformers': windows, soft caps, sinks, scaled queries, norms of heads and of all; across what is read together."""
    text = torch.randint(2, 90, (1, 230), generator=SEEDED)
    for dtype, most in ((torch.float32, 2e-4), (torch.bfloat16, 5e-2)):
        with torch.no_grad():
            wanted = make(family).to(dtype).float()(text).logits[0]
        found = in_pieces(compiled(family, dtype), text[0], (61, 4, 75, 5, 85)).float()
        errors = (found - wanted).square().mean(-1).sqrt() / wanted.std()
        # a near tie may change an expert in bf16
        assert float(errors.median() if dtype == torch.bfloat16 else errors.max()) < most


@pytest.mark.parametrize("dim", [8, 24, 64, 80, 128])
def test_heads_of_other_sizes(dim: int) -> None:
    assert fused_difference(compiled("llama", head_dim=dim)) < 2e-5


def test_numbers_are_rounded_as_pytorch_rounds_them() -> None:
    """By a product with one weight of 1 a row."""
    x = torch.cat([numbers(1000) * 3, torch.tensor([math.inf, -math.inf, math.nan, 0.0, 1e-40, 3.4e38])])
    x = torch.cat([x, torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])])
    product = NativeProduct.of_numbers(x[:, None].contiguous(), None)  # so that the sums are x
    out = product(torch.ones(1, 1, dtype=torch.bfloat16))[0]
    assert torch.equal(out.nan_to_num(7), x.to(torch.bfloat16).nan_to_num(7))


def test_a_token_shares_what_is_read_and_nothing_else(broken_kernels: Broken) -> None:
    """Long rows, by tokens that look together or alone. Control: sums that begin anew wherever a span looks next."""

    def different() -> int:
        model = compiled("mistral", sliding_window=100)  # spans begin anywhere
        tokens = torch.randint(2, 90, (1, 230), generator=SEEDED)
        parts = in_pieces(model, tokens[0, :200], (1, 3, 60, 5, 1, 16, 17, 2, 95))
        return int((parts != scores(model, tokens[:, :200])[0]).any(1).sum())

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


def compiled(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> CausalModel:
    weights = make(family, **changes).to(dtype)
    freeze_linears(weights)
    model = CausalModel(weights)
    assert use_fused_layers(model) is None
    assert model.fused is not None and model.fused.is_native
    return model


def test_pads_are_zeros_and_the_last_is_each_rows_own() -> None:
    """A pass over no token is one, too."""
    model = compiled("llama")
    own = scores(model, torch.tensor([[5, 9]]))[0, 1]
    for logits, columns in ((Logits.NONE, 0), (Logits.LAST, 1), (Logits.ALL, 3)):
        cache = started(model, 3)
        empty = ModelInput(torch.zeros(3, 3, dtype=torch.int64), (0, 0, 0), logits=logits, hidden_layers=(1,))
        out = model.forward(empty, cache)
        assert out.hidden[1].shape[:2] == (3, 3) and cache.lengths == [0, 0, 0]
        if columns:
            assert out.scores().shape[:2] == (3, columns)
            given = ModelInput(torch.tensor([[5, 9, 17]] * 3), (3, 1, 2), logits=logits)
            found = model.forward(given, cache).scores()
            assert found.shape[1] == columns and not found[1, 1:].any()
            assert torch.equal(own, found[2, 1 if logits is Logits.ALL else 0])


def test_a_head_by_another_kernel_is_not_trusted_with_single_rows() -> None:
    weights = make("llama")
    freeze_linears(weights)
    head = torch.nn.Linear(32, 97, bias=False)
    head.weight = torch.nn.Parameter(head.weight.detach().t().contiguous().t())  # no row of it lies in one piece
    weights.lm_head = head
    model = CausalModel(weights)
    assert use_fused_layers(model) is None and model.fused is not None
    assert not model.batch_invariant and not model.capabilities.prefill_together
    assert compiled("llama").capabilities.prefill_together, "control"


def test_a_cache_that_grows_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In length and in rows; it lets go of what it had, else a growing cache would be there twice."""
    model, tokens = compiled("llama"), torch.arange(2, 92).repeat(4)[None]

    def is_found() -> bool:
        """Whether the kernels are given the stores that a cache has after it grew."""
        native, cache, seen = model.fused._native, started(model), []  # type: ignore[union-attr]
        assert native is not None
        model.forward(ModelInput(tokens[:, :60], (60,)), cache)
        assert native._stores_of(cache) is native._stores_of(cache), "looked for once"
        old = [weakref.ref(block) for block in cache.tensors.blocks if block is not None]
        for rows, length in ((0, 600), (2, 64)):
            cache.add_rows(rows)
            cache.begin_pass(0, 1, length, torch.device("cpu"), None)
            blocks = [None if block is None else block.data_ptr() for block in cache.tensors.blocks]
            seen.append(list(native._stores_of(cache).blocks) == blocks)
        assert old and all(one() is None for one in old)
        return all(seen)

    assert is_found()
    assert torch.equal(in_pieces(model, tokens[0], [60] * 6), scores(model, tokens)[0])
    monkeypatch.setattr(RowStores, "version", property(lambda self: 1, lambda self, count: None), raising=False)
    assert not is_found(), "control: what does not count its stores is not looked at again"


def test_threads_may_share_a_model() -> None:
    """Passes by four threads, each over a cache of its own."""
    model, tokens = compiled("llama"), [torch.randint(2, 90, (1, 40), generator=SEEDED) for _ in range(4)]

    alone = [scores(model, ids) for ids in tokens]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda n: torch.equal(scores(model, tokens[n % 4]), alone[n % 4]), range(400)))


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
