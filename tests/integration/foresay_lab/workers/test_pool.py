"""Each task has one result, whichever worker dies: a pool over simulated workers."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.errors import ConfigError, ForesayError, UnknownNameError
from foresay_lab.workers.pool import TRIES, Pool, check_workers, in_order
from helpers.in_process import done
from helpers.refusals import refused


class Simulated:
    """A worker: its unfinished tasks, and the most that it had."""

    def __init__(self) -> None:
        self.tasks: list[tuple[int, Any]] = []
        self.most = 0
        self.closed = False


class Stage:
    """A backend whose script decides for each call whether the worker dies; `cursed` is a task that ends every worker."""

    def __init__(self, script: Sequence[bool] = (), *, room: int = 3, cursed: int | None = None) -> None:
        self.script, self.room, self.cursed = list(script), room, cursed
        self.started: list[Simulated] = []

    def described(self) -> dict[str, Any]:
        return {}

    def start(self, index: int) -> tuple[Simulated, Future[Any]]:
        self.started.append(Simulated())
        return self.started[-1], done((self.described(), self.room))

    def advance(self, worker: Simulated, tasks: Sequence[tuple[int, Any]]) -> Future[Any]:
        assert not worker.closed
        worker.tasks += tasks
        worker.most = max(worker.most, len(worker.tasks))
        if (self.script and self.script.pop(0)) or any(number == self.cursed for number, _ in worker.tasks):
            return done(OSError("killed"))
        number, task = worker.tasks.pop(0)
        return done([(number, ConfigError("refused") if task == "bad" else 2 * task)])

    def close(self, worker: Simulated) -> None:
        worker.closed = True


@settings(max_examples=150, deadline=None)
@given(script=st.lists(st.booleans(), max_size=12), count=st.integers(1, 4), number=st.integers(0, 25))
def test_each_task_is_done_once_whichever_worker_dies(script: list[bool], count: int, number: int) -> None:
    dying = [dies and sum(script[:i]) < TRIES - 1 for i, dies in enumerate(script)]
    stage = Stage(dying)
    with Pool(stage, count) as pool:
        found = list(pool.run({i: i for i in range(number)}))
    assert sorted(found) == [(i, 2 * i) for i in range(number)]
    assert all(worker.closed for worker in stage.started) and all(worker.most <= 3 for worker in stage.started)


def test_no_worker_has_more_than_a_fair_share() -> None:
    stage = Stage(room=100)
    with Pool(stage, 4) as pool:
        list(pool.run({i: i for i in range(8)}))
    assert [worker.most for worker in stage.started] == [2] * 4


@pytest.mark.parametrize(
    ("tasks", "cursed", "error"),
    [
        ({i: i for i in range(10)}, 5, rf"tasks \[.*5.*\] were assigned to {TRIES} workers.*killed"),
        ({0: 1, 1: "bad"}, None, "refused"),
    ],
)
def test_a_task_that_cannot_be_done_is_an_error(tasks: dict[int, Any], cursed: int | None, error: str) -> None:
    with Pool(Stage(cursed=cursed), 2) as pool, pytest.raises(ForesayError, match=error):
        list(pool.run(tasks))


@pytest.mark.parametrize("script", [[], [True]])
def test_a_worker_with_other_settings_is_refused(script: list[bool]) -> None:
    """Such as another dtype on another machine; also if it replaces a dead one. All workers are then ended."""

    class Mixed(Stage):
        def described(self) -> dict[str, Any]:
            return {"settings": {"dtype": "bf16" if len(self.started) < 3 else "fp32"}}

    stage = Mixed(script)
    with refused("settings", {"dtype": "fp32"}):  # noqa: SIM117
        with Pool(stage, 2 if script else 3) as pool:
            list(pool.run({i: i for i in range(6)}))
    assert len(stage.started) == 3 and all(worker.closed for worker in stage.started)


def test_results_in_order() -> None:
    assert list(in_order(iter([(2, "c"), (0, "a"), (1, "b"), (3, "d")]))) == list("abcd")
    early = in_order(iter([(0, "a"), (5, "f")]))
    assert next(early) == "a", "each as soon as all earlier ones have arrived"


def test_wrong_numbers() -> None:
    for wrong in (0, -1, 5000):
        with pytest.raises(ConfigError, match=f"--workers={wrong}"):
            check_workers(wrong)


def test_an_error_is_rebuilt_from_its_parts() -> None:
    error = UnknownNameError("rule", "x", ["y"]).about("prompt 3")
    rebuilt = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(rebuilt) is UnknownNameError and str(rebuilt) == str(error) and vars(rebuilt) == vars(error)
