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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", [Speculative(), Match(), Coupled()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("make", [SuffixDrafter, MaxGram, PromptLookup, NgramStoreDrafter])
def test_what_is_kept_of_a_look_up_changes_no_text(make: Callable[[], Any], rule: Rule, temperature: float) -> None:
    plain = texts(make, ConstantLength(0), rule, temperature)
    assert all(texts(make, Forced(salt), rule, temperature) == plain for salt in range(4))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", [Speculative(), Match(), Coupled()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("behind", [False, True], ids=["alone", "behind a look-up"])
def test_a_draft_of_likeliest_tokens_changes_no_text(behind: bool, rule: Rule, temperature: float) -> None:
    def make() -> ModelDrafter | Hybrid:
        model = ModelDrafter(DRAFT, 8, sample=False)
        return Hybrid(PromptLookup(), model, min_match=2, k=3) if behind else model

    plain = texts(make, ConstantLength(0), rule, temperature)
    assert all(texts(make, Forced(salt), rule, temperature) == plain for salt in range(4))
    assert texts(make, ConstantLength(5), rule, temperature) == plain


@pytest.mark.parametrize("behind", [False, True], ids=["alone", "behind a look-up"])
def test_a_sampled_draft_models_length_is_held(behind: bool) -> None:
    def make() -> ModelDrafter | Hybrid:
        model = ModelDrafter(DRAFT, 8)
        return Hybrid(PromptLookup(), model, min_match=2, k=3) if behind else model

    constant = texts(make, ConstantLength(5), Speculative())
    assert all(texts(make, Forced(salt, sampled=5), Speculative()) == constant for salt in range(4))
    assert any(texts(make, Forced(salt), Speculative()) != constant for salt in range(4)), "control: adapted lengths"
    for rule in (Match(), Coupled()):
        plain = texts(make, ConstantLength(0), rule)
        assert all(texts(make, Forced(salt, sampled=5), rule) == plain for salt in range(4)), "they adapt, as they may"
