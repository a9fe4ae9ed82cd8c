"""Layers joined for a GPU: the same products, no second copy of the weights, and changes in place that are seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from foresay.models.huggingface.joined import joinable, joined
from helpers.families import make


def layers(*, bias: bool = False, sizes: tuple[int, ...] = (6, 2, 4)) -> list[nn.Linear]:
    return [nn.Linear(8, size, bias=bias) for size in sizes]


@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_that_of_each_layer(bias: bool) -> None:
    some = layers(bias=bias)
    x = torch.randn(3, 2, 8)
    wanted = torch.cat([layer(x) for layer in some], -1)
    product = joined(some)
    torch.testing.assert_close(product(x), wanted)
    torch.testing.assert_close(torch.cat([layer(x) for layer in some], -1), wanted)


def test_weights_are_in_memory_once_and_joined_once() -> None:
    some = layers(bias=True)
    product = joined(some)
    again = joined(some)
    assert len({layer.weight.untyped_storage().data_ptr() for layer in some}) == 1
    assert some[0].weight.untyped_storage().nbytes() == sum(layer.weight.nbytes for layer in some)
    x = torch.randn(5, 8)
    with torch.no_grad():
        some[1].weight.mul_(2)
        some[2].bias.add_(1)
    wanted = torch.cat([layer(x) for layer in some], -1)
    for one in (product, again):
        torch.testing.assert_close(one(x), wanted)


def test_views_of_something_else_are_joined_anew() -> None:
    """The first and the third part of one tensor are no neighbours, though they share its memory."""
    some = layers(sizes=(4, 4, 4))
    joined(some)
    pair = [some[0], some[2]]
    x = torch.randn(5, 8)
    wanted = torch.cat([layer(x) for layer in pair], -1)
    torch.testing.assert_close(joined(pair)(x), wanted)
    torch.testing.assert_close(joined(some[1::-1])(x), torch.cat([some[1](x), some[0](x)], -1))


def test_gradients_and_training_go_on() -> None:
    some = layers()
    product = joined(some)
    optimizer = torch.optim.SGD([layer.weight for layer in some], lr=0.1)
    x = torch.randn(5, 8)
    before = product(x).detach()
    sum(layer(x).square().sum() for layer in some).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert not torch.allclose(product(x), before)
    torch.testing.assert_close(product(x), torch.cat([layer(x) for layer in some], -1))


class _Other(nn.Linear):
    pass


@pytest.mark.parametrize(
    "some",
    [
        [nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=True)],
        [nn.Linear(8, 4, bias=False), nn.Linear(6, 4, bias=False)],
        [nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)],
        [nn.Linear(8, 4, bias=False), _Other(8, 4, bias=False)],
        [nn.Linear(8, 4, bias=False, device="meta"), nn.Linear(8, 4, bias=False, device="meta")],
    ],
)
def test_what_is_not_joined(some: list[Any]) -> None:
    assert joinable(layers())
    assert not joinable(some)


def test_a_joined_model_is_saved_whole(tmp_path: Path) -> None:
    model = make("llama")
    wanted = {name: weight.clone() for name, weight in model.state_dict().items()}
    for layer in model.model.layers:
        joined([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj])
        joined([layer.mlp.gate_proj, layer.mlp.up_proj])
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == set(wanted)
    assert all(torch.equal(saved[name], weight) for name, weight in wanted.items())
