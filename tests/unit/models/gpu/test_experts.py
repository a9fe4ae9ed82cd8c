"""Mixtures of experts by Triton kernels, in the interpreter; whole layers are compared with transformers' in test_passes.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from foresay.models.gpu import experts
from foresay.models.gpu.blocks import BlockProduct, ExpertProduct
from foresay.models.gpu.levels import Levels
from foresay.models.layer import ClampedGate, Experts, StackedExperts
from helpers.gguf_files import random_blocks

TOKENS, SIZE, INNER, COUNT, ACTIVE = 19, 48, 40, 5, 2


def layer(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Experts]:
    """States, scores of the router, and experts; more tokens than a tile has."""
    generator = torch.Generator().manual_seed(seed)
    states, scores = (torch.randn(TOKENS, size, generator=generator) for size in (SIZE, COUNT))
    gate_up = torch.randn(COUNT, 2 * INNER, SIZE, generator=generator) * 0.2
    down = torch.randn(COUNT, SIZE, INNER, generator=generator) * 0.2
    return states, scores, Experts(F.linear, (), (), ACTIVE, True, stacked=StackedExperts(gate_up, down))


def blocks(
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
    products = [BlockProduct(one, torch.float32, torch.device("cpu"), None) for one in (gate_up, down)]
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


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "MXFP4"])
def test_experts_over_blocks_have_the_weighted_sums(kind: str) -> None:
    """In a step and in a prompt."""
    states, scores, found = blocks(kind)
    expected = weighted_sums(states, scores, dense(found))
    scale = float(expected.std())
    for is_prompt in (False, True):
        out = outputs(states, scores, found, is_prompt=is_prompt)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5 * scale)


def test_gates_of_all_experts_before_their_ups_are_found() -> None:
    """Control: each expert has its own rows of both."""
    states, scores, found = blocks("Q8_0")

    def in_order(parts: list[Levels], count: int) -> Levels:
        return Levels.of_experts([Levels.of_experts(parts, 1)], 1)

    _, _, other = blocks("Q8_0", joined=in_order)
    expected = weighted_sums(states, scores, dense(found))
    assert (outputs(states, scores, other) - expected).abs().max() > 0.1 * float(expected.std())


@pytest.mark.parametrize("alternates", [False, True])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_clamped_gates_with_biases(alternates: bool, is_quantized: bool) -> None:
    """Control: gates and ups in the other order."""
    states, scores, found = blocks("MXFP4", clamped=ClampedGate(1.7, 0.5), alternates=alternates)
    numbers = dense(found)
    assert numbers.stacked is not None and found.stacked is not None
    expected, read = weighted_sums(states, scores, numbers), found if is_quantized else numbers
    torch.testing.assert_close(outputs(states, scores, read), expected, rtol=1e-4, atol=1e-4)
    assert read.stacked is not None
    other = replace(read, stacked=replace(read.stacked, alternates=not alternates))
    assert (outputs(states, scores, other) - expected).abs().max() > 0.1


def test_an_expert_is_a_product_of_its_own() -> None:
    _, _, found = blocks("Q6_K")
    assert found.stacked is not None
    whole, states = found.stacked.gate_up, torch.randn(2, 256)
    whole.bias = torch.randn(3 * 128)
    parts = [ExpertProduct(whole, i, 3) for i in range(3)]
    assert torch.equal(torch.cat([one.dense() for one in parts]), whole.dense())
    assert sum(one.nbytes for one in parts) == whole.nbytes and parts[0].bits == whole.bits
    expected = states @ whole.dense().T + whole.bias
    torch.testing.assert_close(torch.cat([one(states) for one in parts], 1), expected, rtol=1e-4, atol=1e-4)


def test_a_token_has_the_same_bits_alone_and_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: another division of the inner dimension."""
    states, scores, found = layer(1)
    together = outputs(states, scores, found)

    def alone() -> torch.Tensor:
        return torch.cat([outputs(states[i : i + 1], scores[i : i + 1], found) for i in range(0, TOKENS, 3)])

    assert torch.equal(alone(), together[::3])
    monkeypatch.setattr(experts, "INNER", 16)
    assert not torch.equal(alone(), together[::3])


@pytest.mark.parametrize("kind", ["Q4_K", "MXFP4"])
def test_a_token_has_the_same_bits_with_experts_over_blocks(kind: str) -> None:
    """Control: the weights as numbers, whose products have another order of sums."""
    states, scores, found = blocks(kind)
    together = outputs(states, scores, found)
    alone = [outputs(states[i : i + 1], scores[i : i + 1], found) for i in (0, TOKENS - 1)]
    assert torch.equal(torch.cat(alone), together[[0, -1]])
    numbers = outputs(states[:1], scores[:1], dense(found))
    assert not torch.equal(numbers, together[:1])
    torch.testing.assert_close(numbers, together[:1], rtol=1e-4, atol=1e-5 * float(together.std()))


@pytest.mark.parametrize("kind", ["", "Q8_0"])
def test_padding_selects_no_expert(kind: str) -> None:
    """An expert that padding alone would select is not read: its weights, or their scales, are no numbers."""
    states, scores, found = blocks(kind) if kind else layer(2)
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
