"""Predictions and forced tokens are only drafts: outputs keep the target's distribution, whether they come true or not."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Hybrid, ModelDrafter, SuffixDrafter
from helpers.distribution_cells import ALPHA, DRAFT, LENGTH, PARAMS, PROMPT, RULES, SIZE, TARGET
from helpers.reference import joint, p_value
from helpers.sequential import decided
from helpers.support import Loop

SAMPLES = 900
PREDICTIONS = [tuple(range(SIZE)), (0, 0, 0, 0), (1, 2), tuple(reversed(range(SIZE))) * 2]


class Claims:
    """A processor that changes nothing, and claims to force tokens."""

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def forced_tokens(self, output: Sequence[int]) -> list[int] | None:
        if 2 in output[-1:] and len(output) % 3 == 0:
            return None
        return [len(output) % SIZE, 1] if len(output) % 2 == 0 else []


JOINT = joint(TARGET, PARAMS["plain"], PROMPT, LENGTH)


def value(drafter: Any, rule: str, *, believed: bool = False, **changes: Any) -> tuple[float, int]:
    """The p-value, and the draft tokens of the first look. believed: outputs begin with their predictions."""
    loop, written, drafted = Loop(TARGET, drafter=drafter, rule=rule, gamma=3, max_batch_size=64), list[list[int]](), []

    def look(seeds: range) -> float:
        params = [
            SamplingParams.of(PARAMS["plain"], seed=seed, **{"prediction": PREDICTIONS[seed % 4], **changes})
            for seed in seeds
        ]
        found = loop.outputs([PROMPT] * len(params), params)
        written.extend(
            [PREDICTIONS[seed % 4][0], *one[1:]] if believed else one for seed, one in zip(seeds, found, strict=True)
        )
        drafted.append(sum(step.num_drafted for step in loop.steps))
        return p_value(written, JOINT, SIZE)

    found = decided(look, SAMPLES, JOINT)
    assert loop.engine.draft_failures == 0
    return found, drafted[0]


@functools.cache
def without(rule: str) -> int:
    """Draft tokens of the first look without a prediction."""
    return value(SuffixDrafter(), rule, prediction=())[1]


CELLS = [(rule, hybrid, hybrid == (i % 2 == 0)) for i, rule in enumerate(RULES) for hybrid in (False, True)]
"""Every rule with and without a hybrid and claims, and every pair of these."""


@pytest.mark.parametrize(("rule", "hybrid", "claims"), CELLS)
def test_known_tokens_keep_the_distribution(rule: str, hybrid: bool, claims: bool) -> None:
    drafter = Hybrid(SuffixDrafter(), ModelDrafter(DRAFT, SIZE), min_match=2, k=3) if hybrid else SuffixDrafter()
    found, drafted = value(drafter, rule, processors=(Claims(),) if claims else ())
    assert found > ALPHA and drafted > without(rule), "they are drafted"


def test_the_comparison_sees_predictions_that_are_believed() -> None:
    """Control."""
    assert value(SuffixDrafter(), "speculative", believed=True)[0] < ALPHA
