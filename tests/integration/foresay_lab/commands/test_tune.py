"""`foresay tune`: the settings that it writes and others read, its time, and what Ctrl-C leaves."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foresay.generation.method import Method
from foresay.records.profile import Profile, Timing
from foresay.spec.settings_file import read_settings
from foresay_lab import tune as lab
from foresay_lab.bench import runners
from foresay_lab.candidates import Confirmed
from foresay_lab.replay.record import Recorder
from helpers import tiny

PROMPT = "hello world, hello"
NUM_PROMPTS = 5
Tune = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tune(shell: tiny.Shell, here: Path, which: list[str], monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Runs `foresay tune` with passes of a second, and so much more for each further column, in the profile and live."""
    honest, cost = runners.run_live, 0.0

    def run_live(generator: Any, asks: Any, params: Any) -> Any:
        live = honest(generator, asks, params)
        return dataclasses.replace(live, seconds=live.stats.num_passes + cost * live.stats.num_drafted)

    monkeypatch.setattr(runners, "run_live", run_live)

    def run(*args: str, columns: float = 9.0, stdin: bytes = b"") -> tuple[int, str, str]:
        nonlocal cost
        cost = columns

        def measured(target: Any, *, batches: Any, columns: Any = (), **_: Any) -> Profile:
            timings = [Timing(b, c, 40, 1.0 + cost * (c - 1), 1.0, 1.0) for b in batches for c in columns]
            return Profile("tiny", "float32", {}, tuple(timings), ((8, 0.0), (256, 0.0)))

        monkeypatch.setattr(lab, "measure", measured)
        given = [*args, *([] if "--model" in args or "own.toml" in args else which)]
        given += [] if "--recording" in args or "--count" in args else ["--prompts", "p.jsonl"]
        return shell(
            "tune", *given, *([] if "--length" in args else ["--drafter", "suffix", "--length", "4"]), stdin=stdin
        )

    return run


