"""Predictions and forced tokens are only drafts: outputs keep the target's distribution, whether they come true or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Hybrid, ModelDrafter, SuffixDrafter
from foresay.lengths import ConstantLength
from helpers.distribution_cells import ALPHA, DRAFT, LENGTH, PARAMS, PROMPT, RULES, SIZE, TARGET
from helpers.reference import joint, p_value
from helpers.support import run

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


def outputs(drafter: Any, rule: str, **changes: Any) -> tuple[list[list[int]], int]:
    params = [
        SamplingParams.of(PARAMS["plain"], seed=seed, **{"prediction": PREDICTIONS[seed % 4], **changes})
        for seed in range(SAMPLES)
    ]
    found, steps, engine = run(
        TARGET, [PROMPT] * SAMPLES, params, drafter=drafter, rule=rule, policy=ConstantLength(3), max_batch_size=64
    )
    assert engine.draft_failures == 0
    return found, sum(step.num_drafted for step in steps)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("claims", [False, True])
def test_known_tokens_keep_the_distribution(rule: str, hybrid: bool, claims: bool) -> None:
    drafter = Hybrid(SuffixDrafter(), ModelDrafter(DRAFT, SIZE), min_match=2, k=3) if hybrid else SuffixDrafter()
    found, drafted = outputs(drafter, rule, processors=(Claims(),) if claims else ())
    _, without = outputs(SuffixDrafter(), rule, prediction=())
    assert drafted > without, "they are drafted"
    assert p_value(found, joint(TARGET, PARAMS["plain"], PROMPT, LENGTH), SIZE) > ALPHA


def test_the_comparison_sees_predictions_that_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: outputs that begin with their predictions."""
    found, _ = outputs(SuffixDrafter(), "speculative")
    believed = [[PREDICTIONS[i % 4][0], *one[1:]] for i, one in enumerate(found)]
    assert p_value(believed, joint(TARGET, PARAMS["plain"], PROMPT, LENGTH), SIZE) < ALPHA
