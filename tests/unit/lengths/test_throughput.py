"""The throughput policy against a simulated clock: it pays where drafting pays, and costs next to nothing elsewhere."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.outcome import Step
from foresay.decoding.protocols import LengthPolicy
from foresay.decoding.rows import Rows, RuleNeeds
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import ModelDrafter
from foresay.lengths import ConstantLength, ThroughputLength, costs
from foresay.models.table import TableModel
from helpers.making import make_row
from helpers.support import run

HIGH = 16


@dataclass
class World:
    """Drafts that hold with a fixed chance per token, and seconds as given functions of length, batch and columns."""

    accept: float
    draft_s: Callable[[int], float]
    pass_s: Callable[[int, int], float] = lambda batch, columns: 1.0
    batch: int = 1
    noise: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self, policy: ThroughputLength, steps: int) -> tuple[float, list[int]]:
        """(expected tokens per second and row of the lengths that were chosen, and these)."""
        rows, seconds, tokens, chosen = Rows([make_row() for _ in range(self.batch)]), 0.0, 0.0, []
        for _ in range(steps):
            length = policy.budget(rows)[0]
            assert policy.budget(rows) == [length] * self.batch, "asking changes nothing"
            kept = [self._kept(length) for _ in rows]
            draft = self._noisy(self.draft_s(length)) if length else 0.0
            total = draft + self._noisy(self.pass_s(self.batch, length + 1))
            policy.observe(
                rows,
                [
                    Step(0, (0,) * (n + 1), (), length, n, batch_size=self.batch, draft_s=draft, total_s=total)
                    for n in kept
                ],
            )
            seconds += self.seconds(length)
            tokens += self.tokens(length)
            chosen.append(length)
        return tokens / seconds, chosen

    def _kept(self, length: int) -> int:
        return next((n for n in range(length) if self.rng.random() >= self.accept), length)

    def _noisy(self, seconds: float) -> float:
        return seconds * (1 + self.noise * self.rng.gauss(0, 1))

    def tokens(self, length: int) -> float:
        return sum(self.accept**i for i in range(length + 1))

    def seconds(self, length: int) -> float:
        return (self.draft_s(length) if length else 0.0) + self.pass_s(self.batch, length + 1)

    def rates(self) -> list[float]:
        """Expected tokens per second for each length."""
        return [self.tokens(k) / self.seconds(k) for k in range(HIGH + 1)]

    def best(self) -> int:
        return max(range(HIGH + 1), key=self.rates().__getitem__)


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


@pytest.mark.parametrize(("batch", "noise"), [(1, 0.05), (8, 0.0)])
@pytest.mark.parametrize("case", PAYS)
def test_where_drafts_pay_it_finds_the_best_length(case: str, batch: int, noise: float) -> None:
    accept, cost, share = PAYS[case]
    shares = []
    for seed in range(4):
        world = World(accept, linear(cost), growing(share), batch=batch, noise=noise, rng=random.Random(seed))
        best, rates = world.best(), world.rates()
        policy = ThroughputLength()
        world.run(policy, 400)
        got, chosen = world.run(policy, 1200)
        shares.append(got / rates[best])
        usual = max(set(chosen), key=chosen.count)
        assert abs(usual - best) <= 1 or rates[usual] > 0.97 * rates[best], (usual, best)
    assert statistics.fmean(shares) > 0.95, shares


NEVER = {
    "bad guesses": (0.05, 0.3, 0.0),
    "dear guesses": (0.5, 0.6, 0.0),
    "columns cost": (0.3, 0.0, 0.5),
    "nothing holds": (0.0, 0.05, 0.0),
}


@pytest.mark.parametrize(("batch", "noise"), [(1, 0.05), (8, 0.0)])
@pytest.mark.parametrize("case", NEVER)
def test_where_drafts_never_pay_it_costs_next_to_nothing(case: str, batch: int, noise: float) -> None:
    accept, cost, share = NEVER[case]
    world = World(accept, linear(cost), growing(share), batch=batch, noise=noise)
    assert world.best() == 0
    policy = ThroughputLength()
    _, first = world.run(policy, 50)
    assert any(first), "it tries once, or it would never know"
    got, chosen = world.run(policy, 3000)
    assert got >= 1 / 1.02
    assert any(chosen), "and never end, for conditions may change"


def test_the_first_steps_are_plain_to_compare_with() -> None:
    _, chosen = World(0.9, linear(0.05)).run(ThroughputLength(start=3), 6)
    assert chosen[:4] == [0, 0, 3, 3]


def test_it_follows_when_drafts_begin_to_pay_and_when_they_cease_to() -> None:
    world, policy = World(0.1, linear(0.1)), ThroughputLength()
    world.run(policy, 500)
    world.accept = 0.8
    world.run(policy, 500)
    assert world.run(policy, 500)[0] > 0.95 * max(world.rates())
    world.accept = 0.1
    world.run(policy, 150)
    assert world.run(policy, 2000)[0] >= 1 / 1.02
    world.accept = 0.8
    world.run(policy, 500)
    world.draft_s = linear(2.0)
    world.run(policy, 150)
    assert world.run(policy, 2000)[0] >= 1 / 1.02


def test_an_unlucky_first_try_of_a_length_is_not_held_against_it_for_ever() -> None:
    """From every seed it gets to lengths far above the first, where one try in three of the next length holds at all."""
    for seed in range(8):
        world = World(0.8, linear(0.02), rng=random.Random(seed))
        policy = ThroughputLength(start=2)
        world.run(policy, 400)
        assert world.run(policy, 400)[0] > 0.95 * max(world.rates()), seed


def test_each_batch_size_has_its_own_length() -> None:
    """One row at a time a column is free; from eight rows on it is not, and long drafts cost more than they give."""
    world = World(0.6, linear(0.1), lambda batch, columns: 1 + 0.3 * (columns - 1) * (batch >= 8))
    policy = ThroughputLength()
    for batch in (1, 8, 1, 8, 16):
        world.batch = batch
        world.run(policy, 150)
        assert world.run(policy, 300)[0] > 0.94 * max(world.rates()), batch


def test_a_batch_size_far_from_all_measured_is_measured_first() -> None:
    world, policy = World(0.9, linear(0.01)), ThroughputLength()
    world.run(policy, 100)
    world.batch = 32
    assert world.run(policy, 2)[1][0] == 0
    world.batch = 2
    assert world.run(policy, 1)[1][0] > 0, "twice the size is near enough"


def test_plain_passes_are_measured_again_from_time_to_time() -> None:
    _, chosen = World(0.9, linear(0.05)).run(ThroughputLength(), 1500)
    plain = [i for i, length in enumerate(chosen) if length == 0]
    assert len(plain) > 5 and max(b - a for a, b in itertools.pairwise(plain)) <= 257


def test_what_it_reports() -> None:
    policy = ThroughputLength()
    assert policy.estimates == {"plain_pass_s": 0.0, "first_accepted": 0.0}
    World(0.7, linear(0.05), lambda batch, columns: 0.25).run(policy, 600)
    assert policy.estimates["plain_pass_s"] == pytest.approx(0.25)


@pytest.mark.parametrize("accept", [0.5, 0.7, 0.9])
def test_it_reports_how_often_the_first_token_holds(accept: float) -> None:
    """One estimate remembers about 99 tokens and is off by up to 0.05; the mean of 15 of them by 0.015."""
    found = []
    for seed in range(15):
        policy = ThroughputLength()
        World(accept, linear(0.05), rng=random.Random(seed)).run(policy, 250)
        found.append(policy.estimates["first_accepted"])
    assert statistics.fmean(found) == pytest.approx(accept, abs=0.03)


def test_it_changes_no_greedy_output() -> None:
    model = TableModel.random(8, seed=3, concentration=0.4)
    params = SamplingParams(max_new_tokens=60)
    prompts = [[1], [2, 3], [4]]
    wanted = run(model, prompts, params, gamma=0)[0]
    policy = ThroughputLength()
    outputs, steps, engine = run(model, prompts, params, drafter=ModelDrafter(model, 8), policy=policy, join_later=1)
    assert outputs == wanted and engine.draft_failures == 0
    assert any(step.num_drafted for step in steps) and any(not step.num_drafted for step in steps)


@dataclass
class Ragged:
    """Rows of unlike drafts, and passes that take a second and `share` of one for each draft token."""

    accepts: tuple[float, ...]
    share: float
    drafts: float = 1.0
    """The probability that a row finds a match."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self, policy: ThroughputLength, steps: int) -> tuple[float, list[list[int]]]:
        """(tokens per second, the budgets of each step)."""
        rows = Rows([make_row() for _ in self.accepts], capabilities=Capabilities(ragged=True))
        tokens, seconds, chosen = 0, 0.0, []
        for _ in range(steps):
            budgets = policy.budget(rows)
            drafted = [n if self.rng.random() < self.drafts else 0 for n in budgets]
            kept = [
                next((i for i in range(n) if self.rng.random() >= chance), n)
                for n, chance in zip(drafted, self.accepts, strict=True)
            ]
            total = 1 + self.share * sum(drafted)
            size = len(budgets)
            policy.observe(
                rows,
                [
                    Step(0, (0,) * (k + 1), (), n, k, batch_size=size, total_s=total)
                    for n, k in zip(drafted, kept, strict=True)
                ],
            )
            tokens, seconds = tokens + sum(kept) + size, seconds + total
            chosen.append(budgets)
        return tokens / seconds, chosen

    def best(self) -> float:
        """Tokens per second of the best budgets, by trying the bounds on what a further token may cost."""
        size = len(self.accepts)
        rates = [size / 1.0]
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
    world, policy = Ragged(accepts, share), ThroughputLength()
    world.run(policy, 300)
    got, chosen = world.run(policy, 1000)
    assert got > 0.92 * world.best(), got / world.best()
    mean = [statistics.fmean(step[i] for step in chosen) for i in range(len(accepts))]
    sure, poor = accepts.index(max(accepts)), accepts.index(min(accepts))
    if accepts[sure] - accepts[poor] > 0.5:
        assert mean[sure] > 3 and mean[poor] < 1.5, mean