def refused(done: tuple[int, str, str], message: str) -> None:
    code, out, err = done
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_it_writes_settings_that_are_picked_up(
    tune: Tune, shell: tiny.Shell, which: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = lab.Tuner.confirm

    def fast(self: Any, candidates: Any, **more: Any) -> Any:
        honest(self, candidates[:1], repeats=1, count=1)
        self.tuning.confirmed = [Confirmed(one, 100.0 - 50 * one.is_default, 2.0, 1.9, 2.1) for one in candidates]
        return self.tuning.confirmed

    monkeypatch.setattr(lab.Tuner, "confirm", fast)
    code, out, err = tune("-n", "16", columns=0.0)
    assert (code, err) == (0, "") and "suffix, 4: 2.00x plain decoding at batch 1." in out
    assert out.endswith("wrote foresay.toml; use it: foresay serve foresay.toml\n")
    found, text = read_settings("foresay.toml"), Path("foresay.toml").read_text()
    assert (found.target, found.drafter, found.length, found.dtype) == (str(folder), "suffix", 4, "float32")
    assert found.max_batch_size == 1 and "speed_up = 2.0" in text and "prompts = " in text
    code, out, err = shell("generate", "-n", "8", "--json", PROMPT)
    assert (code, err) == (0, f"foresay: settings from foresay.toml (target {folder}, drafter suffix, length 4)\n")
    [plain] = shell.objects("generate", *which, "--drafter", "none", "-n", "8", "--json", PROMPT)
    assert json.loads(out)["token_ids"] == plain["token_ids"] and json.loads(out)["stats"]["num_drafted"] > 0
    shell.out("generate", *which, "-n", "8", PROMPT)  # a model that is named needs no settings
    refused(tune(), "--output foresay.toml exists")
    refused(tune("-o", "nowhere/foresay.toml"), "the folder 'nowhere'")
    refused(tune("--force", "--recording", "r.jsonl"), "r.jsonl")
    assert read_settings("foresay.toml") == found


def test_where_nothing_pays_and_in_another_folder(
    tune: Tune, shell: tiny.Shell, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decoding is written; the model is found from where the file lies."""
    tiny.save(here / "m")
    (here / "out").mkdir()
    monkeypatch.setattr("foresay_lab.commands.tune.own_methods", lambda *_, **__: [Method("suffix", "12")])
    code, out, _ = tune("--model", "m", "-n", "8", "-o", "out/foresay.toml")
    assert code == 0 and "Plain decoding is fastest: no drafter gains anything here." in out
    found = read_settings("out/foresay.toml")
    assert (found.target, found.drafter) == (os.path.join("..", "m"), "none") and not Path("foresay.toml").exists()
    assert tune("--model", "m", "-n", "8")[0] == 0 and read_settings("foresay.toml").target == "m"
    monkeypatch.chdir(here / "out")
    assert json.loads(shell("generate", "-n", "3", "--json", "x")[1])["stats"]["num_drafted"] == 0


@pytest.mark.parametrize(("speed_up", "answer"), [(1.5, "suffix, 4: 1.50x plain"), (0.99, "costs nothing (0.99x)")])
def test_a_default_that_is_best_needs_no_file(
    tune: Tune, folder: Path, monkeypatch: pytest.MonkeyPatch, speed_up: float, answer: str
) -> None:
    """Unless it is named, replaces an earlier one, or has options for loading, which the model's name alone would lose."""
    named = ["--model", str(folder), "-n", "16"]

    def confirm(self: Any, candidates: Any) -> None:
        self.tuning.confirmed = [Confirmed(one, 100.0, speed_up, speed_up, speed_up) for one in candidates]

    monkeypatch.setattr(lab.Tuner, "confirm", confirm)
    monkeypatch.setattr("foresay_lab.commands.tune.own_methods", lambda *_, **__: [Method("suffix", "4")])
    code, out, _ = tune(*named)
    assert code == 0 and not Path("foresay.toml").exists() and answer in out
    kept = f"Keep the default: foresay serve {folder} (it needs no settings file; --output FILE writes one)\n"
    assert out.endswith(kept)
    assert tune(*named, "-o", "here.toml")[0] == 0 and read_settings("here.toml").drafter == "suffix"
    assert tune(*named, "--dtype", "fp32")[0] == 0 and read_settings("foresay.toml").dtype == "float32"
    Path("foresay.toml").write_text('target = "old"\n')
    assert tune(*named, "--force")[0] == 0 and read_settings("foresay.toml").target == str(folder), "not the old one"


def test_a_prediction_that_is_wrong_is_marked(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live runs take twice the time of drafting that the profile has."""
    _, out, _ = tune("-n", "16", columns=0.5)
    assert "x (rough)" not in out
    honest = runners.run_live

    def slower(generator: Any, asks: Any, params: Any) -> Any:
        live = honest(generator, asks, params)
        return dataclasses.replace(live, seconds=live.seconds * (2 if generator.drafter_name == "suffix" else 1))

    monkeypatch.setattr(runners, "run_live", slower)
    assert "x (rough)" in tune("-n", "16", "--force", columns=0.5)[1]


def test_the_time_is_a_bound(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any time one round of outputs is recorded and the default alone predicted and run once."""
    code, out, _ = tune("-n", "12", "--minutes", "0.0001", "--length", "2", "--length", "4", "--drafter", "suffix")
    assert code == 0 and "not tried: 2 candidates, for lack of time; --minutes gives more\n" in out
    assert len(re.findall(r"^suffix, throughput\S* .* 0\.\d\dx", out, re.MULTILINE)) == 1
    assert tune("--minutes", "0")[0] == 2


@pytest.mark.parametrize(
    ("default", "args"),
    [
        ("suffix", "--length 4"),
        ("suffix", "--length throughput"),
        ("hybrid(suffix, self(1))", "--drafter suffix --length 4"),
    ],
    ids=["another length", "the same length", "another drafter"],
)
def test_the_model_s_own_default_is_run(tune: Tune, monkeypatch: pytest.MonkeyPatch, default: str, args: str) -> None:
    """At its own length, where the replay finds nothing that pays, and whatever the candidates are called."""
    monkeypatch.setattr("foresay.generation.load.default_drafter", lambda *_: default)
    live = re.compile(rf"^{re.escape(default)}, throughput[^:\s]* .*\dx( \(rough\))?  .*\d-\d", re.MULTILINE)
    _, out, _ = tune("-n", "12", "--force", *args.split())
    assert len(live.findall(out)) == 1, out
    monkeypatch.setattr("foresay_lab.commands.tune.own_methods", lambda *_, **__: [])
    assert not live.search(tune("-n", "12", "--force", *args.split())[1]), "what does not pay is not run otherwise"


def test_with_a_latency(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that the replay ranks first may lose live: then the other's batch size is written."""
    code, _, err = tune("-n", "12", "--latency", "1")
    message = r"foresay: --latency 1 cannot be met: the fastest candidate takes 1000\.\d ms per token\n"
    assert code == 2 and re.fullmatch(message, err)
    assert tune("-n", "12", "--latency", "1500", "--batch-size", "1,2")[0] == 0
    assert read_settings("foresay.toml").max_batch_size == 2, "the larger batch writes more, and is as quick"

    def confirm(self: Any, candidates: Any, **more: Any) -> Any:
        assert candidates[0].batch_size == 2 and candidates[-1].batch_size == 1
        self.tuning.confirmed = [Confirmed(candidates[-1], 100.0, 2.0, 1.9, 2.1)]

    monkeypatch.setattr(lab.Tuner, "confirm", confirm)
    assert tune("-n", "12", "--force", "--latency", "5000", "--batch-size", "1,2", columns=0.0)[0] == 0
    assert read_settings("foresay.toml").max_batch_size == 1


def test_from_a_recording(tune: Tune, shell: tiny.Shell, here: Path, which: list[str]) -> None:
    shell.out("record", "r.jsonl", *which, "--prompts", "p.jsonl", "-n", "24")
    Path("own.toml").write_text(f'target = "{which[1]}"\ndtype = "fp32"\nactivations = "float32"\n')
    for settings, given in (
        (Path("foresay.toml"), ["-o", "foresay.toml"]),
        (Path("rounded.toml"), ["own.toml", "-o", "rounded.toml"]),
    ):
        assert tune(*given, "--recording", "r.jsonl")[0] == 0
        assert 'prompts = "r.jsonl"' in settings.read_text()
        assert ('activations = "float32"' in settings.read_text()) == ("own.toml" in given)
    contradicts = "contradict: a recording has its own prompts"
    for more, message in (
        (["--count", "3"], contradicts),
        (["-n", "20"], contradicts),
        (["--model", str(tiny.save(here / "other"))], "--recording is of "),
        (["--batch-size", "1,2"], "--batch-size 1,2 without --latency"),
    ):
        refused(tune(*more, "--recording", "r.jsonl", "-o", "x"), message)


def test_an_interrupted_run_goes_on_with_its_outputs(
    tune: Tune, here: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run with the same prompts and model records the rest; a complete run removes the file."""
    recorded: list[object] = []
    submit = Recorder.submit
    monkeypatch.setattr(Recorder, "submit", lambda self, *args: (recorded.append(args), submit(self, *args)))

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def performed(code: int, tokens: int = 12) -> int:
        """Number of outputs that a run records."""
        recorded.clear()
        assert tune("--force", "-n", str(tokens))[0] == code
        return len(recorded)

    with monkeypatch.context() as patch:
        patch.setattr(lab.Tuner, "search", interrupted)
        assert performed(130) == NUM_PROMPTS
        assert len(list(here.rglob("tune/*.jsonl"))) == 1 and performed(130) == 0
        assert performed(130, 11) == NUM_PROMPTS, "outputs of another length"
        later = folder / "later.json"
        later.write_text("{}")
        assert performed(130) == NUM_PROMPTS, "outputs of another model with this name"
        later.unlink()
    assert performed(0) == 0, "the unchanged folder"
    assert len(list(here.rglob("tune/*.jsonl"))) == 2, "those of the other length and the other model are left"
    assert performed(0) == NUM_PROMPTS


@pytest.mark.parametrize(("runs", "answer"), [(1, "nothing was written"), (4, "wrote foresay.toml")])
def test_ctrl_c_during_live_runs_leaves_an_answer(
    tune: Tune, here: Path, monkeypatch: pytest.MonkeyPatch, runs: int, answer: str
) -> None:
    """The best of what was measured until then; the outputs that were recorded stay for the next run.

    The first run of the candidate, and of the default, only warms up.
    """
    honest, done = runners.run_live, list[str]()

    def watched(generator: Any, asks: Any, params: Any) -> Any:
        done.append(generator.drafter_name)
        if sum(one != "none" for one in done) > runs:
            raise KeyboardInterrupt
        live = honest(generator, asks, params)
        return dataclasses.replace(live, seconds=float(live.stats.num_passes))

    monkeypatch.setattr(runners, "run_live", watched)
    code, out, _ = tune("-n", "12", "--minutes", "600", "-o", "foresay.toml", columns=0.0)
    assert code == 130 and answer in out
    assert Path("foresay.toml").exists() == (runs > 1)
    assert list((here / "cache" / "tune").glob("*.jsonl"))
