"""Losses against values computed by hand and their derivatives; distributions that are known in part."""

from __future__ import annotations

import math

import pytest
import torch

from foresay.errors import ConfigError, UnknownNameError
from foresay_lab.training.losses import LOSSES, Agreement, Objective, Teacher

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
@pytest.mark.parametrize("known", ["all", "some", "likeliest"])
def test_gradients_are_those_of_finite_differences(text: str, known: str) -> None:
    torch.manual_seed(0)
    logits, target, loss = torch.randn(3, 7, dtype=torch.float64), torch.randn(3, 7), Objective.parse(text)
    ids = torch.tensor([0, 2, 5, 6])
    if known == "all":
        teacher, width = Teacher.of_logits(target), 7
    elif known == "some":
        teacher, width = Teacher.of_logits(target, ids), 4
    else:
        teacher, width = Teacher.top_k(target, 3), 7
    logits = logits[:, :width].float().requires_grad_()
    columns = torch.full((7,), -1)
    columns[ids] = torch.arange(4)

    def value(x: torch.Tensor) -> torch.Tensor:
        return loss(*teacher.aligned_probs(x, columns if known == "some" else None)).sum()

    value(logits).backward()
    for place in [(0, 0), (1, 2), (2, 3)]:
        step = torch.zeros_like(logits)
        step[place] = 1e-2
        with torch.no_grad():
            rise = float(value(logits + step) - value(logits - step)) / 2e-2
        assert logits.grad is not None
        assert float(logits.grad[place]) == pytest.approx(rise, abs=2e-3)


@pytest.mark.parametrize("text", [*LOSSES, "ce=0.1, tv=1.8"])
@pytest.mark.parametrize("known", ["all", "per row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_parts_of_the_rows_are_those_of_all_rows(text: str, known: str, dtype: torch.dtype) -> None:
    """Bit for bit, with their gradients under weights that differ, and for a number of rows that no part divides."""
    torch.manual_seed(0)
    drawn, target, loss = torch.randn(150, 9).to(dtype), torch.randn(150, 9), Objective.parse(text)
    teacher = Teacher.of_logits(target) if known == "all" else Teacher.top_k(target, 4)
    labels, weights = torch.randint(teacher.probs.shape[1] + 1, (150,)), torch.rand(150)
    whole, parts = drawn.clone().requires_grad_(), drawn.clone().requires_grad_()
    p, q = teacher.aligned_probs(whole)
    wanted = loss(p, q, labels)
    found, accepted = loss.of_logits(teacher, parts, labels)
    assert torch.equal(found, wanted) and torch.equal(accepted, torch.minimum(p, q)[:, :-1].sum(-1))
    assert not accepted.requires_grad
    (wanted * weights).sum().backward()
    (found * weights).sum().backward()
    assert whole.grad is not None and parts.grad is not None and whole.grad.abs().sum() > 0
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-7)
    with torch.no_grad():
        assert torch.equal(loss.of_logits(teacher, parts, labels)[0], wanted)


def test_what_is_not_known_is_one_outcome() -> None:
    """Distances over fewer outcomes are never larger; acceptance of a trimmed draft counts what it cannot write as lost."""
    torch.manual_seed(2)
    target, draft = torch.randn(20, 50), torch.randn(20, 50)
    whole = Teacher.of_logits(target).aligned_probs(draft)
    part = Teacher.top_k(target, 8).aligned_probs(draft)
    for loss in LOSSES.values():
        assert bool((loss(*part) <= loss(*whole) + 1e-6).all())
    for one in part:
        assert one.shape == (20, 9)
        torch.testing.assert_close(one.sum(1), torch.ones(20))
    p, q = whole
    assert Agreement.of(p, q).acceptance == pytest.approx(1 - float(LOSSES["tv"](p, q).mean()), abs=1e-6)
    assert Agreement.of(p, p).greedy == 1 and Agreement.of(p, p).acceptance == pytest.approx(1, abs=1e-5)

    ids = torch.arange(0, 50, 2)
    columns = torch.full((50,), -1)
    columns[ids] = torch.arange(25)
    trimmed = draft[:, ids]
    p, q = Teacher.of_logits(target, ids).aligned_probs(trimmed, columns)
    wanted = torch.minimum(torch.softmax(target, -1)[:, ids], torch.softmax(trimmed, -1)).sum(-1).mean()
    assert Agreement.of(p, q).acceptance == pytest.approx(float(wanted), abs=1e-6)
    mixed = Teacher.of_logits(target, torch.tensor([1, 4, 7])).aligned_probs(trimmed, columns)[1]
    assert not bool(mixed[:, [0, 2]].any()), "tokens that the draft cannot write"
    torch.testing.assert_close(mixed[:, 1], torch.softmax(trimmed, -1)[:, 2])
    likeliest = Teacher.top_k(target, 8)
    assert not bool(likeliest.aligned_probs(trimmed, columns)[1][:, :-1][likeliest.ids % 2 == 1].any())
