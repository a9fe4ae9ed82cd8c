"""Models whose states cannot be truncated: rewinding, pieces, memory and refusals; on the kernels, further shapes.

What they write is compared in test_guarantees.py. The controls break the rewinding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import UnsupportedModelError
from foresay.models.cache.recurrent_cache import RecurrentCache
from foresay.models.cache.snapshots import MAX_BACKLOG, Snapshot, Snapshots
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.early_exit import first_layers
from foresay.models.huggingface.recurrent import RecurrentModel
from foresay.models.huggingface.self_check import fused_difference
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.wrapping import wrap
from helpers.comparing import NEW, prompts
from helpers.families import RECURRENT, VOCAB, make
from helpers.guarantees import (
    HYBRIDS,
    assert_greedy,
    fused,
    made,
    on,
    outputs_of,
    reference_of,
    target_of,
    without_kernels,
)
from helpers.passes import in_pieces, scores, started
from helpers.support import Never, Sometimes, run

SOME = ("mamba", "qwen3_5", "jamba", "zamba2")
"""Families of different kinds, for tests that need no more."""


@pytest.mark.parametrize("family", SOME)
def test_constant_rejection_ends_in_passes_without_a_draft(family: str) -> None:
    [cell] = on("own code", family)
    wanted, params = outputs_of(cell), SamplingParams(max_new_tokens=NEW)
    ours, steps, _ = run(target_of(cell), prompts(), params, drafter=Never(wanted, VOCAB), gamma=3)
    for prompt, one, theirs in zip(prompts(), ours, wanted, strict=True):
        if one != theirs:
            assert_greedy(reference_of(family), prompt, one)
    own = [step.num_drafted for step in steps if step.request_id == 0]
    assert own.count(0) >= 2, "a backlog must end"
    assert all(any(own[i : i + MAX_BACKLOG + 2]) for i in range(NEW - MAX_BACKLOG - 2)), "drafts must go on"


@pytest.mark.parametrize("family", RECURRENT)
def test_pieces_of_any_size_score_what_the_whole_text_scores(family: str) -> None:
    """A pass continues from the state of the one before, whatever their sizes: the family's own code often does not."""
    target = RecurrentModel(make(family))
    ids = torch.randint(2, VOCAB, (1, 210), generator=torch.Generator().manual_seed(1))
    found = in_pieces(target, ids[0], [70, 1, 7, 7, 70, 1, 54])
    with torch.inference_mode():
        expected = target.uncached(ids)
    spread = float(expected.max() - expected.min())
    assert float((found - expected[0]).abs().max()) < 1e-3 * spread


