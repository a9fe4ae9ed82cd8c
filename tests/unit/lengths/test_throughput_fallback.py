"""The throughput policy over a lookup, followed by a drafter that takes time, against a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from foresay.decoding.rows import Rows
from foresay.lengths import ConstantLength, ThroughputLength, measured_drafter
from helpers.making import make_row
from helpers.simulated_steps import observe, rows_of

FOUND, STEPS = 8, 800


@dataclass
class World:
    """Each row has a match in a share of its steps, whose tokens nearly always hold and cost nothing but their columns."""

    matches: float
    accept: float
    """The chance that a token of the other drafter holds."""
    token_s: float
    """Seconds of each of its tokens, for all rows together; as much less for a part of them in ragged passes."""
    column: float
    look_s: float = 0.002
    """Seconds of a lookup, for all rows together."""
    batch: int = 1
    ragged: bool = True
    match: int = 9
    """Length of a match, and the chance that a token after it holds."""
    holds: float = 0.95
    unlucky: int = 0
    """Steps of the other drafter whose tokens all fail at first, whatever the probability is."""
    asked: list[int] = field(default_factory=list)
    """The longest budget that the other drafter had in each step."""

    def rate(self, policy: Any, steps: int, most: int = FOUND) -> float:
        """Tokens per second and row. most: of the other drafter."""
        rows = rows_of(self.batch, ragged=self.ragged)
        seconds = tokens = 0.0
        self.asked.clear()
        for step in range(steps):
            rng = random.Random(step)  # whatever is decided, the same matches, and the same luck
            noise = 1 + 0.02 * rng.gauss(0, 1)
            drafted, held, draft_s = self._drafted(policy, rows, most, rng)
            wide = sum(drafted) if self.ragged else max(drafted) * self.batch
            total = draft_s + (1 + self.column * wide) * noise
            observe(policy, rows, drafted, held, total, draft_s)
            seconds += total
            tokens += sum(held) / self.batch + 1
        return tokens / seconds

    def _drafted(self, policy: Any, rows: Rows, most: int, rng: random.Random) -> tuple[list[int], list[int], float]:
        budget = policy.budget(rows)
        sure = [rng.random() < self.matches and n > 0 for n in budget]
        luck = [[rng.random() for _ in range(FOUND)] for _ in budget]
        counts = [min(n, FOUND) * on for n, on in zip(budget, sure, strict=True)]
        if any(sure):
            counts = list(policy.num_to_score(rows, counts, [self.match if on else 0 for on in sure]))
        rest = [0 if count else min(n, most) for n, count in zip(budget, counts, strict=True)]
        asked: Sequence[int] = policy.fallback_budget(rows, rest) if any(rest) else rest
        self.asked.append(max(asked))
        drafted = [n or m for n, m in zip(counts, asked, strict=True)]
        chances = [self.holds if count else self.accept for count in counts]
        if any(asked) and self.unlucky > 0:
            self.unlucky -= 1
            chances = [0.0] * len(chances)
        held = [
            next((i for i in range(n) if draws[i] >= chance), n)
            for chance, n, draws in zip(chances, drafted, luck, strict=True)
        ]
        part = sum(n > 0 for n in asked) / self.batch if self.ragged else 1.0
        return drafted, held, self.look_s * any(budget) + self.token_s * max(asked) * part


def settled(world: World, policy: ThroughputLength | None = None, most: int = FOUND, steps: int = STEPS) -> float:
    """The rate of a policy once it has seen 500 steps."""
    policy = policy or ThroughputLength()
    world.rate(policy, 500, most)
    return world.rate(policy, steps, most)


class Fixed(ConstantLength):
    """All tokens of the lookup, and always as many of the other."""

    def __init__(self, other: int) -> None:
        super().__init__(FOUND)
        self.other = other

    def fallback_budget(self, rows: Rows, most: Sequence[int]) -> list[int]:
        return [min(n, self.other) for n in most]


def fixed(world: World) -> list[float]:
    """The rate of each fixed length of the other drafter."""
    return [world.rate(Fixed(k), STEPS) for k in range(6)]


PAYS = {
    "a head": World(0.25, 0.7, 0.05, 0.03),
    "a head, eight rows": World(0.25, 0.7, 0.05, 0.01, batch=8, ragged=False),
    "rare matches": World(0.02, 0.7, 0.1, 0.05),
    "many matches": World(0.7, 0.8, 0.02, 0.01, batch=4, ragged=False),
}
NEVER = {
    "drafts that fail": World(0.25, 0.05, 0.1, 0.03),
    "expensive drafts": World(0.25, 0.5, 0.7, 0.03, ragged=False),
    "columns that cost": World(0.25, 0.3, 0.05, 0.4, batch=8),
}


@pytest.mark.parametrize("case", PAYS)
def test_where_the_other_pays_it_drafts(case: str) -> None:
    rates = fixed(PAYS[case])
    assert settled(PAYS[case]) > 0.97 * max(rates), (rates, PAYS[case].asked[:50])
    assert max(rates) > 1.02 * rates[0], "the case is as named"


@pytest.mark.parametrize("case", NEVER)
def test_where_it_never_pays_the_lookup_alone_goes_on(case: str) -> None:
    """Tokens of a lookup are not dropped because the drafter after it is too expensive."""
    world, policy = NEVER[case], ThroughputLength()
    without = settled(world, most=0)
    assert without >= 0.98 * world.rate(Fixed(0), STEPS)
    world.rate(policy, 500)
    assert any(world.asked), "it is tried"
    assert world.rate(policy, STEPS) > 0.98 * without


def test_one_cost_for_both_would_lose_the_lookup() -> None:
    """Control: a policy that does not separate the two drafts nothing here, or too much."""

    class OneCost(ThroughputLength):
        def fallback_budget(self, rows: Rows, most: Sequence[int]) -> list[int]:
            return list(most)

    world = World(0.25, 0.5, 0.7, 0.03)
    assert settled(world, OneCost()) < 0.9 * settled(world, most=0)


@pytest.mark.parametrize(("batch", "ragged"), [(1, False), (4, True)])
def test_the_better_drafter_drafts_where_both_could(batch: int, ragged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short matches that hold less often leave their rows to the other drafter, good ones do not. Control: they do not either."""
    poor = World(0.6, 0.8, 0.05, 0.04, batch=batch, ragged=ragged, match=3, holds=0.6)
    good = World(0.6, 0.8, 0.05, 0.04, batch=batch, ragged=ragged, match=9, holds=0.95)
    found = [settled(world, most=4, steps=600) for world in (poor, good)]
    monkeypatch.setattr(measured_drafter.MeasuredDrafter, "worth", lambda self, now: None)
    always = [settled(world, most=4, steps=600) for world in (poor, good)]
    assert found[0] > 1.05 * always[0] and found[1] > 0.99 * always[1]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("accept", "pays"), [(0.7, True), (0.05, False)])
