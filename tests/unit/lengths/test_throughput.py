"""The throughput policy against a simulated clock: it pays where drafting pays, and costs next to nothing elsewhere."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from foresay import LengthPolicy, Rows, RuleNeeds
from foresay.lengths import ConstantLength, ThroughputLength, costs
from foresay.lengths.measured_drafter import Credit
from helpers.making import make_row
from helpers.simulated_steps import accepted, observe, rows_of

HIGH = 16


def seeded(seed: int = 0) -> random.Random:
    return random.Random(seed)


@dataclass
class World:
    """Drafts that hold with a fixed chance per token, and seconds as given functions of length, batch and columns."""

    accept: float
    draft_s: Callable[[int], float]
    pass_s: Callable[[int, int], float] = lambda batch, columns: 1.0
    batch: int = 1
    noise: float = 0.0
    rng: random.Random = field(default_factory=seeded)

    def run(self, policy: ThroughputLength, steps: int) -> tuple[float, list[int]]:
        """(expected tokens per second and row of the lengths that were chosen, and these)."""
        rows, seconds, tokens, chosen = rows_of(self.batch, ragged=False), 0.0, 0.0, []
        for step in range(steps):
            length = policy.budget(rows)[0]
            assert step % 10 or policy.budget(rows) == [length] * self.batch, "reading changes nothing"
            held = [accepted(length, self.accept, self.rng) for _ in rows]
            draft = self._noisy(self.draft_s(length)) if length else 0.0
            total = draft + self._noisy(self.pass_s(self.batch, length + 1))
            observe(policy, rows, [length] * self.batch, held, total, draft)
            seconds += self.seconds(length)
            tokens += self.tokens(length)
            chosen.append(length)
        return tokens / seconds, chosen

    def _noisy(self, seconds: float) -> float:
        return seconds * (1 + self.noise * self.rng.gauss(0, 1))

    def tokens(self, length: int) -> float:
        return sum(self.accept**i for i in range(length + 1))

    def seconds(self, length: int) -> float:
        return (self.draft_s(length) if length else 0.0) + self.pass_s(self.batch, length + 1)

    def rates(self) -> list[float]:
        """Expected tokens per second for each length."""
        return [self.tokens(k) / self.seconds(k) for k in range(HIGH + 1)]

    def settled(self, policy: ThroughputLength, before: int, steps: int) -> float:
        """Tokens per second after the steps before, over those of the best length."""
        self.run(policy, before)
        return self.run(policy, steps)[0] / max(self.rates())


def settled(world: World | Ragged | Matches, steps: int) -> ThroughputLength:
    """A policy that has seen some steps of a world."""
    policy = ThroughputLength()
    world.run(policy, steps)
    return policy


def linear(cost: float) -> Callable[[int], float]:
    return lambda length: cost * length


def growing(share: float) -> Callable[[int, int], float]:
    return lambda batch, columns: 1 + share * (columns - 1)


PAYS = {
    "cheap": (0.8, 0.1, 0.0),
    "expensive, short drafts alone pay": (0.6, 0.3, 0.0),
    "free": (0.7, 0.0, 0.1),
    "columns cost": (0.7, 0.05, 0.2),
    "long": (0.9, 0.1, 0.05),
}
NEVER = {
    "bad drafts": (0.05, 0.3, 0.0),
    "expensive drafts": (0.5, 0.6, 0.0),
    "columns cost": (0.3, 0.0, 0.5),
    "nothing is accepted": (0.0, 0.05, 0.0),
}
batches = pytest.mark.parametrize(("batch", "noise"), [(1, 0.05), (8, 0.0)])


@batches
@pytest.mark.parametrize("case", PAYS)
def test_where_drafts_pay_it_finds_the_best_length(case: str, batch: int, noise: float) -> None:
    accept, cost, share = PAYS[case]
    shares = []
    for seed in range(2):
        world = World(accept, linear(cost), growing(share), batch=batch, noise=noise, rng=random.Random(seed))
        rates = world.rates()
        best = rates.index(max(rates))
        got, chosen = world.run(settled(world, 400), 800)
        shares.append(got / rates[best])
        usual = max(set(chosen), key=chosen.count)
        assert abs(usual - best) <= 1 or rates[usual] > 0.97 * rates[best], (usual, best)
    assert statistics.fmean(shares) > 0.95, shares


@batches
@pytest.mark.parametrize("case", NEVER)
def test_where_drafts_never_pay_it_costs_next_to_nothing(case: str, batch: int, noise: float) -> None:
    accept, cost, share = NEVER[case]
    world, policy = World(accept, linear(cost), growing(share), batch=batch, noise=noise), ThroughputLength()
    assert max(world.rates()) == world.rates()[0]
    assert any(world.run(policy, 50)[1]), "it tries once, or it would never know"
    got, chosen = world.run(policy, 2000)
    assert got >= 1 / 1.02
    assert any(chosen), "and never end, for conditions may change"


def test_it_follows_when_drafts_begin_to_pay_and_when_they_cease_to() -> None:
    world, policy = World(0.1, linear(0.1)), ThroughputLength()
    world.run(policy, 500)
    world.accept = 0.8
    assert world.settled(policy, 500, 500) > 0.95
    world.accept = 0.1
    assert world.settled(policy, 150, 2000) >= 1 / 1.02
    world.accept = 0.8
    world.run(policy, 500)
    world.draft_s = linear(2.0)
    assert world.settled(policy, 150, 2000) >= 1 / 1.02


def test_an_unlucky_first_try_of_a_length_is_not_held_against_it_for_ever() -> None:
    """From every seed it gets to lengths far above the first, where one try in three of the next length holds at all."""
    for seed in range(5):
        world = World(0.8, linear(0.02), rng=random.Random(seed))
        assert world.settled(ThroughputLength(start=2), 400, 400) > 0.95, seed


def test_each_batch_size_has_its_own_length_and_is_measured_first() -> None:
    """One row at a time a column is free; from eight rows on it is not, and long drafts cost more than they give."""
    world = World(0.6, linear(0.1), lambda batch, columns: 1 + 0.3 * (columns - 1) * (batch >= 8))
    policy = ThroughputLength()
    for batch in (1, 8, 1, 8, 16):
        world.batch = batch
        assert world.settled(policy, 150, 300) > 0.94, batch
    world, policy = World(0.9, linear(0.01)), ThroughputLength()
    world.run(policy, 100)
    world.batch = 32
    assert world.run(policy, 2)[1][0] == 0
    world.batch = 2
    assert world.run(policy, 1)[1][0] > 0, "twice the size is near enough"


def test_plain_passes_are_measured_at_first_and_from_time_to_time() -> None:
    _, chosen = World(0.9, linear(0.05)).run(ThroughputLength(start=3), 800)
    plain = [i for i, length in enumerate(chosen) if length == 0]
    assert chosen[:4] == [0, 0, 3, 3]
    assert len(plain) > 5 and max(b - a for a, b in itertools.pairwise(plain)) <= 257


def test_what_it_reports() -> None:
    """One estimate of how often the first token holds remembers about 99 tokens and is off by up to 0.05."""
    assert ThroughputLength().estimates == {"plain_pass_s": 0.0, "first_accepted": 0.0}
    for accept in (0.5, 0.9):
        found = []
        for seed in range(15):
            policy = ThroughputLength()
            World(accept, linear(0.01), lambda batch, columns: 0.25, rng=random.Random(seed)).run(policy, 250)
            assert policy.estimates["plain_pass_s"] == pytest.approx(0.25)
            found.append(policy.estimates["first_accepted"])
        assert statistics.fmean(found) == pytest.approx(accept, abs=0.03)


# -- rows with lengths of their own ----------------------------------------------------------------------------------


@dataclass
class Ragged:
    """Rows of unlike drafts, and passes that take a second and `share` of one for each draft token."""

    accepts: tuple[float, ...]
    share: float
    drafts: float = 1.0
    """The probability that a row finds a match."""
    column_cost: float | None = None
    rng: random.Random = field(default_factory=seeded)

    def run(self, policy: ThroughputLength, steps: int) -> tuple[float, list[list[int]]]:
        """(tokens per second, the budgets of each step)."""
        rows = rows_of(len(self.accepts), column_cost=self.column_cost)
        tokens, seconds, chosen = 0, 0.0, []
        for _ in range(steps):
            budgets = policy.budget(rows)
            drafted = [n if self.rng.random() < self.drafts else 0 for n in budgets]
            held = [accepted(n, chance, self.rng) for n, chance in zip(drafted, self.accepts, strict=True)]
            total = 1 + self.share * sum(drafted)
            observe(policy, rows, drafted, held, total)
            tokens, seconds = tokens + sum(held) + len(held), seconds + total
            chosen.append(budgets)
        return tokens / seconds, chosen

    def best(self) -> float:
        """Tokens per second of the best budgets, by trying the bounds on what a further token may cost."""
        rates = [float(len(self.accepts))]
        for bar in [i / 100 for i in range(1, 100)]:
            tokens, drafted = 0.0, 0.0
            for chance in self.accepts:
                count = next((k for k in range(HIGH) if chance ** (k + 1) < bar), HIGH)
                tokens += 1 + self.drafts * sum(chance**k for k in range(1, count + 1))
                drafted += self.drafts * count
            rates.append(tokens / (1 + self.share * drafted))
        return max(rates)


@pytest.mark.parametrize(
    ("accepts", "share"),
    [
        ((0.9, 0.9, 0.05, 0.05), 0.1),
        ((0.95, 0.6, 0.6, 0.2, 0.1, 0.1, 0.05, 0.0), 0.06),
        ((0.9,) * 2 + (0.1,) * 8, 0.03),
        ((0.8,) * 8, 0.03),
    ],
)
def test_each_row_has_the_length_that_pays_for_it(accepts: tuple[float, ...], share: float) -> None:
    """The same rows where the widest draft sets the time of a pass: there the best one length for all writes less."""
    world = Ragged(accepts, share)
    got, chosen = world.run(settled(world, 300), 700)
    assert got > 0.92 * world.best(), got / world.best()
    mean = [statistics.fmean(step[i] for step in chosen) for i in range(len(accepts))]
    if max(accepts) - min(accepts) > 0.5:
        assert mean[accepts.index(max(accepts))] > 3 and mean[accepts.index(min(accepts))] < 1.5, mean
        lengths = range(HIGH + 1)
        uniform = [
            sum(sum(a**j for j in range(k + 1)) for a in accepts) / (1 + share * k * len(accepts)) for k in lengths
        ]
        assert got > 1.1 * max(uniform)


@pytest.mark.parametrize("drafts", [1.0, 0.3])
@pytest.mark.parametrize(("accept", "share"), [(0.0, 0.05), (0.2, 0.06), (0.4, 0.1)])
def test_ragged_passes_whose_drafts_never_pay_lose_next_to_nothing(
    accept: float, share: float, drafts: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: an allowance as large as that of trials that draft for all rows."""

    def rate() -> float:
        world = Ragged((accept,) * 8, share, drafts)
        assert world.best() == 8
        return world.run(settled(world, 50), 1500)[0] / 8

    assert rate() > 0.996
    add = Credit.add
    monkeypatch.setattr(Credit, "add", lambda self, passed, lost: add(self, passed * 8**0.5, lost))
    assert rate() < 0.995


