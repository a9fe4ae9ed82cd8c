"""`foresay simulate` in use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foresay.records.profile import Profile, Timing
from helpers import tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of the tiny model, and a profile of a machine with passes of 10 ms."""
    here = tmp_path_factory.mktemp("load")
    folder = tiny.save(here / "tiny")
    (here / "p.txt").write_text("hello world, hello\none two three one two\nabc abc abc\n")
    tiny.printed(
        *["record", str(here / "r.jsonl"), "--model", str(folder), "--dtype", "fp32"],
        *["--prompts", str(here / "p.txt"), "-n", "24"],
    )
    timings = tuple(
        Timing(b, c, 40, s := 0.01 * (1 + 0.02 * (c - 1) * b + 0.05 * (b - 1)), s, s)
        for b in (1, 4, 16)
        for c in (1, 9)
    )
    Profile("tiny", "float32", {}, timings, ((1, 0.0005), (256, 0.05)), ragged=True).save(str(here / "profile.json"))
    return here


def command(made: Path, *args: str) -> list[str]:
    return ["simulate", str(made / "r.jsonl"), "--profile", str(made / "profile.json"), "--requests", "40", *args]


def test_a_table_of_loads(shell: tiny.Shell, made: Path) -> None:
    code, out, err = shell(*command(made, "--rate", "1,20", "--drafter", "suffix", "--batch-size", "4"))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[-5:-1]] == ["plain", "plain", "suffix,", "suffix,"]
    assert lines[-1].startswith("simulated with 3 outputs of ") and lines[-1].endswith("tiny")


def test_the_figures_as_json_and_how_many_engines_it_takes(shell: tiny.Shell, made: Path) -> None:
    args = ["--length", "4", "--batch-size", "4", "--first-p99", "0.5", "--total-rate", "100"]
    code, out, _ = shell(*command(made, "--rate", "1,60", *args, "--json"))
    lines: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(lines) == 6
    calm, heavy = lines[0], lines[1]
    assert calm["first_p99_s"] < heavy["first_p99_s"] and calm["busy"] < heavy["busy"] <= 1.0001
    assert calm["tokens_per_pass"] == 1.0 and lines[2]["tokens_per_pass"] > 1.0
    plain, drafting = lines[4:]
    assert plain["highest_rate"] > 0 and drafting["highest_rate"] > 0
    for one in (plain, drafting):
        assert one["replicas"] == -(-100 // one["highest_rate"]) and one["total_rate"] == 100
    code, out, _ = shell(*command(made, "--rate", "60", "--drafter", "none", *args[2:]))
    assert "meets the latency targets up to" in out and "100 requests/s need" in out


def test_bursts_and_traces(shell: tiny.Shell, made: Path) -> None:
    def waits(*args: str) -> float:
        code, out, _ = shell(*command(made, "--batch-size", "2", "--drafter", "none", "--json", *args))
        assert code == 0
        return float(json.loads(out.splitlines()[0])["queue_p90_s"])

    assert waits("--rate", "2", "--burst", "20") > 2 * waits("--rate", "2")
    (made / "trace.txt").write_text("5\n5\n5\n5\n5\n5\n")
    args = [
        "simulate",
        str(made / "r.jsonl"),
        "--profile",
        str(made / "profile.json"),
        "--trace",
        str(made / "trace.txt"),
    ]
    code, out, _ = shell(*args, "--batch-size", "2", "--drafter", "none", "--json")
    assert code == 0 and float(json.loads(out)["queue_p90_s"]) > 0.2, "six at once, by twos"


def test_what_it_refuses(shell: tiny.Shell, made: Path) -> None:
    assert "--rate x must be numbers" in shell.refused(*command(made, "--rate", "x"))
    assert "rate" in shell.refused(*command(made, "--rate", "0"))
    assert "--total-rate 5 needs" in shell.refused(*command(made, "--total-rate", "5"))
    plain = ["simulate", str(made / "r.jsonl"), "--profile", str(made / "profile.json"), "--trace", "none.txt"]
    assert "--trace none.txt cannot be read" in shell.refused(*plain)
    for name in ("rate", "burst", "requests", "seed", "first-p99", "gap-p99"):
        assert f"drop --{name}" in shell.refused(*plain, f"--{name}", "3")
    assert "drafts nothing" in shell.refused(*command(made, "--drafter", "none", "--length", "3"))
    assert "has no drafting times" in shell.refused(
        *command(made, "--drafter", f"model({made / 'tiny'})", "--model", str(made / "tiny"))
    )
    assert "--drafter sufix is unknown" in shell.refused(*command(made, "--drafter", "sufix"))
    assert "--requests -5 must be an integer" in shell.refused(*command(made, "--rate", "1", "--requests", "-5"))
    assert "--dtype applies to the model" in shell.refused(*command(made, "--rate", "1", "--dtype", "bf16"))
    (made / "log.txt").write_text("tensor([[1, 2]])\n")
    log = ["simulate", str(made / "log.txt"), "--profile", str(made / "profile.json")]
    assert "is a log of tensors" in shell.refused(*log)
    assert "is not a profile" in shell.refused("simulate", str(made / "r.jsonl"), "--profile", str(made / "p.txt"))
