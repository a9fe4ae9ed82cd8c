"""Workers as actors of a Ray of their own on this machine: `make test-engines`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ModelNotFoundError
from foresay.records.recording import Recording
from foresay_lab.data.items import PromptItem
from foresay_lab.replay.record import record
from foresay_lab.workers import work
from foresay_lab.workers.pool import Pool
from foresay_lab.workers.ray import Actors
from helpers import tiny

ITEMS = [PromptItem(f"a-{i}", f"number {i} and more", followups=("go on",) * (i % 3 == 0)) for i in range(9)]
PARAMS = SamplingParams(max_new_tokens=30, temperature=0.9, seed=4, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    helpers = str(Path(tiny.__file__).parents[1])
    ray.init(num_cpus=2, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": helpers}})
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model") / "m", chat=True)


def load(folder: Path) -> dict[str, Any]:
    return {"target": str(folder), "drafter": "none", "dtype": "fp32", "max_batch_size": 2}


def lines(path: Path) -> dict[str, Any]:
    return {one.id: one for one in Recording.load(path).records}


def test_a_recording_of_two_actors_is_one_s(folder: Path, tmp_path: Path) -> None:
    record(foresay.load(**load(folder)), ITEMS, tmp_path / "alone.jsonl", PARAMS)
    with Pool(Actors(work.record_setup(load(folder), ITEMS, PARAMS, chat=True), 2), 2) as pool:
        work.record(pool, ITEMS, tmp_path / "shared.jsonl")
    assert lines(tmp_path / "alone.jsonl") == lines(tmp_path / "shared.jsonl")


def test_an_actor_that_is_killed_loses_and_doubles_nothing(folder: Path, tmp_path: Path) -> None:
    items = [PromptItem(f"b-{i}", f"text {i}") for i in range(16)]
    killed: list[int] = []
    with Pool(Actors(work.record_setup(load(folder), items, PARAMS, chat=True), 2), 2) as pool:
        victim: Any = pool._workers[0]
        pid = ray.get(victim.handle.__ray_call__.remote(lambda actor: os.getpid()))

        def kill(progress: Any) -> None:
            if progress.done and not killed:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)

        work.record(pool, items, tmp_path / "r.jsonl", on_progress=kill)
    assert killed and len((tmp_path / "r.jsonl").read_text().splitlines()) == 17
    record(foresay.load(**load(folder)), items, tmp_path / "alone.jsonl", PARAMS)
    assert lines(tmp_path / "r.jsonl") == lines(tmp_path / "alone.jsonl")


def test_an_error_of_an_actor_is_ours() -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        Pool(
            Actors({"kind": "generate", "load": {"target": "./nowhere"}, "params": SamplingParams(), "raw": True}, 1), 1
        )