@pytest.mark.parametrize("rows", [8, 32])
def test_the_first_steps_of_a_batch_lose_next_to_nothing(rows: int) -> None:
    """Less than a plain pass: a trial drafts for an eighth of the rows, others in each step, with as much less credit."""
    world, policy = Ragged((0.0,) * rows, 1 / rows), ThroughputLength()
    world.column_cost = 0.5
    rate, chosen = world.run(policy, 64)
    assert rate > 0.985 * rows
    drafted = [[i for i, n in enumerate(step) if n] for step in chosen if any(step)]
    assert max(map(len, drafted)) == rows // 8 and len({i for step in drafted for i in step}) > rows // 8
    world.accepts, world.share = (0.9,) * rows, 0.1 / rows
    assert world.run(policy, 300)[0] > 0.8 * world.best(), "and finds out where they begin to pay"


@pytest.mark.parametrize(("rows", "share", "first"), [(1, 0.06, 4), (8, 0.04, 3), (32, 0.03, 1), (32, 0.2, 1)])
def test_a_first_draft_costs_at_most_about_a_plain_pass(rows: int, share: float, first: int) -> None:
    """The column cost is measured before: many rows with long drafts would cost several."""
    world = Ragged((0.0,) * rows, share)
    world.column_cost = share / (1 - (rows - 1) * share) if rows * share < 1 else None
    assert max(next(budgets for budgets in world.run(ThroughputLength(), 6)[1] if any(budgets))) == first


