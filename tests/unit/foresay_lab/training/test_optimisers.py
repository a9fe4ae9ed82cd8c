"""Muon next to its definition, and which weights are whose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foresay.errors import ConfigError
from foresay_lab.training.optimisers import Muon, make_optimisers, orthogonal
from helpers.families import make


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)])
def test_steps_are_orthogonal(shape: tuple[int, int]) -> None:
    """The same singular vectors, values near one. Control: the matrix itself has values far apart."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    out = orthogonal(matrix)
    inner = u.T @ out @ v.T
    assert float((inner - torch.diag(inner.diagonal())).abs().max()) < 1e-3
    assert float(inner.diagonal().min()) > 0.5 and float(inner.diagonal().max()) < 1.3
    assert float(values.max() / values.min()) > 2.5


def test_steps_are_those_of_pytorchs_own() -> None:
    """Which computes the iteration in 16 bits."""
    generator = torch.Generator().manual_seed(0)
    begun = torch.randn(24, 32, generator=generator)
    ours, theirs = (nn.Parameter(begun.clone()) for _ in range(2))
    steps = (
        Muon([ours], 0.02, weight_decay=0.1),
        torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(4):
        gradient = torch.randn(24, 32, generator=generator)
        for weight, step in zip((ours, theirs), steps, strict=True):
            weight.grad = gradient.clone()
            step.step()
    moved = float((ours - begun).detach().norm())
    assert float((ours - theirs).detach().norm()) < 0.03 * moved


def test_each_weight_is_one_optimisers() -> None:
    model = make("llama", 0, tie_word_embeddings=False)
    learned = dict(model.named_parameters())
    muon, adamw = make_optimisers("muon", model, learned, 1e-3, 0.0)
    names = {id(weight): name for name, weight in learned.items()}
    theirs = {names[id(weight)] for group in adamw.param_groups for weight in group["params"]}
    ours = {names[id(weight)] for group in muon.param_groups for weight in group["params"]}
    assert ours | theirs == set(learned) and not ours & theirs
    assert all("proj" in name for name in ours) and {"model.embed_tokens.weight", "lm_head.weight"} <= theirs
    assert [type(one) for one in make_optimisers("adamw", model, learned, 1e-3, 0.0)] == [torch.optim.AdamW]
    with pytest.raises(ConfigError, match="optimiser='sgd'"):
        make_optimisers("sgd", model, learned, 1e-3, 0.0)
