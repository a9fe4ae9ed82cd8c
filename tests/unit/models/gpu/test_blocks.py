"""Products over quantized blocks, and mixtures of experts, in Triton's interpreter, against weights that others read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from foresay.models.gpu import blocks, experts
from foresay.models.gpu.blocks import BlockProduct, ExpertProduct, StackedProduct
from foresay.models.huggingface import linears
from foresay.models.layer import ClampedGate, Experts, StackedExperts
from foresay.models.levels import E4M3, KINDS, Levels
from helpers.gguf_files import random_blocks

CPU = torch.device("cpu")
SIZES = {
    "Q8_0": (40, 7 * 32),
    "Q4_0": (33, 5 * 32),
    "Q4_1": (33, 5 * 32),
    "Q5_0": (33, 96),
    "Q5_1": (33, 7 * 32),
    "Q4_K": (40, 512),
}
SIZES |= {"Q5_K": (36, 256), "Q6_K": (35, 256), "MXFP4": (33, 7 * 32)}


def stored(kind: str, seed: int = 0) -> tuple[Any, torch.Tensor]:
    return random_blocks(kind, *SIZES[kind], seed)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_file(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, weight = stored(kind)
    bias = torch.randn(len(weight))
    found = BlockProduct(Levels.of_file(kind, data), torch.float32, CPU, bias)
    torch.testing.assert_close(found.dense(), weight, rtol=1e-6, atol=1e-7)
    assert (found.out_features, found.in_features) == tuple(weight.shape) and found.bits < 9
    torch.manual_seed(0)
    x = torch.randn(2, 3, weight.shape[1])
    expected = x @ weight.T + bias
    torch.testing.assert_close(found(x), expected, rtol=1e-4, atol=1e-4)
    many, tokens = expected.repeat(12, 1, 1), x.repeat(12, 1, 1)
    torch.testing.assert_close(found(tokens), many, rtol=1e-4, atol=1e-4)  # by the kernel, in groups of 64 tokens
    monkeypatch.setattr(blocks, "MOST", 32)  # by dequantized weights, in slices of 8,192
    found = BlockProduct(Levels.of_file(kind, np.tile(data, (270, 1))), torch.float32, CPU, bias.repeat(270))
    torch.testing.assert_close(found(tokens), many.repeat(1, 1, 270), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("exponents", [(0, 1), (2, 100), (160, 252)])
def test_exponents_of_any_size_are_exact(exponents: tuple[int, int]) -> None:
    """Exponents of MXFP4: of 0 and 1 half the scale is a subnormal number."""
    data, _ = stored("MXFP4")
    data.reshape(len(data), -1, 17)[..., 0] = np.random.default_rng(1).choice(exponents, (len(data), 7))
    weight = torch.from_numpy(np.array(gguf.dequantize(data, gguf.GGMLQuantizationType.MXFP4)))
    found = BlockProduct(Levels.of_file("MXFP4", data), torch.float32, CPU, None)
    assert torch.equal(found.dense(), weight)
    assert torch.equal(found(torch.eye(weight.shape[1])[:3]), weight[:, :3].T)


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "4 bits with levels that stand for 0, one scale for 128 weights": {"bits": 4, "per": 4, "zeros": (0, 16)},
    "8 bits with such levels": {"bits": 8, "per": 2, "zeros": (-128, 128)},
    "4 bits with offsets": {"bits": 4, "mins": True},
    "floats of 8 bits": {"bits": 8, "per": 4, "is_float": True},
}


def levels_of(kind: str, rows: int = 37, depth: int = 288) -> tuple[Levels, torch.Tensor]:
    """Random levels, scales and zeros, and their weights. 288 weights are nine groups, not a multiple of four."""
    given = dict(CHECKPOINTS[kind])
    rng, bits, per = np.random.default_rng(len(kind)), given.pop("bits"), given.pop("per", 1)
    levels = rng.integers(0, 1 << bits, (rows, depth), dtype=np.uint8)
    count = -(-depth // 32 // per)
    scales = rng.uniform(0.001, 0.02, (rows, count)).astype(np.float16)
    numbers = torch.from_numpy(levels.view(np.int8).copy() if bits == 8 else levels).float()
    if given.get("is_float"):
        levels[levels & 127 == 127] = 0  # these are no numbers
        numbers = torch.from_numpy(levels).view(torch.float8_e4m3fn).float() / E4M3
    if (span := given.pop("zeros", None)) is not None:
        given["zeros"] = rng.integers(*span, (rows, count), dtype=np.int8)
        numbers = numbers - torch.from_numpy(given["zeros"]).repeat_interleave(32 * per, 1)[:, :depth]
    weight = numbers * torch.from_numpy(scales).float().repeat_interleave(32 * per, 1)[:, :depth]
    if given.pop("mins", False):
        given["mins"] = rng.uniform(-0.1, 0.1, (rows, count)).astype(np.float16)
        weight = weight - torch.from_numpy(given["mins"]).float().repeat_interleave(32 * per, 1)[:, :depth]
    return Levels(bits=bits, group=32, levels=levels, scales=scales, per=per, **given), weight


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_weights_are_those_of_a_checkpoint(kind: str) -> None:
    """Control: a scale serves one group fewer."""
    levels, weight = levels_of(kind)
    found = BlockProduct(levels, torch.float32, CPU, None)
    torch.testing.assert_close(found.dense(), weight, rtol=1e-6, atol=1e-7)
    torch.manual_seed(0)
    x = torch.randn(3, weight.shape[1])
    torch.testing.assert_close(found(x), x @ weight.T, rtol=1e-4, atol=1e-4)
    if levels.per > 1:
        found._how = replace(levels, per=levels.per - 1)
        assert not torch.allclose(found(x), x @ weight.T, atol=1e-2)


@pytest.mark.parametrize(("bits", "depth"), [(8, 80), (8, 64), (4, 96)])
def test_rounded_weights_are_those_of_cpus(bits: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of eight bits may end within a group."""
    torch.manual_seed(depth)
    weight, x, bias = torch.randn(40, depth), torch.randn(3, depth), torch.randn(40)
    found: Any = linears._on_gpu(bits, weight, bias)
    native = linears.quantizer(bits)(weight, bias)
    torch.testing.assert_close(found.dense(), native.dense(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found(x), x @ native.dense().T + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_a_token_has_the_same_bits_alone_and_among_others(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the inner dimension is divided by the number of tokens."""
    found = BlockProduct(Levels.of_file(kind, stored(kind)[0]), torch.float32, CPU, None)
    torch.manual_seed(1)
    x = torch.randn(9, found.in_features)

    def agrees() -> bool:
        whole = found(x)
        return all(torch.equal(found(x[a:b]), whole[a:b]) for a, b in ((0, 1), (3, 8)))

    monkeypatch.setattr(blocks, "parts_of", lambda *_: 2)
    assert agrees()
    count = iter((1, 2, 4, 2, 1))
    monkeypatch.setattr(blocks, "parts_of", lambda *_: next(count))
    assert not agrees()


def test_swapped_halves_of_a_byte_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    known = Levels.of_file

    def swapped(kind: str, data: Any) -> Levels:
        found = known(kind, data)
        groups = found.levels.reshape(len(found.levels), -1, 2, found.group)
        return replace(found, levels=groups[:, :, ::-1].reshape(found.levels.shape))

    monkeypatch.setattr(Levels, "of_file", swapped)
    with pytest.raises(AssertionError):
        test_weights_are_those_of_the_file("Q4_K", monkeypatch)


def test_tensors_of_several_types_are_multiplied_jointly() -> None:
    parts = [BlockProduct(Levels.of_file(kind, stored(kind)[0]), torch.float32, CPU, None) for kind in ("Q6_K", "Q6_K")]
    both, x = StackedProduct(parts), torch.randn(3, parts[0].in_features)
    assert torch.equal(both(x), torch.cat([one(x) for one in parts], 1)) and both.dense().shape[0] == both.out_features


TOKENS, SIZE, INNER, COUNT, ACTIVE = 19, 48, 40, 5, 2


def layer(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Experts]:
    """States, scores of the router, and experts; more tokens than a tile has."""
    generator = torch.Generator().manual_seed(seed)
    states, scores = (torch.randn(TOKENS, size, generator=generator) for size in (SIZE, COUNT))
    gate_up = torch.randn(COUNT, 2 * INNER, SIZE, generator=generator) * 0.2
    down = torch.randn(COUNT, SIZE, INNER, generator=generator) * 0.2
    return states, scores, Experts(F.linear, (), (), ACTIVE, True, stacked=StackedExperts(gate_up, down))


def over_blocks(
    kind: str, *, clamped: ClampedGate | None = None, alternates: bool = False, joined: Any = Levels.of_experts
) -> tuple[torch.Tensor, torch.Tensor, Experts]:
    """The same over random blocks of a type of GGUF files, wide ones next to Q8_0; clamped gates have biases.

    joined: of gates and ups.
    """
    is_wide = kind.endswith("K")
    size, inner, count = 256 if is_wide else 96, 64, 3  # two or three groups, not a multiple of four
    generator, last = torch.Generator().manual_seed(len(kind)), "Q8_0" if is_wide else kind
    states, scores = (torch.randn(TOKENS, one, generator=generator) for one in (size, count))
    gate, up, down = (
        Levels.of_file(own, random_blocks(own, count * rows, depth, seed)[0])
        for seed, (own, rows, depth) in enumerate(((kind, inner, size), (kind, inner, size), (last, size, inner)))
    )
    gate_up = joined([gate, up], count)
    if alternates:
        order = torch.arange(count * 2 * inner).view(count, 2, inner).transpose(1, 2).flatten().numpy()
        gate_up = replace(gate_up, levels=gate_up.levels[order], scales=gate_up.scales[order])
    states /= 2 * size**0.5 * float(random_blocks(kind, 8, size)[1].std())  # products of about 0.5
    products = [BlockProduct(one, torch.float32, CPU, None) for one in (gate_up, down)]
    biases = [torch.randn(count, rows, generator=generator) for rows in (2 * inner, size)]
    stacked = StackedExperts(*products, *(biases if clamped else ()), alternates=alternates)
    return states, scores, Experts(F.linear, (), (), ACTIVE, True, clamped, stacked=stacked)


def dense(found: Experts) -> Experts:
    """The same experts with their weights as numbers."""
    own = found.stacked
    assert own is not None
    count = len(own.gate_up_bias) if own.gate_up_bias is not None else 3
    gate_up, down = (one.dense().view(count, -1, one.in_features) for one in (own.gate_up, own.down))
    return replace(found, stacked=replace(own, gate_up=gate_up, down=down))


def outputs(
    states: torch.Tensor, scores: torch.Tensor, found: Experts, slots: torch.Tensor | None = None, **given: bool
) -> torch.Tensor:
    slots = torch.arange(len(states)).int() if slots is None else slots
    return experts.mixture(states, scores, found, "silu", slots, **({"is_prompt": False} | given))


def weighted_sums(states: torch.Tensor, scores: torch.Tensor, found: Experts) -> torch.Tensor:
    """The outputs, for experts whose weights are numbers."""
    own = found.stacked
    assert own is not None
    top, index = scores.topk(ACTIVE, -1)
    weights, out = top.softmax(-1), torch.zeros_like(states)
    for token in range(TOKENS):
        for expert, weight in zip(index[token], weights[token], strict=True):
            joint = own.gate_up[expert] @ states[token]
            joint = joint if own.gate_up_bias is None else joint + own.gate_up_bias[expert]
            gate, up = (joint[::2], joint[1::2]) if own.alternates else joint.chunk(2)
            part = own.down[expert] @ (F.silu(gate) * up if found.clamped is None else found.clamped(gate, up))
            out[token] += weight * (part if own.down_bias is None else part + own.down_bias[expert])
    return out


def test_outputs_are_the_weighted_sums() -> None:
    states, scores, found = layer()
    torch.testing.assert_close(
        outputs(states, scores, found), weighted_sums(states, scores, found), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("kind", "is_prompt"), [("Q4_0", False), ("Q4_K", True), ("Q6_K", False), ("Q8_0", True), ("MXFP4", False)]
)
def test_experts_over_blocks_have_the_weighted_sums(kind: str, is_prompt: bool) -> None:
    states, scores, found = over_blocks(kind)
    expected = weighted_sums(states, scores, dense(found))
    out = outputs(states, scores, found, is_prompt=is_prompt)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5 * float(expected.std()))


def test_gates_of_all_experts_before_their_ups_are_found() -> None:
    """Control: each expert has its own rows of both."""
    states, scores, found = over_blocks("Q8_0")

    def in_order(parts: list[Levels], count: int) -> Levels:
        return Levels.of_experts([Levels.of_experts(parts, 1)], 1)

    _, _, other = over_blocks("Q8_0", joined=in_order)
    expected = weighted_sums(states, scores, dense(found))
    assert (outputs(states, scores, other) - expected).abs().max() > 0.1 * float(expected.std())


@pytest.mark.parametrize(("alternates", "is_quantized"), [(False, True), (True, False)])
def test_clamped_gates_with_biases(alternates: bool, is_quantized: bool) -> None:
    """Control: gates and ups in the other order."""
    states, scores, found = over_blocks("MXFP4", clamped=ClampedGate(1.7, 0.5), alternates=alternates)
    numbers = dense(found)
    assert numbers.stacked is not None and found.stacked is not None
    expected, read = weighted_sums(states, scores, numbers), found if is_quantized else numbers
    torch.testing.assert_close(outputs(states, scores, read), expected, rtol=1e-4, atol=1e-4)
    assert read.stacked is not None
    other = replace(read, stacked=replace(read.stacked, alternates=not alternates))
    assert (outputs(states, scores, other) - expected).abs().max() > 0.1


def test_an_expert_is_a_product_of_its_own() -> None:
    _, _, found = over_blocks("Q6_K")
    assert found.stacked is not None
    whole, states = found.stacked.gate_up, torch.randn(2, 256)
    whole.bias = torch.randn(3 * 128)
    parts = [ExpertProduct(whole, i, 3) for i in range(3)]
    assert torch.equal(torch.cat([one.dense() for one in parts]), whole.dense())
    assert sum(one.nbytes for one in parts) == whole.nbytes and parts[0].bits == whole.bits
    expected = states @ whole.dense().T + whole.bias
    torch.testing.assert_close(torch.cat([one(states) for one in parts], 1), expected, rtol=1e-4, atol=1e-4)


def test_a_token_has_the_same_bits_with_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: another division of the inner dimension."""
    states, scores, found = layer(1)
    together = outputs(states, scores, found)

    def alone() -> torch.Tensor:
        return torch.cat([outputs(states[i : i + 1], scores[i : i + 1], found) for i in range(0, TOKENS, 3)])

    assert torch.equal(alone(), together[::3])
    monkeypatch.setattr(experts, "INNER", 16)
    assert not torch.equal(alone(), together[::3])


def test_a_token_has_the_same_bits_with_experts_over_blocks() -> None:
    """Control: the weights as numbers, whose products have another order of sums."""
    states, scores, found = over_blocks("MXFP4")
    together = outputs(states, scores, found)
    alone = [outputs(states[i : i + 1], scores[i : i + 1], found) for i in (0, TOKENS - 1)]
    assert torch.equal(torch.cat(alone), together[[0, -1]])
    numbers = outputs(states[:1], scores[:1], dense(found))
    assert not torch.equal(numbers, together[:1])
    torch.testing.assert_close(numbers, together[:1], rtol=1e-4, atol=1e-5 * float(together.std()))


@pytest.mark.parametrize("kind", ["", "Q8_0"])
def test_padding_selects_no_expert(kind: str) -> None:
    """An expert that padding alone would select is not read: its weights, or their scales, are no numbers."""
    states, scores, found = over_blocks(kind) if kind else layer(2)
    scores[:, 0], scores[4, 0] = -9.0, 9.0
    slots = torch.arange(TOKENS).int()
    slots[4] = -1
    expected = outputs(states, scores, found)
    assert found.stacked is not None
    if kind:
        found.stacked.gate_up.rows(0, 2 * 64)._scales.fill_(torch.nan)
    else:
        found.stacked.gate_up[0] = torch.nan
    out = outputs(states, scores, found, slots)
    assert not out[4].any()
    others = torch.arange(TOKENS) != 4
    assert torch.equal(out[others], expected[others])
    assert outputs(states, scores, found)[4].isnan().any(), "control"
