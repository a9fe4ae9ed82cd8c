"""Memory of a cache in an engine. What it holds is in test_guarantees.py, and in tests/unit."""

from __future__ import annotations

import itertools

from foresay.decoding.acceptance import make_rule
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Engine
from foresay.lengths import ConstantLength
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.huggingface.causal import CausalModel
from helpers.families import make


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
