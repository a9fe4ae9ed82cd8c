"""`foresay simulate` in use."""

from __future__ import annotations

from pathlib import Path

import pytest

from foresay.records.profile import Profile, Timing
from helpers import tiny


@pytest.fixture
def command(made: Path, here: Path) -> list[str]:
    """The command for a recording, and a profile of a machine with passes of 10 ms."""
    timings = tuple(
        Timing(b, c, 40, s := 0.01 * (1 + 0.02 * (c - 1) * b + 0.05 * (b - 1)), s, s)
        for b in (1, 4, 16)
        for c in (1, 9)
    )
    Profile("tiny", "float32", {}, timings, ((1, 0.0005), (256, 0.05)), ragged=True).save("profile.json")
    return ["simulate", str(made), "--profile", "profile.json"]


def test_a_table_of_loads(shell: tiny.Shell, command: list[str]) -> None:
    args = ["--requests", "40", "--rate", "1,20", "--drafter", "suffix", "--batch-size", "4"]
    lines = shell.out(*command, *args).splitlines()
    assert [line.split()[0] for line in lines[-5:-1]] == ["plain", "plain", "suffix,", "suffix,"]
    assert lines[-1].startswith("simulated with 3 outputs of ") and lines[-1].endswith("tiny")


def test_the_figures_as_json_and_how_many_engines_it_takes(shell: tiny.Shell, command: list[str]) -> None:
    args = ["--requests", "10", "--batch-size", "4", "--first-p99", "0.5", "--total-rate", "100"]
    lines = shell.objects(*command, *args, "--rate", "1,60", "--length", "4", "--json")
    assert len(lines) == 6
    calm, heavy = lines[0], lines[1]
    assert calm["first_p99_s"] < heavy["first_p99_s"] and calm["busy"] < heavy["busy"] <= 1.0001
    assert calm["tokens_per_pass"] == 1.0 and lines[2]["tokens_per_pass"] > 1.0
    for one in lines[4:]:
        assert one["highest_rate"] > 0 and one["total_rate"] == 100
        assert one["replicas"] == -(-100 // one["highest_rate"])
    out = shell.out(*command, *args, "--rate", "60", "--drafter", "none")
    assert "meets the latency targets up to" in out and "100 requests/s need" in out


def test_bursts_and_traces(shell: tiny.Shell, command: list[str]) -> None:
    def waits(*args: str) -> float:
        [line] = shell.objects(*command, "--batch-size", "2", "--drafter", "none", "--json", *args)
        return float(line["queue_p90_s"])

    rate = ["--requests", "40", "--rate", "2"]
    assert waits(*rate, "--burst", "20") > 2 * waits(*rate)
    Path("trace.txt").write_text("5\n5\n5\n5\n5\n5\n")
    assert waits("--trace", "trace.txt") > 0.2, "six at once, by twos"


def test_what_it_refuses(shell: tiny.Shell, folder: Path, command: list[str]) -> None:
    needless = ("rate", "burst", "requests", "seed", "first-p99", "gap-p99")
    for args, message in (
        ("--rate x", "--rate x must be numbers"),
        ("--rate 0", "rate"),
        ("--total-rate 5", "--total-rate 5 needs"),
        ("--trace none.txt", "--trace none.txt cannot be read"),
        *((f"--trace none.txt --{name} 3", f"drop --{name}") for name in needless),
        ("--drafter none --length 3", "drafts nothing"),
        (f"--drafter model({folder}) --model {folder} --requests 2", "has no drafting times"),
        ("--drafter sufix", "--drafter sufix is unknown"),
        ("--rate 1 --requests -5", "--requests -5 must be an integer"),
        ("--rate 1 --dtype bf16", "--dtype applies to the model"),
        ("--profile p.jsonl", "is not a profile"),
    ):
        assert message in shell.refused(*command, *args.split()), args
    Path("log.txt").write_text("tensor([[1, 2]])\n")
    assert "is a log of tensors" in shell.refused("simulate", "log.txt", *command[2:])
