"""A benchmark that workers share: every turn once, counts as one process counts them, plain decoding next to each."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.generation.method import PLAIN, methods
from foresay.records.results import Results
from foresay_lab.bench.bench import Progress, bench
from foresay_lab.bench.settings import BenchSettings
from foresay_lab.data.items import PromptItem
from foresay_lab.data.requests import RequestBuilder
from foresay_lab.workers import processes, work
from foresay_lab.workers.pool import Pool
from foresay_lab.workers.processes import Processes
from helpers import tiny
from helpers.in_process import InProcess

pytestmark = pytest.mark.slow
ITEMS = [PromptItem(f"a-{i}", f"number {i} and more", followups=("go on",) * (i == 0)) for i in range(3)]
METHODS = methods(["suffix", "max_gram"], ["4"])
PARAMS = [
    SamplingParams(max_new_tokens=12, ignore_eos=True),
    SamplingParams(max_new_tokens=12, temperature=0.8, seed=2),
]


def load(chat_folder: Path) -> dict[str, Any]:
    return {"target": str(chat_folder), "drafter": "none", "dtype": "fp32", "max_batch_size": 2}


def pool(chat_folder: Path) -> Pool:
    settings = {"params": PARAMS, "methods": METHODS, "batch_sizes": [1, 2], "repeats": 2}
    setup = work.bench_setup(load(chat_folder), {"d": ITEMS}, chat=True, **settings)
    return Pool(Processes(setup, 2, threads=1), 2)


def alone(chat_folder: Path, path: Path) -> Results:
    target = foresay.load(**load(chat_folder))
    asks = RequestBuilder(target).all(ITEMS, PARAMS[0])
    settings = BenchSettings(methods=METHODS, datasets={"d": asks}, params=PARAMS, batch_sizes=[1, 2], repeats=2)
    return bench(target, settings, path)


def counted(results: Results) -> dict[Any, Any]:
    """The results of each drafted run without its times."""
    runs = [run for run in results.runs if run.cell.method != PLAIN]
    times = Counter((run.cell, run.repeat) for run in runs)
    assert set(times.values()) == {1}, "each turn is run once"
    names = ("num_tokens", "num_passes", "num_drafted", "num_accepted")
    return {(run.cell, run.repeat): (run.tokens, run.identical, *(run.stats[name] for name in names)) for run in runs}


def test_what_two_write_is_what_one_writes(chat_folder: Path, tmp_path: Path) -> None:
    """Also when one is killed, when the file was begun by one process, and when nothing is left to do."""
    wanted = alone(chat_folder, tmp_path / "alone.jsonl")
    begun = tmp_path / "begun.jsonl"
    begun.write_text("".join((tmp_path / "alone.jsonl").read_text().splitlines(keepends=True)[:9]))
    seen: list[Progress] = []
    with pool(chat_folder) as two:
        victims = [worker.handle.process.pid for worker in two._workers]

        def kill(progress: Progress) -> None:
            seen.append(progress)
            if len(seen) == 2:
                os.kill(victims[0], signal.SIGKILL)

        shared = work.bench(two, tmp_path / "shared.jsonl", on_run=kill)
        resumed = work.bench(two, begun)
        again = work.bench(two, tmp_path / "shared.jsonl", on_run=lambda _: pytest.fail("it was there"))
    assert counted(shared) == counted(wanted) == counted(resumed) == counted(again)
    assert (seen[-1].done, seen[-1].total, len(seen)) == (16, 16, 16)
    assert shared.settings == wanted.settings and not shared.failures
    assert {(t.cell, t.id, t.pieces) for t in shared.traces} == {(t.cell, t.id, t.pieces) for t in wanted.traces}
    assert len(shared.traces) == len(wanted.traces)
    assert list(shared.by_cell())[:5] == list(wanted.by_cell())[:5], "in the order of one process"
    assert all(run.plain_seconds for run in shared.runs if run.cell.method != PLAIN)


def test_few_turns_are_shared_too() -> None:
    tasks = work.bench_tasks({0: [(0, "a"), (1, "a"), (2, "a")], 2: [(0, "a")]}, 3, 2)
    assert [(block, len(turns)) for block, turns in tasks] == [(0, 2), (0, 1), (2, 1)]
    assert work.bench_tasks({}, 3, 2) == []


def test_the_command(chat_folder: Path, tmp_path: Path, shell: tiny.Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "Processes", InProcess)
    asked = ("bench", str(tmp_path / "r.jsonl"), "--model", str(chat_folder), "--dtype", "fp32", "--drafter", "suffix")
    asked += ("--length", "4", "--count", "3", "-n", "12", "--repeats", "2", "--workers", "2")
    code, out, err = shell(*asked)
    assert code == 0, err
    assert "suffix, 4" in out and "slow each other" in err
    runs = Results.load(tmp_path / "r.jsonl").runs
    assert sorted(run.repeat for run in runs if run.cell.method == "suffix, 4") == [0, 1]
    assert "--against and --workers contradict" in shell.refused(*asked, "--against", "transformers")
