"""An n-gram drafter where its match is long, else another drafter: who drafts which row, and that no text changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresay.decoding.protocols import Drafter
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import (
    Cascade,
    HeadDrafter,
    Hybrid,
    MaxGram,
    Memory,
    ModelDrafter,
    ModelTreeDrafter,
    SuffixDrafter,
)
from foresay.drafters.draft_chain import DraftChain
from foresay.lengths import ConstantLength, ThroughputLength
from foresay.models.drafts.head import HeadModel
from foresay.models.huggingface.causal import CausalModel
from foresay.models.table import TableModel
from helpers.distribution_cells import ALPHA, DRAFT, LENGTH, PARAMS, PROMPT, SIZE, TARGET
from helpers.families import make
from helpers.forced import Forced
from helpers.heads import random_head
from helpers.reference import joint
from helpers.refusals import refused
from helpers.sequential import value_of
from helpers.support import Loop, run

SMALL = 7
PROMPTS = [[5, 6, 1, 2, 3, 4, 5], [2], [1, 2, 1], [6] * 9, [3, 1] * 8]


def value(drafter: Drafter, samples: int = 1500, late: int = 0, **options: Any) -> float:
    """The p-value of what is written against the target's distribution."""
    loop = Loop(TARGET, drafter=drafter, **options)
    probs = joint(TARGET, PARAMS["plain"], PROMPT, LENGTH)
    found = value_of(loop, PROMPT, PARAMS["plain"], probs, samples, join_later=late)
    assert len({step.num_drafted for step in loop.steps}) > 1
    return found


@pytest.mark.parametrize("rule", ["speculative", "block", "match", "coupled"])
@pytest.mark.parametrize("min_match", [1, 2, 4])
def test_the_distribution_is_the_targets(rule: str, min_match: int) -> None:
    """Some rows are drafted by n-gram drafters and some by a model, in one batch."""
    drafter = Hybrid(SuffixDrafter(), ModelDrafter(DRAFT, SIZE), min_match=min_match, k=2)
    assert value(drafter, rule=rule, max_batch_size=64, late=20) > ALPHA


@pytest.mark.parametrize("rule", ["speculative", "block"])
@pytest.mark.parametrize("sample", [True, False])
@pytest.mark.parametrize("follows", [True, False])
def test_lengths_that_come_out_as_they_please_leave_the_distribution(follows: bool, sample: bool, rule: str) -> None:
    """Whatever is requested, kept and afforded, and wherever a draft ends because it is unsure of a token that stays in it."""
    model, policy = ModelDrafter(DRAFT, SIZE, sample=sample), Forced(1)
    drafter = Hybrid(SuffixDrafter(), model, min_match=2, k=3) if follows else model
    assert value(drafter, rule=rule, policy=policy, max_batch_size=64) > ALPHA
    assert policy.ended > 100, "drafts end where they are unsure"


def test_an_unsure_token_that_is_dropped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a chain whose drafts end before the token that ended them writes another distribution."""
    honest = DraftChain.add

    def dropping(self, *arguments):  # type: ignore[no-untyped-def]
        before = self.counts.clone()
        going = honest(self, *arguments)
        sure = arguments[0].confidence(self.ids[:, -1:])[:, 0] >= 0.3
        self.counts = torch.where(sure, self.counts, before)
        return going

    monkeypatch.setattr(DraftChain, "add", dropping)
    drafter = Hybrid(SuffixDrafter(), ModelDrafter(DRAFT, SIZE), min_match=9, k=1)
    assert value(drafter, 3000, max_batch_size=500) < ALPHA


def test_a_choice_by_what_was_drafted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a hybrid that takes the model's draft only where it likes its first token writes another distribution."""
    propose = ModelDrafter.propose

    def liked(self, rows, budget, policy):  # type: ignore[no-untyped-def]
        proposal = propose(self, rows, budget, policy)
        counts = [n if n and int(proposal.token_ids[i, 0]) < 2 else 0 for i, n in enumerate(proposal.num_tokens)]
        return type(proposal)(
            proposal.token_ids, counts, proposal.distributions, proposal.distribution_index, proposal.confidence
        )

    monkeypatch.setattr(ModelDrafter, "propose", liked)
    drafter = Hybrid(SuffixDrafter(), ModelDrafter(DRAFT, SIZE), min_match=9, k=2)
    assert value(drafter, 3000, max_batch_size=500) < ALPHA


@pytest.mark.parametrize("policy", [ConstantLength(6), ThroughputLength()], ids=["constant", "throughput"])
def test_greedy_output_is_that_of_plain_decoding(policy: Any) -> None:
    model = CausalModel(make("llama", 3, vocab_size=SMALL, tie_word_embeddings=False))
    model.use_fused()
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    plain, _, _ = run(model, PROMPTS, params, drafter=None, gamma=0)
    other = HeadDrafter(HeadModel(random_head(model), model), SMALL)
    drafter = Hybrid(SuffixDrafter(), other, min_match=3, k=2)
    ours, _, engine = run(model, PROMPTS, params, drafter=drafter, policy=policy, join_later=2, max_batch_size=3)
    assert engine.draft_failures == 0 and ours == plain


def test_each_row_is_drafted_by_the_one_that_knows_it() -> None:
    """A long match is taken from the n-gram drafter, up to the budget; other rows get at most k tokens of the model."""
    prompts = [[1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4], [8, 1, 7]]
    drafter = Hybrid(SuffixDrafter(), ModelDrafter(TableModel.random(9, seed=2), 9), min_match=3, k=2)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    _, steps, _ = run(TableModel.random(9, seed=1), prompts, params, drafter=drafter, gamma=6)
    first = {step.request_id: step.num_drafted for step in reversed(steps)}
    assert first[0] > 2 and first[1] == 2


def test_what_is_kept_by_a_member_of_a_member_is_known() -> None:
    """Else a seed could meet draft tokens that were made of its own numbers."""
    keeps, model = SuffixDrafter(Memory(max_tokens=256)), ModelDrafter(DRAFT, SIZE)
    inner = Cascade([model, keeps], [[2, 4], [0, 0]])
    assert Hybrid(MaxGram(), inner).repeats_seeds() and Hybrid(keeps, model).repeats_seeds()
    assert Cascade([Hybrid(keeps, model), MaxGram()], [[2, 4], [0, 0]]).repeats_seeds()
    assert not Hybrid(MaxGram(), model).repeats_seeds()


def test_what_cannot_be_a_hybrid() -> None:
    model = ModelDrafter(DRAFT, SIZE)
    tree = ModelTreeDrafter(CausalModel(make("llama")), 97)
    cases: list[tuple[str, Any, list[Any], dict[str, int]]] = [
        ("lookup", "ModelDrafter", [model, model], {}),
        ("drafters", "ModelTreeDrafter", [MaxGram(), tree], {}),
        ("min_match", 0, [MaxGram(), model], {"min_match": 0}),
        ("k", 0, [MaxGram(), model], {"k": 0}),
    ]
    for param, given, drafters, options in cases:
        with refused(param, given):
            Hybrid(*drafters, **options)
