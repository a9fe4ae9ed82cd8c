"""The lab's commands in use: tables, JSON, exit codes, wrong input, and files after Ctrl-C."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import foresay
from foresay.engine.stats import Stats
from foresay.generation.method import PLAIN
from foresay.lengths import ThroughputLength
from foresay.records.profile import Profile, Timing
from foresay.records.recording import Recording
from foresay.records.results import Results
from foresay.spec.settings_file import read_settings
from foresay_lab.commands import tune_estimate
from foresay_lab.commands.tune_estimate import Estimate
from foresay_lab.measure import roofline as floors
from foresay_lab.replay import record as recording
from helpers import tiny
from helpers.small_alias import share_kernels

ESTIMATE = r"foresay: tuning takes about \d+ (s|min): (\w[\w ]* \d+ (s|min)(, )?)+\n"
"""Line that `foresay tune` prints before it starts."""
TUNE = ["tune", "--prompts", "p.jsonl", "--drafter", "suffix"]
TEXTS = ["hello world, hello", "one two three one two", "abc abc abc", "hello", "x = 1\ny = 2"]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "_BLOCK_BYTES", 1 << 16)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with prompts, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORESAY_CACHE", str(share_kernels(tmp_path / "cache")))
    lines = [json.dumps({"id": f"t{i}", "prompt": text, "category": "ab"[i % 2]}) for i, text in enumerate(TEXTS)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def which(folder: Path) -> list[str]:
    return ["--model", str(folder), "--dtype", "fp32"]


@pytest.fixture(scope="session")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of the tiny model, made by the command."""
    path = tmp_path_factory.mktemp("made") / "r.jsonl"
    prompts = path.with_name("p.txt")
    prompts.write_text("hello world, hello\none two three one two\nabc abc abc\n")
    args = ["record", str(path), "--model", str(folder), "--dtype", "fp32", "--prompts", str(prompts), "-n", "24"]
    assert tiny.printed(*args) == f"{path}: 3 outputs, 72 tokens\n"
    return path


def tables(out: str) -> dict[str, list[str]]:
    """Rows of a printed table by their first word."""
    return {line.split("  ")[0].strip(): line.split() for line in out.splitlines() if line.strip()}


# -- record ------------------------------------------------------------------------------------------------------------


