"""Mixtures of experts by Triton kernels, in the interpreter; whole layers are compared with transformers' in test_passes.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from foresay.models.cpu.gated_layer import Experts, StackedExperts
from foresay.models.gpu import experts
from helpers.paged import sum_products_in_order

TOKENS, SIZE, INNER, COUNT, ACTIVE = 19, 48, 40, 5, 2


def layer(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Experts]:
    """States, scores of the router, and experts; more tokens than a tile has."""
    generator = torch.Generator().manual_seed(seed)
    states, scores = (torch.randn(TOKENS, size, generator=generator) for size in (SIZE, COUNT))
    gate_up = torch.randn(COUNT, 2 * INNER, SIZE, generator=generator) * 0.2
    down = torch.randn(COUNT, SIZE, INNER, generator=generator) * 0.2
    return states, scores, Experts(F.linear, (), (), ACTIVE, True, stacked=StackedExperts(gate_up, down))


def outputs(
    states: torch.Tensor, scores: torch.Tensor, found: Experts, slots: torch.Tensor | None = None
) -> torch.Tensor:
    slots = torch.arange(len(states)).int() if slots is None else slots
    return experts.mixture(states, scores, found, "silu", slots, is_prompt=False)


def test_outputs_are_the_weighted_sums() -> None:
    states, scores, found = layer()
    assert found.stacked is not None
    weights, index = scores.softmax(-1).topk(ACTIVE, -1)
    weights, expected = weights / weights.sum(-1, keepdim=True), torch.zeros_like(states)
    for token in range(TOKENS):
        for expert, weight in zip(index[token], weights[token], strict=True):
            gate, up = (found.stacked.gate_up[expert] @ states[token]).chunk(2)
            expected[token] += weight * (found.stacked.down[expert] @ (F.silu(gate) * up))
    torch.testing.assert_close(outputs(states, scores, found), expected, rtol=1e-4, atol=1e-5)


def test_a_token_has_the_same_bits_alone_and_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: another division of the inner dimension."""
    sum_products_in_order(monkeypatch)
    states, scores, found = layer(1)
    together = outputs(states, scores, found)

    def alone() -> torch.Tensor:
        return torch.cat([outputs(states[i : i + 1], scores[i : i + 1], found) for i in range(0, TOKENS, 3)])

    assert torch.equal(alone(), together[::3])
    monkeypatch.setattr(experts, "INNER", 16)
    assert not torch.equal(alone(), together[::3])


def test_padding_selects_no_expert() -> None:
    """An expert that padding alone would select is not read: its weights are no numbers."""
    states, scores, found = layer(2)
    scores[:, 0], scores[4, 0] = -9.0, 9.0
    slots = torch.arange(TOKENS).int()
    slots[4] = -1
    expected = outputs(states, scores, found)
    assert found.stacked is not None
    found.stacked.gate_up[0] = torch.nan
    out = outputs(states, scores, found, slots)
    assert not out[4].any()
    others = torch.arange(TOKENS) != 4
    assert torch.equal(out[others], expected[others])
    assert outputs(states, scores, found)[4].isnan().any(), "control"
