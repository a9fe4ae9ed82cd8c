"""Losses against values computed by hand and their derivatives; distributions that are known in part."""

from __future__ import annotations

import math

import pytest
import torch

from foresay.errors import ConfigError, UnknownNameError
from foresay_lab.training.losses import LOSSES, Objective, aligned

P, Q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])


def test_values_by_hand_and_mixtures() -> None:
    found = {name: float(loss(P, Q)) for name, loss in LOSSES.items()}
    assert found["forward_kl"] == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5))
    assert found["reverse_kl"] == pytest.approx(0.25 * math.log(0.5) + 0.5 * math.log(2))
    assert found["tv"] == pytest.approx(0.25)
    lopsided = torch.tensor([[0.9, 0.1, 0.0]])
    assert float(LOSSES["forward_kl"](lopsided, Q)) != pytest.approx(float(LOSSES["reverse_kl"](lopsided, Q)))
    for loss in LOSSES.values():
        assert float(loss(P, P)) == pytest.approx(0, abs=1e-7) and float(loss(P, Q)) > 0.1
    mixed = Objective.parse("forward_kl=0.5, tv=2")
    assert float(mixed(P, Q)) == pytest.approx(0.5 * found["forward_kl"] + 2 * found["tv"])
    assert str(mixed) == "forward_kl=0.5, tv=2"
    for text in ("forward_kl=x", "tv=0", "tv=-1", "tv, tv", "tv=inf"):
        with pytest.raises(ConfigError):
            Objective.parse(text)
    with pytest.raises(UnknownNameError):
        Objective.parse("kl")


@pytest.mark.parametrize("text", [*LOSSES, "forward_kl=0.3, tv=2"])
@pytest.mark.parametrize("width", [7, 4])
def test_gradients_are_those_of_finite_differences(text: str, width: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 7, dtype=torch.float64)[:, :width].float().requires_grad_()
    probs, loss = torch.randn(3, 7).softmax(-1)[:, [0, 2, 5, 6] if width == 4 else slice(None)], Objective.parse(text)

    def value(x: torch.Tensor) -> torch.Tensor:
        return loss(*aligned(probs, x)).sum()

    (gradients,) = torch.autograd.grad(value(logits), logits)
    for place in [(0, 0), (1, 2), (2, 3)]:
        step = torch.zeros_like(logits)
        step[place] = 1e-2
        with torch.no_grad():
            rise = float(value(logits + step) - value(logits - step)) / 2e-2
        assert float(gradients[place]) == pytest.approx(rise, abs=2e-3)


@pytest.mark.parametrize("text", [*LOSSES, "ce=0.1, tv=1.8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_parts_of_the_rows_are_those_of_all_rows(text: str, dtype: torch.dtype) -> None:
    """Bit for bit, with their gradients under weights that differ, and for a number of rows that no part divides."""
    torch.manual_seed(0)
    drawn, probs, loss = torch.randn(150, 9).to(dtype), torch.randn(150, 9).softmax(-1), Objective.parse(text)
    labels, weights = torch.randint(10, (150,)), torch.rand(150)
    whole, parts = drawn.clone().requires_grad_(), drawn.clone().requires_grad_()
    p, q = aligned(probs, whole)
    wanted = loss(p, q, labels)
    found, accepted = loss.of_logits(probs, parts, labels)
    assert torch.equal(found, wanted) and torch.equal(accepted, torch.minimum(p, q)[:, :-1].sum(-1))
    assert not accepted.requires_grad
    (wanted * weights).sum().backward()
    (found * weights).sum().backward()
    assert whole.grad is not None and parts.grad is not None and whole.grad.abs().sum() > 0
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-7)
    with torch.no_grad():
        assert torch.equal(loss.of_logits(probs, parts, labels)[0], wanted)


def test_what_cannot_be_drafted_is_one_outcome() -> None:
    """Which the target may have, and a draft of some tokens has not; the acceptance of a draft counts it as lost."""
    torch.manual_seed(2)
    target, draft, ids = torch.randn(20, 50).softmax(-1), torch.randn(20, 50), torch.arange(0, 50, 2)
    for probs, logits in ((target, draft), (target[:, ids], draft[:, ids])):
        p, q = aligned(probs, logits)
        for one, known in ((p, probs), (q, logits.softmax(-1))):
            assert torch.equal(one[:, :-1], known)
            torch.testing.assert_close(one.sum(1), torch.ones(20))
        torch.testing.assert_close(torch.minimum(p, q)[:, :-1].sum(-1), 1 - LOSSES["tv"](p, q))
    assert float(p[:, -1].min()) > 0.1 and not q[:, -1].any()


def test_rounding_has_no_gradient() -> None:
    """That of sum p (-log q) is (sum p) q - p. Control: the rest of the draft's sum, whose rounding is divided by itself."""
    torch.manual_seed(3)
    probs, logits = torch.randn(50, 4000).softmax(-1)[:, :700], torch.randn(50, 700, requires_grad=True)
    p, q = aligned(probs, logits)
    rest = (1 - q[:, :-1].sum(-1, keepdim=True)).clamp(min=0)
    wanted = (probs.sum(-1, keepdim=True) * q[:, :-1] - probs).detach()
    errors = []
    for own in (q, torch.cat([q[:, :-1], rest], -1)):
        (found,) = torch.autograd.grad(LOSSES["forward_kl"](p, own).sum(), logits, retain_graph=True)
        errors.append(float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()))
    assert errors[0] < 1e-3 and errors[1] > 0.1, errors
