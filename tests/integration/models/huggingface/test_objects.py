"""Models handed over as objects: compiled passes over weights that stay the caller's, and every change of them is seen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import UnsupportedModelError
from foresay.models.cache.recurrent_cache import RecurrentCache
from foresay.models.huggingface.causal import CausalModel
from foresay.models.sources.wrapping import wrap
from helpers.families import FAMILIES, make
from helpers.passes import scores, started
from helpers.support import run

PROMPTS = [[5, 9, 17, 5, 9], [7], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]
PARAMS = SamplingParams(max_new_tokens=24)


def wrapped(weights: Any) -> CausalModel:
    model = wrap("object", weights, None, optimise=False).model
    assert isinstance(model, CausalModel)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "olmo2", "phi3"])
def test_an_object_writes_what_its_own_code_writes(family: str) -> None:
    """Biases, norms whose weight is what is added to one, joint weights: all where they lie."""
    own = run(CausalModel(make(family)), PROMPTS, PARAMS, gamma=0)[0]
    weights = make(family)
    before = {name: (value.data_ptr(), value.clone()) for name, value in weights.named_parameters()}
    model = wrapped(weights)
    assert model.batch_invariant
    assert run(model, PROMPTS, PARAMS, gamma=0)[0] == own
    model.release()
    assert all(before[name][0] == value.data_ptr() for name, value in weights.named_parameters())
    assert all(torch.equal(before[name][1], value) for name, value in weights.named_parameters())


def test_a_batch_of_an_object_with_a_draft_model_writes_what_each_prompt_writes_alone() -> None:
    """In bf16, 24 of 24: once 19, since PyTorch's products sum in another order for other numbers of rows."""
    changes = {"num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 1000}
    target = make("llama", **changes).to(torch.bfloat16)
    numbers, params = torch.Generator().manual_seed(0), SamplingParams(max_new_tokens=40)
    prompts = [torch.randint(5, 900, (7 + i % 9,), generator=numbers).tolist() for i in range(24)]
    alone = foresay.load(target, drafter="none", eos_token_ids=0, max_batch_size=1).generate(prompts, params)
    batches = foresay.load(target, target, eos_token_ids=0, max_batch_size=8, num_draft_tokens=4)
    drafted = batches.generate(prompts, params)
    assert sum(a.token_ids == b.token_ids for a, b in zip(alone, drafted, strict=True)) == 24
    assert any(step.num_accepted for one in drafted for step in one.steps)


IDS = torch.tensor([[5, 9, 17, 3]])


def its_own(model: CausalModel) -> torch.Tensor:
    """Scores that must be those of the family's code."""
    found = scores(model, IDS)
    torch.testing.assert_close(found, model.uncached(IDS), atol=2e-4, rtol=2e-4)
    return found


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "mixtral", "qwen3_5"])
def test_weights_that_are_trained_on_are_seen(family: str) -> None:
    """Layers, biases, norms, embeddings, experts, states: none is a copy, whether a weight or its `data` is written to."""
    weights = make(family)
    model = wrapped(weights)
    for by_data in (False, True):
        before = scores(model, IDS)
        with torch.no_grad():
            for weight in weights.parameters():
                one = weight.data if by_data else weight
                one += 0.02 * torch.randn_like(weight)
        assert not torch.allclose(before, its_own(model), atol=1e-3)
        assert model.batch_invariant, "and passes are still compiled"


def hooked(weights: Any) -> None:
    weights.model.layers[1].mlp.register_forward_hook(lambda _module, _args, out: out * 2)


def patched(weights: Any) -> None:
    mlp = weights.model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda x: 2 * own(x)


def replaced(weights: Any) -> None:
    weights.model.layers[1].self_attn.o_proj = torch.nn.Linear(32, 32, bias=False)


def moved(weights: Any) -> None:
    proj = weights.model.layers[0].mlp.down_proj
    proj.weight.data = 2 * proj.weight.data


@pytest.mark.parametrize("change", [hooked, patched, replaced, moved])
def test_what_changes_more_than_weights_gives_the_model_its_own_code_back(
    change: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    weights = make("llama")
    model = wrapped(weights)
    before = scores(model, IDS)
    change(weights)
    with caplog.at_level(logging.WARNING, logger="foresay"):
        after = its_own(model)
        scores(model, IDS)
    assert not torch.allclose(before, after, atol=1e-4) and not model.batch_invariant
    assert sum("was changed" in record.getMessage() for record in caplog.records) == 1


def test_a_session_of_a_changed_model_with_states_ends_by_name() -> None:
    weights = make("qwen3_5")
    model = wrapped(weights)
    cache = started(model)
    scores(model, IDS, cache=cache)
    hooked(weights)
    assert isinstance(model.new_cache(), RecurrentCache)
    with pytest.raises(UnsupportedModelError, match="begin another session"):
        scores(model, IDS, cache=cache)


def test_every_family_can_be_an_object_and_code_of_ones_own_is_kept() -> None:
    """A subclass may do anything under its family's name."""
    for family in FAMILIES:
        wrapped(make(family))
    assert wrapped(make("llama")).fused is not None, "control"
    weights = make("llama")

    class Louder(type(weights.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 3 * super().forward(x)  # type: ignore[no-any-return]

    weights.model.layers[0].mlp.__class__ = Louder
    model = wrapped(weights)
    assert model.fused is None
    its_own(model)
