"""Simulated runs of a server of two models keep every invariant; broken rules of loading do not."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from foresay.server import service
from foresay.server.residency import Residency
from simulation.bodies import BODIES
from simulation.several import NAMES, expected, simulate_several

SEEDS = 120


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Failures that are meant to happen are not logged, and no memory of this process is freed in virtual time."""
    monkeypatch.setattr(service, "_free_memory", lambda: None)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_every_seed_keeps_the_invariants() -> None:
    failed, loads, codes = dict[int, str](), list[str](), set[str]()
    for seed in range(SEEDS):
        problems, run = simulate_several(seed)
        loads += run.loads
        codes |= set(run.model.faults.happened)
        if problems:
            failed[seed] = problems[0]
    assert not failed, failed
    assert set(loads) == set(NAMES) and len(loads) > SEEDS and "load" in codes


def _forgets_to_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residency, "release", lambda self, name: None)


def _keeps_those_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residency, "leave", lambda self, waiting: None)


def _unloads_a_used_model(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Residency.next

    def next_(self: Residency, fits: object) -> object:
        counts, self.users = self.users, dict.fromkeys(self.users, 0)
        found = honest(self, fits)  # type: ignore[arg-type]
        self.users = counts
        return found

    monkeypatch.setattr(Residency, "next", next_)
    monkeypatch.setattr(Residency, "unloaded", lambda self, name: self.users.pop(name))
    monkeypatch.setattr(Residency, "release", lambda self, name: self.users.update({name: self.users.get(name, 1) - 1}))


@pytest.mark.parametrize("breaks", [_forgets_to_release, _keeps_those_who_left, _unloads_a_used_model])
def test_a_broken_rule_is_found(breaks: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls."""
    for name in NAMES:
        for path, body in BODIES:
            if "response_format" not in body:
                expected(path, {**body, "model": name})  # which is kept
    breaks(monkeypatch)  # type: ignore[operator]
    assert any(simulate_several(seed)[0] for seed in range(SEEDS))
