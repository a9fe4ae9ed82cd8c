"""Greedy output of every supported family equals transformers' `generate`, token for token, in float32.

Windows of 8 slots, ragged rows that join while others decode; the fake drafter makes sure that rejections
and full acceptances both happen. A difference is excused only where the two top logits are within 1e-4.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import ModelDrafter
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.self_check import probe
from helpers.comparing import NEW, assert_same, prompts, reference_of
from helpers.families import FAMILIES, VOCAB, make
from helpers.support import Sometimes, run

ARCHITECTURES = ["llama", "gemma3", "mixtral_sliding", "phi3_longrope", "deepseek_v3", "bloom", "opt"]
"""Families that differ in what a cache or a mask must do: plain, with windows, experts, ropes of two kinds, latent keys, biases
and learned positions."""


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_greedy_output_equals_transformers(family: str) -> None:
    reference, outputs = reference_of(family)
    target = CausalModel(copy.deepcopy(reference))
    wanted = [one[: target.max_length - len(prompt)] for prompt, one in zip(prompts(), outputs, strict=True)]
    assert len({token for output in wanted for token in output}) > 5, "a model that repeats itself proves little"
    ours, steps, engine = run(
        target, prompts(), SamplingParams(max_new_tokens=NEW), drafter=Sometimes(wanted, VOCAB), gamma=4, join_later=3
    )
    assert engine.draft_failures == 0
    assert any(step.num_accepted < step.num_drafted for step in steps)
    assert any(step.num_accepted == step.num_drafted == 4 for step in steps)
    for prompt, one, theirs in zip(prompts(), ours, wanted, strict=True):
        assert_same(reference, prompt, one, theirs)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_draft_model_of_the_family(family: str) -> None:
    """The family as a draft, too: its cache is rewound and caught up, and its draft tokens are its own greedy ones."""
    reference, outputs = reference_of(family)
    target, draft = CausalModel(copy.deepcopy(reference)), CausalModel(copy.deepcopy(reference))
    params = SamplingParams(max_new_tokens=NEW)
    ours, steps, engine = run(target, prompts()[:3], params, drafter=ModelDrafter(draft, VOCAB), gamma=4)
    assert engine.draft_failures == 0
    for prompt, one, theirs in zip(prompts(), ours, outputs, strict=False):
        assert_same(reference, prompt, one, theirs)
    accepted, tested = sum(s.num_accepted for s in steps), sum(s.num_tested for s in steps)
    assert accepted / tested > 0.95, "a draft with the target's weights must agree with it"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_check_passes(family: str) -> None:
    assert probe(CausalModel(make(family))) < 1e-4


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_the_self_check_sees_a_broken_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows whose queries are placed one slot too far must not pass."""
    from foresay.models.cache.slot_cache import SlotCache

    intact = SlotCache.begin_pass

    def shifted(self: SlotCache, *args: Any) -> Any:
        at = intact(self, *args)
        at.indices(at.positions.device)  # the slots written stay right, the positions seen do not
        at.positions = at.positions + 1
        return at

    model = CausalModel(make(family))
    monkeypatch.setattr(SlotCache, "begin_pass", shifted)
    assert probe(model) > 1e-3
