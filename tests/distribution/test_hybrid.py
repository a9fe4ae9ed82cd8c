"""An n-gram drafter in front of a sampled draft under the default lengths, over passes that take the time of real tokens.

And predictions and forced tokens, which are only drafts: outputs keep the distribution, whether they come true or not.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from foresay.decoding import clock
from foresay.decoding.capabilities import Capabilities
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Hybrid, MaxGram, Memory, ModelDrafter, SuffixDrafter
from foresay.lengths import ThroughputLength, measured_drafter
from foresay.models.table import TableModel
from helpers.distribution_cells import ALPHA, DRAFT, LENGTH, PARAMS, PROMPT, RULES, SIZE, TARGET
from helpers.reference import joint
from helpers.sequential import value_of
from helpers.support import Loop

JOINT = joint(TARGET, PARAMS["plain"], PROMPT, LENGTH)


class Ragged(TableModel):
    """A table whose passes take the time of their real tokens, as those of compiled kernels do."""

    capabilities = Capabilities(trees=True, ragged=True)


DEFAULTS: dict[str, Callable[[], LengthPolicy]] = {
    "every row's length": lambda: ThroughputLength(),
    "fixed for sampled rows": lambda: ThroughputLength(sampled=3),
}
LOOKUPS = {"max_gram": MaxGram, "suffix": lambda: SuffixDrafter(Memory(max_tokens=512))}


@pytest.fixture
def _virtual_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting takes no time and a pass a millisecond, so that n-gram drafters are free: a step reads its clock four times."""
    calls = itertools.count()
    monkeypatch.setattr(clock, "perf_counter", lambda: (lambda n: n // 4 + (n % 4 > 1))(next(calls)) * 1e-3)


def value(lookup: str, rule: str, policy: LengthPolicy, *, greedy_too: bool = False) -> float:
    drafter = Hybrid(LOOKUPS[lookup](), ModelDrafter(DRAFT, SIZE), min_match=1, k=3)
    loop = Loop(Ragged(TARGET.table), drafter=drafter, rule=rule, policy=policy, max_batch_size=32)

    def params(seed: int) -> SamplingParams:
        return SamplingParams.of(PARAMS["plain"], seed=seed, temperature=float(not greedy_too or seed % 4 < 3))

    def counted(seeds: range, outputs: list[list[int]]) -> list[list[int]]:
        return [one for seed, one in zip(seeds, outputs, strict=True) if not params(seed).greedy]

    found = value_of(loop, PROMPT, params, JOINT, 600, counted=counted)
    assert any(step.num_drafted for step in loop.steps)
    return found


HALF = [
    (rule, lookup, policy, i ^ j ^ k == 0)
    for i, rule in enumerate(("speculative", "block"))
    for j, lookup in enumerate(LOOKUPS)
    for k, policy in enumerate(DEFAULTS)
]
"""Any three of rule, lookup, lengths, and greedy rows or none, in every combination."""


@pytest.mark.usefixtures("_virtual_clock")
@pytest.mark.parametrize(("rule", "lookup", "policy", "greedy_too"), HALF)
def test_default_lengths_keep_the_distribution(rule: str, lookup: str, policy: str, greedy_too: bool) -> None:
    assert value(lookup, rule, DEFAULTS[policy](), greedy_too=greedy_too) > ALPHA


@pytest.mark.usefixtures("_virtual_clock")
def test_rows_none_of_which_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a budget that maximises over no row at all fails."""
    monkeypatch.setattr(measured_drafter.Credit, "check", lambda *_: np.zeros(0).argmax())
    with pytest.raises(ValueError, match="empty"):
        value("max_gram", "speculative", DEFAULTS["fixed for sampled rows"]())


# -- predictions and forced tokens --------------------------------------------------------------------------------------

PREDICTIONS = [tuple(range(SIZE)), (0, 0, 0, 0), (1, 2), tuple(reversed(range(SIZE))) * 2]


class Claims:
    """A processor that changes nothing, and claims to force tokens."""

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def forced_tokens(self, output: Sequence[int]) -> list[int] | None:
        if 2 in output[-1:] and len(output) % 3 == 0:
            return None
        return [len(output) % SIZE, 1] if len(output) % 2 == 0 else []


def known(drafter: Any, rule: str, *, believed: bool = False, **changes: Any) -> tuple[float, int]:
    """The p-value, and the draft tokens of the first look. believed: outputs begin with their predictions."""
    loop, drafted = Loop(TARGET, drafter=drafter, rule=rule, gamma=3, max_batch_size=64), list[int]()

    def params(seed: int) -> SamplingParams:
        return SamplingParams.of(PARAMS["plain"], seed=seed, **{"prediction": PREDICTIONS[seed % 4], **changes})

    def counted(seeds: range, outputs: list[list[int]]) -> list[list[int]]:
        drafted.append(sum(step.num_drafted for step in loop.steps))
        each = zip(seeds, outputs, strict=True)
        return [[PREDICTIONS[seed % 4][0], *one[1:]] if believed else one for seed, one in each]

    return value_of(loop, PROMPT, params, JOINT, 600, counted=counted), drafted[0]


@functools.cache
def without(rule: str) -> int:
    """Draft tokens of the first look without a prediction."""
    return known(SuffixDrafter(), rule, prediction=())[1]


CELLS = [(rule, hybrid, hybrid == (i % 2 == 0)) for i, rule in enumerate(RULES) for hybrid in (False, True)]
"""Every rule with and without a hybrid and claims, and every pair of these."""


@pytest.mark.parametrize(("rule", "hybrid", "claims"), CELLS)
def test_known_tokens_keep_the_distribution(rule: str, hybrid: bool, claims: bool) -> None:
    drafter = Hybrid(SuffixDrafter(), ModelDrafter(DRAFT, SIZE), min_match=2, k=3) if hybrid else SuffixDrafter()
    found, drafted = known(drafter, rule, processors=(Claims(),) if claims else ())
    assert found > ALPHA and drafted > without(rule), "they are drafted"


def test_the_comparison_sees_predictions_that_are_believed() -> None:
    """Control."""
    assert known(SuffixDrafter(), "speculative", believed=True)[0] < ALPHA
