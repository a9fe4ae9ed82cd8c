"""Fused models with recurrent layers: shapes that no family of test_guarantees.py has, hidden states, memory, and controls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import UnsupportedModelError
from foresay.models.cache.recurrent_cache import RecurrentCache
from foresay.models.cache.state_cache import RowStates, StateCache
from foresay.models.huggingface.recurrent import RecurrentModel
from foresay.models.huggingface.self_check import fused_difference, use_fused_layers
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.wrapping import wrap
from helpers import guarantees
from helpers.broken_kernels import Broken
from helpers.comparing import NEW, prompts
from helpers.families import VOCAB, make
from helpers.guarantees import HYBRIDS as FAMILIES
from helpers.guarantees import on, outputs_of, without_kernels
from helpers.support import Sometimes, run

_GROUPS = {"hidden_size": 48, "mamba_expand": 1, "mamba_n_heads": 6, "mamba_n_groups": 3, "mamba_d_state": 5}
_WIDE = {"hidden_size": 280, "mamba_expand": 1, "mamba_n_heads": 4, "mamba_d_head": 70, "mamba_d_state": 65}
_SCALES = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.8, "attention_multiplier": 0.3}
_ODD = {"linear_num_key_heads": 4, "linear_key_head_dim": 5, "linear_value_head_dim": 40, "linear_conv_kernel_dim": 2}
_FEW = {"linear_num_key_heads": 1, "linear_num_value_heads": 3}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "one key head": ("qwen3_5", _FEW),
    "equal heads of odd sizes": ("qwen3_5", _ODD),
    "wide values": ("qwen3_5", {**_FEW, "linear_key_head_dim": 19, "linear_value_head_dim": 70}),
    "values by key head": ("qwen3_next", {"linear_num_value_heads": 6, "linear_value_head_dim": 33}),
    "partial rotary positions": ("qwen3_5", {"head_dim": 32}),
    "attention first": ("qwen3_5", {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2}),
    "a bias and five taps": ("lfm2", {"conv_bias": True, "conv_L_cache": 5}),
    "a wide convolution": ("lfm2", {"hidden_size": 544, "conv_L_cache": 2}),
    "untied": ("lfm2", {"tie_word_embeddings": False}),
    "Granite without experts": ("granitemoehybrid", {"num_local_experts": 0}),
    "Granite with groups and odd sizes": ("granitemoehybrid", {**_GROUPS, "mamba_d_conv": 2, "mamba_conv_bias": False}),
    "Granite with wide heads": ("granitemoehybrid", {**_WIDE, "mamba_n_groups": 2}),
    "Granite with scales, a bias of its products and positions": (
        "granitemoehybrid",
        {**_SCALES, "mamba_n_groups": 2, "mamba_d_conv": 3, "mamba_proj_bias": True, "position_embedding_type": "rope"},
    ),
}


def fused(weights: Any) -> RecurrentModel:
    model = RecurrentModel(weights)
    assert use_fused_layers(model) is None
    assert model.fused is not None and model.batch_invariant
    return model


def target_of(family: str) -> RecurrentModel:
    [cell] = on("kernels", family)
    found: RecurrentModel = guarantees.target_of(cell)
    return found


def started(model: RecurrentModel, rows: int = 1) -> StateCache:
    cache = model.new_cache()
    assert isinstance(cache, StateCache)
    cache.add_rows(rows)
    return cache


def scores(model: RecurrentModel, cache: StateCache, tokens: torch.Tensor) -> torch.Tensor:
    """[T] -> [T, V] of the first row."""
    return model.forward(ModelInput(tokens[None], (len(tokens),)), cache).scores()[0]


@pytest.mark.parametrize("name", SHAPES)
def test_other_shapes(name: str) -> None:
    family, changes = SHAPES[name]
    assert fused_difference(fused(make(family, **changes))) < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_the_familys(family: str) -> None:
    """Before each layer and after the last norm, of ragged rows: drafts on hidden states read them."""
    model, tokens = target_of(family), torch.randint(2, VOCAB, (2, 9), generator=torch.Generator().manual_seed(4))
    layers = tuple(range(model.num_layers + 1))
    found = model.forward(ModelInput(tokens, (9, 4), hidden_layers=layers), started(model, 2)).hidden
    reference = make(family)  # which gets hooks
    with torch.inference_mode():
        wanted = reference(tokens, output_hidden_states=True, use_cache=False).hidden_states
    for layer in layers:
        for row, count in enumerate((9, 4)):
            torch.testing.assert_close(found[layer][row, :count], wanted[layer][row, :count], atol=1e-4, rtol=1e-4)


def test_keys_and_values_in_8_bits() -> None:
    options = LoadOptions(kv_cache_dtype="int8")
    model = wrap("qwen3_5", make("qwen3_5"), None, optimise=True, options=options).model
    assert isinstance(model, RecurrentModel)
    params = SamplingParams(max_new_tokens=12)
    alone, _, _ = run(model, prompts(), params)
    assert run(model, prompts(), params, drafter=Sometimes(alone, VOCAB), gamma=5)[0] == alone
    tokens = torch.arange(2, 60)
    ours, exact = (scores(one, started(one), tokens) for one in (model, target_of("qwen3_5")))
    assert 0 < float((ours - exact).abs().max()) < 0.1


def test_capabilities_and_memory() -> None:
    for family in FAMILIES:
        model = target_of(family)
        own = model.capabilities
        assert own.prefill_in_any_pieces and own.prefill_together and own.ragged and not own.trees
        cache = started(model, 2)
        tokens = torch.randint(2, VOCAB, (2, 50), generator=torch.Generator().manual_seed(1))
        for start in range(0, 50, 10):
            model.forward(ModelInput(tokens[:, start : start + 10], (10, 10), logits=Logits.NONE), cache)
        assert cache.nbytes <= model.cache_bytes([50, 50]) <= 1.5 * cache.nbytes
        cache.rearrange([(1, 0)], 1)
        assert cache.lengths == [50]
        assert cache.nbytes <= model.cache_bytes([50])


def test_a_model_that_was_changed_runs_its_own_code() -> None:
    """Fused passes would miss a hook; weights that are trained are read where they are."""
    weights = make("qwen3_5")
    model = fused(weights)
    model.watch_for_changes()
    tokens = torch.arange(2, 12)
    before = scores(model, started(model), tokens)
    with torch.no_grad():
        weights.model.layers[0].linear_attn.A_log += 0.5
        weights.model.layers[1].linear_attn.conv1d.weight *= 2
    cache = started(model)
    after = scores(model, cache, tokens)
    with torch.inference_mode():
        torch.testing.assert_close(after, model.uncached(tokens[None])[0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(before, after, atol=1e-3)
    handle = weights.model.layers[0].register_forward_hook(lambda *given: None)
    assert isinstance(model.new_cache(), RecurrentCache)
    with pytest.raises(UnsupportedModelError, match="begin another session"):
        scores(model, cache, tokens)
    handle.remove()


def test_without_kernels_the_familys_own_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)
    loaded = wrap("lfm2", make("lfm2"), None, optimise=True, options=LoadOptions())
    assert isinstance(loaded.model, RecurrentModel)
    assert loaded.model.fused is None and isinstance(loaded.model.new_cache(), RecurrentCache)


@pytest.mark.parametrize("normalized", [True, False])
def test_experts_with_a_correction(normalized: bool) -> None:
    """LFM2's are selected by sigmoids and a bias. Control: without the bias others are."""
    weights = make("lfm2_moe", norm_topk_prob=normalized, routed_scaling_factor=1.5, num_dense_layers=1)
    for layer in weights.model.layers[1:]:
        layer.feed_forward.expert_bias.copy_(torch.linspace(2, -2, 4))
    model = fused(weights)
    tokens = torch.arange(2, 40)
    found = scores(model, started(model), tokens)
    for layer in weights.model.layers[1:]:
        layer.feed_forward.expert_bias.zero_()
    with torch.inference_mode():
        assert float((found - model.uncached(tokens[None])[0]).abs().max()) > 0.1


def test_broken_rewinding_is_seen(monkeypatch: pytest.MonkeyPatch, broken_kernels: Broken) -> None:
    """Controls: a state restored one token off, or not at all."""
    wanted = outputs_of(*on("kernels", "qwen3_5"))
    params, drafter = SamplingParams(max_new_tokens=NEW), Sometimes(wanted, VOCAB)

    def wrong() -> int:
        ours, _, _ = run(fused(make("qwen3_5")), prompts(), params, drafter=drafter, gamma=5)
        return sum(one != theirs for one, theirs in zip(ours, wanted, strict=True))

    def kept(self: RowStates, length: int) -> None:
        self.base = self.first = self.end = length

    with broken_kernels("a state restored one token off"):
        assert wrong() >= 4
    monkeypatch.setattr(RowStates, "go_to", kept)
    assert wrong() >= 4
