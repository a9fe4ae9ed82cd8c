"""Tasks are done once each, whoever dies: a pool over workers that are played."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, ForesayError
from foresay.workers.messages import Plain, plain_params, read_params
from foresay.workers.pool import TRIES, Pool, Worker, WorkerDiedError, check_workers, in_order


class Played(Worker):
    def __init__(self, name: str, room: int, described: Plain) -> None:
        self.name, self.capacity, self.described = name, room, described
        self.held: list[tuple[int, Plain]] = []
        self.most = 0
        self.closed = False

    def give(self, number: int, task: Plain) -> None:
        assert not self.closed
        self.held.append((number, task))
        self.most = max(self.most, len(self.held))

    def close(self) -> None:
        self.closed = True


class Stage:
    """Which worker speaks next, and whether it dies, is a script: (worker, dies); afterwards all work in turn."""

    def __init__(self, script: Sequence[tuple[int, bool]] = (), *, room: int = 3, cursed: int | None = None) -> None:
        self.script, self.room, self.cursed = list(script), room, cursed
        self.started: list[Played] = []
        self.turn = 0

    def start(self, index: int) -> Played:
        self.started.append(Played(f"worker {index + 1}", self.room, {"by": len(self.started)}))
        return self.started[-1]

    def poll(self, workers: Sequence[Worker]) -> Iterator[tuple[Worker, int, Plain | ForesayError]]:
        self.turn += 1
        which, dies = self.script.pop(0) if self.script else (self.turn, False)
        worker: Any = workers[which % len(workers)]
        if dies or any(number == self.cursed for number, _ in worker.held):
            yield worker, -1, WorkerDiedError(f"{worker.name} was killed")
            if worker.held:  # what a pipe still held when its end was noticed
                yield worker, worker.held[0][0], {"late": True}
        elif worker.held:
            number, task = worker.held.pop(0)
            yield worker, number, ForesayError("refused") if task.get("bad") else {"twice": 2 * task["value"]}


def tasks(count: int) -> dict[int, Plain]:
    return {i: {"value": i} for i in range(count)}


@settings(max_examples=150, deadline=None)
@given(
    script=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=6),
    count=st.integers(1, 4),
    number=st.integers(0, 25),
)
def test_each_task_is_done_once_whoever_dies(script: list[tuple[int, bool]], count: int, number: int) -> None:
    dying = [(who, dies and sum(d for _, d in script[:i]) < TRIES - 1) for i, (who, dies) in enumerate(script)]
    stage = Stage(dying)
    with Pool(stage, count) as pool:
        found = list(pool.run(tasks(number)))
    assert sorted(found) == [(i, {"twice": 2 * i}) for i in range(number)]
    assert all(worker.closed for worker in stage.started) and all(worker.most <= 3 for worker in stage.started)


def test_the_last_tasks_are_shared_out() -> None:
    """Nobody holds more than a fair share while another has nothing."""
    stage = Stage(room=100)
    with Pool(stage, 4) as pool:
        list(pool.run(tasks(8)))
    assert [worker.most for worker in stage.started] == [2] * 4


def test_a_task_over_which_all_die_is_an_error() -> None:
    with (
        Pool(Stage(cursed=5), 2) as pool,
        pytest.raises(ForesayError, match=f"task 5 was assigned to {TRIES} workers.*killed"),
    ):
        list(pool.run(tasks(10)))


def test_a_task_that_cannot_be_done_is_an_error() -> None:
    with Pool(Stage(), 2) as pool, pytest.raises(ForesayError, match="refused"):
        list(pool.run({0: {"value": 1}, 1: {"value": 2, "bad": True}}))


def test_workers_are_ended_where_one_does_not_start() -> None:
    class Half(Stage):
        def start(self, index: int) -> Played:
            if index == 2:
                raise ConfigError("no such model")
            return super().start(index)

    stage = Half()
    with pytest.raises(ConfigError, match="no such model"):
        Pool(stage, 4)
    assert len(stage.started) == 2 and all(worker.closed for worker in stage.started)


def test_results_in_order() -> None:
    shuffled = [(2, {"n": 2}), (0, {"n": 0}), (1, {"n": 1}), (3, {"n": 3})]
    assert [one["n"] for one in in_order(iter(shuffled))] == [0, 1, 2, 3]
    early = in_order(iter([(0, {"n": 0}), (5, {"n": 5})]))
    assert next(early) == {"n": 0}, "each as soon as those before it are there"


def test_how_many() -> None:
    for wrong in (0, -1, 5000):
        with pytest.raises(ConfigError):
            check_workers(wrong)


def test_a_worker_that_would_do_something_else_is_refused() -> None:
    """Another dtype on another machine, say; also where it takes a dead one's place."""

    class Mixed(Stage):
        def start(self, index: int) -> Played:
            worker = super().start(index)
            worker.described = {"settings": {"dtype": "bf16" if len(self.started) < 3 else "fp32"}}
            return worker

    stage = Mixed()
    with pytest.raises(ConfigError, match=r"differ from those of the first worker: .*fp32"):
        Pool(stage, 3)
    assert all(worker.closed for worker in stage.started)
    stage = Mixed([(0, True)])
    with Pool(stage, 2) as pool, pytest.raises(ConfigError, match="differ from"):
        list(pool.run(tasks(6)))
    assert all(worker.closed for worker in stage.started)


def test_parameters_go_through_json() -> None:
    """Whose keys are strings, and which has no tuples."""
    params = SamplingParams(
        max_new_tokens=7,
        temperature=0.5,
        seed=3,
        logit_bias={5: 1.5, 70: -2.0},
        stop=("a", "b"),
        allowed_token_ids=(5, 70, 71),
        banned_token_ids=(71,),
        stop_token_ids=(5,),
        logprobs=2,
    )
    assert read_params(json.loads(json.dumps(plain_params(params)))) == params
    with pytest.raises(ConfigError, match="processors"):
        plain_params(SamplingParams(processors=(lambda ids, scores: scores,)))
