"""Seeds given twice under every length policy: no request meets lengths that were learned from its own random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from foresay.decoding import clock
from foresay.decoding.outcome import Step
from foresay.decoding.protocols import Drafter, LengthPolicy
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Hybrid, MaxGram, ModelDrafter
from foresay.engine.request_keys import RequestKeys
from foresay.models.table import TableModel
from helpers.distribution_cells import ALPHA, LENGTHS
from helpers.reference import p_value
from helpers.sequential import decided
from helpers.support import run

Patch = pytest.MonkeyPatch
SAMPLES = 160
SHARP = TableModel(torch.tensor([0.6, 0.3, 0.1]).expand(3, 3, 3))
VAGUE = TableModel(torch.tensor([0.04, 0.36, 0.6]).expand(3, 3, 3))


class Learning(LengthPolicy):
    """Drafts nothing where the last request's draft was rejected at once, as a policy that learns may."""

    def __init__(self) -> None:
        self.rejected: set[int] = set()

    def budget(self, rows: Rows) -> list[int]:
        return [0 if row.num_new in self.rejected else 2 for row in rows]

    def observe(self, rows: Rows, steps: Sequence[Step]) -> None:
        for row, step in zip(rows, steps, strict=True):
            if step.num_drafted and not step.num_accepted:
                self.rejected.add(row.num_new - len(step.token_ids))


class Stateless(Learning):
    """The same, claiming that it remembers nothing."""

    remembers = False


POLICIES: dict[str, Callable[[], LengthPolicy]] = {**LENGTHS, "learning": Learning}
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(VAGUE, 3),
    "hybrid": lambda: Hybrid(MaxGram(), ModelDrafter(VAGUE, 3), min_match=2, k=3),
}


def second_requests(policy: Callable[[], LengthPolicy], drafter: str, rule: str, monkeypatch: Patch) -> float:
    """The p-value of first tokens of second requests with the seed and policy of a first one, on a virtual clock."""
    ticks = itertools.count()
    monkeypatch.setattr(clock, "perf_counter", lambda: next(ticks) * 1e-3)
    firsts, probs = list[list[int]](), SHARP.distribution([1, 0]).numpy()

    def look(seeds: range) -> float:
        for seed in seeds:
            shared, params = policy(), SamplingParams(temperature=1.0, seed=seed, max_new_tokens=4)
            for enough in (None, 1):  # of the second request the first token is counted
                made = DRAFTERS[drafter]()
                found, _, engine = run(SHARP, [[1, 0]], params, drafter=made, rule=rule, policy=shared, enough=enough)
                assert engine.draft_failures == 0
            firsts.append(found[0][:1])
        return p_value(firsts, probs, 3)

    return decided(look, SAMPLES, probs)


def cells() -> list[tuple[str, str, str]]:
    """Every policy with one of the rules by turns, and with both where it learns; a hybrid with those that measure.

    Of the constant lengths, which learn nothing, 2 stands for 0 and 5 too.
    """
    different = [name for name in POLICIES if name not in ("0", "5")]
    found = [("model", "block" if i % 2 else "speculative", policy) for i, policy in enumerate(different)]
    both = [("model", rule, "learning") for rule in ("speculative", "block")]
    return sorted({*found, *both, *(("hybrid", "speculative", name) for name in ("throughput", "fixed"))})


@pytest.mark.parametrize(("drafter", "rule", "policy"), cells())
def test_a_seed_given_twice_keeps_the_distribution(drafter: str, rule: str, policy: str, monkeypatch: Patch) -> None:
    assert second_requests(POLICIES[policy], drafter, rule, monkeypatch) > ALPHA


def test_lengths_learned_from_a_seeds_own_numbers(monkeypatch: Patch) -> None:
    """Controls: a policy that claims to remember nothing, and does; other random numbers only where the drafter remembers."""
    assert second_requests(Stateless, "model", "speculative", monkeypatch) < ALPHA
    monkeypatch.setattr(RequestKeys, "key_of", lambda keys, row: row.seed)
    assert second_requests(Learning, "model", "block", monkeypatch) < ALPHA
