"""Mixtures of experts: frozen as each expert's own products, computed by the kernels, and counted by what one token reads."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from foresay.decoding.protocols import ModelInput
from foresay.models.cpu import structs
from foresay.models.cpu.layers import NativeLayers
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.experts import active_share, expert_weights
from foresay.models.huggingface.frozen import FrozenExperts
from foresay.models.huggingface.linears import (
    count_parameters,
    freeze_linears,
    quantizer,
    resident_bytes,
    weight_bytes,
)
from foresay.models.huggingface.self_check import use_fused_layers
from foresay.models.sources.wrapping import wrap
from helpers.broken_kernels import Broken
from helpers.families import make

MOE = pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen3_moe_unnormalized", "gpt_oss", "gemma4_moe"])


def experts_of(layer: Any) -> Any:
    return getattr(layer, "experts", None) or layer.mlp.experts


def passes(model: CausalModel, tokens: torch.Tensor) -> torch.Tensor:
    cache = model.new_cache()
    cache.add_rows(len(tokens))
    return model.forward(ModelInput(tokens, [tokens.shape[1]] * len(tokens)), cache).scores()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(2, 90, shape, generator=torch.Generator().manual_seed(1))


@MOE
def test_frozen_experts_compute_what_the_model_computes(family: str) -> None:
    model, other = make(family), make(family)
    assert freeze_linears(model) > 0
    frozen = [part for part in model.modules() if isinstance(part, FrozenExperts)]
    assert len(frozen) == (2 if family == "qwen3_moe" else 3)
    ids = tokens(2, 40)
    torch.testing.assert_close(model(ids).logits, other(ids).logits, atol=1e-4, rtol=1e-4)
    part = frozen[0]
    wrong = part.down[0], part.down[1]
    part.down[1], part.down[0] = wrong
    assert not torch.allclose(model(ids).logits, other(ids).logits, atol=1e-3), "control: two experts exchanged"


@MOE
@pytest.mark.parametrize("bits", [8, 4])
def test_experts_are_rounded_as_all_weights_are(family: str, bits: int) -> None:
    changes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    if family.startswith(("qwen3", "gemma4")):
        changes["moe_intermediate_size"] = 32
    weights = make(family, **changes)
    before = expert_weights(experts_of(weights.model.layers[0]))
    assert before is not None
    freeze_linears(weights, quantizer(bits), all_dtypes=True)
    experts = experts_of(weights.model.layers[0])
    for i, one in enumerate(experts.gate_up):
        wanted, bias = before.gate_up(i)
        assert (one.bias is None and bias is None) or torch.equal(one.bias, bias)
        error = (one.product.dense() - wanted).abs().max() / wanted.abs().max()
        assert 0 < error < 1.2 * 2.0**-bits and one.product.bits <= bits + 2


FAULTS = {
    "rows of other experts": ["mixtral"],
    "weights divided by their sum or not, the other way": ["qwen3_moe", "qwen3_moe_unnormalized"],
    "no clamped gate": ["gpt_oss"],
    "a gate without its limit": ["gpt_oss"],
    "no sinks": ["gpt_oss"],
    "corrections that count as weights": ["glm4_moe"],
    "groups that are not selected": ["glm4_moe"],
    "no shared expert": ["glm4_moe"],
    "weights without their scale": ["glm4_moe"],
    "values that are not normalized": ["gemma4", "gemma4_equal"],
    "values that are rotated as keys are": ["gemma4_equal"],
    "inputs of the first layer for all": ["gemma4"],
    "outputs without their scale": ["gemma4"],
    "experts without factors of their own": ["gemma4_moe"],
    "a router that reads what experts read": ["gemma4_moe"],
    "a dense output with the norm of experts": ["gemma4_moe"],
    "": [
        "gemma4_moe",
        "mixtral",
        "qwen3_moe",
        "qwen3_moe_unnormalized",
        "gpt_oss",
        "glm4_moe",
        "gemma4",
        "gemma4_equal",
    ],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_kernels_are_not_used(fault: str, broken_kernels: Broken) -> None:
    """The comparison when a model is loaded notices each of these faults."""
    with broken_kernels(fault):
        for family in FAULTS[fault]:
            model = make(family)
            freeze_linears(model)
            reason = use_fused_layers(CausalModel(model))
            assert "its scores differ from its own code's" in str(reason) if fault else reason is None


OTHERS: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "granitemoe": {"num_local_experts": 4},
    "phimoe": {"num_local_experts": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
    "minimax": {"num_local_experts": 4},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_families_that_are_not_fused_compute_the_same_with_frozen_experts(kind: str) -> None:
    """Their experts have the common layout, so the rounding of weights applies to them as well."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 0}
    config = CONFIG_MAPPING[kind](**sizes, **{"num_experts_per_tok": 2, "pad_token_id": 0, **OTHERS[kind]})

    def made() -> Any:
        model = AutoModelForCausalLM.from_config(config).float().eval()
        generator = torch.Generator().manual_seed(0)
        for weight in model.parameters():
            weight.data = 0.2 * torch.randn(weight.shape, generator=generator)
        return model

    model, other = made(), made()
    freeze_linears(model)
    assert any(isinstance(part, FrozenExperts) for part in model.modules())
    ids = tokens(2, 30)
    torch.testing.assert_close(model(ids).logits, other(ids).logits, atol=1e-4, rtol=1e-4)


