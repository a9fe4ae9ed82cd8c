"""Layers joined for a GPU: the same products, no second copy of the weights, and changes in place that are seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from foresay.models.huggingface.joined import join, joined
from helpers.families import make


def layers(*, bias: bool = False, sizes: tuple[int, ...] = (6, 2, 4)) -> list[nn.Linear]:
    return [nn.Linear(8, size, bias=bias) for size in sizes]


def product_of(some: Sequence[nn.Module]) -> Callable[[torch.Tensor], torch.Tensor]:
    found = joined(some)
    assert found is not None
    return found


def alone(some: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return torch.cat([layer(x) for layer in some], -1)


@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_that_of_each_layer(bias: bool) -> None:
    """Weights are in memory once."""
    some, x = layers(bias=bias), torch.randn(3, 2, 8)
    wanted = alone(some, x)
    assert joined(some) is None
    assert join(some)
    torch.testing.assert_close(product_of(some)(x), wanted)
    torch.testing.assert_close(alone(some, x), wanted)
    assert not join(some), "nothing is joined twice"
    products = [product_of(some) for _ in range(2)]
    assert len({layer.weight.untyped_storage().data_ptr() for layer in some}) == 1
    assert some[0].weight.untyped_storage().nbytes() == sum(layer.weight.nbytes for layer in some)
    x = torch.randn(5, 8)
    with torch.no_grad():
        some[1].weight.mul_(2)
        if bias:
            some[2].bias.add_(1)
    for one in products:
        torch.testing.assert_close(one(x), alone(some, x))


def test_what_is_no_neighbour_is_not_taken_for_one() -> None:
    """The first and the third part of one tensor, and the parts in another order; neither is joined again."""
    some = layers(sizes=(4, 4, 4))
    assert join(some)
    for part in ([some[0], some[2]], some[1::-1]):
        assert joined(part) is None
        assert not join(part)
    x = torch.randn(5, 8)
    torch.testing.assert_close(product_of(some[1:])(x), alone(some[1:], x))


def test_training_goes_on() -> None:
    """Also if the layers were joined in inference mode."""
    some = layers()
    with torch.inference_mode():
        assert join(some)
    product = product_of(some)
    optimizer = torch.optim.SGD([layer.weight for layer in some], lr=0.1)
    x = torch.randn(5, 8)
    before = product(x).detach()
    alone(some, x).square().sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert not torch.allclose(product(x), before)
    torch.testing.assert_close(product(x), alone(some, x))


class _Other(nn.Linear):
    pass


def test_what_is_not_joined() -> None:
    one = nn.Linear(8, 4, bias=False)
    others = [nn.Linear(8, 4), nn.Linear(6, 4, bias=False), _Other(8, 4, bias=False), one]
    others.append(nn.Linear(8, 4, bias=False, dtype=torch.bfloat16))
    pairs = [[one, other] for other in others]
    for some in [*pairs, [nn.Linear(8, 4, bias=False, device="meta") for _ in range(2)]]:
        before = [layer.weight.data_ptr() for layer in some]
        assert not join(some) and joined(some) is None
        assert [layer.weight.data_ptr() for layer in some] == before


def test_a_joined_model_is_saved_whole(tmp_path: Path) -> None:
    model = make("llama")
    wanted = {name: weight.clone() for name, weight in model.state_dict().items()}
    for layer in model.model.layers:
        assert join([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj])
        assert join([layer.mlp.gate_proj, layer.mlp.up_proj])
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == set(wanted)
    assert all(torch.equal(saved[name], weight) for name, weight in wanted.items())
