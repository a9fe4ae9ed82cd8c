"""An n-gram drafter where its match is long, else another drafter: who drafts which row, and that no text changes.

Every rule over hybrids is in tests/distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from foresay import Drafter, Rule, SamplingParams, TableModel
from foresay.decoding.acceptance import Coupled, Match, Speculative
from foresay.drafters import (
    Cascade,
    HeadDrafter,
    Hybrid,
    MaxGram,
    Memory,
    ModelDrafter,
    ModelTreeDrafter,
    NgramStoreDrafter,
    PromptLookup,
    SuffixDrafter,
)
from foresay.drafters.draft_chain import DraftChain
from foresay.lengths import ConstantLength, ThroughputLength
from foresay.models.drafts.head import HeadModel
from foresay.models.huggingface.causal import CausalModel
from helpers.distribution_cells import ALPHA, DRAFT, LENGTH, PARAMS, PROMPT, SIZE, TARGET
from helpers.drafting import SMALL, decoded, llama_target
from helpers.families import make
from helpers.forced import Forced
from helpers.heads import random_head
from helpers.reference import joint
from helpers.refusals import refused
from helpers.sequential import value_of
from helpers.support import Loop, run


def value(drafter: Drafter, samples: int = 1500, **options: Any) -> float:
    """The p-value of what is written against the target's distribution."""
    loop = Loop(TARGET, drafter=drafter, **options)
    probs = joint(TARGET, PARAMS["plain"], PROMPT, LENGTH)
    found = value_of(loop, PROMPT, PARAMS["plain"], probs, samples)
    assert len({step.num_drafted for step in loop.steps}) > 1
    return found


@pytest.mark.parametrize(
    ("follows", "sample", "rule"),
    [(True, True, "block"), (True, False, "speculative"), (False, True, "speculative"), (False, False, "block")],
)
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


@pytest.mark.parametrize("policy", [ConstantLength(6), ThroughputLength()], ids=["constant", "throughput"])
def test_greedy_output_is_that_of_plain_decoding(policy: Any) -> None:
    model = llama_target(vocab=SMALL)
    other = HeadDrafter(HeadModel(random_head(model), model), SMALL)
    decoded(model, Hybrid(SuffixDrafter(), other, min_match=3, k=2), policy=policy)


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


# -- lengths that adapt change no seed's text: n-gram drafters never do, and where a draft would, the length is fixed ------

TEXTS = [[1, 2, 3, 1, 2, 3, 1], [4, 5, 4, 5, 4], [6]]
WRITER, OTHER = (TableModel.random(8, seed=seed, concentration=0.4) for seed in (3, 4))


def texts(make: Callable[[], Any], policy: Any, rule: Rule, temperature: float = 1.0) -> Any:
    params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=11)
    return run(WRITER, TEXTS, params, drafter=make(), policy=policy, rule=rule)[0]


def after_lookup(sample: bool) -> Any:
    return Hybrid(PromptLookup(), ModelDrafter(OTHER, 8, sample=sample), min_match=2, k=3)


LOOKUPS = (SuffixDrafter, MaxGram, PromptLookup, NgramStoreDrafter)
MAKE: dict[str, Callable[[], Any]] = {
    **{one.__name__: one for one in LOOKUPS},
    "likeliest tokens": lambda: ModelDrafter(OTHER, 8, sample=False),
    "likeliest tokens after a lookup": lambda: after_lookup(False),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", [Speculative(), Match(), Coupled()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("drafter", MAKE)
def test_drafts_that_are_not_sampled_change_no_text(drafter: str, rule: Rule, temperature: float) -> None:
    plain = texts(MAKE[drafter], ConstantLength(0), rule, temperature)
    for policy in (Forced(0), ConstantLength(5)):
        assert texts(MAKE[drafter], policy, rule, temperature) == plain


@pytest.mark.parametrize("follows", [False, True], ids=["alone", "after a lookup"])
def test_a_sampled_draft_models_length_is_held(follows: bool) -> None:
    def make() -> Any:
        return after_lookup(True) if follows else ModelDrafter(OTHER, 8)

    constant = texts(make, ConstantLength(5), Speculative())
    assert all(texts(make, Forced(salt, sampled=5), Speculative()) == constant for salt in range(2))
    assert any(texts(make, Forced(salt), Speculative()) != constant for salt in range(4)), "control: adapted lengths"
    for rule in (Match(), Coupled()):
        plain = texts(make, ConstantLength(0), rule)
        assert all(texts(make, Forced(salt, sampled=5), rule) == plain for salt in range(2)), "they adapt, as they may"