def test_a_row_that_fails_costs_its_neighbours_less_than_one_length_for_all() -> None:
    """The same rows where the widest draft sets the time of a pass: there the best one length for all writes less."""
    world = Ragged((0.9, 0.9, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05), 0.05)
    policy = ThroughputLength()
    world.run(policy, 300)
    uniform = max(
        sum(sum(a**j for j in range(k + 1)) for a in world.accepts) / (1 + world.share * k * len(world.accepts))
        for k in range(HIGH + 1)
    )
    assert world.run(policy, 1000)[0] > 1.1 * uniform


@pytest.mark.parametrize("drafts", [1.0, 0.3])
@pytest.mark.parametrize(("accept", "share"), [(0.0, 0.05), (0.2, 0.06), (0.4, 0.1)])
def test_ragged_passes_whose_drafts_never_pay_lose_next_to_nothing(accept: float, share: float, drafts: float) -> None:
    world, policy = Ragged((accept,) * 8, share, drafts), ThroughputLength()
    assert world.best() == 8
    world.run(policy, 50)
    assert world.run(policy, 3000)[0] > 0.98 * 8


@pytest.mark.parametrize(("rows", "share", "first"), [(1, 0.06, 4), (8, 0.04, 3), (32, 0.03, 1), (32, 0.2, 1)])
def test_a_first_draft_costs_at_most_about_a_plain_pass(rows: int, share: float, first: int) -> None:
    """The column cost is measured before: many rows with long drafts would cost several."""
    policy, world = ThroughputLength(), Ragged((0.0,) * rows, share)
    capabilities = Capabilities(ragged=True, column_cost=share / (1 - (rows - 1) * share) if rows * share < 1 else None)
    original = Rows

    def told(*args: object, **more: object) -> Rows:
        return original(*args, capabilities=capabilities)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "Rows", told)
        _, chosen = world.run(policy, 6)
    trial = next(budgets for budgets in chosen if any(budgets))
    assert max(trial) == first


