"""The throughput policy over trees of chosen tokens, against a simulated clock."""

from __future__ import annotations

import random
from typing import Any

import pytest

from foresay.decoding.capabilities import Capabilities
from foresay.decoding.continuation import Branching, Drawn
from foresay.decoding.outcome import Step
from foresay.decoding.rows import Rows
from foresay.lengths import ConstantLength, ThroughputLength
from foresay.lengths.tree_counts import TreeCounts
from helpers.making import make_row

SURE, UNSURE = (0.9, 0.05, 0.02), (0.4, 0.25, 0.15)
NODES, WIDTH, LEVELS = 16, 4, 6
Path = tuple[int, ...]


def grown(rule: Branching, most: int, levels: list[tuple[float, ...]]) -> tuple[dict[Path, float], int]:
    """Kept nodes with their path probabilities, and passes. levels: the draft's probabilities of the children at each depth."""
    nodes: dict[Path, float] = {}
    level: list[Path] = [()]
    for depth in range(LEVELS):
        newest = {(*path, i): nodes.get(path, 1.0) * p for path in level for i, p in enumerate(levels[depth])}
        nodes |= newest
        best = sorted(nodes.values(), reverse=True)
        least = best[most - 1] if len(best) >= most else 0.0
        order = sorted(newest, key=lambda path: -newest[path])[:WIDTH]
        level = [path for path in order if rule.scale * newest[path] > rule.each and newest[path] > least]
        if not sum(rule.scale * newest[path] - rule.each for path in level) > rule.threshold:
            break
    kept = sorted(nodes, key=lambda path: -nodes[path])[:most]
    return {
        path: nodes[path] for i, path in enumerate(kept) if i == 0 or rule.scale * nodes[path] > rule.least
    }, depth + 1


def rate(policy: Any, steps: int, *, column: float, start_s: float, pass_s: float, truth: float = 1.0) -> float:
    """Tokens per second of a single row. truth: a child is accepted this many times as often as the draft's probability."""
    rows = Rows([make_row()], capabilities=Capabilities(ragged=True, trees=True))
    seconds = tokens = 0.0
    for step in range(steps):
        numbers = random.Random(step)
        levels = [numbers.choice((SURE, UNSURE)) for _ in range(LEVELS)]
        [most] = policy.budget(rows)
        accepted, depths, passes = 0, 0, 0
        nodes: dict[Path, float] = {}
        if most:
            nodes, passes = grown(policy.branching(rows), most, levels)
            policy.drawn(rows, Drawn([0] * len(nodes), list(nodes.values()), passes, [0] * len(nodes)))
            path: Path = ()
            for children in levels:
                luck, found = numbers.random(), None
                for i, p in enumerate(children):
                    luck -= p * truth
                    if luck < 0:
                        found = i
                        break
                if found is None or (*path, found) not in nodes:
                    break
                path = (*path, found)
            accepted = len(path)
            depths = accepted + any(node[:-1] == path for node in nodes)
        draft_s = start_s + pass_s * passes if most else 0.0
        total = draft_s + 1 + column * len(nodes)
        policy.observe(
            rows,
            [Step(0, (0,) * (accepted + 1), (), len(nodes), accepted, (1,) * depths, draft_s=draft_s, total_s=total)],
        )
        seconds, tokens = seconds + total, tokens + accepted + 1
    return tokens / seconds


class Free(ThroughputLength):
    """Control: trees grow as far as they can."""

    def branching(self, rows: Rows) -> Branching:
        return Branching()


WORLDS = {
    "flat": {"column": 0.02, "start_s": 0.05, "pass_s": 0.03},
    "steep": {"column": 0.15, "start_s": 0.05, "pass_s": 0.03},
    "slow draft": {"column": 0.05, "start_s": 0.1, "pass_s": 0.25},
    "sure by mistake": {"column": 0.06, "start_s": 0.05, "pass_s": 0.06, "truth": 0.6},
}


@pytest.mark.parametrize("world", WORLDS)
def test_trees_are_as_large_as_they_pay(world: str) -> None:
    best = max(rate(ConstantLength(n), 1500, **WORLDS[world]) for n in (1, 2, 4, 8, 12, 16))
    plain = rate(ConstantLength(0), 100, **WORLDS[world])
    adaptive = rate(ThroughputLength(high=NODES), 1500, **WORLDS[world])
    assert adaptive > 0.96 * best and adaptive > plain


def test_trees_that_never_pay_are_given_up() -> None:
    world = {"column": 0.9, "start_s": 0.5, "pass_s": 0.5}
    assert rate(ThroughputLength(high=NODES), 1500, **world) > 0.97


def test_trees_without_a_rule_cost_more() -> None:
    """Control."""
    steep = WORLDS["steep"]
    assert rate(Free(high=NODES), 1500, **steep) < 0.96 * rate(ThroughputLength(high=NODES), 1500, **steep)


def test_costs_are_those_of_passes_and_the_scale_that_of_acceptance() -> None:
    policy = ThroughputLength(high=NODES)
    rate(policy, 1500, **WORLDS["sure by mistake"])
    line = policy._primary.costs.of(1).line
    assert line.at(4) == pytest.approx(0.05 + 4 * 0.06, rel=0.1)
    assert 0.35 < policy._primary._trees.ratio() < 0.85


def test_a_row_has_a_ratio_of_its_own() -> None:
    counts, good, bad = TreeCounts(), make_row(), make_row()
    assert counts.ratio() == counts.ratio(good) == 1.0
    for _ in range(60):
        counts.add(good, 3, 2.0)
        counts.add(bad, 0, 2.0)
    assert counts.ratio(bad) < 0.5 < counts.ratio() < 1.0 < counts.ratio(good) < 1.5
    for _ in range(60):
        counts.add(bad, 2, 2.0)
    assert counts.ratio(bad) == pytest.approx(1.0, abs=0.1), "what was is forgotten"
