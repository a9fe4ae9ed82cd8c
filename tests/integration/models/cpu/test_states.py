"""Kernels of layers with states against their definitions; a token's bits whatever passes, rows and rejections came before."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from foresay.models.cache.state_cache import SLOTS, RowStates, StateCache
from foresay.models.cache.stores import RowStores
from foresay.models.cpu import build
from foresay.models.cpu.mixers import Mixers, StatePass
from foresay.models.cpu.product import NativeProduct
from foresay.models.layer import GatedDelta, Layer, Norm, ShortConvolution, StateSpace
from helpers.broken_kernels import Broken

SEEDED = torch.Generator()
Mixer = GatedDelta | StateSpace | ShortConvolution


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    SEEDED.manual_seed(7)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=SEEDED).to(dtype)


def delta(
    heads: tuple[int, int],
    dims: tuple[int, int],
    taps: int = 4,
    *,
    by_head: bool = False,
    tiled: bool = False,
    dtype: Any = torch.float32,
) -> GatedDelta:
    channels, values = 2 * heads[0] * dims[0] + heads[1] * dims[1], heads[1]
    own = [numbers(channels, 1, taps, dtype=dtype), numbers(values, dtype=dtype), numbers(values, dtype=dtype)]
    side = NativeProduct.of_numbers(torch.eye(2 * values), None)  # a layer's input are its betas and alphas here
    return GatedDelta(heads, dims, *own, Norm(numbers(dims[1], dtype=dtype), 1e-5), side, by_head, tiled)


def space(
    heads: tuple[int, int], dims: tuple[int, int], taps: int = 4, *, bias: bool = True, dtype: Any = torch.float32
) -> StateSpace:
    values = heads[1]
    channels = 2 * heads[0] * dims[0] + values * dims[1]
    norm = Norm(numbers(values * dims[1], dtype=dtype), 1e-5)
    of_heads = [numbers(values, dtype=dtype) for _ in range(3)]
    own = numbers(channels, 1, taps, dtype=dtype), numbers(channels, dtype=dtype) if bias else None
    return StateSpace(heads, dims, *own, *of_heads, norm)


def short(width: int, taps: int = 3, *, bias: bool = False) -> ShortConvolution:
    return ShortConvolution(numbers(width, 1, taps), numbers(width) if bias else None)


MIXERS: dict[str, Any] = {
    "delta": lambda: delta((2, 4), (8, 8)),
    "delta of odd sizes": lambda: delta((3, 3), (5, 7), 2),
    "delta of wide values": lambda: delta((1, 3), (19, 70), 3),
    "delta by key heads": lambda: delta((2, 6), (16, 33), by_head=True),
    "delta of tiled outputs": lambda: delta((2, 6), (8, 9), tiled=True),
    "delta in bf16": lambda: delta((2, 4), (16, 40), dtype=torch.bfloat16),
    "space": lambda: space((1, 4), (8, 8)),
    "space of groups and odd sizes": lambda: space((3, 6), (5, 7), 2, bias=False),
    "space of wide heads and many channels": lambda: space((2, 4), (65, 70), 3),
    "space in bf16": lambda: space((1, 3), (16, 40), dtype=torch.bfloat16),
    "short": lambda: short(48),
    "short and wide with a bias": lambda: short(530, 5, bias=True),
    "one tap": lambda: short(9, 1),
}


def width_of(mixer: Mixer) -> tuple[int, int]:
    """Inputs and outputs."""
    if isinstance(mixer, ShortConvolution):
        size = mixer.convolution.shape[0]
        return 3 * size, size
    values, steps = mixer.heads[1] * mixer.dims[1], mixer.heads[1] * (1 + isinstance(mixer, GatedDelta))
    return mixer.convolution.shape[0] + values + steps, values


def convolved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, channels] -> the same, causally."""
    padded = F.pad(x.T[None], (weight.shape[-1] - 1, 0))
    return F.conv1d(padded, weight.double(), groups=weight.shape[0])[0].T


