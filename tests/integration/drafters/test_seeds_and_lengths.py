"""Lengths that adapt change no seed's text: n-gram drafters never do, and where a draft would, the length is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foresay.decoding.acceptance import Coupled, Match, Speculative
from foresay.decoding.protocols import Rule
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Hybrid, MaxGram, ModelDrafter, NgramStoreDrafter, PromptLookup, SuffixDrafter
from foresay.lengths import ConstantLength
from foresay.models.table import TableModel
from helpers.forced import Forced
from helpers.support import run

PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [4, 5, 4, 5, 4], [6]]
MODEL, DRAFT = (TableModel.random(8, seed=seed, concentration=0.4) for seed in (3, 4))


def texts(make: Callable[[], Any], policy: Any, rule: Rule, temperature: float = 1.0) -> Any:
    params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=11)
    return run(MODEL, PROMPTS, params, drafter=make(), policy=policy, rule=rule)[0]


def after_lookup(sample: bool) -> Any:
    return Hybrid(PromptLookup(), ModelDrafter(DRAFT, 8, sample=sample), min_match=2, k=3)


LOOKUPS = (SuffixDrafter, MaxGram, PromptLookup, NgramStoreDrafter)
MAKE: dict[str, Callable[[], Any]] = {
    **{one.__name__: one for one in LOOKUPS},
    "likeliest tokens": lambda: ModelDrafter(DRAFT, 8, sample=False),
    "likeliest tokens after a lookup": lambda: after_lookup(False),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", [Speculative(), Match(), Coupled()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("drafter", MAKE)
def test_drafts_that_are_not_sampled_change_no_text(drafter: str, rule: Rule, temperature: float) -> None:
    plain = texts(MAKE[drafter], ConstantLength(0), rule, temperature)
    for policy in (Forced(0), Forced(1), ConstantLength(5)):
        assert texts(MAKE[drafter], policy, rule, temperature) == plain


@pytest.mark.parametrize("follows", [False, True], ids=["alone", "after a lookup"])
def test_a_sampled_draft_models_length_is_held(follows: bool) -> None:
    def make() -> Any:
        return after_lookup(True) if follows else ModelDrafter(DRAFT, 8)

    constant = texts(make, ConstantLength(5), Speculative())
    assert all(texts(make, Forced(salt, sampled=5), Speculative()) == constant for salt in range(2))
    assert any(texts(make, Forced(salt), Speculative()) != constant for salt in range(4)), "control: adapted lengths"
    for rule in (Match(), Coupled()):
        plain = texts(make, ConstantLength(0), rule)
        assert all(texts(make, Forced(salt, sampled=5), rule) == plain for salt in range(2)), "they adapt, as they may"
