"""Workers: each task has one result, whichever worker dies; what several write together is what one writes."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, ForesayError, ModelNotFoundError, UnknownNameError
from foresay.generation.method import PLAIN, methods
from foresay.records.recording import Recording
from foresay.records.results import Results
from foresay_lab.bench.bench import BenchSettings, Progress, bench
from foresay_lab.commands import sharing
from foresay_lab.data.items import PromptItem
from foresay_lab.data.requests import RequestBuilder
from foresay_lab.replay.record import record
from foresay_lab.workers import processes, work
from foresay_lab.workers.pool import TRIES, Pool, in_order
from foresay_lab.workers.processes import Processes
from helpers import tiny
from helpers.forks import fork
from helpers.in_process import InProcess, done
from helpers.refusals import refused
from helpers.waiting import has_ended, wait_until

ITEMS = [PromptItem(f"a-{i}", f"number {i} and more", followups=("go on",) * (i % 3 == 0)) for i in range(15)]
SAMPLED = SamplingParams(max_new_tokens=12, temperature=0.9, seed=4)


@dataclass
class Simulated:
    """A worker: its unfinished tasks, and the most that it had."""

    tasks: list[tuple[int, Any]] = field(default_factory=list)
    most: int = 0
    closed: bool = False


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


def test_shares_order_and_errors_of_tasks() -> None:
    stage = Stage(room=100)
    with Pool(stage, 4) as pool:
        list(pool.run({i: i for i in range(8)}))
    assert [worker.most for worker in stage.started] == [2] * 4, "no worker has more than a fair share"
    cursed = rf"tasks \[.*5.*\] were assigned to {TRIES} workers.*killed"
    with Pool(Stage(cursed=5), 2) as pool, pytest.raises(ForesayError, match=cursed):
        list(pool.run({i: i for i in range(10)}))
    with Pool(Stage(), 2) as pool, pytest.raises(ForesayError, match="refused"):
        list(pool.run({0: 1, 1: "bad"}))
    assert list(in_order(iter([(2, "c"), (0, "a"), (1, "b"), (3, "d")]))) == list("abcd")
    assert next(in_order(iter([(0, "a"), (5, "f")]))) == "a", "each as soon as all earlier ones have arrived"
    error = UnknownNameError("rule", "x", ["y"]).about("prompt 3")
    rebuilt = sent(error)
    assert type(rebuilt) is UnknownNameError and str(rebuilt) == str(error) and vars(rebuilt) == vars(error)


@pytest.mark.parametrize("script", [[], [True]], ids=["at the start", "as a replacement"])
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


def sent(value: Any) -> Any:
    """The value as another process receives it."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301