def test_many_tokens_are_routed_in_parts() -> None:
    """A prompt of more rows than are sorted at once has the bits of its pieces."""
    weights = make("qwen3_moe", max_position_embeddings=4096)
    freeze_linears(weights)
    model = CausalModel(weights)
    assert use_fused_layers(model) is None
    ids = tokens(1, 3000)
    whole, cache = passes(model, ids), model.new_cache()
    cache.add_rows(1)
    for first in range(0, 3000, 500):
        part = model.forward(ModelInput(ids[:, first : first + 500], [500]), cache).scores()
        assert torch.equal(part, whole[:, first : first + 500])


def test_equal_scores_of_the_router() -> None:
    """All experts tie: the first ones are selected, in every pass."""
    weights = make("mixtral")
    for layer in weights.model.layers:
        layer.mlp.gate.weight.data.zero_()
        for i in (2, 3):
            layer.mlp.experts.down_proj.data[i] = 1e6  # whichever of these is selected shows
    freeze_linears(weights)
    model = CausalModel(weights)
    model.use_fused()
    assert float(passes(model, tokens(2, 9)).abs().max()) < 1e3


def test_scores_of_the_router_that_are_not_numbers() -> None:
    """They make the token's scores NaN, not a wrong address; other rows stay as they are."""
    weights = make("mixtral")
    freeze_linears(weights)
    model = CausalModel(weights)
    model.use_fused()
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    wanted = passes(model, ids)
    weights.model.embed_tokens.weight.data[9] = torch.nan
    found = passes(model, ids)
    assert found[1, 3].isnan().all() and torch.equal(found[0], wanted[0])


def test_a_model_that_the_caller_keeps() -> None:
    """Its experts are read where they are, so that a change takes effect."""
    weights = make("mixtral")
    loaded = wrap("tiny", weights, None, optimise=False)
    model: Any = loaded.model
    assert model.fused is not None and expert_weights(weights.model.layers[0].mlp.experts) is not None
    ids = tokens(1, 12)
    before = passes(model, ids)
    torch.testing.assert_close(before, make("mixtral")(ids).logits, atol=1e-4, rtol=1e-4)
    weights.model.layers[1].mlp.experts.down_proj.data *= 2
    assert not torch.allclose(passes(model, ids), before, atol=1e-3)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_pass_of_one_token_reads_the_experts_that_it_selects(frozen: bool) -> None:
    model = make("qwen3_moe")
    count = count_parameters(model)
    whole = sum(one.nbytes for one in model.parameters())
    experts = 2 * 8 * 3 * 24 * 32 * 4
    if frozen:
        freeze_linears(model)
    read = whole - model.model.embed_tokens.weight.nbytes
    padding = resident_bytes(model) - whole  # of panels
    assert active_share(model) == 3 / 8
    assert read - experts * 5 / 8 <= weight_bytes(model) <= read - experts * 5 / 8 + padding
    assert count_parameters(model) == count


class Unusual(nn.Module):
    """Experts of another layout."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.zeros(2, 8, 4)), nn.Parameter(torch.zeros(2, 4, 4))
        self.act_fn = nn.SiLU()
        for name, value in {"has_bias": False, "is_transposed": False, **changes}.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    "changes",
    [
        {"has_bias": True},
        {"is_transposed": True},
        {"is_concatenated": False},
        {"has_gate": False},
        {"has_post_expert_norm": True},
        {"down_proj": nn.Parameter(torch.zeros(2, 4, 8))},
        {},
    ],
)
def test_experts_of_other_layouts_stay_as_they_are(changes: dict[str, Any]) -> None:
    """The last one differs in its gate alone."""
    module = Unusual(**changes)
    assert expert_weights(module) is None
    holder = nn.ModuleList([module])
    assert freeze_linears(holder) == 0 and holder[0] is module


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("active", 5),
        ("active", 0),
        ("count", 0),
        ("count", 1 << 20),
        ("inner", 49),
        ("down", None),
        ("groups", 3),
        ("groups", 4),
        ("active_groups", 2),
        ("sigmoid", 1),
    ],
)
def test_sizes_of_experts_are_checked(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make("mixtral")
    freeze_linears(weights)
    build = NativeLayers._experts

    def wrong(self: NativeLayers, experts: Any) -> structs.ExpertsStruct:
        made = build(self, experts)
        setattr(made, name, ctypes.POINTER(structs.ProductStruct)() if value is None else value)
        return made

    monkeypatch.setattr(NativeLayers, "_experts", wrong)
    assert "by the compiled kernels only" in str(use_fused_layers(CausalModel(weights)))


@pytest.mark.parametrize("name", ["before", "router", "after", "dense", "scales"])
@pytest.mark.parametrize("damage", ["size", "values"])
def test_sizes_of_norms_next_to_experts_are_checked(name: str, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make("gemma4_moe")
    freeze_linears(weights)
    build = NativeLayers._expert_norms

    def wrong(self: NativeLayers, *given: Any) -> Any:
        made = build(self, *given)
        setattr(getattr(made.contents, name), damage, None if damage == "values" else 7)
        return made

    monkeypatch.setattr(NativeLayers, "_expert_norms", wrong)
    assert "by the compiled kernels only" in str(use_fused_layers(CausalModel(weights)))