def test_a_row_recovers() -> None:
    """A row's failures are forgotten."""
    world, policy = Ragged((0.05, 0.9), 0.1), ThroughputLength()
    rows = world.run(policy, 300)[1]
    assert statistics.fmean(step[0] for step in rows[-100:]) < 1.5
    world.accepts = (0.9, 0.05)
    assert world.run(policy, 400)[0] > 0.85 * world.best()


@pytest.mark.parametrize("ignores_drafts", [False, True])
def test_sampled_rows_keep_one_length_where_their_text_depends_on_it(ignores_drafts: bool) -> None:
    needs, policy = RuleNeeds(ignores_drafts=ignores_drafts), ThroughputLength(sampled=5)
    rows = rows_of(1, make_row(temperature=1.0), needs=needs)
    seen: list[list[int]] = []
    for _ in range(60):
        budgets = policy.budget(rows)
        observe(policy, rows, budgets, budgets, 1 + 0.01 * sum(budgets))
        seen.append(budgets)
    assert ({b[1] for b in seen} == {5}) != ignores_drafts
    assert max(b[0] for b in seen) > 5, "the greedy row next to it adapts"


# -- tokens after matches --------------------------------------------------------------------------------------------


@dataclass
class Matches:
    """Rows whose drafter finds tokens that continue matches: the longer the match, the surer they are."""

    batch: int
    share: float
    sure: dict[int, float] = field(default_factory=lambda: {1: 0.1, 2: 0.4, 12: 0.95})
    rng: random.Random = field(default_factory=seeded)
    ragged: bool = True
    start: float = 0.0
    """Cost of a pass's first draft token, in addition to `share`."""

    def run(self, policy: LengthPolicy, steps: int) -> tuple[float, dict[int, float]]:
        """(tokens per second over plain decoding's, mean tokens kept of a draft by its match)."""
        rows = rows_of(self.batch, ragged=self.ragged)
        tokens, seconds = 0, 0.0
        kept: dict[int, list[int]] = {length: [] for length in self.sure}
        for _ in range(steps):
            budgets = policy.budget(rows)
            matched = [self.rng.choice([0, 0, *self.sure]) for _ in rows]
            found = [min(n, 3 * m) for n, m in zip(budgets, matched, strict=True)]
            drafted = list(policy.num_to_score(rows, found, matched)) if any(found) else [0] * self.batch
            assert all(0 <= n <= most for n, most in zip(drafted, found, strict=True))
            held = [accepted(n, self.sure.get(m, 0), self.rng) for m, n in zip(matched, drafted, strict=True)]
            total = 1 + self.share * (sum(drafted) if self.ragged else max(drafted) * self.batch)
            total += self.start * any(drafted)
            observe(policy, rows, drafted, held, total)
            tokens, seconds = tokens + sum(held) + self.batch, seconds + total
            for m, n, most in zip(matched, drafted, found, strict=True):
                if m and most:
                    kept[m].append(n)
        return tokens / seconds / self.batch, {m: statistics.fmean(some) for m, some in kept.items() if some}