@pytest.mark.parametrize(("family", "weights"), [(one, ("auto", "int8")[i % 2]) for i, one in enumerate(RECURRENT)])
def test_a_family_over_weights_arranged_for_the_processor(family: str, weights: str) -> None:
    plain_model, options = make(family), LoadOptions(weights=weights)
    wrapped = wrap(family, copy.deepcopy(plain_model), None, optimise=True, options=options)
    assert isinstance(wrapped.model, RecurrentModel)
    ids = torch.randint(2, VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    own, arranged = (scores(model, ids) for model in (RecurrentModel(plain_model), wrapped.model))
    spread = float(own.max() - own.min())
    assert float((own - arranged).abs().median()) < (1e-4 if weights == "auto" else 5e-2) * spread


def test_states_at_the_ends_of_prefill_passes_are_kept() -> None:
    target = RecurrentModel(make("mamba2"))
    cache = started(target)
    ids = torch.randint(2, VOCAB, (1, 60), generator=torch.Generator().manual_seed(1))
    for start in range(0, 60, 10):
        target.forward(ModelInput(ids[:, start : start + 10], [10], logits=Logits.NONE), cache)
    assert [one.length for one in cache.states.held(0)] == [20, 40, 60]
    assert [cache.prefix_length(0, length) for length in (19, 20, 49, 60)] == [0, 20, 40, 60]


def test_broken_rewinding_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length is set back, the state is not; one token off; and accepted tokens that are not fed again."""
    [cell] = on("own code", "mamba2")
    wanted = outputs_of(cell)
    rewind, truncate = Snapshots.rewind, RecurrentCache.truncate

    def not_restored(self: Snapshots[Any], row: int, length: int) -> int:
        history = self._rows[row]
        found, last = history.longest(length), history.undo[-1]
        history.undo = [Snapshot(found.length, last.state)]
        return found.length

    def one_off(self: Snapshots[Any], row: int, length: int) -> int:
        return min(rewind(self, row, length) + 1, length)

    def dropped(self: RecurrentCache, lengths: Sequence[int]) -> None:
        before = list(self.lengths)
        truncate(self, lengths)
        self.lengths[: len(lengths)] = map(min, before, lengths)

    faults: list[tuple[Any, str, Any]] = [(Snapshots, "rewind", not_restored), (Snapshots, "rewind", one_off)]
    for owner, name, wrong in (*faults, (RecurrentCache, "truncate", dropped)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrong)
            target, drafter = made(cell), Sometimes(wanted, VOCAB)
            ours, _, _ = run(target, prompts(), SamplingParams(max_new_tokens=NEW), drafter=drafter, gamma=5)
        assert sum(one != theirs for one, theirs in zip(ours, wanted, strict=True)) >= 4


def test_what_is_refused() -> None:
    """Families whose states are in no common cache, by name."""
    model = RecurrentModel(make("mamba2"))
    with pytest.raises(UnsupportedModelError, match="recurrent"):
        first_layers(model, 1)
    assert not model.capabilities.trees
    with pytest.raises(UnsupportedModelError, match="recurrent layers"):
        CausalModel(make("mamba2"))
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "num_attention_heads": 4}
    for kind in ("minimax", "recurrent_gemma", "rwkv", "xlstm"):
        other = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes))
        with pytest.raises(UnsupportedModelError, match=f"(?i){kind.replace('_', '')}.*no common cache"):
            RecurrentModel(other)


def _held(cache: RecurrentCache) -> int:
    """Bytes of the memory that snapshots keep alive."""
    states = [one.state or {} for row in range(len(cache.states)) for one in cache.states.held(row)]
    stores = [tensor.untyped_storage() for state in states for tensor in state.values()]
    return sum({store.data_ptr(): store.nbytes() for store in stores}.values())


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_h1", "qwen3_5"])
def test_states_keep_no_more_memory_than_is_counted(family: str) -> None:
    """Neither the inputs of a long pass nor the other rows of a ragged one."""
    model = RecurrentModel(make(family))
    cache = started(model, 3)
    ids = torch.randint(2, VOCAB, (3, 4), generator=torch.Generator().manual_seed(1))
    chunk = model.capabilities.prefill_chunk
    for row in range(3):
        for _ in range(5):
            model.forward(ModelInput(ids[:1, :1].expand(1, chunk), [chunk], row, logits=Logits.NONE), cache)
    lengths = [5 * chunk + 64] * 3
    for counts in ([1, 2, 4], [4, 1, 1], [2, 2, 2], [3, 1, 4]):
        model.forward(ModelInput(ids, counts), cache)
        cache.truncate(cache.lengths)
        reported = cache.nbytes - super(RecurrentCache, cache).nbytes
        assert 0 < _held(cache) <= 1.05 * reported
        assert reported <= model.cache_bytes(lengths) - 3 * max(lengths) * model._slot_bytes


def test_rows_of_a_batch_share_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that feeds tokens again drafts fewer, so that passes are of one length. Control: with full drafts they are not."""
    [cell] = on("own code", "mamba2")
    wanted, target, params = outputs_of(cell), made(cell), SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    passes: list[int] = []
    target.model.register_forward_hook(lambda *_: passes.append(1))  # the body alone is called for no scores

    def passes_of_a_step() -> float:
        passes.clear()
        ours, steps, _ = run(target, prompts(), params, drafter=Sometimes(wanted, VOCAB), gamma=4)
        assert ours == wanted
        return len(passes) / max(sum(step.request_id == i for step in steps) for i in range(len(wanted)))

    assert passes_of_a_step() < 1.7
    monkeypatch.setattr(RecurrentCache, "shortened", lambda self, budget, sizes, free: list(budget))
    assert passes_of_a_step() > 2


# -- on the kernels ----------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("name", SHAPES)
def test_other_shapes(name: str) -> None:
    family, changes = SHAPES[name]
    assert fused_difference(fused(make(family, **changes))) < 2e-5


@pytest.mark.parametrize("family", HYBRIDS)
def test_hidden_states_are_the_familys(family: str) -> None:
    """Before each layer and after the last norm, of ragged rows: drafts on hidden states read them."""
    [cell], tokens = on("kernels", family), torch.randint(2, VOCAB, (2, 9), generator=torch.Generator().manual_seed(4))
    model = target_of(cell)
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
    ours, exact = (scores(one, torch.arange(2, 60)[None]) for one in (model, target_of(*on("kernels", "qwen3_5"))))
    assert 0 < float((ours - exact).abs().max()) < 0.1


def test_capabilities_and_memory() -> None:
    for cell in on("kernels", *HYBRIDS):
        model = target_of(cell)
        own = model.capabilities
        assert own.prefill_in_any_pieces and own.prefill_together and own.ragged and not own.trees
        cache = started(model, 2)
        tokens = torch.randint(2, VOCAB, (2, 50), generator=torch.Generator().manual_seed(1))
        for start in range(0, 50, 10):
            model.forward(ModelInput(tokens[:, start : start + 10], (10, 10), logits=Logits.NONE), cache)
        assert cache.nbytes <= model.cache_bytes([50, 50]) <= 1.5 * cache.nbytes
        cache.rearrange([(1, 0)], 1)
        assert cache.lengths == [50] and cache.nbytes <= model.cache_bytes([50])


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
    tokens = torch.arange(2, 40)[None]
    found = scores(model, tokens)
    for layer in weights.model.layers[1:]:
        layer.feed_forward.expert_bias.zero_()
    with torch.inference_mode():
        assert float((found - model.uncached(tokens)).abs().max()) > 0.1