class Dying(InProcess):
    """Workers in this process, one of which dies at its second turn of work."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(sent(setup), 2)
        self.calls = 0

    def start(self, index: int) -> tuple[Any, Future[Any]]:
        worker, begun = super().start(index)
        return worker, done(sent(begun.result()))

    def advance(self, worker: Any, tasks: Sequence[tuple[int, Any]]) -> Future[Any]:
        self.calls += 1
        return done(OSError("killed") if self.calls == 3 else sent(super().advance(worker, sent(tasks)).result()))


@pytest.fixture
def in_process(shell: tiny.Shell, monkeypatch: pytest.MonkeyPatch) -> tiny.Shell:
    monkeypatch.setattr(processes, "Processes", InProcess)
    return shell


@pytest.fixture
def load(chat_folder: Path) -> dict[str, Any]:
    return {"target": str(chat_folder), "drafter": "none", "dtype": "fp32", "max_batch_size": 2}


def lines(path: Path) -> dict[str, Any]:
    return {one.id: one for one in Recording.load(path).records}


@pytest.mark.slow
def test_a_recording_of_two_is_one_s(load: dict[str, Any], tmp_path: Path) -> None:
    """Turns included; a file that is there goes on, also one that another kind of run began; a worker that is killed loses and
    doubles nothing."""
    alone, shared, begun, killed = (tmp_path / f"{name}.jsonl" for name in ("alone", "shared", "begun", "killed"))
    record(foresay.load(**load), ITEMS, alone, SAMPLED)
    whole = alone.read_text().splitlines(keepends=True)
    begun.write_text("".join(whole[:6]))
    seen, ends = list[Any](), list[int]()
    setup = work.record_setup(load, ITEMS, SAMPLED, chat=True)
    with Pool(Dying(setup), 2) as two:
        work.record(two, ITEMS, shared, on_progress=seen.append)
        assert [name for name in lines(shared) if "/" not in name] == [item.id for item in ITEMS]
        assert (seen[0].done, seen[-1].done, seen[-1].total) == (0, 20, 20), "their turns"
        seen.clear()
        for watch in (seen.append, lambda _: None):
            work.record(two, ITEMS, begun, on_progress=watch)
        assert seen[0].resumed == 5
    with Pool(Processes(setup, 1, threads=1), 1) as one:

        def kill(progress: Any) -> None:
            if progress.done >= 2 and not ends:
                os.kill(one._workers[0].handle.process.pid, signal.SIGKILL)
                ends.append(progress.done)

        work.record(one, ITEMS, killed, on_progress=kill)
    for path in (shared, begun, killed):
        assert list(lines(path).items()) == list(lines(alone).items()), "in the order of the prompts"
        assert len(path.read_text().splitlines()) == len(whole), "nothing is there twice"
    assert ends


def counted(results: Results) -> dict[Any, Any]:
    """The results of each drafted run without its times."""
    runs = [run for run in results.runs if run.cell.method != PLAIN]
    times = Counter((run.cell, run.repeat) for run in runs)
    assert set(times.values()) == {1}, "each turn is run once"
    names = ("num_tokens", "num_passes", "num_drafted", "num_accepted")
    return {(run.cell, run.repeat): (run.tokens, run.identical, *(run.stats[name] for name in names)) for run in runs}


@pytest.mark.slow
def test_a_benchmark_of_two_is_one_s(load: dict[str, Any], tmp_path: Path) -> None:
    """Also when one dies, when the file was begun by one process, and when nothing is left to do."""
    alone, begun, shared = (tmp_path / f"{name}.jsonl" for name in ("alone", "begun", "shared"))
    target, items = foresay.load(**load), ITEMS[:3]
    params = [SamplingParams(max_new_tokens=12, ignore_eos=True), SAMPLED]
    named, seen = methods(["suffix", "max_gram"], ["4"]), list[Progress]()
    options: dict[str, Any] = {"params": params, "methods": named, "batch_sizes": [1, 2], "repeats": 2}
    asks = RequestBuilder(target).all(items, params[0])
    wanted = bench(target, BenchSettings(datasets={"d": asks}, **options), alone)
    begun.write_text("".join(alone.read_text().splitlines(keepends=True)[:9]))
    with Pool(Dying(work.bench_setup(load, {"d": items}, chat=True, **options)), 2) as two:
        found = work.bench(two, shared, on_run=seen.append)
        resumed = work.bench(two, begun)
        again = work.bench(two, shared, on_run=lambda _: pytest.fail("it was there"))
    assert counted(found) == counted(wanted) == counted(resumed) == counted(again)
    assert (seen[-1].done, seen[-1].total, len(seen)) == (16, 16, 16)
    assert found.settings == wanted.settings and not found.failures
    assert {(t.cell, t.id, t.pieces) for t in found.traces} == {(t.cell, t.id, t.pieces) for t in wanted.traces}
    assert len(found.traces) == len(wanted.traces)
    assert list(found.by_cell())[:5] == list(wanted.by_cell())[:5], "in the order of one process"
    assert all(run.plain_seconds for run in found.runs if run.cell.method != PLAIN)
    tasks = work.bench_tasks({0: [(0, "a"), (1, "a"), (2, "a")], 2: [(0, "a")]}, 3, 2)
    assert [(block, len(turns)) for block, turns in tasks] == [(0, 2), (0, 1), (2, 1)], "few turns are shared too"
    assert work.bench_tasks({}, 3, 2) == []


@pytest.mark.slow
def test_errors_of_tasks_and_loading(load: dict[str, Any], tmp_path: Path) -> None:
    """A model that is not there, an empty prompt, a turn that does not fit: one error each, after which the job goes on."""
    params = SamplingParams(max_new_tokens=4)
    setup = {"kind": "generate", "load": load, "params": params, "raw": True}
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        Pool(InProcess({**setup, "load": {"target": "./nowhere"}}, 1), 1)
    pool = Pool(InProcess(setup, 1), 1)
    with pytest.raises(ForesayError, match="empty"):
        list(pool.run({0: ""}))
    assert len(list(pool.run({0: "a"}))) == 1
    long = [PromptItem("c-0", "short", followups=("long " * 4000,))]
    pool = Pool(InProcess(work.record_setup(load, long, params, chat=True), 1), 1)
    with pytest.raises(ForesayError, match="c-0/2"):
        work.record(pool, long, tmp_path / "r.jsonl")


@pytest.mark.slow
def test_kept_results_need_no_worker(
    in_process: tiny.Shell, load: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording of the same name with other texts is another; other settings are refused, and a settings file is ignored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sharing, "pool", lambda *_: pytest.fail("workers were started"))
    Path("foresay.toml").write_text('target = "nowhere"\n')
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    grid = ("replay", "a.jsonl", "--drafter", "suffix", "--json", "-o", "g.jsonl")
    found = []
    for count in (2, 3):
        Path("a.jsonl").unlink(missing_ok=True)
        record(foresay.load(**load), ITEMS[:count], "a.jsonl", params)
        found.append(in_process.out(*grid))
        assert found[-1] == in_process.out(*grid, "--workers", "2")
    assert found[0] != found[1] and len(Path("g.jsonl").read_text().splitlines()) == 3
    for more, named in ((("--batch-size", "4"), "batch_size"), (("--dtype", "fp32"), "dtype")):
        assert named in in_process.refused(*grid, *more)


@pytest.mark.slow
def test_commands(chat_folder: Path, tmp_path: Path, in_process: tiny.Shell) -> None:
    """generate --lines and replay print what they print alone, in order; record and bench too. Wrong uses are refused.

    A bar on a terminal changes nothing of standard output.
    """
    shell, prompts = in_process, "".join(f"prompt {i}\n" for i in range(7)).encode()
    model, two = ("--model", str(chat_folder), "--dtype", "fp32"), ("--workers", "2")
    asked = ("generate", "--lines", *model, "-n", "9", "-t", "0.8", "--seed", "3")
    alone, shared = (shell(*asked, "--json", *more, stdin=prompts) for more in ((), two))
    assert (alone[0], shared[0], shared[2]) == (0, 0, ""), shared
    texts, others = (
        [(one["prompt"], one["text"]) for one in map(json.loads, out.splitlines())] for _, out, _ in (alone, shared)
    )
    assert texts == others and [prompt for prompt, _ in texts] == [f"prompt {i}" for i in range(7)]
    wanted, shown = shell(*asked, stdin=prompts)[1], shell.watched(*asked, *two, stdin=prompts)
    assert shown[:2] == (0, wanted) and "tokens/s" in shown[2] and "7/7" in shown[2], shown

    one, other, kept, runs = (tmp_path / name for name in ("one.jsonl", "other.jsonl", "grid.jsonl", "b.jsonl"))
    asking = (*model, "--count", "6", "-n", "12")
    for path, more in ((one, ()), (other, two)):
        assert shell("record", str(path), *asking, *more)[0] == 0
    assert lines(one) == lines(other)
    other.unlink()  # replay another one: results are kept by the digest of a file
    assert shell("record", str(other), *asking, "--count", "4")[0] == 0
    grid = ("replay", str(one), str(other), "--drafter", "suffix", "--drafter", "prompt_lookup", "--json")
    found = [shell(*grid, *more) for more in ((), (*two, "-o", str(kept)), ("-o", str(kept)))]
    assert [code for code, _, _ in found] == [0] * 3, found[1]
    results = [
        [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "stats")} for line in out.splitlines()]
        for _, out, _ in found
    ]
    assert results[0] == results[1] == results[2] and len(results[0]) == 4
    assert found[1][1] == found[2][1], "what is kept is not done again"
    benched = ("bench", str(runs), *asking, "--drafter", "suffix", "--length", "4", "--repeats", "2", *two)
    code, out, err = shell(*benched)
    assert code == 0 and "suffix, 4" in out and "slow each other" in err, err
    assert sorted(run.repeat for run in Results.load(runs).runs if run.cell.method == "suffix, 4") == [0, 1]

    recording = ("record", "x.jsonl", *model, "--workers")
    assert "--against and --workers contradict" in shell.refused(*benched, "--against", "transformers")
    assert "--workers needs --lines" in shell.refused("generate", "a", *model, *two)
    assert "--ray needs --workers" in shell.refused(*asked, "--ray", stdin=prompts)
    assert "--threads -1" in shell.refused(*recording, "1", "--threads", "-1")
    assert all(f"--workers {wrong} must be" in shell.refused(*recording, wrong) for wrong in ("0", "5000"))


@pytest.mark.slow
def test_an_interrupt_ends_the_workers(chat_folder: Path, tmp_path: Path) -> None:
    command = ["foresay", "record", str(tmp_path / "r.jsonl"), "--model", str(chat_folder), "--workers", "1"]
    child = fork([*command, "-n", "4000", "--ignore-eos"], out := tmp_path / "out")

    def workers() -> list[int]:
        listed = subprocess.run(["pgrep", "-P", str(child.pid)], capture_output=True, text=True, check=False)
        return [int(one) for one in listed.stdout.split()]

    wait_until(workers, "a worker")
    time.sleep(1)
    pids = workers()
    os.kill(child.pid or 0, signal.SIGINT)
    child.join(60)
    err = Path(f"{out}.err").read_text()
    assert (child.exitcode, out.read_text()) == (130, "") and "Traceback" not in err, err
    wait_until(lambda: all(has_ended(pid) for pid in pids), "it ends with the command")