def defined(mixer: Mixer, joint: torch.Tensor) -> torch.Tensor:
    """The layer's outputs for a text, [T, inputs] -> [T, outputs], token after token."""
    joint = joint.double()
    if isinstance(mixer, ShortConvolution):
        b, c, x = joint.chunk(3, -1)
        found = convolved(b * x, mixer.convolution)
        return c * (found if mixer.bias is None else found + mixer.bias.double())
    (keys, values), (key_dim, dim) = mixer.heads, mixer.dims
    count, group = len(joint), values // keys
    if isinstance(mixer, StateSpace):
        return _of_space(mixer, joint)
    if mixer.by_key_head:
        first, last = joint.split([2 * keys * key_dim + 2 * values * dim, 2 * values], -1)
        sizes = [key_dim, key_dim, group * dim, group * dim]
        query, key, value, gate = (one.flatten(1) for one in first.view(count, keys, -1).split(sizes, -1))
        beta, alpha = (one.flatten(1) for one in last.view(count, keys, -1).split([group, group], -1))
    else:
        sizes = [keys * key_dim, keys * key_dim, values * dim, values * dim, values, values]
        query, key, value, gate, beta, alpha = joint.split(sizes, -1)
    mixed = F.silu(convolved(torch.cat([query, key, value], -1), mixer.convolution))
    query, key, value = mixed.split([keys * key_dim, keys * key_dim, values * dim], -1)
    query, key = (
        F.normalize(one.reshape(count, keys, key_dim), dim=-1).repeat_interleave(group, 1) for one in (query, key)
    )
    decay = torch.exp(-mixer.decays.double().exp() * F.softplus(alpha + mixer.steps.double()))
    state, out = torch.zeros(values, key_dim, dim).double(), []
    for t in range(count):
        state = state * decay[t][:, None, None]
        read = torch.einsum("hkv,hk->hv", state, key[t])
        written = beta[t].sigmoid()[:, None] * (value[t].view(values, dim) - read)
        state = state + key[t][:, :, None] * written[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, query[t]) * key_dim**-0.5)
    normed = torch.stack(out)
    normed = normed * (normed.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * mixer.norm.weight.double()
    found = (normed.flatten(1) * F.silu(gate)).view(count, keys, group, dim)
    return (found.transpose(1, 2) if mixer.tiled else found).reshape(count, -1)


def _of_space(mixer: StateSpace, joint: torch.Tensor) -> torch.Tensor:
    (groups, heads), (size, dim) = mixer.heads, mixer.dims
    values, count = heads * dim, len(joint)
    gate, inputs, steps = joint.split([values, mixer.convolution.shape[0], heads], -1)
    mixed = convolved(inputs, mixer.convolution)
    mixed = F.silu(mixed if mixer.bias is None else mixed + mixer.bias.double())
    x, b, c = mixed.split([values, groups * size, groups * size], -1)
    b, c = (one.view(count, groups, size).repeat_interleave(heads // groups, 1) for one in (b, c))
    step = F.softplus(steps + mixer.steps.double())
    decay, x = torch.exp(-mixer.decays.double().exp() * step), x.view(count, heads, dim)
    state, out = torch.zeros(heads, dim, size).double(), []
    for t in range(count):
        state = state * decay[t][:, None, None] + (step[t][:, None] * x[t])[:, :, None] * b[t][:, None]
        out.append(torch.einsum("hds,hs->hd", state, c[t]) + mixer.skips.double()[:, None] * x[t])
    gated = (torch.stack(out).flatten(1) * F.silu(gate)).view(count, groups, -1)
    normed = gated * (gated.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return normed.flatten(1) * mixer.norm.weight.double()


class Mixed:
    """One layer over a cache of its states."""

    def __init__(self, mixer: Mixer, rows: int = 1) -> None:
        layer = object.__new__(Layer)
        object.__setattr__(layer, "mixer", mixer)
        self.inputs, self.outputs = width_of(mixer)
        self.aside = 2 * mixer.heads[1] if isinstance(mixer, GatedDelta) else 0
        self.mixers = Mixers([layer], self.outputs)
        self.cache = StateCache(RowStores([(1, 4)], torch.float32), self.mixers.sizes)
        self.cache.add_rows(rows)

    def __call__(self, parts: dict[int, torch.Tensor], threads: int = 1) -> list[torch.Tensor]:
        """Outputs of a pass over some tokens [n, inputs] of rows."""
        library = build.library()
        assert library is not None, "the tests need a C++ compiler"
        whole = torch.cat(list(parts.values()))
        joint, side = (one.contiguous() for one in whole.split([self.inputs - self.aside, self.aside], -1))
        rows = torch.cat([torch.full((len(part),), row) for row, part in parts.items()])
        out = torch.empty(len(joint), self.outputs)
        for row, part in parts.items():
            self.cache.reserve(row, [self.cache.lengths[row] + len(part)], 0)
        with StatePass(self.cache, rows) as states:
            pointer = self.mixers.pointer(0)
            given = [ctypes.byref(states.struct), side.data_ptr(), joint.data_ptr(), out.data_ptr()]
            library.foresay_mix(pointer, *given, len(joint), threads)
        for row, part in parts.items():
            self.cache.lengths[row] += len(part)
        return list(out.split([len(part) for part in parts.values()]))


def whole(mixer: Mixer, text: torch.Tensor) -> torch.Tensor:
    return Mixed(mixer)({0: text})[0]


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("length", [1, 3, 61])
def test_a_layer_computes_its_definition(name: str, length: int) -> None:
    mixer = MIXERS[name]()
    text = numbers(length, width_of(mixer)[0])
    torch.testing.assert_close(whole(mixer, text).double(), defined(mixer, text), atol=2e-5, rtol=2e-5)


def test_the_definition_notices_what_a_layer_does() -> None:
    """Control: without the decay, the order of inputs, or one tap, the comparison above fails."""
    mixer = delta((2, 4), (8, 8))
    text = numbers(9, width_of(mixer)[0])
    wanted = defined(mixer, text)
    shorter = torch.cat([torch.zeros_like(mixer.convolution[..., :1]), mixer.convolution[..., 1:]], -1)
    others = [
        replace(mixer, decays=mixer.decays - 9),
        replace(mixer, by_key_head=True),
        replace(mixer, tiled=True),
        replace(mixer, convolution=shorter),
    ]
    for other in others:
        assert not torch.allclose(whole(other, text).double(), wanted, atol=1e-3)


def test_the_definition_notices_what_a_state_space_does() -> None:
    """Control: without the skips, the bias, the steps' shift or the groups, the comparison fails."""
    mixer = space((2, 4), (8, 8))
    text = numbers(9, width_of(mixer)[0])
    wanted = defined(mixer, text)
    others = [
        replace(mixer, skips=torch.zeros(4)),
        replace(mixer, bias=None),
        replace(mixer, steps=torch.zeros(4)),
        replace(mixer, norm=Norm(torch.ones(32), 1e-5)),
        replace(mixer, heads=(1, 4), dims=(16, 8)),
    ]
    for other in others:
        assert not torch.allclose(whole(other, text).double(), wanted, atol=1e-3)


@pytest.mark.parametrize("name", MIXERS)
def test_a_token_has_its_bits_in_any_pieces_rows_and_threads(name: str) -> None:
    mixer = MIXERS[name]()
    texts = [numbers(length, width_of(mixer)[0]) for length in (90, 70, 8)]
    wanted = [whole(mixer, text) for text in texts]
    mixed, at, sizes = Mixed(mixer, 3), [0, 0, 0], itertools.cycle([1, 5, 40, 2, 30, 1, 1, 3])
    found: list[list[torch.Tensor]] = [[], [], []]
    for turn in itertools.count():
        parts = {}
        for row, text in enumerate(texts):
            if (row + turn) % 3 or turn % 2:
                count = min(next(sizes), len(text) - at[row])
                if count:
                    parts[row] = text[at[row] : at[row] + count]
        if not parts:
            if all(one == len(text) for one, text in zip(at, texts, strict=True)):
                break
            continue
        for (row, part), out in zip(parts.items(), mixed(parts, 1 + turn % 3), strict=True):
            found[row].append(out)
            at[row] += len(part)
    assert all(torch.equal(torch.cat(one), text) for one, text in zip(found, wanted, strict=True))


def rejected(mixer: Mixer, drafts: Sequence[int], length: int = 120) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Outputs after passes with drafts that end differently, rewound to each position in turn; those of the text; tokens fed."""
    text, noise = numbers(length, width_of(mixer)[0]), numbers(length, width_of(mixer)[0])
    mixed, out, at, fed = Mixed(mixer), torch.zeros(length, width_of(mixer)[1]), 0, []
    mixed({0: text[:10]})
    mixed.cache.share(0, [10])
    at = 10
    out[:at] = whole(mixer, text[:at])
    turn = 0
    while at < length:
        drafted = min(drafts[turn % len(drafts)], length - at - 1)
        accepted = turn % (drafted + 1)
        start = mixed.cache.lengths[0]
        fed.append(at - start)
        part = torch.cat([text[start : at + 1 + accepted], noise[at + 1 + accepted : at + 1 + drafted]])
        out[start : at + 1 + accepted] = mixed({0: part})[0][: at + 1 + accepted - start]
        at += 1 + accepted
        mixed.cache.truncate([at])
        turn += 1
    return out, whole(mixer, text), fed


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("drafts", [(0,), (1,), (8,), (0, 3, 8, 1), (SLOTS - 1,), (SLOTS + 9, 2)])
def test_rejections_at_each_position(name: str, drafts: tuple[int, ...]) -> None:
    """The bits are those of the whole text; no token is fed again unless a draft was longer than what a row keeps."""
    mixer = MIXERS[name]()
    found, wanted, fed = rejected(mixer, drafts)
    assert torch.equal(found, wanted)
    assert any(fed) == (max(drafts) >= SLOTS)


@pytest.mark.parametrize("drafted", [9, SLOTS - 1, SLOTS + 20])
def test_a_row_rewinds_after_single_tokens(drafted: int) -> None:
    """As a draft model does: token after token, then back. Of more tokens than a row keeps, the accepted ones are fed again."""
    mixer = delta((2, 4), (8, 8))
    text = numbers(300, width_of(mixer)[0])
    wanted, mixed = whole(mixer, text), Mixed(mixer)
    at = mark = 0
    for turn in range(30):
        for t in range(mixed.cache.lengths[0], min(mark + drafted, len(text))):
            assert torch.equal(mixed({0: text[t : t + 1]})[0][0], wanted[t])
        at = min(mark + turn % 9, len(text))
        mixed.cache.truncate([at])
        assert mixed.cache.lengths == [at if drafted < SLOTS else mark], "or to where it was before"
        for t in range(mixed.cache.lengths[0], at):
            mixed({0: text[t : t + 1]})
        mixed.cache.truncate([at])
        mark = at


def test_a_row_that_is_rewound_far_starts_where_it_can() -> None:
    mixer = delta((2, 4), (8, 8))
    text = numbers(200, width_of(mixer)[0])
    wanted, mixed = whole(mixer, text), Mixed(mixer)
    for start, end in itertools.pairwise([0, 30, 70, 100, 160]):
        mixed({0: text[start:end]})
        if end < 160:
            mixed.cache.share(0, [end - start])
    for length, reached in [(150, 100), (99, 70), (70, 70), (69, 30), (20, 0)]:
        mixed.cache.truncate([length])
        assert mixed.cache.lengths == [reached]
        ends = [reached + 7, reached + 9]
        for start, end in itertools.pairwise([reached, *ends]):
            assert torch.equal(mixed({0: text[start:end]})[0], wanted[start:end])
        mixed.cache.truncate([reached + 2])
        assert torch.equal(mixed({0: text[reached + 2 : reached + 3]})[0], wanted[reached + 2 : reached + 3])


def test_prefixes_are_copied_exactly() -> None:
    """From an active row within what it keeps and from the end of a prefill pass, and from a saved one."""
    mixer = delta((2, 4), (8, 8))
    text = numbers(100, width_of(mixer)[0])
    wanted, mixed = whole(mixer, text), Mixed(mixer, 4)
    mixed({0: text[:50]})
    mixed.cache.share(0, [50])
    for t in range(50, 70, 4):
        mixed({0: text[t : t + 4]})
    saved = mixed.cache.save_prefix(0, 68)
    assert saved.prefix_length(68) == 68 and saved.prefix_length(51) in (50, 51) and saved.nbytes > 0
    cases = [(1, 66, lambda n: mixed.cache.copy_prefix(0, 1, n)), (2, 50, lambda n: mixed.cache.copy_prefix(0, 2, n))]
    cases.append((3, 68, lambda n: mixed.cache.load_prefix(3, saved, n)))
    for row, length, copy in cases:
        assert mixed.cache.prefix_length(0, length) == length
        copy(length)
        assert mixed.cache.lengths[row] == length
    mixed.cache.swap(0, 3)
    parts = {row: text[mixed.cache.lengths[row] : mixed.cache.lengths[row] + 5] for row in range(4)}
    starts = list(mixed.cache.lengths)
    for start, out in zip(starts, mixed(parts), strict=True):
        assert torch.equal(out, wanted[start : start + 5])
    mixed.cache.rearrange([(3, 1)], 3)
    assert mixed.cache.lengths == [73, 75, 55]
    assert torch.equal(mixed({1: text[75:80]})[0], wanted[75:80])
    assert mixed.cache.nbytes > 0


def test_an_interrupted_pass_leaves_a_row_that_can_go_on() -> None:
    mixer = delta((2, 4), (8, 8))
    text = numbers(60, width_of(mixer)[0])
    wanted, mixed = whole(mixer, text), Mixed(mixer)
    mixed({0: text[:20]})
    mixed.cache.share(0, [20])
    mixed({0: text[20:30]})
    states = mixed.cache.states(0)

    def interrupted() -> None:
        with StatePass(mixed.cache, torch.zeros(3, dtype=torch.int64)):
            states.at_end.fill_(torch.nan)
            states.at_base.numbers.fill_(torch.nan)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert mixed.cache.lengths == [20]
    assert torch.equal(mixed({0: text[20:40]})[0], wanted[20:40])


# -- controls ----------------------------------------------------------------------------------------------------------


def test_a_state_that_is_not_restored_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(self: RowStates, length: int) -> None:
        self.base = self.first = self.end = length

    monkeypatch.setattr(RowStates, "go_to", kept)
    found, wanted, _ = rejected(delta((2, 4), (8, 8)), (8,), 40)
    assert not torch.equal(found, wanted)


@pytest.mark.parametrize("fault", ["a state restored one token off", "inputs before the base of the token after"])
def test_a_state_that_is_restored_wrongly_is_seen(fault: str, broken_kernels: Broken) -> None:
    mixer = delta((2, 4), (8, 8))
    with broken_kernels():
        found, wanted, _ = rejected(mixer, (8, 3), 60)
        assert torch.equal(found, wanted)
    with broken_kernels(fault):
        found, wanted, _ = rejected(mixer, (8, 3), 60)
        assert not torch.equal(found, wanted)
