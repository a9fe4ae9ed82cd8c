"""`foresay worth`: a sentence and a command, from passes of known costs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from foresay.generation.method import Method
from foresay.records.profile import Profile, Timing
from foresay_lab import worth
from foresay_lab.bench import runners
from foresay_lab.candidates import advice
from foresay_lab.worth import Gain, conclusion
from helpers import tiny

Worth = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(shell: tiny.Shell, here: Path, which: list[str], monkeypatch: pytest.MonkeyPatch) -> Worth:
    """Runs `foresay worth` with a draft of 4 tokens, passes of a second, and so much more for each further token."""
    honest, cost, spread = runners.run_live, 0.0, 1.0

    def measured(target: Any, *, columns: Any, **_: Any) -> Profile:
        timings = [Timing(1, c, 40, 1.0 + cost * (c - 1), 1.0, spread) for c in columns]
        return Profile("tiny", "float32", {}, tuple(timings), ())

    def run_live(generator: Any, asks: Any, params: Any) -> Any:
        live = honest(generator, asks, params)
        return dataclasses.replace(live, seconds=live.stats.num_passes + cost * live.stats.num_drafted)

    def run(*args: str, further: float = 0.0, differ: float = 1.0) -> tuple[int, str, str]:
        nonlocal cost, spread
        cost, spread = further, differ
        return shell("worth", *which, "--prompts", "p.jsonl", "--seconds", "100", *args)

    monkeypatch.setattr(worth, "measure", measured)
    monkeypatch.setattr(worth, "perf_counter", partial(next, count()))
    monkeypatch.setattr(worth, "thread_time", partial(next, count()))
    monkeypatch.setattr(runners, "run_live", run_live)
    monkeypatch.setattr("foresay_lab.commands.worth.own_methods", lambda _: [Method("suffix", "4")])
    return run


def test_a_default_that_pays(run: Worth, folder: Path) -> None:
    """By kind of prompt, in a table, a sentence and JSON; predicted as it runs."""
    code, out, err = run()
    assert code == 0 and err == "" and "It pays here: the default drafter is " in out, out
    assert out.endswith(f"Keep the default: foresay serve {folder} --dtype fp32\n") and "rough" not in out
    [one] = json.loads(run("--json")[1])["methods"]
    assert sorted(one["kinds"]) == ["a", "b"] and one["measured"] == pytest.approx(one["predicted"], rel=0.08)
    for tokens, speed in one["kinds"].values():
        assert speed == pytest.approx(tokens, rel=0.05), "passes of any width cost the same"


def test_the_options_of_a_settings_file_are_shown(run: Worth, here: Path, folder: Path) -> None:
    """Next to those that are typed; its drafter is not, since the default's command is shown."""
    (here / "s.toml").write_text(f'target = "{folder}"\nweights = "int8"\ndrafter = "max_gram"\n')
    code, out, _ = run("--model", "s.toml", "--dtype", "auto", "--device", "cpu")
    assert code == 0 and out.endswith(f": foresay serve {folder} --device cpu --weights int8\n"), out


def test_a_default_that_loses(run: Worth, folder: Path) -> None:
    code, out, _ = run(further=9.0)
    assert code == 0 and "Nothing gains here: the default drafter is 0." in out
    assert out.endswith(f"Turn speculation off: foresay serve {folder} --dtype fp32 --drafter none\n")


def test_a_busy_machine_is_named(run: Worth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal passes that differ, a processor that others use, and runs that differ; nothing measured is claimed."""

    def busy(reason: str, **given: float) -> None:
        found = json.loads(run("--json", **given)[1])
        assert reason in found["busy"] and reason in found["conclusion"] and found["methods"][0]["measured"] is None

    busy("equal passes differ by 50%", differ=1.5)
    with monkeypatch.context() as patch:
        patch.setattr(worth, "BUSY", -1.0)
        busy("runs of plain decoding differ by ")
    monkeypatch.setattr(worth, "thread_time", partial(next, count(0, 0.5)))
    busy("this process had a processor for 50% of the time")


def test_a_draft_model_is_predicted_too(run: Worth, here: Path, folder: Path) -> None:
    tiny.save(here / "draft")
    code, out, _ = run("--draft", str(here / "draft"))
    assert code == 0 and f"model({here / 'draft'})" in out and "tokens a pass, and gains from " in out
    code, _, err = run("--seconds", "0")
    assert code == 2 and "--seconds" in err


def gain(drafter: str, speed: float, *, length: str = "", **more: Any) -> Gain:
    return Gain(Method(drafter, length), {"chat": (1.5, speed), "code": (1.0, 1.0)}, speed, 1.2, 1.4, **more)


@pytest.mark.parametrize(
    ("found", "sentences", "answer"),
    [
        (
            [gain("suffix", 1.4)],
            "1.40x on chat; the other kinds gain nothing (1.00x).",
            "Keep the default: foresay serve m --dtype fp32",
        ),
        ([gain("suffix", 1.0)], "Nothing gains here", "Keep the default: foresay serve m --dtype fp32"),
        (
            [gain("suffix", 1.0), gain("suffix", 1.3, length="8")],
            "suffix, 8 gives 1.40 tokens a pass, and gains from 1.20 on: 1.30x.",
            "Use: foresay serve m --dtype fp32 --drafter suffix --length 8",
        ),
        (
            [gain("suffix", 1.2, measured=0.9, predicted=1.1)],
            "0.90x measured, 1.10x predicted: the prediction is rough.",
            "Keep the default: foresay serve m --dtype fp32",
        ),
        (
            [gain("suffix", 1.2, measured=0.7, predicted=1.1)],
            "rough",
            "Turn speculation off: foresay serve m --dtype fp32 --drafter none",
        ),
        (
            [gain("suffix", 1.0), gain("model(d)", 1.3)],
            "gains from 1.20 on: 1.30x.",
            "Use: foresay serve m --dtype fp32 --draft-weights int8 --drafter 'model(d)'",
        ),
    ],
    ids=["pays", "no gain", "another", "measured", "loses", "a draft model"],
)
def test_the_conclusion(found: list[Gain], sentences: str, answer: str) -> None:
    options = ["--dtype fp32", "--draft-weights int8"]
    speeds = {one.method: one.best_known for one in found}
    assert sentences in conclusion(found) and ": ".join(advice("m", speeds, options)) == answer
    assert "busy (others run)" in conclusion(found, "others run")
