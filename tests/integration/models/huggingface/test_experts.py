"""Mixtures of experts: frozen as each expert's own products, computed by the kernels, and counted by what one token reads."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from foresay.models.cpu import structs
from foresay.models.huggingface.causal import CausalModel, is_recurrent
from foresay.models.huggingface.experts import active_share, expert_weights
from foresay.models.huggingface.frozen import FrozenExperts
from foresay.models.huggingface.linears import (
    count_parameters,
    freeze_linears,
    quantizer,
    resident_bytes,
    weight_bytes,
)
from foresay.models.huggingface.recurrent import RecurrentModel
from foresay.models.huggingface.self_check import use_fused_layers
from foresay.models.sources.wrapping import wrap
from helpers.broken_kernels import Broken
from helpers.families import make
from helpers.guarantees import fused
from helpers.passes import in_pieces, scores

MOE = ["mixtral", "qwen3_moe", "qwen3_moe_unnormalized", "gpt_oss", "gemma4_moe"]


def experts_of(layer: Any) -> Any:
    return getattr(layer, "experts", None) or layer.mlp.experts


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(2, 90, shape, generator=torch.Generator().manual_seed(1))


OTHERS: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "granitemoe": {"num_local_experts": 4},
    "phimoe": {"num_local_experts": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
    "minimax": {"num_local_experts": 4},
}
"""Families that are not fused, whose experts have the common layout."""


def made(kind: str) -> Any:
    if kind not in OTHERS:
        return make(kind)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 0}
    config = CONFIG_MAPPING[kind](**{**sizes, "num_experts_per_tok": 2, **OTHERS[kind]})
    model, generator = AutoModelForCausalLM.from_config(config).float().eval(), torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data = 0.2 * torch.randn(weight.shape, generator=generator)
    return model


@pytest.mark.parametrize("kind", [*MOE, *OTHERS])
def test_frozen_experts_compute_what_the_model_computes(kind: str) -> None:
    """By the family's own code; no layer keeps its experts as they were."""
    model, other = made(kind), made(kind)
    assert freeze_linears(model) > 0 and all(one.dim() < 3 for one in model.parameters())
    ids = tokens(2, 40)
    torch.testing.assert_close(model(ids).logits, other(ids).logits, atol=1e-4, rtol=1e-4)
    part: Any = next(part for part in model.modules() if isinstance(part, FrozenExperts))
    part.down[1], part.down[0] = part.down[0], part.down[1]
    assert not torch.allclose(model(ids).logits, other(ids).logits, atol=1e-3), "control: two experts exchanged"


@pytest.mark.parametrize("family", MOE)
def test_experts_are_rounded_as_all_weights_are(family: str) -> None:
    changes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    if family.startswith(("qwen3", "gemma4")):
        changes["moe_intermediate_size"] = 32
    for bits in (8, 4):
        weights = make(family, **changes)
        before = expert_weights(experts_of(weights.model.layers[0]))
        assert before is not None
        freeze_linears(weights, quantizer(bits), all_dtypes=True)
        for i, one in enumerate(experts_of(weights.model.layers[0]).gate_up):
            wanted, bias = before.gate_up(i)
            assert (one.bias is None and bias is None) or torch.equal(one.bias, bias)
            error = (one.product.dense() - wanted).abs().max() / wanted.abs().max()
            assert 0 < error < 1.2 * 2.0**-bits and one.product.bits <= bits + 2


FAULTS = {
    "mixtral": ["rows of other experts"],
    "qwen3_moe": ["weights divided by their sum or not, the other way"],
    "qwen3_moe_unnormalized": ["weights divided by their sum or not, the other way"],
    "gpt_oss": ["no clamped gate", "a gate without its limit", "no sinks"],
    "glm4_moe": [
        "corrections that count as weights",
        "groups that are not selected",
        "no shared expert",
        "weights without their scale",
    ],
    "gemma4": ["values that are not normalized", "inputs of the first layer for all", "outputs without their scale"],
    "gemma4_equal": ["values that are not normalized", "values that are rotated as keys are"],
    "gemma4_moe": [
        "experts without factors of their own",
        "a router that reads what experts read",
        "a dense output with the norm of experts",
    ],
    "qwen3_next": ["no shared expert", "a shared expert without its gate"],
    "qwen3_5_moe": ["no shared expert", "a shared expert without its gate"],
}


