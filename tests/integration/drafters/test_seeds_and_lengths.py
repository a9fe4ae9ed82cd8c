"""Lengths that adapt change no seed's text: what look-ups guess never does, and where a draft would, the length is held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from foresay.decoding.acceptance import Coupled, Match, Speculative
from foresay.decoding.protocols import DraftStep, Rule
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Hybrid, MaxGram, ModelDrafter, NgramStoreDrafter, PromptLookup, SuffixDrafter
from foresay.lengths import ConstantLength, ThroughputLength
from foresay.models.table import TableModel
from helpers.support import run

PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [4, 5, 4, 5, 4], [6]]
MODEL, DRAFT = (TableModel.random(8, seed=seed, concentration=0.4) for seed in (3, 4))


class Forced(ThroughputLength):
    """Measured times that came out as they please: any lengths, and any number of what was found."""

    def __init__(self, salt: int, *, sampled: int | None = None) -> None:
        super().__init__(sampled=sampled)
        self.random = torch.Generator().manual_seed(salt)

    def _choose(self, rows: Rows, held: Sequence[int | None]) -> list[int]:
        return [self._any(8) if n is None else n for n in held]

    def keep(self, rows: Rows, counts: Sequence[int], matched: Sequence[int]) -> list[int]:
        return self._changed(rows, super().keep(rows, counts, matched), counts)

    def afford(self, rows: Rows, most: Sequence[int]) -> list[int]:
        return self._changed(rows, super().afford(rows, most), most)

    def keep_drafting(self, step: DraftStep) -> torch.Tensor | None:
        self._drafting.least = torch.rand(3, generator=self.random).double().numpy()
        return super().keep_drafting(step)

    def _changed(self, rows: Rows, chosen: Sequence[int], most: Sequence[int]) -> list[int]:
        free = [one is None for one in self._held(rows)]
        return [self._any(bound) if on else n for n, bound, on in zip(chosen, most, free, strict=True)]

    def _any(self, most: int) -> int:
        return int(torch.randint(most + 1, (1,), generator=self.random))


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
