"""record, replay, profile and bench: tables, JSON, exit codes, wrong input, and files after Ctrl-C."""

from __future__ import annotations

import json
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
from foresay_lab.bench.runners import MethodRunner
from helpers import tiny


def tables(out: str) -> dict[str, list[str]]:
    """Rows of a printed table by their first word."""
    return {line.split("  ")[0].strip(): line.split() for line in out.splitlines() if line.strip()}


def test_record(shell: tiny.Shell, here: Path, which: list[str]) -> None:
    base = [*which, "--prompts", "p.jsonl"]
    command = ["record", "r.jsonl", *base, "-n", "10"]
    assert shell.out(*command) == "r.jsonl: 5 outputs, 50 tokens\n"
    recording = Recording.load("r.jsonl")
    assert {r.id: r.category for r in recording.records} == {f"t{i}": "ab"[i % 2] for i in range(5)}
    [written] = shell.objects("generate", *which, "-n", "10", "--json", "hello world, hello")
    assert next(list(r.output) for r in recording.records if r.id == "t0") == written["token_ids"]
    assert recording.provenance["versions"]["foresay"] == foresay.__version__
    lines = Path("r.jsonl").read_text().splitlines(keepends=True)
    Path("r.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    assert shell.out(*command) == "r.jsonl: 5 outputs, 50 tokens, 2 of them from an earlier run\n"
    assert Recording.load("r.jsonl").records == recording.records
    Path("long.txt").write_text("x" * 5000 + "\n")
    Path("mine.json").write_text('{"my": "file"}')
    before = Path("r.jsonl").read_bytes()
    for args, message in (
        (["r.jsonl", *base, "-n", "5"], "r.jsonl was started with params.max_new_tokens=10, and this run has 5"),
        (["r.jsonl", *base, "-n", "10", "--count", "2"], "was started with settings.prompts="),
        (["r.jsonl", *base, "--seed", "1"], "--seed has no effect at temperature 0"),
        (["s.jsonl", *which, "--prompts", "none.jsonl"], "none.jsonl"),
        (["s.jsonl", *which, "--prompts", "long.txt"], "prompt 'long-1': the prompt has 5000 tokens; the model's "),
        (["mine.json", *base], "is unchanged"),
    ):
        assert message in shell.refused("record", *args)
    assert Path("r.jsonl").read_bytes() == before and Path("mine.json").read_text() == '{"my": "file"}'


def test_a_sampled_recording_with_logprobs_and_its_replay_are_an_estimate(
    shell: tiny.Shell, here: Path, which: list[str]
) -> None:
    command = ["record", "r.jsonl", *which, "--prompts", "p.jsonl", "--category", "b", "-n", "8", "-t", "0.8"]
    shell.out(*command, "--seed", "3", "--logprobs", "2", "--batch-size", "1")
    one = Recording.load("r.jsonl")
    assert len(one.records) == 2 and not one.greedy and one.params["temperature"] == 0.8
    assert all(r.token_probs and r.logprobs and r.top and r.seed is not None for r in one.records)
    replayed = ["replay", "r.jsonl", "--drafter", "suffix"]
    assert shell.out(*replayed).rstrip().endswith("an estimate, with 95% intervals")
    [line] = shell.objects(*replayed, "--json")
    assert line["estimate"] is True and line["tokens_per_pass"][1] <= line["tokens_per_pass"][0]


def test_replay(shell: tiny.Shell, made: Path, here: Path) -> None:
    out = shell.out("replay", str(made), "--drafter", "suffix", "--drafter", "max_gram", "--length", "4")
    assert {"suffix, 4", "max_gram, 4"} <= tables(out).keys()
    assert out.splitlines()[-1].startswith("3 outputs, 72 tokens of ")
    assert out.rstrip().endswith("exact: live decoding takes the same steps")
    out = shell.out("replay", str(made))
    assert all(f"{name}, " in out for name in ("suffix", "max_gram", "prompt_lookup", "ngram_store"))
    Path("one.json").write_text('{"1_2_1_2": "1_2_1_2_1_2_1_2_1_2"}')
    single = ["replay", "one.json", "--drafter", "max_gram"]
    shell.out(*single)
    [line] = shell.objects(*single, "--json")
    assert line["tokens_per_pass"][1:] == [None, None], "one output has no interval, and JSON no infinity"
    assert line["tokens_per_pass"][0] > 1


def test_replay_as_json_is_what_generate_does(shell: tiny.Shell, made: Path, folder: Path) -> None:
    """N-gram drafters, drafters for which the model is loaded, and a cascade, whose length is its matrix's first row."""
    cascade = f"cascade(model={folder}, self=1, max_gram; k=[[1, 2, 3], [0, 1, 1], [0, 0, 1]])"
    drafters = ["max_gram", "self(1)", f"model({folder})"]
    replayed = ["replay", str(made), "--json", "--dtype", "fp32"]
    lines = shell.objects(*replayed, "--length", "3", *(arg for one in drafters for arg in ("--drafter", one)))
    lines += shell.objects(*replayed, "--drafter", cascade)
    assert [line["method"] for line in lines] == [*(f"{one}, 3" for one in drafters), f"{cascade}, 6"]
    prompts = [list(record.prompt) for record in Recording.load(made).records]
    for line, drafter, length in zip(lines, [*drafters, cascade], [3, 3, 3, None], strict=True):
        live = foresay.load(folder, drafter=drafter, dtype="fp32", max_batch_size=1, length=length)
        steps = [step for one in live.generate(prompts, max_new_tokens=24) for step in one.steps]
        wanted, stats = Stats.of(steps), line["stats"]
        for name in ("num_passes", "num_drafted", "num_accepted"):
            assert stats[name] == getattr(wanted, name), (drafter, name)
        assert max(step.num_drafted for step in steps) == (length or 6) and wanted.num_accepted > 0
        assert stats["num_tokens"] == 72 and line["estimate"] is False
        assert line["tokens_per_pass"][0] == pytest.approx(72 / stats["num_passes"])
        assert line["verification_rate"] == pytest.approx(stats["num_passes"] / 72)
        assert line["discard_rate"] == pytest.approx((stats["num_drafted"] - stats["num_accepted"]) / 72)
    assert lines[2]["draft_utilization"] == 1 and lines[3]["draft_utilization"] < 1
    adaptive = foresay.load(folder, drafter=cascade, length="throughput", dtype="fp32")
    assert isinstance(adaptive.policy, ThroughputLength), "a length that is given is the length"


def test_replaying_other_formats(shell: tiny.Shell, here: Path, which: list[str]) -> None:
    Path("log.txt").write_text("tensor([[10, 11, 10, 11,\n   10, 11]])\ntensor([[7, 8, 9]])\n")
    command = ["replay", "log.txt", *which, "--prompts", "p.jsonl", "--drafter", "prompt_lookup(min_ngram=1)"]
    code, out, err = shell(*command)
    assert code == 0 and "2 outputs, 9 tokens of log.txt" in out
    assert "foresay: log.txt: 2 outputs and 5 prompts; the first prompts are used\n" in err
    Path("cache.json").write_text('{"5_6": "0_3_4_3_4_3_4", "7_8": "0_3_4"}')
    [line] = shell.objects("replay", "cache.json", "--drafter", "max_gram", "--length", "2", "--json")
    assert line["stats"]["num_tokens"] == 8


@pytest.mark.parametrize(
    ("order", "raw", "doubt"),
    [
        ((0, 1, 2), None, ""),
        ((1, 2, 0), None, "prompt 1 begins like output 2 of the log: the prompts are in another order\n"),
        ((2, 1, 0), None, "prompt 1 begins like output 3 of the log: the prompts are in another order\n"),
        ((0, 1, 2), False, "differ from the log"),  # which was written without a chat template
        ((0, 1, 2), True, ""),
    ],
)
def test_a_log_is_exact_with_its_own_prompts_alone(
    shell: tiny.Shell, made: Path, here: Path, request: Any, order: tuple[int, ...], raw: bool | None, doubt: str
) -> None:
    Path("log.txt").write_text("".join(f"tensor([{list(one.output)}])\n" for one in Recording.load(made).records))
    prompts = made.with_name("p.txt").read_text().splitlines(keepends=True)
    Path("p.txt").write_text("".join(prompts[i] for i in order))
    model = request.getfixturevalue("folder" if raw is None else "chat_folder")
    command = ["replay", "log.txt", "--model", str(model), "--dtype", "fp32", "--prompts", "p.txt"]
    command += ["--drafter", "suffix", *["--raw"] * bool(raw)]
    code, out, err = shell(*command)
    assert code == 0 and doubt in err and bool(err) == bool(doubt)
    assert ("exact: live decoding" in out, "which is doubtful" in out) == (not doubt, bool(doubt))
    found = json.loads(shell(*command, "--json")[1]).get("doubt", "")
    assert doubt.strip().split(": ")[-1] in found and bool(found) == bool(doubt)


def test_replay_with_a_profile_and_costs(shell: tiny.Shell, made: Path, here: Path) -> None:
    timings = tuple(Timing(1, c, 40, 1.0, 1.0, 1.0) for c in (1, 2, 9))
    Profile("tiny", "float32", {}, timings, ((8, 0.0), (256, 0.0))).save("p.json")
    Path("costs.json").write_text('{"big": 4}')
    args = ["replay", str(made), "--drafter", "suffix", "--length", "4", "--length", "throughput"]
    args += ["--profile", "p.json", "--costs", "costs.json=big"]
    lines = shell.objects(*args, "--json")
    assert [line["method"] for line in lines] == ["suffix, 4", "suffix, throughput"]
    for line in lines:
        passes = line["stats"]["num_passes"]
        assert line["swi"] == pytest.approx(72 / passes)
        assert line["tokens_per_s"] == pytest.approx(72 / passes, rel=0.02), "a second a pass"
    assert "SWI" in "".join(shell.out(*args).splitlines()[:2])


def test_what_is_refused(shell: tiny.Shell, made: Path, here: Path, which: list[str]) -> None:
    Path("x.json").write_text("hello")
    lines = made.read_text().splitlines()
    Path("bad.jsonl").write_text("\n".join([*lines[:2], '{"id": 3}', *lines[2:]]) + "\n")
    for args, message in (
        (["none.jsonl"], "RECORDING none.jsonl "),
        (["x.json"], "RECORDING x.json is not a recording"),
        (["bad.jsonl"], "bad.jsonl, line 3: "),
        ([str(made), "--drafter", "sufix"], "--drafter sufix"),
        ([str(made), "--drafter", "none"], "--drafter names nothing to compare"),
        ([str(made), "--length", "throughput"], "replay it with a profile of the target"),
        ([str(made), "--costs", "previous_work"], "--costs previous_work "),
        ([str(made), "--drafter", "suffix", "--costs", "previous_work=gpt"], "gpt is unknown"),
        ([str(made), "--prompts", "p.jsonl"], "--prompts is for a log of tensors"),
        ([str(made), "--weights", "int8"], "--weights applies to the model"),
        ([str(made), "--profile", "x.json"], "--profile x.json is not a profile"),
    ):
        assert message in shell.refused("replay", *args)
    for args, message in (
        (["--batch-size", "1,x"], "--batch-size 1,x "),
        (["--length", "3,-1"], "--length 3,-1 "),
        (["--context", "5000", "--batch-size", "1"], "5000"),
    ):
        assert message in shell.refused("profile", *which, *args) and not (here / "cache" / "profiles").exists()


def test_profile(shell: tiny.Shell, here: Path, which: list[str]) -> None:
    small = ["profile", *which, "--batch-size", "1,2", "--length", "0,2", "--context", "16,32", "--repeats", "2"]
    out = shell.out(*small, "-o", "mine.json")
    assert "quartiles" in out and "floor" in out and "prefill, in tokens: 8 in " in out
    assert len([line for line in out.splitlines() if line.split()[:1] in (["16"], ["32"])]) == 8
    kept = Profile.load("mine.json")
    assert {(t.batch, t.columns, t.context) for t in kept.timings} == {
        (b, c, n) for b in (1, 2) for c in (1, 3) for n in (16, 32)
    }
    for more, same in ((["--json"], True), (["--json", "--fresh"], False)):
        found = json.loads(shell.out(*small, *more))["timings"]
        assert ([t["seconds"] for t in found] == [t.seconds for t in kept.timings]) == same, "kept from before"
    assert len(list((here / "cache" / "profiles").iterdir())) == 1


def test_bench_and_its_report(shell: tiny.Shell, here: Path, which: list[str]) -> None:
    """A folder with something else is refused before anything is loaded."""
    command = ["bench", "b.jsonl", *which, "--prompts", "p.jsonl", "--count", "3", "-n", "8", "--repeats", "1"]
    command += ["--drafter", "suffix", "--length", "2", "--length", "4", "--report"]
    out = shell.out(*command, "drawn")
    rows = tables(out)
    assert {PLAIN, "suffix, 2", "suffix, 4"} <= rows.keys() and "1x" in rows[PLAIN]
    assert rows["suffix, 4"][-1] == "yes" and rows[PLAIN][-1] != "yes"
    assert out.endswith(f"wrote {Path('drawn/report.html')}\n")
    assert "Tokens per pass by draft length" in Path("drawn/report.html").read_text()
    results = Results.load("b.jsonl")
    assert {run.cell.dataset for run in results.runs} == {"p.jsonl"} and all(run.tokens == 24 for run in results.runs)
    before = Path("b.jsonl").read_bytes()
    assert shell(*command[:-1])[0] == 0 and Path("b.jsonl").read_bytes() == before, "everything is there"
    assert "was started with settings." in shell.refused(*command[:-1], "--ignore-eos")
    Path("other").mkdir()
    Path("other/notes").touch()
    assert "contains something else" in shell.refused(*command, "other")


@pytest.mark.parametrize(
    ("drafters", "code", "message"),
    [
        (["suffix", "prompt_lookup"], 0, "failed: suffix, 4 on p.jsonl, batch 1, greedy: RuntimeError: no memory\n"),
        (["suffix"], 1, "failed: suffix, 4"),  # nothing could be run
        (["max_gram"], 1, "DIFFERENT OUTPUT: max_gram, 4 on p.jsonl"),
    ],
)
def test_bench_reports_what_failed(
    shell: tiny.Shell, here: Path, which: list[str], monkeypatch: Any, drafters: list[str], code: int, message: str
) -> None:
    honest = MethodRunner.run

    def failing(self: MethodRunner, block: Any, asks: Any) -> Any:
        if self.name == "suffix, 4":
            raise RuntimeError("no memory")
        out = honest(self, block, asks)
        out.outputs[0][-1] += self.name == "max_gram, 4"
        return out

    monkeypatch.setattr(MethodRunner, "run", failing)
    base = ["bench", "b.jsonl", *which, "--prompts", "p.jsonl", "-n", "6", "--repeats", "1", "--length", "4"]
    found, out, _ = shell(*base, *(arg for one in drafters for arg in ("--drafter", one)))
    assert found == code and message in out
