"""Distribution tests of Gemma 4's assistants, whose drafts depend on the target's keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import AssistantDrafter
from foresay.models.drafts.assistant import Assistant
from foresay.models.huggingface.causal import CausalModel
from helpers.assistants import assistant_model, read
from helpers.distribution_cells import ALPHA
from helpers.families import make
from helpers.reference import enumerated, joint
from helpers.sequential import value_of
from helpers.support import Loop

SIZE, LENGTH, SAMPLES, PROMPT = 5, 3, 1200, [1, 2, 1]


class _RecordsOthers(AssistantDrafter):
    """Draws from its distributions, and records them for other tokens."""

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        proposal = super().propose(rows, budget, policy)
        if proposal.distributions is None:
            return proposal
        return dataclasses.replace(proposal, distributions=proposal.distributions.roll(1, -1).contiguous())


@pytest.fixture(scope="module")
def target() -> CausalModel:
    model = CausalModel(make("gemma4", 3, vocab_size=SIZE, vocab_size_per_layer_input=SIZE))
    assert model.use_fused() is None
    return model


def value(
    target: CausalModel,
    made: type[AssistantDrafter],
    rule: str,
    nodes: int = 0,
    *,
    ordered: bool = False,
    gain: float = 2.0,
) -> float:
    assistant = Assistant(read(assistant_model(vocab_size=SIZE, gain=gain, ordered=ordered)), target)
    params = SamplingParams(temperature=1.5, max_new_tokens=LENGTH + nodes, ignore_eos=True)
    drafter = made(assistant, SIZE, nodes=nodes)
    loop = Loop(target, drafter=drafter, rule=rule, gamma=nodes or 2, max_batch_size=100)
    found = value_of(loop, PROMPT, params, joint(enumerated(target), params, PROMPT, LENGTH), SAMPLES, enough=LENGTH)
    requests = len({step.request_id for step in loop.steps})
    assert sum(step.num_accepted for step in loop.steps) > requests / 4
    assert sum(step.num_accepted < step.num_drafted for step in loop.steps) > requests / 8
    return found


@pytest.mark.parametrize(
    ("rule", "nodes", "ordered"), [("speculative", 0, False), ("block", 0, True), ("speculative", 6, False)]
)
def test_drafts_leave_the_distribution(rule: str, nodes: int, ordered: bool, target: CausalModel) -> None:
    assert value(target, AssistantDrafter, rule, nodes, ordered=ordered) > ALPHA


def test_distributions_of_other_tokens_would_be_noticed(target: CausalModel) -> None:
    assert value(target, _RecordsOthers, "speculative", gain=4.0) < ALPHA