def test_a_lookup_that_is_not_free(accept: float, pays: bool, batch: int) -> None:
    """Where it takes a tenth of a pass and finds next to nothing: the other drafts if it pays, and else nothing does."""
    world = World(0.01, accept, 0.05, 0.02, look_s=0.1, batch=batch)
    best = max(fixed(world)) if pays else 1.0
    assert settled(world) > 0.95 * best, world.asked[:60]


def test_a_row_with_a_fixed_length_keeps_it() -> None:
    rows, policy = rows_of(0, make_row(temperature=1.0, seed=0), make_row()), ThroughputLength(sampled=3)
    for _ in range(80):
        budget = policy.budget(rows)
        assert budget[0] == 3
        drafted = policy.fallback_budget(rows, [min(n, 2) for n in budget])
        assert drafted[0] == 2, "as many as the drafter takes of its constant"
        observe(policy, rows, drafted, [0, 0], 1.5 + 0.1 * sum(drafted), 0.5)
    assert drafted[1] == 0, "while the other drafts nothing that fails"


def test_a_few_failures_are_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first trial whose tokens all fail goes on while it has credit; control: without any it drafts nothing for long."""
    drafted = []
    for check in (measured_drafter.Credit.check, lambda self, pays: pays):
        monkeypatch.setattr(measured_drafter.Credit, "check", check)
        world = World(0.0, 0.75, 0.05, 0.05, unlucky=5)
        world.rate(ThroughputLength(), 100, most=2)
        drafted.append(sum(n > 0 for n in world.asked))
    assert drafted[1] < 60 and drafted[0] > 80, drafted


def test_a_drafter_that_never_pays_loses_its_credit_and_its_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its tokens cost; control: an allowance of a tenth of the time is lost as well."""
    share, add = 0.0075, measured_drafter.Credit.add
    for token_s, column in ((0.02, 0.0), (0.1, 0.05), (0.5, 0.1)):
        world = World(0.0, 0.0, token_s, column)
        assert world.rate(ThroughputLength(), 1500, most=4) > 1 - 2 * share, token_s
    monkeypatch.setattr(measured_drafter.Credit, "add", lambda self, own, lost: add(self, own * 0.1 / share, lost))
    assert World(0.0, 0.0, 0.1, 0.05).rate(ThroughputLength(), 1500, most=4) < 0.95


def test_each_size_of_batches_has_its_own_credit() -> None:
    """Where drafts pay for one row and not for eight, the eight do not spend what the one gained."""
    policy, few, many = ThroughputLength(), World(0.0, 0.9, 0.05, 0.02), World(0.0, 0.9, 1.5, 0.3, batch=8)
    many.rate(policy, 400)
    drafted = 0
    for _ in range(20):
        assert few.rate(policy, 20) > 1.5
        many.rate(policy, 20)
        drafted += sum(n > 0 for n in many.asked)
    assert drafted < 0.06 * 400


def test_what_another_drafter_pays_anyway_is_no_cost_of_a_match() -> None:
    """Its draft has already paid for the first token of the pass. Control: alone, the same match does not pay for that."""
    drafter, rows = measured_drafter.MeasuredDrafter(4, 16), rows_of(4)
    now = measured_drafter.Situation(rows, [None] * 4, 4.4, 1.0, 0.4, 0.03)
    drafter.selects = True
    drafter.credit(4, ragged=True).passes = 0.25  # no trial
    for other, scored in (([0.0, 1.5, 1.5, 1.5], 3), ([0.0] * 4, 0), (None, 0)):
        drafter.choose(now, [True] * 4)
        assert drafter.selected(now, [3, 0, 0, 0], [3, 0, 0, 0], other)[0] == scored