def test_a_row_recovers() -> None:
    """A row's failures are forgotten."""
    world, policy = Ragged((0.05, 0.9), 0.1), ThroughputLength()
    rows = world.run(policy, 300)[1]
    assert statistics.fmean(step[0] for step in rows[-100:]) < 1.5
    world.accepts = (0.9, 0.05)
    assert world.run(policy, 400)[0] > 0.85 * world.best()


def test_sampled_rows_keep_one_length_where_their_text_depends_on_it() -> None:
    sampled = make_row(temperature=1.0)
    for needs, wanted in ((RuleNeeds(), {5}), (RuleNeeds(ignores_drafts=True), None)):
        rows, policy = (
            Rows([make_row(), sampled], needs=needs, capabilities=Capabilities(ragged=True)),
            ThroughputLength(sampled=5),
        )
        seen: list[list[int]] = []
        for _ in range(60):
            budgets = policy.budget(rows)
            steps = [Step(0, (0,) * (n + 1), (), n, n, batch_size=2, total_s=1 + 0.01 * sum(budgets)) for n in budgets]
            policy.observe(rows, steps)
            seen.append(budgets)
        assert ({b[1] for b in seen} == wanted) == (wanted is not None)
        assert max(b[0] for b in seen) > 5, "the greedy row next to it adapts"