def test_drafts_are_kept_by_what_they_match() -> None:
    """In a busy batch only tokens after long matches; alone, where a token more costs little, after shorter ones too."""
    gain, kept = Matches(16, 0.04).run(settled(Matches(16, 0.04), 100), 400)
    assert kept[12] > 3 and kept[1] < 0.2 and kept[2] < 1 and gain > 1.05
    gain, kept = Matches(1, 0.02).run(settled(Matches(1, 0.02), 100), 800)
    assert kept[12] > 12 and kept[2] > 1 and kept[1] > 0.2 and gain > 3
    padded = Matches(8, 0.06, {1: 0.1, 12: 0.95}, ragged=False)
    gain, kept = padded.run(settled(padded, 100), 600)
    assert gain > 0.98 and kept.get(1, 0) < 1, "padded passes are widened only for what pays"


class FromMatch(ConstantLength):
    """All tokens after a match of at least this length, up to a number."""

    def __init__(self, least: int, most: int) -> None:
        super().__init__(HIGH)
        self.least, self.most = least, most

    def num_to_score(self, rows: Rows, counts: Sequence[int], matched: Sequence[int]) -> list[int]:
        return [min(n, self.most) * (m >= self.least) for n, m in zip(counts, matched, strict=True)]


@pytest.mark.parametrize(("batch", "share", "start"), [(1, 0.03, 0.4), (1, 0.08, 0.3), (4, 0.03, 0.4)])
def test_a_step_from_one_token_to_two_is_no_cost_of_each(
    batch: int, share: float, start: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: in proportion, the cost of the first token is taken for that of each, and fewer are scored than pay."""

    def reached(policy: LengthPolicy) -> float:
        return Matches(batch, share, start=start).run(policy, 1000)[0]

    def learned() -> ThroughputLength:
        return settled(Matches(batch, share, start=start, rng=random.Random(1)), 300)

    best = max(reached(FromMatch(least, most)) for least in (1, 2, 12) for most in (4, 8, 16))
    found = reached(learned())

    def proportion(line: costs.Line) -> float:
        return statistics.median(cost / max(n, 1) for n, cost in line._measured)

    for name, value in (("start", lambda line: 0.0), ("per_token", proportion)):
        monkeypatch.setattr(costs.Line, name, property(value, lambda line, value: None), raising=False)
    assert found > 0.91 * best and found > 1.01 * reached(learned())


def test_matches_that_never_hold_cost_next_to_nothing() -> None:
    for batch, share in ((1, 0.1), (8, 0.06), (32, 0.03)):
        world = Matches(batch, share, {1: 0.0, 2: 0.0, 5: 0.0, 12: 0.0})
        assert world.run(settled(world, 60), 1000)[0] > 0.985, batch


def test_one_slow_pass_stops_no_drafts() -> None:
    """A machine that stands still while the first draft is scored, and halves its pace later, is no reason to stop drafting."""
    policy, world, rows = ThroughputLength(), Matches(1, 0.02), rows_of(1)
    world.run(policy, 3)
    assert policy.budget(rows)[0] and policy.num_to_score(rows, [16], [12])[0]
    observe(policy, rows, [16], [0], 30.0)
    gain, kept = world.run(policy, 300)
    assert kept[12] > 10 and gain > 1.4


def test_slow_lookups_are_not_used_for_all_they_find() -> None:
    """A lookup that takes a third of a pass is drafting that must pay, as a draft model's is."""
    policy, rows = ThroughputLength(), rows_of(1)
    used = 0
    for _ in range(1500):
        budget = policy.budget(rows)[0]
        count = policy.num_to_score(rows, [budget], [1])[0] if budget else 0
        draft_s = 0.3 if budget else 0.0
        observe(policy, rows, [count], [0], 1 + draft_s + 0.05 * count, draft_s)
        used += budget > 0
    assert used < 0.06 * 1500