@pytest.mark.parametrize("family", FAULTS)
def test_broken_kernels_are_not_used(family: str, broken_kernels: Broken) -> None:
    """The comparison when a model is loaded notices each of these faults."""
    for fault in ("", *FAULTS[family]):
        with broken_kernels(fault):
            weights = make(family)
            freeze_linears(weights)
            reason = use_fused_layers((RecurrentModel if is_recurrent(weights) else CausalModel)(weights))
            assert "its scores differ from its own code's" in str(reason) if fault else reason is None, fault


def test_many_tokens_are_routed_in_parts() -> None:
    """A prompt of more rows than are sorted at once has the bits of its pieces."""
    model, ids = fused(make("qwen3_moe", max_position_embeddings=4096)), tokens(1, 3000)
    assert torch.equal(in_pieces(model, ids[0], [500] * 6), scores(model, ids)[0])


def mixture() -> tuple[Any, CausalModel]:
    """Weights, and a model on the kernels that reads them."""
    weights = make("mixtral")
    model: Any = wrap("tiny", weights, None, optimise=False).model
    assert model.fused is not None and expert_weights(weights.model.layers[0].mlp.experts) is not None
    return weights, model


def test_scores_of_the_router_that_are_equal_or_not_numbers() -> None:
    """All experts tie: the first ones are selected. NaN makes the token's scores NaN, not a wrong address; others stay."""
    weights, model = mixture()
    for layer in weights.model.layers:
        layer.mlp.gate.weight.data.zero_()
        for i in (2, 3):
            layer.mlp.experts.down_proj.data[i] = 1e6  # whichever of these is selected shows
    assert float(scores(model, tokens(2, 9)).abs().max()) < 1e3
    weights, model = mixture()
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    wanted = scores(model, ids)
    weights.model.embed_tokens.weight.data[9] = torch.nan
    found = scores(model, ids)
    assert found[1, 3].isnan().all() and torch.equal(found[0], wanted[0])


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


def test_experts_of_other_layouts_stay_as_they_are() -> None:
    """The last one differs in its gate alone."""
    layouts: list[dict[str, Any]] = [{"has_bias": True}, {"is_transposed": True}, {"is_concatenated": False}]
    layouts += [{"has_gate": False}, {"has_post_expert_norm": True}]
    layouts += [{"down_proj": nn.Parameter(torch.zeros(2, 4, 8))}, {}]
    for changes in layouts:
        module: Any = nn.Module()
        module.gate_up_proj, module.down_proj = nn.Parameter(torch.zeros(2, 8, 4)), nn.Parameter(torch.zeros(2, 4, 4))
        module.act_fn = nn.SiLU()
        for name, value in {"has_bias": False, "is_transposed": False, **changes}.items():
            setattr(module, name, value)
        assert expert_weights(module) is None
        holder = nn.ModuleList([module])
        assert freeze_linears(holder) == 0 and holder[0] is module


EXPERTS: dict[str, Any] = {"active": 5, "count": 1 << 20, "inner": 49, "down": None, "groups": 3, "active_groups": 2}
SIZES = [*EXPERTS.items(), ("active", 0), ("count", 0), ("groups", 4), ("sigmoid", 1)]
NORMS = [(name, one) for name in ("before", "router", "after", "dense", "scales") for one in ("size", "values")]


@pytest.mark.parametrize(
    ("family", "kind", "name", "value"),
    [
        *(("mixtral", "ExpertsStruct", *one) for one in SIZES),
        *(("gemma4_moe", "ExpertNormsStruct", *one) for one in NORMS),
    ],
)
def test_sizes_of_experts_and_of_norms_next_to_them_are_checked(
    family: str, kind: str, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = make(family)
    freeze_linears(weights)
    make_struct = getattr(structs, kind)

    def wrong(*given: Any, **fields: Any) -> Any:
        made = make_struct(*given, **fields)
        if kind == "ExpertsStruct":
            setattr(made, name, ctypes.POINTER(structs.ProductStruct)() if value is None else value)
        else:
            setattr(getattr(made, name), value, None if value == "values" else 7)
        return made

    monkeypatch.setattr(structs, kind, wrong)
    assert "by the compiled kernels only" in str(use_fused_layers(CausalModel(weights)))
