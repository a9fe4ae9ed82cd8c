"""An n-gram drafter in front of a sampled draft under the default lengths, over passes that take the time of real tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from foresay.decoding import clock
from foresay.decoding.capabilities import Capabilities
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Hybrid, MaxGram, Memory, ModelDrafter, SuffixDrafter
from foresay.lengths import ThroughputLength, measured_drafter
from foresay.models.table import TableModel
from helpers.distribution_cells import ALPHA, DRAFT, LENGTH, PARAMS, PROMPT, SIZE, TARGET
from helpers.reference import joint, p_value
from helpers.sequential import decided
from helpers.support import Loop

SAMPLES = 900
JOINT = joint(TARGET, PARAMS["plain"], PROMPT, LENGTH)


class Ragged(TableModel):
    """A table whose passes take the time of their real tokens, as those of compiled kernels do."""

    capabilities = Capabilities(trees=True, ragged=True)


DEFAULTS: dict[str, Callable[[], LengthPolicy]] = {
    "every row's length": lambda: ThroughputLength(),
    "fixed for sampled rows": lambda: ThroughputLength(sampled=3),
}
LOOKUPS = {"max_gram": MaxGram, "suffix": lambda: SuffixDrafter(Memory(max_tokens=512))}


@pytest.fixture(autouse=True)
def _virtual_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting takes no time and a pass a millisecond, so that n-gram drafters are free: a step reads its clock four times."""
    calls = itertools.count()
    monkeypatch.setattr(clock, "perf_counter", lambda: (lambda n: n // 4 + (n % 4 > 1))(next(calls)) * 1e-3)


def value(lookup: str, rule: str, policy: LengthPolicy, *, greedy_too: bool = False) -> tuple[float, int]:
    target = Ragged(TARGET.table)
    drafter = Hybrid(LOOKUPS[lookup](), ModelDrafter(DRAFT, SIZE), min_match=1, k=3)
    loop, written = Loop(target, drafter=drafter, rule=rule, policy=policy, max_batch_size=32), list[list[int]]()

    def look(seeds: range) -> float:
        params = [SamplingParams.of(PARAMS["plain"], seed=seed) for seed in seeds]
        if greedy_too:
            params = [SamplingParams.of(one, temperature=0.0) if i % 4 == 3 else one for i, one in enumerate(params)]
        outputs = loop.outputs([PROMPT] * len(params), params)
        written.extend(out for out, one in zip(outputs, params, strict=True) if not one.greedy)
        return p_value(written, JOINT, SIZE)

    found = decided(look, SAMPLES, JOINT)
    assert any(step.num_drafted for step in loop.steps)
    return found, loop.engine.draft_failures


HALF = [
    (rule, lookup, policy, i ^ j ^ k == 0)
    for i, rule in enumerate(("speculative", "block"))
    for j, lookup in enumerate(LOOKUPS)
    for k, policy in enumerate(DEFAULTS)
]
"""Any three of rule, lookup, lengths, and greedy rows or none, in every combination."""


@pytest.mark.parametrize(("rule", "lookup", "policy", "greedy_too"), HALF)
def test_default_lengths_keep_the_distribution(rule: str, lookup: str, policy: str, greedy_too: bool) -> None:
    found, failures = value(lookup, rule, DEFAULTS[policy](), greedy_too=greedy_too)
    assert failures == 0 and found > ALPHA


def test_rows_none_of_which_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a budget that maximises over no row at all fails."""

    def empty(*args: object, **kwargs: object) -> None:
        np.zeros(0).argmax()

    monkeypatch.setattr(measured_drafter.MeasuredDrafter, "_best_lengths", empty)
    monkeypatch.setattr(measured_drafter.MeasuredDrafter, "_best_drafts", empty)
    with pytest.raises(ValueError, match="empty"):
        value("max_gram", "speculative", DEFAULTS["fixed for sampled rows"]())