@dataclass
class Matches:
    """Rows whose drafter finds tokens that continue matches: the longer the match, the surer they are."""

    batch: int
    share: float
    sure: dict[int, float] = field(default_factory=lambda: {1: 0.1, 2: 0.4, 12: 0.95})
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    ragged: bool = True
    start: float = 0.0
    """Cost of a pass's first draft token, in addition to `share`."""

    def run(self, policy: LengthPolicy, steps: int) -> tuple[float, dict[int, float]]:
        """(tokens per second over plain decoding's, mean tokens kept of a draft by its match)."""
        rows = Rows([make_row() for _ in range(self.batch)], capabilities=Capabilities(ragged=self.ragged))
        tokens, seconds = 0, 0.0
        kept: dict[int, list[int]] = {length: [] for length in self.sure}
        for _ in range(steps):
            budgets = policy.budget(rows)
            matched = [self.rng.choice([0, 0, *self.sure]) for _ in rows]
            found = [min(n, 3 * m) for n, m in zip(budgets, matched, strict=True)]
            drafted = list(policy.num_to_score(rows, found, matched)) if any(found) else [0] * self.batch
            assert all(0 <= n <= most for n, most in zip(drafted, found, strict=True))
            held = [self._held(m, n) for m, n in zip(matched, drafted, strict=True)]
            total = 1 + self.share * (sum(drafted) if self.ragged else max(drafted) * self.batch)
            total += self.start * any(drafted)
            each = zip(drafted, held, strict=True)
            policy.observe(
                rows, [Step(0, (0,) * (k + 1), (), n, k, batch_size=self.batch, total_s=total) for n, k in each]
            )
            tokens, seconds = tokens + sum(held) + self.batch, seconds + total
            for m, n, most in zip(matched, drafted, found, strict=True):
                if m and most:
                    kept[m].append(n)
        return tokens / seconds / self.batch, {m: statistics.fmean(some) for m, some in kept.items() if some}

    def _held(self, matched: int, count: int) -> int:
        return next((k for k in range(count) if self.rng.random() >= self.sure[matched]), count)


def test_guesses_are_kept_by_what_they_match() -> None:
    """In a busy batch only tokens after long matches; alone, where a token more costs little, after shorter ones too."""
    policy = ThroughputLength()
    Matches(16, 0.04).run(policy, 100)
    gain, kept = Matches(16, 0.04).run(policy, 400)
    assert kept[12] > 3 and kept[1] < 0.2 and kept[2] < 1 and gain > 1.05
    alone = ThroughputLength()
    Matches(1, 0.02).run(alone, 100)
    gain, kept = Matches(1, 0.02).run(alone, 800)
    assert kept[12] > 12 and kept[2] > 1 and kept[1] > 0.2 and gain > 3


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

    def reached() -> float:
        policy = ThroughputLength()
        Matches(batch, share, start=start, rng=random.Random(1)).run(policy, 300)
        return Matches(batch, share, start=start).run(policy, 1000)[0]

    best = max(
        Matches(batch, share, start=start).run(FromMatch(least, most), 1000)[0]
        for least in (1, 2, 12)
        for most in (4, 8, 16)
    )
    found = reached()
    monkeypatch.setattr(costs.Line, "start", property(lambda self: 0.0, lambda self, value: None), raising=False)
    monkeypatch.setattr(
        costs.Line,
        "per_token",
        property(
            lambda self: statistics.median(cost / max(n, 1) for n, cost in self._measured), lambda self, value: None
        ),
        raising=False,
    )
    assert found > 0.91 * best and found > 1.01 * reached(), (found, best, reached())


def test_padded_passes_are_widened_only_for_what_pays() -> None:
    policy = ThroughputLength()
    world = Matches(8, 0.06, {1: 0.1, 12: 0.95}, ragged=False)
    world.run(policy, 100)
    gain, kept = world.run(policy, 600)
    assert gain > 0.98 and kept.get(1, 0) < 1


def test_matches_that_never_hold_cost_next_to_nothing() -> None:
    for batch, share in ((1, 0.1), (8, 0.06), (32, 0.03)):
        policy = ThroughputLength()
        world = Matches(batch, share, {1: 0.0, 2: 0.0, 5: 0.0, 12: 0.0})
        world.run(policy, 60)
        assert world.run(policy, 2000)[0] > 0.985, batch


def test_one_slow_pass_stops_no_drafts() -> None:
    """A machine that stands still while the first draft is scored, and halves its pace later, is no reason to stop drafting."""
    policy, world = ThroughputLength(), Matches(1, 0.02)
    world.run(policy, 3)
    rows = Rows([make_row()], capabilities=Capabilities(ragged=True))
    assert policy.budget(rows)[0] and policy.num_to_score(rows, [16], [12])[0]
    policy.observe(rows, [Step(0, (0,), (), 16, 0, total_s=30.0)])
    gain, kept = world.run(policy, 300)
    assert kept[12] > 10 and gain > 1.4


def test_slow_look_ups_are_not_asked_for_all_they_find() -> None:
    """A lookup that takes a third of a pass is drafting that must pay, as a draft model's is."""
    policy, rows = ThroughputLength(), Rows([make_row()], capabilities=Capabilities(ragged=True))
    asked = 0
    for _ in range(1500):
        budget = policy.budget(rows)[0]
        count = policy.num_to_score(rows, [budget], [1])[0] if budget else 0
        draft_s = 0.3 if budget else 0.0
        policy.observe(rows, [Step(0, (0,), (), count, 0, draft_s=draft_s, total_s=1 + draft_s + 0.05 * count)])
        asked += budget > 0
    assert asked < 0.06 * 1500
