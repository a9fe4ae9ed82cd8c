"""Fused passes: the families that are read so score and write what their own code does; others keep their own code."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

from foresay.decoding.protocols import ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.models.families import table
from foresay.models.huggingface import family_layers, fused, operations
from foresay.models.huggingface.causal import CausalModel, is_recurrent
from foresay.models.huggingface.early_exit import first_layers
from foresay.models.huggingface.linears import freeze_linears, quantizer
from foresay.models.huggingface.self_check import UnfusedReason, use_fused_layers
from foresay.models.sources.wrapping import wrap
from helpers.families import FAMILIES, VOCAB, make
from helpers.guarantees import READ, without_kernels
from helpers.passes import started
from helpers.support import run

PROMPTS = [[5, 9, 17, 5, 9], [7], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]
PARAMS = SamplingParams(max_new_tokens=24)


def frozen(model: CausalModel) -> CausalModel:
    """As a model is that foresay loads."""
    freeze_linears(model.model)
    return model


@pytest.mark.parametrize("family", ["bloom", "gpt2", "falcon", "deepseek_v3"])
def test_other_families_keep_their_own_code(family: str) -> None:
    model = CausalModel(make(family))
    assert "do not support the family" in str(use_fused_layers(model))
    assert model.fused is None


@pytest.mark.parametrize(
    ("family", "kernels", "counts"),
    [*((family, kernels, (3, 5)) for family in READ for kernels in (True, False)), ("llama", True, (5, 5))],
)
def test_trees_and_hidden_states_are_those_of_the_familys_own_code(
    family: str, kernels: bool, counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = CausalModel(make(family)), CausalModel(make(family))
    if not kernels:
        without_kernels(monkeypatch)
        if table.FAMILIES[FAMILIES[family][0]].by_kernels and family != "granite4":  # which has attention alone
            assert "by the compiled kernels only" in str(use_fused_layers(frozen(model)))
            return
    layers = tuple(range(model.capabilities.num_layers + 1))  # type: ignore[operator]
    before, tree = torch.tensor([[5, 9, 17, 5, 9, 6], [7, 8, 9, 0, 0, 0]]), torch.tensor([[4, 5, 6, 7, 8]] * 2)
    parents = torch.tensor([[-1, 0, 0, 2, 1], [-1, 0, 1, 1, 3]])

    def outputs(model: CausalModel) -> list[torch.Tensor]:
        cache = started(model, 2)
        filled = model.forward(ModelInput(before, (6, 3), hidden_layers=layers), cache)
        grown = model.forward(ModelInput(tree, counts, parents=parents, hidden_layers=layers), cache)
        whole = [filled.scores()[1, :3], *(filled.hidden[n][1, :3] for n in layers)]
        for row, count in enumerate(counts):  # the rest are pads
            whole += [x[row, :count] for x in (grown.scores(), *(grown.hidden[n] for n in layers))]
        return whole

    own = outputs(other)
    assert use_fused_layers(frozen(model)) is None
    assert model.fused is not None
    assert model.fused.is_native == kernels
    torch.testing.assert_close(outputs(model), own, atol=2e-4, rtol=2e-4)
    parents[1, 3] = 0
    with pytest.raises(AssertionError):  # control: the tree counts
        torch.testing.assert_close(outputs(model), own, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kernels", [True, False])
def test_attention_without_positions_in_any_layer(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        without_kernels(monkeypatch)
    own = run(CausalModel(make("granite4", position_embedding_type=None)), PROMPTS, PARAMS, gamma=0)[0]
    model = CausalModel(make("granite4", position_embedding_type=None))
    assert use_fused_layers(frozen(model)) is None
    assert run(model, PROMPTS, PARAMS, gamma=0)[0] == own
    assert run(CausalModel(make("granite4")), PROMPTS, PARAMS, gamma=0)[0] != own, "control: positions count"


def test_only_known_families_are_without_states_by_what_their_layers_are() -> None:
    assert not is_recurrent(make("granite4"))
    weights = make("zamba")
    weights.config.layer_types = ["full_attention"] * weights.config.num_hidden_layers
    assert is_recurrent(weights), "a field that its code does not read"


def test_a_model_with_hooks_or_without_a_layer_keeps_its_own_code() -> None:
    accelerated, hooked, lacking = (make("llama") for _ in range(3))
    accelerated.model.layers[0]._hf_hook = object()
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    del lacking.model.layers[1].mlp.gate_proj
    assert "hooks" in str(use_fused_layers(CausalModel(accelerated)))
    assert use_fused_layers(CausalModel(hooked)) == UnfusedReason("it has hooks on its modules", expected=True)
    model = CausalModel(lacking)
    assert "gate_proj" in str(use_fused_layers(model)) and model.fused is None


def test_the_first_layers_of_a_fused_model_are_fused() -> None:
    model = CausalModel(make("llama"))
    assert use_fused_layers(frozen(model)) is None
    short = first_layers(model, 2)
    assert short.fused is not None
    found = run(short, PROMPTS, PARAMS, gamma=0)[0]
    short.fused = None
    assert run(short, PROMPTS, PARAMS, gamma=0)[0] == found


def test_passes_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rotation, the wrong half negated, norms that do nothing."""
    without_kernels(monkeypatch)
    turns = operations.rotary_of
    broken: list[tuple[Any, str, Any]] = [(fused, "rotary_of", lambda cos, sin: turns(0 * cos + 1, 0 * sin))]
    broken += [(fused, "rotary_of", lambda cos, sin: turns(cos, -sin))]
    broken += [(family_layers, "norm_of", lambda module: lambda x: x)]
    for owner, name, instead in broken:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, instead)
            model = CausalModel(make("llama"))
            assert "its scores differ from its own code's" in str(use_fused_layers(model)) and model.fused is None


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("wrong", [{"scaling": 1.0}, {"rotates": False}, {"heads": (4, 2), "window": 2}])
def test_kernels_that_are_told_something_else_are_not_used(
    wrong: dict[str, Any], rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor in 4 bits, with inputs rounded to 8, although rounding alone makes a difference there."""
    intact, weights = fused.read_layer, make("llama")
    if rounded:
        freeze_linears(weights, quantizer(4))
        assert use_fused_layers(CausalModel(weights)) is None
    monkeypatch.setattr(fused, "read_layer", lambda *args: dataclasses.replace(intact(*args), **wrong))
    model = CausalModel(weights)
    assert "its scores differ from its own code's" in str(use_fused_layers(model))
    assert model.fused is None


def test_a_fallback_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A family without support is no warning; one that should have worked is."""
    with caplog.at_level(logging.INFO, "foresay"):
        wrap("mine", make("gpt2"), None, optimise=True)
        monkeypatch.setattr(family_layers, "norm_of", lambda module: None)
        wrap("yours", make("llama"), None, optimise=True)
    [(_, first, one), (_, second, two)] = caplog.record_tuples
    assert (first, second) == (logging.INFO, logging.WARNING)
    assert one == "passes of mine are made by its family's own code: fused layers do not support the family 'gpt2'"
    assert two.startswith("passes of yours are made by its family's own code: ")


def differences_near_the_limit(model: CausalModel, counts: tuple[int, int]) -> list[float]:
    """Largest difference of each row's scores from those of its text alone; the first row ends one token before the limit."""
    limit = model.max_length
    lengths = [limit - counts[0] - 1, 5]
    ids = torch.randint(2, VOCAB, (2, limit), generator=torch.Generator().manual_seed(2))
    cache = started(model, 2)
    model.forward(ModelInput(ids[:, : lengths[0]], lengths), cache)
    fed = torch.stack([row[n : n + max(counts)] for row, n in zip(torch.cat([ids, ids], 1), lengths, strict=True)])
    scores = model.forward(ModelInput(fed, counts), cache).scores()
    wanted = [
        model.uncached(ids[i : i + 1, : n + k])[0, -k:] for i, (n, k) in enumerate(zip(lengths, counts, strict=True))
    ]
    return [float((scores[i, :k] - wanted[i]).detach().abs().max()) for i, k in enumerate(counts)]


@pytest.mark.parametrize("counts", [(9, 30), (3, 9)])
def test_padding_after_the_last_position_changes_no_rotation(
    counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frequencies depend on the highest position of a pass, which padding may raise above the model's limit."""
    without_kernels(monkeypatch)
    model = CausalModel(make("phi3_longrope"))
    model.use_fused()
    assert max(differences_near_the_limit(model, counts)) < 1e-4
    assert model.fused is not None
    model.fused._position_limit = None
    assert max(differences_near_the_limit(model, counts)) > 1e-2, "control"
