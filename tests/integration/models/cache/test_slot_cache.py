"""After every step the cached logits equal a fresh forward, and rewinding copies nothing."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from foresay.decoding.acceptance import make_rule
from foresay.decoding.protocols import ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Engine
from foresay.lengths import ConstantLength
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.huggingface.causal import CausalModel
from helpers.families import VOCAB, make
from helpers.support import Sometimes, run

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13] * 9]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_cached_logits_equal_a_fresh_forward_after_every_step(family: str) -> None:
    reference = make(family)
    model = CausalModel(copy.deepcopy(reference))
    wanted = run(model, PROMPTS, SamplingParams(max_new_tokens=18), gamma=0)[0]
    engine = Engine(model, Sometimes(wanted, VOCAB), make_rule("speculative"), ConstantLength(4))
    contexts = {engine.submit(p, SamplingParams(max_new_tokens=18)): list(p) for p in PROMPTS}
    steps = []
    while engine.has_work:
        for step in engine.step():
            contexts[step.request_id] += step.token_ids
            steps.append(step)
        _assert_coherent(engine, reference, contexts)
    assert any(step.num_accepted < step.num_drafted for step in steps), "a rejection"
    assert any(step.num_accepted == step.num_drafted > 0 for step in steps), "a full acceptance"


def _assert_coherent(engine: Engine, reference: torch.nn.Module, contexts: dict[int, list[int]]) -> None:
    """Feeding each row's last token over the cache scores it as a fresh forward does; the cache is left as it was."""
    cache, rows = engine._cache, engine._items
    assert isinstance(cache, SlotCache)
    if not rows:
        return
    assert cache.lengths == [row.size - 1 for row in rows]
    before = list(cache.lengths)
    last = torch.tensor([[int(row.tokens[-1])] for row in rows])
    cached = engine.target.forward(ModelInput(last, [1] * len(rows)), cache).scores()[:, 0]
    cache.truncate(before)
    for i, row in enumerate(rows):
        assert row.tokens.tolist() == contexts[row.request_id]
        with torch.no_grad():
            fresh = reference(torch.tensor([contexts[row.request_id]])).logits[0, -1]
        assert float((cached[i] - fresh).abs().max()) < 1e-4 * max(1.0, float(fresh.abs().max()))


def test_rewinding_allocates_and_copies_nothing() -> None:
    model = CausalModel(make("llama"))
    cache = model.new_cache()
    cache.add_rows(2)
    model.forward(ModelInput(torch.ones(2, 40, dtype=torch.int64), [40, 30]), cache)
    stores = [store for layer in cache.tensors.layers for store in layer or ()]
    before = [(store.data_ptr(), store.clone()) for store in stores]
    cache.truncate([12, 3])
    assert cache.lengths == [12, 3]
    for store, (pointer, content) in zip(stores, before, strict=True):
        assert store.data_ptr() == pointer
        assert torch.equal(store, content)


def test_decoding_allocates_slots_only_when_the_width_is_full() -> None:
    model = CausalModel(make("llama"))
    engine = Engine(model, None, make_rule("speculative"), ConstantLength(0))
    engine.submit([1, 2, 3], SamplingParams(max_new_tokens=200))
    sizes = []
    while engine.has_work:
        engine.step()
        assert isinstance(engine._cache, SlotCache)
        sizes.append(engine._cache.nbytes)
    heads, dim = model.model.config.num_key_value_heads, model.model.config.head_dim
    slot = 2 * model.model.config.num_hidden_layers * heads * dim * 4  # keys and values in float32
    assert [size / slot for size, _ in itertools.groupby(sizes)] == [128, 256]
    assert sizes.index(256 * slot) in (125, 126), "the 126th step's token takes the last slot"
