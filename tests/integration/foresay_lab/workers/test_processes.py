"""Workers as real processes: what they write together is what one writes, also when one of them is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ForesayError, ModelNotFoundError
from foresay.records.recording import Recording
from foresay_lab.commands import sharing
from foresay_lab.data.items import PromptItem
from foresay_lab.replay.record import record
from foresay_lab.workers import processes, work
from foresay_lab.workers.pool import Pool
from foresay_lab.workers.processes import Processes
from helpers import tiny
from helpers.in_process import InProcess
from helpers.waiting import has_ended, wait_until

pytestmark = pytest.mark.slow
ITEMS = [PromptItem(f"a-{i}", f"number {i} and more", followups=("go on",) * (i % 3 == 0)) for i in range(15)]
COUNT = 20
"""Their turns."""
SAMPLED = SamplingParams(max_new_tokens=12, temperature=0.9, seed=4)


@pytest.fixture
def two(chat_folder: Path) -> Iterator[Any]:
    opened: list[Pool] = []

    def start(setup: dict[str, Any], count: int = 2) -> Pool:
        opened.append(Pool(Processes(setup, count, threads=1), count))
        return opened[-1]

    yield start
    for pool in opened:
        pool.close()


@pytest.fixture
def in_process(shell: tiny.Shell, monkeypatch: pytest.MonkeyPatch) -> tiny.Shell:
    monkeypatch.setattr(processes, "Processes", InProcess)
    return shell


def load(chat_folder: Path, **more: Any) -> dict[str, Any]:
    return {"target": str(chat_folder), "drafter": "none", "dtype": "fp32", "max_batch_size": 2, **more}


def lines(path: Path) -> dict[str, Any]:
    return {one.id: one for one in Recording.load(path).records}


def test_a_recording_of_two_is_one_s(chat_folder: Path, two: Any, tmp_path: Path) -> None:
    """Turns included; a file that is there goes on, also one that another kind of run began; a worker that is killed loses and
    doubles nothing."""
    alone, shared = tmp_path / "alone.jsonl", tmp_path / "shared.jsonl"
    record(foresay.load(**load(chat_folder)), ITEMS, alone, SAMPLED)
    seen = []
    pool = two(work.record_setup(load(chat_folder), ITEMS, SAMPLED, chat=True))
    work.record(pool, ITEMS, shared, on_progress=seen.append)
    assert lines(alone) == lines(shared)
    assert list(lines(shared)) == list(lines(alone)), "the order of the prompts, whichever worker was first"
    assert [name for name in lines(shared) if "/" not in name] == [item.id for item in ITEMS]
    assert (seen[0].done, seen[-1].done, seen[-1].total) == (0, COUNT, COUNT)

    whole = alone.read_text().splitlines(keepends=True)
    begun = tmp_path / "begun.jsonl"
    begun.write_text("".join(whole[:6]))
    seen.clear()
    work.record(pool, ITEMS, begun, on_progress=seen.append)
    assert lines(begun) == lines(alone) and seen[0].resumed == 5
    assert len(begun.read_text().splitlines()) == len(whole), "nothing is there twice"
    work.record(pool, ITEMS, begun)
    assert len(begun.read_text().splitlines()) == len(whole)

    victim, killed = pool._workers[0].handle.process.pid, tmp_path / "killed.jsonl"
    ends: list[int] = []

    def kill(progress: Any) -> None:
        if progress.done >= 2 and not ends:
            os.kill(victim, signal.SIGKILL)
            ends.append(progress.done)

    work.record(pool, ITEMS, killed, on_progress=kill)
    assert ends and lines(killed) == lines(alone) and len(killed.read_text().splitlines()) == len(whole)


def test_errors_of_tasks_and_loading(chat_folder: Path, tmp_path: Path) -> None:
    """A model that is not there, an empty prompt, a turn that does not fit: one error each, after which the job goes on."""
    settings = {"kind": "generate", "load": load(chat_folder), "params": SamplingParams(max_new_tokens=4), "raw": True}
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        Pool(InProcess({**settings, "load": {"target": "./nowhere"}}, 1), 1)
    pool = Pool(InProcess(settings, 1), 1)
    with pytest.raises(ForesayError, match="empty"):
        list(pool.run({0: ""}))
    assert len(list(pool.run({0: "a"}))) == 1
    long = [PromptItem("c-0", "short", followups=("long " * 4000,))]
    pool = Pool(
        InProcess(work.record_setup(load(chat_folder), long, SamplingParams(max_new_tokens=4), chat=True), 1), 1
    )
    with pytest.raises(ForesayError, match="c-0/2"):
        work.record(pool, long, tmp_path / "r.jsonl")


def test_kept_results_need_no_worker(
    in_process: tiny.Shell, chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording of the same name with other texts is another; other settings are refused, and a settings file is ignored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sharing, "pool", lambda *_: pytest.fail("workers were started"))
    (tmp_path / "foresay.toml").write_text('target = "nowhere"\n')
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    grid = ("replay", "a.jsonl", "--drafter", "suffix", "--json", "-o", "g.jsonl")
    found = []
    for count in (2, 3):
        (tmp_path / "a.jsonl").unlink(missing_ok=True)
        record(foresay.load(**load(chat_folder)), ITEMS[:count], tmp_path / "a.jsonl", params)
        found.append(in_process(*grid))
        assert found[-1] == in_process(*grid, "--workers", "2") and found[-1][0] == 0
    assert found[0] != found[1] and all(err == "" for _, _, err in found)
    assert len((tmp_path / "g.jsonl").read_text().splitlines()) == 3
    for more, named in ((("--batch-size", "4"), "batch_size"), (("--dtype", "fp32"), "dtype")):
        assert named in in_process.refused(*grid, *more)


def test_commands(chat_folder: Path, tmp_path: Path, in_process: tiny.Shell) -> None:
    """generate --lines and replay print what they print alone, in order; record too. Wrong uses are refused."""
    shell, prompts = in_process, "".join(f"prompt {i}\n" for i in range(7)).encode()
    asked = (
        "generate",
        "--lines",
        "--model",
        str(chat_folder),
        "-n",
        "9",
        "--dtype",
        "fp32",
        "-t",
        "0.8",
        "--seed",
        "3",
    )
    alone, shared = (shell(*asked, "--json", *more, stdin=prompts) for more in ((), ("--workers", "2")))
    assert (alone[0], shared[0], shared[2]) == (0, 0, ""), shared
    texts = [
        [(one["prompt"], one["text"]) for one in map(json.loads, out.splitlines())] for out in (alone[1], shared[1])
    ]
    assert texts[0] == texts[1] and [prompt for prompt, _ in texts[0]] == [f"prompt {i}" for i in range(7)]

    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    asking = ("--model", str(chat_folder), "--count", "6", "-n", "12", "--dtype", "fp32")
    assert shell("record", str(one), *asking)[0] == 0
    made = shell("record", str(other), *asking, "--workers", "2")
    assert made[0] == 0, made
    assert lines(one) == lines(other)
    other.unlink()  # replay another one: results are kept by the digest of a file
    assert shell("record", str(other), *asking, "--count", "4")[0] == 0

    grid = ("replay", str(one), str(other), "--drafter", "suffix", "--drafter", "prompt_lookup", "--json")
    kept = tmp_path / "grid.jsonl"
    found = [shell(*grid), shell(*grid, "--workers", "2", "-o", str(kept)), shell(*grid, "-o", str(kept))]
    assert [one[0] for one in found] == [0] * 3, found[1]
    results = [
        [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "stats")} for line in one[1].splitlines()]
        for one in found
    ]
    assert results[0] == results[1] == results[2] and len(results[0]) == 4
    assert found[1][1] == found[2][1], "what is kept is not done again"

    assert "--workers needs --lines" in shell.refused("generate", "a", "--model", str(chat_folder), "--workers", "2")
    assert "--ray needs --workers" in shell.refused(*asked, "--ray", stdin=prompts)


def test_a_terminal_gets_a_bar_and_standard_output_the_texts(chat_folder: Path, in_process: tiny.Shell) -> None:
    """A pipe reads the same with and without progress on a terminal."""
    prompts = "".join(f"prompt {i}\n" for i in range(4)).encode()
    asked = ("generate", "--lines", "--model", str(chat_folder), "-n", "9", "--dtype", "fp32")
    wanted = in_process(*asked, stdin=prompts)[1]
    code, out, shown = in_process.watched(*asked, "--workers", "2", stdin=prompts)
    assert (code, out) == (0, wanted), shown
    assert "tokens/s" in shown and "4/4" in shown


def test_an_interrupt_ends_the_workers(chat_folder: Path, tmp_path: Path) -> None:
    command = [*tiny.FORESAY, "record", str(tmp_path / "r.jsonl"), "--model", str(chat_folder), "--workers", "2"]
    child = subprocess.Popen(
        [*command, "-n", "4000", "--ignore-eos"],
        env=tiny.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )

    def workers() -> list[int]:
        listed = subprocess.run(
            ["pgrep", "-P", str(child.pid)], capture_output=True, text=True, check=False
        ).stdout.split()
        return [int(one) for one in listed]

    wait_until(lambda: len(workers()) == 2, "two workers")
    time.sleep(1)
    pids = workers()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130 and b"Traceback" not in err
    wait_until(lambda: all(has_ended(pid) for pid in pids), "the workers end with the command")


def test_a_number_of_workers_is_checked(chat_folder: Path, shell: tiny.Shell) -> None:
    asked = ("record", "x.jsonl", "--model", str(chat_folder), "--workers")
    assert "--threads -1" in shell.refused(*asked, "1", "--threads", "-1")
    assert "--workers 0 " in shell.refused(*asked, "0")
