"""500 simulated runs of the server keep every invariant, and 4,000 with --long; broken versions do not.

`scripts/simulation SEED` repeats one run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from foresay.engine import Engine
from foresay.engine.admission import MemoryLimit
from foresay.engine.guard import GuardedDrafter
from foresay.generation.session_thread import SessionThread
from foresay.server import generating, service, shared
from foresay.server.residency import Residency
from simulation import run
from simulation.bodies import BODIES
from simulation.model import HashCache
from simulation.run import Simulation, plain_text, reference, simulate
from simulation.several import NAMES, SeveralModels, simulate_several

SEEDS, LONG, PART, OF_SEVERAL = 500, 4_000, 500, 120
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: Patch) -> Iterator[None]:
    """Failures that are meant to happen are not logged, and no memory of this process is freed in virtual time."""
    for name in ("gc", "trim"):
        monkeypatch.setattr(service, name, Mock())
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    "first", [pytest.param(i, marks=[pytest.mark.long] * (i >= SEEDS)) for i in range(0, LONG, PART)]
)
def test_every_seed_keeps_the_invariants(first: int) -> None:
    """In each part of the seeds every fault, manner and error happens."""
    failed, seen = dict[int, list[str]](), set[str]()
    for seed in range(first, first + PART):
        one = Simulation(seed)
        one.plan()
        if problems := one.run():
            failed[seed] = problems
        seen |= {*one.model.faults.happened, *(str(call.manner) for call in one.calls if call.began is not None)}
        seen |= {run.error_of(call) or "" for call in one.calls if call.is_complete}
        seen |= {"prefix copied"} if any(session.engine.prefix_bytes for session in one.sessions) else set()
    assert not failed, "\n".join(f"scripts/simulation {seed}: {problems[0]}" for seed, problems in failed.items())
    codes = {"timeout", "shutting_down", "out_of_memory", "generation_failed", "cannot_go_on", "queue_full"}
    assert seen >= {*run.FAULTS, *(str(one) for one in run.Manner), *codes, "prefix copied"}


def test_every_seed_of_several_models_keeps_the_invariants() -> None:
    failed, loads, faults = dict[int, str](), list[str](), set[str]()
    for seed in range(OF_SEVERAL):
        problems, one = simulate_several(seed)
        loads += one.loads
        faults |= set(one.model.faults.happened)
        if problems:
            failed[seed] = problems[0]
    assert not failed, failed
    assert set(loads) == set(NAMES) and len(loads) > OF_SEVERAL and "load" in faults


def test_a_seed_decides_everything() -> None:
    def traced(seed: int) -> Any:
        one = Simulation(seed)
        one.plan()
        one.run()
        return [(call.status, call.began, call.ended, call.data.count(b"data: ")) for call in one.calls]

    once = [traced(seed) for seed in range(15)]
    assert once == [traced(seed) for seed in range(15)] and len(set(map(str, once))) > 12


def test_outputs_are_the_librarys() -> None:
    """The references of the other tests, against plain decoding by the library."""
    texts = [(path, body, plain_text(path, body)) for path, body in BODIES]
    compared = [reference(path, body)[0][0] == text for path, body, text in texts if text is not None]
    assert all(compared) and len(compared) >= 6


def _loses_ended(monkeypatch: Patch) -> None:
    """Cancelled requests are lost if the target fails in the same step."""
    real = Engine.abandon

    def abandon(self: Engine) -> list[int]:
        self._ended.clear()
        return real(self)

    monkeypatch.setattr(Engine, "abandon", abandon)


def _leaves_streams_open(monkeypatch: Patch) -> None:
    monkeypatch.setattr(generating, "_Stream", generating.StreamingResponse)


def _keeps_rejected_tokens(monkeypatch: Patch) -> None:
    monkeypatch.setattr(HashCache, "truncate", lambda self, lengths: None)


def _copies_a_stale_slot(monkeypatch: Patch) -> None:
    def copy(self: HashCache, source: int, target: int, length: int) -> None:
        self.lengths[target], self.tokens[target] = length, [*self.tokens[source][: length - 1], 1]

    monkeypatch.setattr(HashCache, "copy_prefix", copy)


def _lets_drafters_fail(monkeypatch: Patch) -> None:
    monkeypatch.setattr(GuardedDrafter, "propose", lambda self, *given: self.inner.propose(*given))


def _cancels_nothing(monkeypatch: Patch) -> None:
    real = SessionThread.cancel
    monkeypatch.setattr(SessionThread, "cancel", lambda self, tickets: real(self, []))


def _never_times_out(monkeypatch: Patch) -> None:
    async def wait(self: Any, chunk: Any) -> Any:
        return await chunk

    monkeypatch.setattr(shared.TimeLimit, "wait", wait)


def _admits_all(monkeypatch: Patch) -> None:
    monkeypatch.setattr(MemoryLimit, "num_fitting", lambda self, active, waiting, count, cached: count)


def _forgets_to_release(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Residency, "release", lambda self, name: None)


def _keeps_those_who_left(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Residency, "leave", lambda self, waiting: None)


def _unloads_a_used_model(monkeypatch: Patch) -> None:
    honest = Residency.next

    def next_(self: Residency, fits: object) -> object:
        counts, self.users = self.users, dict.fromkeys(self.users, 0)
        found = honest(self, fits)  # type: ignore[arg-type]
        self.users = counts
        return found

    monkeypatch.setattr(Residency, "next", next_)
    monkeypatch.setattr(Residency, "unloaded", lambda self, name: self.users.pop(name))
    monkeypatch.setattr(Residency, "release", lambda self, name: self.users.update({name: self.users.get(name, 1) - 1}))


BROKEN = {
    _loses_ended: 152,
    _leaves_streams_open: 0,
    _keeps_rejected_tokens: 0,
    _copies_a_stale_slot: 24,
    _lets_drafters_fail: 2,
    _cancels_nothing: 2,
    _never_times_out: 9,
    _admits_all: 11,
}
"""Broken versions, and the seed that found each before, which is tried first."""
BROKEN_LOADING = [_forgets_to_release, _keeps_those_who_left, _unloads_a_used_model]


@pytest.mark.parametrize("breaks", [*BROKEN, *BROKEN_LOADING])
def test_a_broken_version_is_found(breaks: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """Negative controls."""
    for path, body in BODIES:  # the outputs of intact versions, which are kept
        if breaks in BROKEN:
            reference(path, body)
        elif "response_format" not in body:
            for name in NAMES:
                reference(path, {**body, "model": name}, SeveralModels)
    breaks(monkeypatch)
    if breaks in BROKEN:
        assert any(simulate(seed) for seed in (BROKEN[breaks], *range(SEEDS)))
    else:
        assert any(simulate_several(seed)[0] for seed in range(OF_SEVERAL))
