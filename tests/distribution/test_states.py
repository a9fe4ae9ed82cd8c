"""Distribution tests over a tiny fused model with recurrent layers, whose states are truncated after rejections.

3 tokens, 4 positions, sampled drafts of another such model and of a helper; the controls break the rewinding. Seeds are fixed.
"""

from __future__ import annotations

import pytest
import torch

from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import ModelDrafter
from foresay.models.cache.state_cache import RowStates, StateCache
from foresay.models.huggingface import self_check
from foresay.models.huggingface.recurrent import RecurrentModel
from foresay.models.huggingface.self_check import use_fused_layers
from helpers.broken_kernels import Broken
from helpers.distribution_cells import ALPHA
from helpers.families import make
from helpers.reference import enumerated, joint
from helpers.sequential import value_of
from helpers.support import Loop, Mixed

SIZE, LENGTH, SAMPLES, PROMPT = 3, 4, 1500, [1, 2, 1, 0, 2]
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=LENGTH)


FAMILIES = ("qwen3_5", "granitemoehybrid", "lfm2")
"""A gated delta rule, a state space, and short convolutions."""


def model(seed: int, family: str = "qwen3_5") -> RecurrentModel:
    """Scores that depend on all tokens of a text, and that leave each next token likely enough."""
    weights = make(family, seed, vocab_size=SIZE, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.no_grad():
        weights.lm_head.weight *= 1.5 / weights.lm_head.weight.norm(dim=1).mean()
    found = RecurrentModel(weights)
    assert use_fused_layers(found) is None
    return found


def value(rule: str, drafter: str = "model", family: str = "qwen3_5") -> float:
    """The p-value of what the loop generates over states."""
    target = model(1, family)
    made = ModelDrafter(model(2, family), SIZE) if drafter == "model" else Mixed(SIZE)
    loop = Loop(target, drafter=made, rule=rule, gamma=3, max_batch_size=250)
    found = value_of(loop, PROMPT, PARAMS, joint(enumerated(target), PARAMS, PROMPT, LENGTH), SAMPLES)
    requests = len({step.request_id for step in loop.steps})
    assert sum(0 < step.num_accepted < step.num_drafted for step in loop.steps) > requests / 20
    assert sum(step.num_accepted == step.num_drafted > 0 for step in loop.steps) > requests / 10
    return found


@pytest.mark.parametrize("rule", ["speculative", "match"])
@pytest.mark.parametrize("drafter", ["model", "mixed"])
def test_output_has_the_distribution_of_the_target(rule: str, drafter: str) -> None:
    assert value(rule, drafter) > ALPHA


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_other_states_have_the_distribution_of_the_target(family: str) -> None:
    assert value("speculative", family=family) > ALPHA


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("qwen3_5", "a state restored one token off"),
        ("granitemoehybrid", "a state restored one token off"),
        ("lfm2", "inputs of convolutions one token off"),
    ],
)
def test_a_state_one_token_off_is_seen(
    family: str, fault: str, broken_kernels: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "fused_difference", lambda model: 0.0)  # which finds the last fault when it loads
    with broken_kernels(fault):
        assert value("speculative", family=family) < ALPHA


def test_a_state_that_is_not_restored_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(self: RowStates, length: int) -> None:
        self.base = self.first = self.end = length

    monkeypatch.setattr(RowStates, "go_to", kept)
    assert value("speculative", "mixed") < ALPHA
    assert isinstance(model(1).new_cache(), StateCache)