def test_record(shell: tiny.Shell, here: Path, which: list[str]) -> None:
    command = ["record", "r.jsonl", *which, "--prompts", "p.jsonl", "-n", "10"]
    assert shell(*command) == (0, "r.jsonl: 5 outputs, 50 tokens\n", "")
    recording = Recording.load("r.jsonl")
    assert {r.id: r.category for r in recording.records} == {f"t{i}": "ab"[i % 2] for i in range(5)}
    written = json.loads(shell("generate", *which, "-n", "10", "--json", TEXTS[0])[1])["token_ids"]
    assert next(list(r.output) for r in recording.records if r.id == "t0") == written
    assert recording.provenance["versions"]["foresay"] == foresay.__version__
    lines = Path("r.jsonl").read_text().splitlines(keepends=True)
    Path("r.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    assert shell(*command) == (0, "r.jsonl: 5 outputs, 50 tokens, 2 of them from an earlier run\n", "")
    assert {r.id: r.output for r in Recording.load("r.jsonl").records} == {r.id: r.output for r in recording.records}


def test_record_sampled_with_logprobs(shell: tiny.Shell, here: Path, which: list[str]) -> None:
    command = ["record", "r.jsonl", *which, "--prompts", "p.jsonl", "--category", "b", "-n", "6", "-t", "0.8"]
    assert shell(*command, "--seed", "3", "--logprobs", "2", "--batch-size", "1")[0] == 0
    one = Recording.load("r.jsonl")
    assert len(one.records) == 2 and not one.greedy and one.params["temperature"] == 0.8
    assert all(r.token_probs and r.logprobs and r.top and r.seed is not None for r in one.records)


def test_record_refuses(shell: tiny.Shell, here: Path, which: list[str], folder: Path) -> None:
    base = ["record", "r.jsonl", *which, "--prompts", "p.jsonl"]
    assert shell(*base, "-n", "4")[0] == 0
    before = Path("r.jsonl").read_bytes()
    assert "r.jsonl was started with params.max_new_tokens=4, and this run has 5" in shell.refused(*base, "-n", "5")
    assert "was started with settings.prompts=" in shell.refused(*base, "-n", "4", "--count", "2")
    assert "--seed has no effect at temperature 0" in shell.refused(*base, "--seed", "1")
    assert Path("r.jsonl").read_bytes() == before
    other = ["record", "s.jsonl", *which]
    assert "no such file" in shell.refused(*other, "--prompts", "none.jsonl").lower() or "none.jsonl" in shell.refused(
        *other, "--prompts", "none.jsonl"
    )
    Path("long.txt").write_text("x" * 5000 + "\n")
    message = shell.refused(*other, "--prompts", "long.txt")
    assert message.startswith("prompt 'long-1': the prompt has 5000 tokens; the model's context is 4096")
    Path("mine.json").write_text('{"my": "file"}')
    assert "is unchanged" in shell.refused("record", "mine.json", *which, "--prompts", "p.jsonl")
    assert Path("mine.json").read_text() == '{"my": "file"}'


@pytest.mark.slow
def test_ctrl_c_leaves_a_recording_that_goes_on(folder: Path, here: Path, shell: tiny.Shell, which: list[str]) -> None:
    command = ["record", "r.jsonl", *which, "--prompts", "p.jsonl", "-n", "400", "--batch-size", "1"]
    process = subprocess.Popen(
        [*tiny.FORESAY, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=tiny.environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    path = here / "r.jsonl"
    until = time.monotonic() + 60
    while (not path.exists() or path.read_bytes().count(b"\n") < 3) and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")
    kept = path.read_text().count("\n") - 1
    assert 2 <= kept < 5
    assert shell(*command) == (0, f"r.jsonl: 5 outputs, 2000 tokens, {kept} of them from an earlier run\n", "")


# -- replay ------------------------------------------------------------------------------------------------------------


def test_replay(shell: tiny.Shell, made: Path) -> None:
    code, out, err = shell("replay", str(made), "--drafter", "suffix", "--drafter", "max_gram", "--length", "4")
    assert (code, err) == (0, "")
    rows = tables(out)
    assert "suffix, 4" in rows and "max_gram, 4" in rows
    assert out.splitlines()[-1].startswith("3 outputs, 72 tokens of ")
    assert out.rstrip().endswith("exact: live decoding takes the same steps")
    code, out, _ = shell("replay", str(made))
    assert code == 0 and all(f"{name}, " in out for name in ("suffix", "max_gram", "prompt_lookup", "ngram_store"))


def test_replay_as_json_is_what_generate_does(shell: tiny.Shell, made: Path, folder: Path) -> None:
    """N-gram drafters, and drafters for which the model is loaded; live decoding has the same counts."""
    args = ["--drafter", "max_gram", "--drafter", "self(1)", "--drafter", f"model({folder})", "--length", "3"]
    code, out, err = shell("replay", str(made), "--json", "--dtype", "fp32", *args)
    lines = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "") and [line["method"] for line in lines] == [
        *("max_gram, 3", "self(1), 3", f"model({folder}), 3")
    ]
    for line, drafter in zip(lines, ("max_gram", "self(1)", f"model({folder})"), strict=True):
        generator = foresay.load(folder, drafter=drafter, length=3, dtype="fp32", max_batch_size=1)
        total = [
            one.stats
            for one in generator.generate([list(r.prompt) for r in Recording.load(made).records], max_new_tokens=24)
        ]
        stats = line["stats"]
        assert stats["num_accepted"] == sum(s.num_accepted for s in total)
        assert stats["num_drafted"] == sum(s.num_drafted for s in total) and stats["num_tokens"] == 72
        assert line["estimate"] is False and line["tokens_per_pass"][0] == pytest.approx(72 / stats["num_passes"])
        assert line["verification_rate"] == pytest.approx(stats["num_passes"] / 72)
        assert line["discard_rate"] == pytest.approx((stats["num_drafted"] - stats["num_accepted"]) / 72)
    assert lines[2]["draft_utilization"] == 1


def test_a_cascades_matrix_is_its_length_live_and_in_a_replay(shell: tiny.Shell, made: Path, folder: Path) -> None:
    """Without a length both draft the 6 tokens of the first row, where the n-gram drafter finds its 3, with the same steps."""
    cascade = f"cascade(model={folder}, self=1, max_gram; k=[[1, 2, 3], [0, 1, 1], [0, 0, 1]])"
    code, out, err = shell("replay", str(made), "--json", "--dtype", "fp32", "--drafter", cascade)
    assert (code, err) == (0, "")
    line = json.loads(out)
    live = foresay.load(folder, drafter=cascade, dtype="fp32", max_batch_size=1)
    prompts = [list(record.prompt) for record in Recording.load(made).records]
    steps = [step for one in live.generate(prompts, max_new_tokens=24) for step in one.steps]
    assert line["method"] == f"{cascade}, 6" and max(step.num_drafted for step in steps) == 6
    counts = Stats.of(steps)
    for name in ("num_passes", "num_drafted", "num_accepted"):
        assert line["stats"][name] == getattr(counts, name), name
    assert 0 < counts.num_accepted < counts.num_drafted
    adaptive = foresay.load(folder, drafter=cascade, length="throughput", dtype="fp32")
    assert isinstance(adaptive.policy, ThroughputLength), "a length that is given is the length"


def test_replaying_a_sampled_recording_is_an_estimate(shell: tiny.Shell, here: Path, which: list[str]) -> None:
    assert shell("record", "r.jsonl", *which, "--prompts", "p.jsonl", "-n", "8", "-t", "1", "--seed", "1")[0] == 0
    code, out, _ = shell("replay", "r.jsonl", "--drafter", "suffix")
    assert code == 0 and out.rstrip().endswith("an estimate, with 95% intervals")
    [line] = map(json.loads, shell("replay", "r.jsonl", "--drafter", "suffix", "--json")[1].splitlines())
    assert line["estimate"] is True and line["tokens_per_pass"][1] <= line["tokens_per_pass"][0]


def test_one_output_has_no_interval(shell: tiny.Shell, here: Path) -> None:
    """JSON knows no infinity."""

    def strict(name: str) -> Any:
        raise AssertionError(name)

    Path("c.json").write_text('{"1_2_1_2": "1_2_1_2_1_2_1_2_1_2"}')
    out = shell("replay", "c.json", "--drafter", "max_gram", "--json")[1]
    line = json.loads(out, parse_constant=strict)
    assert line["tokens_per_pass"][1:] == [None, None] and line["tokens_per_pass"][0] > 1
    assert shell("replay", "c.json", "--drafter", "max_gram")[0] == 0


def test_replaying_other_formats(shell: tiny.Shell, here: Path, which: list[str]) -> None:
    Path("log.txt").write_text("tensor([[10, 11, 10, 11,\n   10, 11]])\ntensor([[7, 8, 9]])\n")
    command = ["replay", "log.txt", *which, "--prompts", "p.jsonl", "--drafter", "prompt_lookup(min_ngram=1)"]
    code, out, err = shell(*command)
    assert code == 0 and "2 outputs, 9 tokens of log.txt" in out
    assert "foresay: log.txt: 2 outputs and 5 prompts; the first prompts are used\n" in err
    Path("cache.json").write_text('{"5_6": "0_3_4_3_4_3_4", "7_8": "0_3_4"}')
    code, out, _ = shell("replay", "cache.json", "--drafter", "max_gram", "--length", "2", "--json")
    assert code == 0 and json.loads(out)["stats"]["num_tokens"] == 8


def printed_log(made: Path) -> str:
    """A recording's outputs as PyTorch prints them, in the order of their prompts."""
    return "".join(f"tensor([{list(one.output)}])\n" for one in Recording.load(made).records)


def test_a_log_with_its_own_prompts_is_exact(shell: tiny.Shell, made: Path, here: Path, which: list[str]) -> None:
    Path("log.txt").write_text(printed_log(made))
    code, out, err = shell(
        "replay", "log.txt", *which, "--prompts", str(made.with_name("p.txt")), "--drafter", "suffix"
    )
    assert (code, err) == (0, "") and "; exact: live decoding takes the same steps" in out


@pytest.mark.parametrize("order", [(1, 2, 0), (2, 1, 0)])
def test_prompts_in_another_order_are_noticed(
    shell: tiny.Shell, made: Path, here: Path, which: list[str], order: tuple[int, ...]
) -> None:
    Path("log.txt").write_text(printed_log(made))
    prompts = made.with_name("p.txt").read_text().splitlines(keepends=True)
    Path("p.txt").write_text("".join(prompts[i] for i in order))
    command = ["replay", "log.txt", *which, "--prompts", "p.txt", "--drafter", "suffix"]
    code, out, err = shell(*command)
    assert code == 0 and err.endswith(
        f"prompt 1 begins like output {order[0] + 1} of the log: the prompts are in another order\n"
    )
    assert "exact: live" not in out and "which is doubtful" in out
    assert "in another order" in json.loads(shell(*command, "--json")[1])["doubt"]


def test_prompts_in_another_format_are_noticed(shell: tiny.Shell, made: Path, here: Path, tmp_path: Path) -> None:
    """The log was written without a chat template, and the prompts go through one."""
    Path("log.txt").write_text(printed_log(made))
    chats = tiny.save(tmp_path / "chats", chat=True)
    command = ["replay", "log.txt", "--model", str(chats), "--dtype", "fp32", "--prompts", str(made.with_name("p.txt"))]
    code, out, err = shell(*command, "--drafter", "suffix")
    assert code == 0 and "differ from the log" in err and "which is doubtful" in out
    code, out, err = shell(*command, "--drafter", "suffix", "--raw")
    assert (code, err) == (0, "") and "exact: live decoding" in out


def test_replay_with_a_profile_and_costs(shell: tiny.Shell, made: Path, here: Path) -> None:
    timings = tuple(Timing(1, c, 40, 1.0, 1.0, 1.0) for c in (1, 2, 9))
    Profile("tiny", "float32", {}, timings, ((8, 0.0), (256, 0.0))).save("p.json")
    Path("costs.json").write_text('{"big": 4}')
    args = ["--drafter", "suffix", "--length", "4", "--length", "throughput", "--profile", "p.json"]
    code, out, _ = shell("replay", str(made), *args, "--costs", "costs.json=big", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [line["method"] for line in lines] == ["suffix, 4", "suffix, throughput"]
    for line in lines:
        passes = line["stats"]["num_passes"]
        assert line["swi"] == pytest.approx(72 / passes)
        assert line["tokens_per_s"] == pytest.approx(72 / passes, rel=0.02), "a second a pass"
    code, out, _ = shell("replay", str(made), *args, "--costs", "costs.json=big")
    assert code == 0 and "SWI" in out.splitlines()[0] + out.splitlines()[1]


def test_costs_by_the_sources_names(shell: tiny.Shell, made: Path, folder: Path, here: Path) -> None:
    """CS-Drafting's configurations name hub ids, and its tables the last part of them."""
    Path("google").mkdir()
    Path("google/flan-t5-base").symlink_to(folder)
    args = ["--dtype", "fp32", "--drafter", "model(google/flan-t5-base)", "--length", "3", "--json"]
    code, out, err = shell("replay", str(made), *args, "--costs", "model_parameters=google/flan-t5-xxl")
    assert (code, err) == (0, "")
    line = json.loads(out)
    passes, drafted = line["stats"]["num_passes"], line["stats"]["num_drafted"]
    assert line["swi"] == pytest.approx(72 * 11300 / (passes * 11300 + drafted * 220))


def test_replay_refuses(shell: tiny.Shell, made: Path, here: Path) -> None:
    assert shell.refused("replay", "none.jsonl").startswith("RECORDING none.jsonl ")
    assert "--drafter sufix" in shell.refused("replay", str(made), "--drafter", "sufix")
    assert "replay it with a profile of the target" in shell.refused("replay", str(made), "--length", "throughput")
    assert shell.refused("replay", str(made), "--costs", "previous_work").startswith("--costs previous_work ")
    assert "--drafter names nothing to compare" in shell.refused("replay", str(made), "--drafter", "none")
    refused = ["replay", str(made), "--drafter", "suffix", "--costs", "previous_work=gpt"]
    assert "gpt is unknown" in shell.refused(*refused)
    assert "--prompts is for a log of tensors" in shell.refused("replay", str(made), "--prompts", "p.jsonl")
    assert "--weights applies to the model" in shell.refused("replay", str(made), "--weights", "int8")
    Path("x.json").write_text("hello")
    assert "RECORDING x.json is not a recording" in shell.refused("replay", "x.json")
    assert "--profile x.json is not a profile" in shell.refused("replay", str(made), "--profile", "x.json")
    lines = made.read_text().splitlines()
    Path("bad.jsonl").write_text("\n".join([*lines[:2], '{"id": 3}', *lines[2:]]) + "\n")
    assert shell.refused("replay", "bad.jsonl").startswith("bad.jsonl, line 3: ")


# -- profile -------------------------------------------------------------------------------------------------------------


def test_profile(shell: tiny.Shell, here: Path, which: list[str]) -> None:
    small = ["--batch-size", "1,2", "--length", "0,2", "--context", "16,32", "--repeats", "2"]
    code, out, err = shell("profile", *which, *small, "-o", "mine.json")
    assert (code, err) == (0, "")
    assert "quartiles" in out and "floor" in out and "prefill, in tokens: 8 in " in out
    assert len([line for line in out.splitlines() if line.split()[:1] in (["16"], ["32"])]) == 8
    kept = Profile.load("mine.json")
    assert {(t.batch, t.columns, t.context) for t in kept.timings} == {
        (b, c, n) for b in (1, 2) for c in (1, 3) for n in (16, 32)
    }
    code, out, _ = shell("profile", *which, *small, "--json")
    assert code == 0 and json.loads(out) == json.loads(json.dumps(json.loads(out))), "one JSON object"
    assert [t["seconds"] for t in json.loads(out)["timings"]] == [t.seconds for t in kept.timings], "kept from before"
    fresh = json.loads(shell("profile", *which, *small, "--json", "--fresh")[1])
    assert [t["seconds"] for t in fresh["timings"]] != [t.seconds for t in kept.timings]
    assert len(list((here / "cache" / "profiles").iterdir())) == 1


def test_profile_refuses(shell: tiny.Shell, here: Path, which: list[str]) -> None:
    assert shell.refused("profile", *which, "--batch-size", "1,x").startswith("--batch-size 1,x ")
    assert shell.refused("profile", *which, "--length", "3,-1").startswith("--length 3,-1 ")
    assert "5000" in shell.refused("profile", *which, "--context", "5000", "--batch-size", "1")
    assert not (here / "cache" / "profiles").exists()


# -- bench ---------------------------------------------------------------------------------------------------------------


def test_bench(shell: tiny.Shell, here: Path, which: list[str]) -> None:
    command = ["bench", "b.jsonl", *which, "--prompts", "p.jsonl", "--count", "3", "-n", "8", "--repeats", "1"]
    command += ["--drafter", "suffix", "--drafter", "max_gram", "--length", "4"]
    code, out, err = shell(*command)
    assert (code, err) == (0, "")
    rows = tables(out)
    assert {PLAIN, "suffix, 4", "max_gram, 4"} <= set(rows) and "1x" in rows[PLAIN]
    assert rows["suffix, 4"][-1] == "yes" and rows[PLAIN][-1] != "yes"
    results = Results.load("b.jsonl")
    assert {run.cell.dataset for run in results.runs} == {"p.jsonl"} and all(run.tokens == 24 for run in results.runs)
    before = Path("b.jsonl").read_bytes()
    assert shell(*command)[0] == 0 and Path("b.jsonl").read_bytes() == before, "everything is there"
    assert "was started with settings." in shell.refused(*command, "--ignore-eos")


def test_bench_also_writes_the_report(shell: tiny.Shell, here: Path, which: list[str]) -> None:
    """A folder with something else is refused before anything is loaded."""
    command = ["bench", "b.jsonl", *which, "--prompts", "p.jsonl", "--count", "2", "-n", "6", "--repeats", "1"]
    command += ["--drafter", "suffix", "--length", "2", "--length", "4", "--report", "drawn"]
    code, out, _ = shell(*command)
    assert code == 0 and out.endswith(f"wrote {Path('drawn/report.html')}\n")
    assert "Tokens per pass by draft length" in Path("drawn/report.html").read_text()
    Path("other").mkdir()
    Path("other/notes").touch()
    assert "contains something else" in shell.refused(*command[:-1], "other")


def test_bench_says_what_failed(
    shell: tiny.Shell, here: Path, which: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from foresay_lab.bench.runners import MethodRunner

    honest = MethodRunner.run

    def failing(self: MethodRunner, block: Any, asks: Any) -> Any:
        if self.name == "suffix, 4":
            raise RuntimeError("no memory")
        out = honest(self, block, asks)
        if self.name == "max_gram, 4":
            out.outputs[0][-1] += 1
        return out

    base = ["bench", "b.jsonl", *which, "--prompts", "p.jsonl", "-n", "6", "--repeats", "1", "--length", "4"]
    monkeypatch.setattr(MethodRunner, "run", failing)
    code, out, _ = shell(*base, "--drafter", "suffix", "--drafter", "prompt_lookup")
    assert code == 0 and "failed: suffix, 4 on p.jsonl, batch 1, greedy: RuntimeError: no memory\n" in out
    assert shell(*["bench", "c.jsonl", *base[2:]], "--drafter", "suffix")[0] == 1, "nothing could be run"
    code, out, _ = shell(*["bench", "d.jsonl", *base[2:]], "--drafter", "max_gram")
    assert code == 1 and "DIFFERENT OUTPUT: max_gram, 4 on p.jsonl" in out


# -- tune ----------------------------------------------------------------------------------------------------------------


def profiled(monkeypatch: pytest.MonkeyPatch, columns: float) -> None:
    """Give the tuner these pass times; live runs are real."""

    def measured(target: Any, *, batches: Any, columns: Any = (), **_: Any) -> Profile:
        timings = [Timing(b, c, 40, 1.0 + cost * (c - 1), 1.0, 1.0) for b in batches for c in columns]
        return Profile("tiny", "float32", {}, tuple(timings), ((8, 0.0), (256, 0.0)))

    cost = columns
    monkeypatch.setattr("foresay_lab.tune.measure", measured)


def test_tune_writes_settings_that_are_picked_up(
    shell: tiny.Shell, here: Path, which: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foresay_lab import tune as lab

    profiled(monkeypatch, 0.0)
    honest = lab.Tuner.confirm

    def fast(self: Any, candidates: Any, **more: Any) -> Any:
        honest(self, candidates[:1], repeats=1, count=1)
        self.tuning.confirmed = [lab.Confirmed(one, 100.0 - i, 2.0, 1.9, 2.1) for i, one in enumerate(candidates)]
        return self.tuning.confirmed

    monkeypatch.setattr(lab.Tuner, "confirm", fast)
    command = [*TUNE, *which, "-n", "16", "--length", "4", "--length", "6"]
    code, out, err = shell(*command)
    assert code == 0 and re.match(ESTIMATE, err), err
    assert "2.00x plain decoding at batch 1." in out and out.endswith("wrote foresay.toml\n")
    said = read_settings("foresay.toml")
    assert said.target == str(folder) and said.drafter == "suffix" and said.length in (4, 6)
    assert (said.max_batch_size, said.dtype) == (1, "float32")
    assert "speed_up = 2.0" in Path("foresay.toml").read_text() and "prompts = " in Path("foresay.toml").read_text()
    code, out, err = shell("generate", "-n", "8", "--json", TEXTS[0])
    assert (
        code == 0
        and err == f"foresay: settings from foresay.toml (target {folder}, drafter suffix, length {said.length})\n"
    )
    plain = json.loads(shell("generate", *which, "--drafter", "none", "-n", "8", "--json", TEXTS[0])[1])
    assert json.loads(out)["token_ids"] == plain["token_ids"] and json.loads(out)["stats"]["num_drafted"] > 0
    assert shell("generate", *which, "-n", "8", TEXTS[0])[2] == "", "a model that is named needs no settings"
    assert "--output foresay.toml exists" in shell.refused(*command)
    assert "the folder 'nowhere'" in shell.refused(*command, "-o", "nowhere/foresay.toml")
    assert shell(*command, "--force", "--recording", "r.jsonl")[0] == 2, "no such recording"
    assert read_settings("foresay.toml") == said


def test_tune_where_nothing_pays(
    shell: tiny.Shell, here: Path, which: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profiled(monkeypatch, 9.0)
    command = [*TUNE, *which, "-n", "12", "--length", "4", "-o", "t.toml"]
    code, out, err = shell(*command)
    assert code == 0 and re.match(ESTIMATE, err) and "Plain decoding is fastest: no drafter gains anything here." in out
    assert read_settings("t.toml").drafter == "none" and not Path("foresay.toml").exists()
    assert json.loads(shell("generate", "--model", "t.toml", "-n", "4", "--json", "x")[1])["stats"]["num_drafted"] == 0


def test_settings_in_another_folder_find_their_model(
    shell: tiny.Shell, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiled(monkeypatch, 9.0)
    tiny.save(here / "m")
    (here / "out").mkdir()
    command = ["tune", "--model", "m", "--prompts", "p.jsonl", "-n", "8", "--drafter", "suffix", "--length", "4"]
    assert shell(*command, "-o", "out/foresay.toml")[0] == 0
    assert read_settings("out/foresay.toml").target == os.path.join("..", "m")
    assert shell(*command)[0] == 0 and read_settings("foresay.toml").target == "m"
    monkeypatch.chdir(here / "out")
    assert shell("generate", "-n", "3", "x")[0] == 0


class Terminal(io.TextIOWrapper):
    """Standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_duration_of_tune_is_estimated(shell: tiny.Shell, here: Path, which: list[str]) -> None:
    command = [*TUNE, *which, "-n", "12", "--length", "4", "--estimate"]
    code, out, err = shell(*command)
    assert (code, err) == (0, "") and re.fullmatch(ESTIMATE.removeprefix("foresay: "), out)
    assert not Path("foresay.toml").exists()
    for part in ("recording", "timing passes", "replaying 2 candidates", "running 2 live"):  # suffix, and the default
        assert part in out


def test_a_run_of_tune_fits_its_minutes() -> None:
    whole = Estimate(100.0, 60.0, 20.0, 300.0, count=48, rounds=3, candidates=20, finalists=4)
    assert whole.within(1e9) == whole
    part = whole.within(90.0)
    assert (part.count, part.rounds, part.live) == (12, 1, 30.0)
    assert (part.recording, part.replaying, part.timing) == (25.0, 5.0, 20.0)
    least = whole.within(0.001)
    assert (least.count, least.rounds) == (4, 1)


def test_prompts_that_begin_alike_do_not_shorten_the_estimate(
    shell: tiny.Shell, here: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their beginnings are prefilled once; timing passes prefills random tokens."""

    def timed(target: object, prompts: list[list[int]]) -> tuple[float, float]:
        return float(len({tuple(ids[: i + 1]) for ids in prompts for i in range(len(ids))})), 0.0

    monkeypatch.setattr(tune_estimate, "_timed", timed)
    target = foresay.load(folder, drafter="none")
    alike = [[1] * 40 + [i] for i in range(8)]
    apart = [[i] * 41 for i in range(8)]
    of = {"recorded": False, "methods": [], "sizes": [8], "rows": 8, "finalists": 2}
    found = [tune_estimate.estimate(target, prompts, (8, 4), **of) for prompts in (alike, apart)]
    assert found[0].recording < found[1].recording and found[0].timing == found[1].timing


def test_an_interrupted_tune_goes_on_with_its_outputs(
    shell: tiny.Shell, here: Path, folder: Path, which: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run with the same prompts and model records the rest; a complete run removes the file."""
    profiled(monkeypatch, 9.0)
    command = [*TUNE, *which, "-n", "12", "--length", "4", "--force"]

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def performed() -> int:
        """Number of outputs that a run records."""
        found: list[int] = []
        submit = recording.Recorder.submit
        with monkeypatch.context() as patch:
            patch.setattr(recording.Recorder, "submit", lambda self, *args: (found.append(1), submit(self, *args)))
            shell(*command)
        return len(found)

    with monkeypatch.context() as patch:
        patch.setattr("foresay_lab.tune.Tuner.search", interrupted)
        assert performed() == len(TEXTS) and shell(*command)[0] == 130
        assert len(list(here.rglob("tune/*.jsonl"))) == 1 and performed() == 0
        command[command.index("-n") + 1] = "11"
        assert performed() == len(TEXTS), "outputs of another length"
        command[command.index("-n") + 1] = "12"
        later = folder / "later.json"
        later.write_text("{}")
        assert performed() == len(TEXTS), "outputs of another model with this name"
        later.unlink()
    assert performed() == 0, "the unchanged folder"
    assert len(list(here.rglob("tune/*.jsonl"))) == 2, "those of the other length and the other model are left"
    assert performed() == len(TEXTS)


@pytest.mark.parametrize("default", ["suffix", "hybrid(suffix, self(1))"])
@pytest.mark.parametrize(
    "args", [["--length", "4"], ["--length", "throughput"], ["--drafter", "suffix", "--length", "4"]]
)
def test_tune_runs_the_model_s_own_default(
    shell: tiny.Shell, here: Path, which: list[str], monkeypatch: pytest.MonkeyPatch, default: str, args: list[str]
) -> None:
    """At its own length, where the replay finds nothing that pays, and whatever the candidates are called."""
    from foresay_lab.commands import tune

    profiled(monkeypatch, 9.0)
    monkeypatch.setattr("foresay.generation.load.default_drafter", lambda *_: default)
    live = re.compile(rf"^live: {re.escape(default)}, throughput\S* \d", re.MULTILINE)
    command = ["tune", "--prompts", "p.jsonl", *which, "-n", "12", *args, "--force"]
    _, out, err = shell(*command)
    assert live.search(err), err
    assert len(re.findall(rf"^{re.escape(default)}, throughput", out, re.MULTILINE)) == 1, "in one row of the table"
    monkeypatch.setattr(tune, "own_methods", lambda *_, **__: [])
    assert not live.search(shell(*command)[2]), "what is predicted not to pay is not run otherwise"


@pytest.mark.parametrize(("answer", "args", "started"), [("n", [], False), ("y", [], True), ("", ["--yes"], True)])
def test_a_long_run_is_confirmed_on_a_terminal(
    shell: tiny.Shell,
    here: Path,
    which: list[str],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    args: list[str],
    started: bool,
) -> None:
    from foresay_lab.commands import tune

    profiled(monkeypatch, 9.0)
    monkeypatch.setattr(tune, "estimate", lambda *_, **__: Estimate(600.0, 0.0, 0.0, 0.0, 8, 3, 1, 3))
    monkeypatch.setattr("io.TextIOWrapper", Terminal)
    command = [*TUNE, *which, "-n", "8", "--length", "4", *args]
    code, _, err = shell(*command, stdin=f"{answer}\n".encode())
    assert "tuning takes about 5 min: recording 4 outputs 5 min" in err
    assert code == (0 if started else 130) and Path("foresay.toml").exists() == started


def test_tune_with_a_latency(shell: tiny.Shell, here: Path, which: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    profiled(monkeypatch, 9.0)
    command = [*TUNE, *which, "-n", "12", "--length", "4"]
    code, _, err = shell(*command, "--latency", "1")
    estimate, message = err.splitlines()
    assert code == 2 and re.fullmatch(ESTIMATE, estimate + "\n")
    assert re.fullmatch(
        r"foresay: --latency 1 cannot be met: the fastest candidate takes 1000\.\d ms per token", message
    )
    assert shell(*command, "--latency", "1500", "--batch-size", "1,2")[0] == 0
    assert read_settings("foresay.toml").max_batch_size == 2, "the larger batch writes more, and is as quick"


def test_the_batch_size_is_that_of_what_won(
    shell: tiny.Shell, here: Path, which: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate that the replay ranks first may lose live: then the other's batch size is written."""
    from foresay_lab import tune as lab

    profiled(monkeypatch, 0.0)

    def confirm(self: Any, candidates: Any, **more: Any) -> Any:
        assert candidates[0].batch_size == 2 and candidates[-1].batch_size == 1
        self.tuning.confirmed = [lab.Confirmed(candidates[-1], 100.0, 2.0, 1.9, 2.1)]

    monkeypatch.setattr(lab.Tuner, "confirm", confirm)
    command = [*TUNE, *which, "-n", "12", "--length", "4"]
    assert shell(*command, "--latency", "5000", "--batch-size", "1,2")[0] == 0
    assert read_settings("foresay.toml").max_batch_size == 1


def test_tune_from_a_recording(
    shell: tiny.Shell, here: Path, which: list[str], made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiled(monkeypatch, 9.0)
    args = ["--drafter", "suffix", "--length", "4", "--recording", str(made)]
    assert shell("tune", *which, *args)[0] == 0
    assert 'prompts = "r.jsonl"' in Path("foresay.toml").read_text()
    for more in (["--count", "3"], ["-n", "20"]):
        assert "contradict: a recording has its own prompts" in shell.refused("tune", *which, *args, *more, "-o", "x")
    Path("own.toml").write_text(f'target = "{which[1]}"\ndtype = "fp32"\nactivations = "float32"\n')
    assert shell("tune", "own.toml", *args, "-o", "rounded.toml")[0] == 0
    assert 'activations = "float32"' in Path("rounded.toml").read_text()
    assert "activations" not in Path("foresay.toml").read_text()
    other = tiny.save(here / "other")
    assert "--recording is of " in shell.refused("tune", "--model", str(other), *args, "-o", "x.toml")
    assert "--batch-size 1,2 without --latency" in shell.refused(
        "tune", *which, *args, "--batch-size", "1,2", "-o", "x"
    )


@pytest.mark.parametrize(("runs", "answer"), [(1, "nothing was written"), (4, "wrote foresay.toml")])
def test_ctrl_c_during_live_runs_leaves_an_answer(
    shell: tiny.Shell, here: Path, which: list[str], monkeypatch: pytest.MonkeyPatch, runs: int, answer: str
) -> None:
    """The best of what was measured until then; the outputs that were recorded stay for the next run."""
    from foresay_lab.bench import runners

    profiled(monkeypatch, 0.0)
    honest, done = runners.run_live, list[str]()

    def watched(generator: Any, asks: Any, params: Any) -> Any:
        done.append(generator.drafter_name)
        if sum(one != "none" for one in done) > runs:
            raise KeyboardInterrupt
        live = honest(generator, asks, params)
        return dataclasses.replace(live, seconds=float(live.stats.num_passes))

    monkeypatch.setattr(runners, "run_live", watched)
    code, out, err = shell(*TUNE, *which, "-n", "12", "--length", "4", "--minutes", "600")
    assert code == 130 and answer in out and "predicted: suffix, 4 " in err
    assert err.count("live: ") == max(0, runs - 2), "the first run of the candidate, and of the default, only warms up"
    assert Path("foresay.toml").exists() == (runs > 1)
    assert list((here / "cache" / "tune").glob("*.jsonl"))


def test_a_bad_settings_file_is_one_line(shell: tiny.Shell, here: Path) -> None:
    Path("foresay.toml").write_text('target = "tiny"\ncolour = 3\n')
    assert shell.refused("generate", "x").startswith("foresay.toml: setting='colour'")
    assert os.path.exists("foresay.toml")
