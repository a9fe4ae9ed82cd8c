"""Passes over flat tokens and pages against the family's own code, with a capture function that repeats the pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from foresay.decoding.protocols import Logits, ModelInput
from foresay.models.gpu import attention
from foresay.models.gpu.layers import PagedLayers
from foresay.models.gpu.pages import PagePool
from foresay.models.gpu.passes import PagedPasses, Replay
from foresay.models.hardware import Hardware
from foresay.models.huggingface import fused, layer_inputs
from foresay.models.huggingface.causal import CausalModel
from foresay.models.layer import Separate
from helpers.families import make, whole_product
from helpers.paged import PAGE, few_programs

VOCAB, HEADS = 97, (4, 2)
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_hidden_layers": 1}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"num_hidden_layers": 1}),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {"num_hidden_layers": 2, "sliding_window": 20, "query_pre_attn_scalar": 16},
    ),
}

SLIDING, FULL = "sliding_attention", "full_attention"
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 1},
    "gpt_oss": {"num_hidden_layers": 2},
    "glm4_moe": {"num_hidden_layers": 2},
    "ministral3": {"num_hidden_layers": 1},
    "olmo2": {"num_hidden_layers": 1},
    "gemma4": {
        "num_hidden_layers": 5,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
        "num_kv_shared_layers": 2,
    },
    "gemma4_equal": {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]},
}
"""Families with experts, with queries that are scaled by their position or normalized as one vector, with inputs of layers and
shared or equal values."""


def run_before(run: Replay) -> Replay:
    """As graphs are captured: after a run of the pass, whose buffers are empty."""
    run()
    return run


def apart(*layers: Any) -> Any:
    """The products of a model that the caller owns, whose layers are not joined."""
    return layers[0] if len(layers) == 1 else Separate(layers)


def made(kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[PagedPasses, CausalModel]:
    few_programs(monkeypatch, apart if kind == "llama" else whole_product)
    monkeypatch.setattr(attention, "SPLITS", 2)
    monkeypatch.setattr(Hardware, "gpu_kernels", True)
    monkeypatch.setattr(layer_inputs, "product_of", whole_product)
    torch.manual_seed(0)
    if kind in MIXTURES:
        return over_pages(make(kind, 2, vocab_size=VOCAB, max_position_embeddings=256, **MIXTURES[kind]))
    model_class, config_class, more = KINDS[kind]
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": HEADS[0],
        "num_key_value_heads": HEADS[1],
    }
    model = model_class(
        config_class(vocab_size=VOCAB, head_dim=16, max_position_embeddings=256, **sizes, **more)
    ).eval()
    return over_pages(model)


def over_pages(model: Any) -> tuple[PagedPasses, CausalModel]:
    whole = fused.FusedDecoder(model)
    decoder = whole.on_pages(256)
    device = torch.device("cpu")
    pool = PagePool(decoder.layers, 12, torch.float32, device)
    passes = PagedPasses(decoder, pool, rows=4, max_length=256, device=device, capture=run_before)
    return passes, CausalModel(model)


@pytest.mark.parametrize("kind", [*KINDS, *MIXTURES])
@torch.inference_mode()
def test_passes_score_as_the_family_s_own_code(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill over a page's border, ragged chains with hidden states, a tree of which some tokens are kept, an idle row."""
    passes, model = made(kind, monkeypatch)
    ours, theirs = passes.new_cache(), model.new_cache()
    for cache in (ours, theirs):
        cache.add_rows(2)
    layers = tuple(range(model.num_layers + 1))
    ids = torch.randint(0, VOCAB, (2, PAGE + 10))
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, -1, 0]])
    inputs = [
        ModelInput(ids[:, : PAGE + 2], [PAGE + 2, 2], logits=Logits.NONE),
        ModelInput(ids[:, :3], [1, 3], hidden_layers=layers),
        ModelInput(ids[:, 3:7], [4, 4], parents=parents),
        ModelInput(ids[:, 7:9], [2, 0], logits=Logits.LAST),
        ModelInput(ids[:, 9:10], [1, 1]),
    ]
    for step, one in enumerate(inputs):
        scores, hidden = passes(one, ours)
        expected = model.forward(one, theirs)
        assert ours.lengths == theirs.lengths
        for i, count in enumerate(one.num_tokens):
            if scores is not None and count:
                last = 1 if one.logits is Logits.LAST else count
                torch.testing.assert_close(scores[i, :last], expected.scores()[i, :last], rtol=1e-4, atol=1e-4)
            for layer in one.hidden_layers:
                found = hidden[layer][i, :count]
                torch.testing.assert_close(found, expected.hidden[layer][i, :count], rtol=1e-4, atol=1e-4)
        if step == 2:
            for cache in (ours, theirs):
                cache.keep([PAGE + 3, 5], [[0, 1, 3], [0, 3]])
    assert passes.captures == 3 and passes.replays == 4


@torch.inference_mode()
def test_a_layer_that_reads_another_one_s_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: Gemma 4's layers without keys of their own read those of the last layer of the other kind."""
    known = PagedLayers.__init__

    def init(self: Any, *given: Any, **options: Any) -> None:
        known(self, *given, **options)
        sizes = [self.shapes[store] for store in self._stores]
        own = [store for layer, store in zip(self._layers, self._stores, strict=True) if layer.shares is None]
        for i, layer in enumerate(self._layers):
            if layer.shares is not None:  # of the same size, or the pass would fail otherwise
                self._stores[i] = next(store for store in own if self.shapes[store] == sizes[i])

    monkeypatch.setattr(PagedLayers, "__init__", init)
    with pytest.raises(AssertionError, match="not close"):
        test_passes_score_as_the_family_s_own_code("gemma4", monkeypatch)


@torch.inference_mode()
def test_a_size_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows, lengths and caches follow: a joining row, a longer context, another cache."""
    passes, _ = made("llama", monkeypatch)
    caches = [passes.new_cache() for _ in range(2)]
    for cache in caches:
        cache.add_rows(2)
        for counts in ([2, 0], [1, 1], [0, 2]):
            passes(ModelInput(torch.ones(2, 2, dtype=torch.int64), counts), cache)
    assert passes.captures == 1 and passes.replays == 6
