"""Tuning where the best is known, and the settings file that it ends in."""

from __future__ import annotations

import dataclasses
import math
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN, Method, methods
from foresay.lengths import HeuristicLength, ThroughputLength
from foresay.records.profile import Profile, Timing
from foresay.records.recording import Record, Recording
from foresay.spec.settings_file import Settings, read_settings, write_settings
from foresay_lab import tune as lab_tune
from foresay_lab.bench import runners
from foresay_lab.candidates import Candidate, Confirmed, Tuning, pick
from foresay_lab.data.requests import PromptRequest
from foresay_lab.measure.live_run import run_live
from foresay_lab.replay.record import record
from foresay_lab.replay.replay import Expected
from foresay_lab.tune import Tuner
from helpers.recordings import Numbers, cycle, loaded, numbered
from helpers.refusals import refused, refuses

SIZE = 12
SUFFIX = methods(["suffix"], ["2", "4", "8", "12"])


def repeating(batch: int = 4) -> Generator:
    return loaded(cycle(SIZE), batch=batch, tokenizer=Numbers(SIZE))


def comes_again(i: int, size: int) -> list[int]:
    return [2 + (i + k) % 10 for k in range(size)]


def interrupted(i: int, size: int) -> list[int]:
    """Five tokens that come again and one that may be another: long drafts are cut short there."""
    numbers = random.Random(i)
    return [token for _ in range(size) for token in (2, 3, 4, 5, 6, numbers.randrange(7, 12))][:size]


def recording(text: Callable[[int, int], list[int]] = comes_again, count: int = 6, new: int = 60) -> Recording:
    """Prompts of 20 tokens."""
    texts = [text(i, 20 + new) for i in range(count)]
    records = [Record(f"p{i}", tuple(t[:20]), tuple(t[20:]), category=f"c{i % 2}") for i, t in enumerate(texts)]
    return Recording(tuple(records), SIZE, model="TableModel", params={"max_new_tokens": new})


def costs(columns: float, *, batches: float = 0.0) -> Profile:
    """A pass of one row and column takes a second, each further column so much more, and each further row."""
    timings = [
        Timing(b, c, 40, s := 1.0 + columns * (c - 1) * b + batches * (b - 1), s, s)
        for b in (1, 2, 4)
        for c in (1, 2, 5, 9, 17)
    ]
    return Profile("TableModel", "", {}, tuple(timings), ((8, 1e-3), (256, 1e-2)))


def tuned(
    columns: float,
    recorded: Recording | None = None,
    named: Sequence[Method] = SUFFIX[2:3],
    sizes: Sequence[int] = (1,),
    own: Sequence[Method] = (),
    **more: float,
) -> Tuner:
    """A tuner that has searched; by default for drafts of 8 tokens."""
    tuner = Tuner(repeating(), recorded or recording(), profile=costs(columns, **more))
    tuner.search(named, sizes, own)
    return tuner


def names(tuner: Tuner) -> list[str]:
    return [one.method.name for one in tuner.tuning.candidates]


@pytest.mark.parametrize(("columns", "pays"), [(0.0, True), (0.06, True), (1.5, False)])
def test_costs_are_those_of_passes_counted_by_hand(columns: float, pays: bool) -> None:
    """Every draft token holds: 60 tokens are passes of K + 1 of them and one of what is left. Expensive columns pay for none."""
    tuner = tuned(columns, named=SUFFIX)
    ranked = tuner.tuning.candidates
    assert names(tuner)[:: 1 if pays else -1] == [*(m.name for m in reversed(SUFFIX)), PLAIN]
    assert bool(pick(ranked)[0]) == pays and pick(ranked)[1] is not None
    for one in ranked:
        length = int(one.method.length or 0)
        if length < 12:  # of which the first pass finds fewer
            passes, left = divmod(60, length + 1)
            seconds = passes * (1 + columns * length) + (1 + columns * (left - 1) if left else 0)
            assert one.expected is not None and one.expected.tokens_per_pass == 60 / (passes + bool(left)), length
            assert one.expected.tokens_per_s == pytest.approx(60 / seconds, rel=0.02), length
    throughput = tuned(columns, named=[Method("suffix", "throughput")]).tuning.candidates
    speed_up = next(one.speed_up or 0 for one in throughput if one.method.name != PLAIN)
    assert (speed_up > 1.5) == pays and speed_up > 0.6, "it is given what passes would cost"


def test_where_columns_cost_something_the_best_is_in_between() -> None:
    tuner = tuned(0.15, recording(interrupted), SUFFIX)
    assert names(tuner)[0] == "suffix, 8"
    rates = {c.method.length: c.expected.tokens_per_pass for c in tuner.tuning.candidates if c.expected}
    assert rates["2"] < rates["4"] < rates["8"] < rates["12"], "it writes more per pass, and yet less per second"


def test_batch_sizes_and_latency() -> None:
    """Rows cost a tenth of a pass each: the larger batch writes more in all, each of its requests more slowly."""
    found = tuned(0.0, recording(count=8), sizes=(1, 4), batches=0.2).tuning.candidates
    best, plain = pick(found)
    assert [one.batch_size for one in best] == [4, 1] and plain is not None and plain.batch_size == 4
    slow, quick = (one.expected.latency_s for one in best if one.expected)
    assert quick < slow
    best, plain = pick(found, latency_s=(quick + slow) / 2)
    assert [one.batch_size for one in best] == [1] and plain is None
    assert pick(found, latency_s=quick / 2) == ([], None)
    assert len(pick(found, count=1)[0]) == 1


def test_what_may_pay_is_picked_and_must_gain_more_than_plain_decoding_differs_from_itself() -> None:
    def candidate(name: str, rate: float) -> Candidate:
        expected, plain = (Expected(100, 50, 50, seconds, 0, 0) for seconds in (100 / rate, 10.0))
        return Candidate(Method(name), 1, expected, plain)

    some = [candidate("none", 10), candidate("suffix", 9), candidate("max_gram", 30), candidate("prompt_lookup", 9.8)]
    best, plain = pick(some)
    assert [one.method.drafter for one in best] == ["max_gram", "prompt_lookup"] and plain is some[0]
    slow, quick = (Confirmed(candidate("suffix", 12), rate, gain, 1.0, 1.1) for rate, gain in ((11, 1.04), (12, 1.03)))
    for confirmed, spread, fastest in (
        ([], 0.0, None),
        ([slow], 0.1, None),
        ([slow], 0.02, slow),
        ([slow, quick], 0.02, quick),  # tokens per second decide
    ):
        assert Tuning(confirmed=confirmed, plain_spread=spread).best is fastest


def test_the_default_is_kept_where_it_costs_nothing_and_nothing_is_much_faster() -> None:
    def confirmed(speed_up: float, *, is_default: bool) -> Confirmed:
        expected = Expected(100, 50, 50, 10.0, 0, 0)
        one = Candidate(Method("suffix"), 1, expected, expected, is_own=is_default, is_default=is_default)
        return Confirmed(one, 10 * speed_up, speed_up, speed_up, speed_up)

    for default, other, choice in (
        (1.3, 1.35, "default"),
        (1.3, 1.4, "other"),
        (0.97, 1.0, "default"),  # nothing gains
        (0.9, 1.0, None),
        (0.9, 1.2, "other"),
        (1.0, 1.03, "default"),
    ):
        found = confirmed(default, is_default=True), confirmed(other, is_default=False)
        best = Tuning(confirmed=list(found), plain_spread=0.02).best
        assert best is {"default": found[0], "other": found[1], None: None}[choice], (default, other)


def test_what_cannot_be_replayed_is_left_out_and_named() -> None:
    reasons = {"ngram_store(filler_top_k=3), 4": "filler_top_k", "suffix, 4, typical": "lossy"}
    refused_ones = [Method("ngram_store(filler_top_k=3)", "4"), Method("suffix", "4", "typical")]
    tuner = tuned(0.0, named=[*SUFFIX[1:2], *refused_ones])
    assert names(tuner) == ["suffix, 4", "plain"] and tuner.tuning.failed.keys() == reasons.keys()
    assert all(reason in tuner.tuning.failed[name] for name, reason in reasons.items())
    for change in ({"params": {"temperature": 1.0}}, {"model": "other"}):
        with refused("recording"):
            Tuner(repeating(), dataclasses.replace(recording(), **change))


def test_a_draft_model_is_run_once_and_a_missing_profile_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = loaded()
    one = record(target, numbered(4), tmp_path / "r.jsonl", SamplingParams(max_new_tokens=16))
    taught, honest = [], lab_tune.precompute
    monkeypatch.setattr(lab_tune, "precompute", lambda *args: (taught.append(1), honest(*args))[1])
    tuner = Tuner(target, one, profile=costs(0.0))
    found = tuner.search(methods(["self(1)", "self(2)"], ["2", "4", "confidence(0.5)"]), (1, 2))
    assert len(taught) == 2 and len(found) == 2 * 7 and not tuner.tuning.failed
    assert {"replay", "drafts"} <= set(tuner.tuning.seconds)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(lab_tune, "measure", lambda _, **settings: (asked.update(settings), costs(0.0))[1])
    Tuner(repeating(), recording()).search(methods(["suffix"], ["4", "12"]), (5,))
    assert asked["batches"] == [1, 5] and asked["columns"] == [1, 2, 3, 5, 9, 13] and asked["fills"] == ()
    assert asked["contexts"] == [50], "a prompt of 20 and half of 60"


Runs = list[tuple[str, list[str]]]


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> tuple[Runs, list[float]]:
    """Receives each live run's drafter and prompts; a pass is taken for a second, times the scales of runs after the first."""
    runs, scales = Runs(), list[float]()

    def watched(generator: Generator, asks: Sequence[PromptRequest], params: SamplingParams) -> Any:
        runs.append((generator.drafter_name, [ask.id for ask in asks]))
        found = run_live(generator, asks, params)
        scale = scales.pop(0) if scales and len(asks) > 1 else 1.0
        return dataclasses.replace(found, seconds=scale * found.stats.num_passes)

    monkeypatch.setattr(runners, "run_live", watched)
    return runs, scales


def test_confirming_runs_live(live: tuple[Runs, list[float]]) -> None:
    """Against plain decoding before and after; categories take turns in what is run."""
    tuner = tuned(0.0, sizes=(2,))
    [found] = tuner.confirm(tuner.tuning.candidates, repeats=2, count=4)
    assert found.candidate.method.name == "suffix, 8" and tuner.tuning.confirmed == [found]
    runs = live[0]
    assert [name for name, _ in runs] == ["none", "suffix", "none", "suffix", "none", "suffix", "none"]
    assert runs[2][1] == ["p0", "p1", "p2", "p3"] and len(runs[0][1]) == len(runs[1][1]) == 1
    assert found.low == found.speed_up == found.high == found.tokens_per_s == 60 / math.ceil(60 / 9)
    assert tuner.tuning.plain_spread == 0


def test_a_machine_that_changes_between_runs_decides_nothing(live: tuple[Runs, list[float]]) -> None:
    """The runs of the shorter drafts are four times as fast as those before them, and so is plain decoding next to them."""
    tuner = tuned(0.0, named=methods(["suffix"], ["8", "2"]))
    best, _ = pick(tuner.tuning.candidates)
    live[1].extend([1.0, 1.0, 1.0, 0.25, 0.0625])  # plain, 8, plain, 2, plain
    raw = {one.candidate.method.name: one for one in tuner.confirm(best, repeats=1, count=2)}
    assert raw["suffix, 8"].speed_up > raw["suffix, 2"].speed_up > 1
    assert tuner.tuning.confirmed[0] is raw["suffix, 8"]
    tuner.tuning.plain_spread = 0.0
    assert tuner.tuning.best is raw["suffix, 8"]


def test_the_target_s_own_methods_are_run_live_without_a_prediction() -> None:
    """The search alone would never have tried them; one that cannot be run is named, and the others go on."""
    own = [Method("ngram_store(filler_top_k=3)", "4"), Method("head(nowhere)", "2")]
    tuner = tuned(9.0, own=own)
    best, plain = pick(tuner.tuning.candidates)
    assert [(one.method.name, one.expected, one.speed_up) for one in best] == [(one.name, None, None) for one in own]
    assert plain is not None and plain.method.name == PLAIN
    [found] = tuner.confirm(best, repeats=1, count=2)
    assert found.candidate is best[0] and found.predicted is None
    assert set(tuner.tuning.failed) == {"head(nowhere), 2"}
    assert pick(tuner.tuning.candidates, latency_s=0.5) == ([], None), "as slow as plain decoding until it is known"


def test_live_runs_fit_the_time(live: tuple[Runs, list[float]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding writes a token a second: 8 prompts of 60 tokens twice are 960 s for one turn; three turns are to fit."""
    now = 0.0

    def monotonic() -> float:
        return now

    def take(generator: Generator, asks: Sequence[PromptRequest], params: SamplingParams) -> Any:
        nonlocal now
        found = taken(generator, asks, params)
        now += found.stats.num_tokens
        return found

    taken = runners.run_live
    monkeypatch.setattr(lab_tune, "monotonic", monotonic)
    monkeypatch.setattr(runners, "run_live", take)
    for turns, count, most in ((9.1, 8, 9), (3.1, 8, 4), (1, 2, 4), (0.001, 1, 1)):
        now = 0.0
        tuner = Tuner(repeating(), recording(count=8), profile=costs(0.0), end=turns * 960)
        best, _ = pick(tuner.search(SUFFIX[2:3], (1,)))
        live[0].clear()
        [found] = tuner.confirm(best)
        sizes = [len(asks) for _, asks in live[0][2:]]  # two that warm up
        assert set(sizes) == {count} and len(found_runs(live[0])) <= most and len(sizes) % 2 == 1
        assert turns < 1 or (len(found_runs(live[0])) >= 2 and now <= 1.2 * turns * 960)
        assert found.speed_up > 1


def found_runs(runs: Runs) -> list[str]:
    """The drafters of the live runs, without the one that warms up."""
    return [name for name, _ in runs if name != "none"][1:]


def test_a_search_fits_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the time is for replays: fewer outputs, and where even those take longer, the default and no other."""
    now = 0.0
    honest = lab_tune.replay

    def replayed(recording: Recording, *args: Any, **more: Any) -> Any:
        nonlocal now
        now += len(recording.records)
        return honest(recording, *args, **more)

    monkeypatch.setattr(lab_tune, "monotonic", lambda: now)
    monkeypatch.setattr(lab_tune, "replay", replayed)
    for end, outputs, skipped in ((1000.0, 12, 0), (150.0, 11, 0), (9.0, 4, 3)):
        now = 0.0
        tuner = Tuner(repeating(), recording(count=12), profile=costs(0.0), end=end)
        tuner.search(SUFFIX, (1,), SUFFIX[:1])
        assert (len(tuner.recording.records), tuner.tuning.skipped) == (outputs, skipped), end
        assert SUFFIX[0].name in names(tuner)


def test_the_prediction_that_is_shown_is_of_what_was_run() -> None:
    """Texts gain more the longer they are; the first 64 of 107 tokens run live are predicted alone."""
    tuner = tuned(0.06, recording(new=107))
    best, _ = pick(tuner.tuning.candidates)
    [found] = tuner.confirm(best, repeats=1, count=2)
    assert found.predicted == pytest.approx(64 / (7 * 1.48 + 1), rel=0.01), "7 passes of 9 tokens, and one token"
    assert best[0].speed_up == pytest.approx(107 / (11 * 1.48 + 1.42), rel=0.01)


def test_confirming_refuses_a_method_that_writes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner, honest = tuned(0.0), Method.generator
    other = loaded(cycle(SIZE, 7), tokenizer=Numbers(SIZE))
    monkeypatch.setattr(Method, "generator", lambda self, _, size: honest(self, other, size))
    with refused("method", "suffix, 8"):
        tuner.confirm(tuner.tuning.candidates)


def test_settings_round_trip(tmp_path: Path) -> None:
    path, plain = tmp_path / "foresay.toml", tmp_path / "plain"
    for settings in (
        Settings(target="a"),
        Settings(target='q"uo\\te\n\x7f', drafter="suffix(scale=3)", length=8, rule="block", dtype="fp32"),
        Settings(target="ä/日本", length="confidence(0.5)", max_batch_size=4),
        Settings(target="a.gguf", drafter="suffix", backend="llama.cpp"),
    ):
        write_settings(path, settings, {"speed_up": 1.5, "prompts": 'a "b"', "good": True, "no": None})
        assert read_settings(path) == settings
    plain.touch()
    assert set(tmp_path.iterdir()) == {path, plain} and path.stat().st_mode == plain.stat().st_mode
    assert "no = " not in path.read_text() and "speed_up = 1.5" in path.read_text()
    with refused("path"):
        write_settings(tmp_path / "no" / "such", settings, {})


def test_what_a_settings_file_holds_is_loaded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder is meant from where the file lies, not from where the program runs."""
    here, near = tmp_path / "foresay.toml", os.path.relpath(folder, tmp_path)
    settings = Settings(target=near, drafter="max_gram", length=7, rule="block", max_batch_size=3, dtype="fp32")
    write_settings(here, settings, {"speed_up": 2.0})
    monkeypatch.chdir(folder)

    def loaded(**more: Any) -> tuple[Any, ...]:
        one: Any = foresay.load(str(here), **more)
        length = getattr(one.policy, "num_draft_tokens", type(one.policy))
        return one.drafter_name, length, one.rule.name, one.max_batch_size, one.target.model.model.dtype

    assert loaded() == ("max_gram", 7, "block", 3, torch.float32)
    given = {"drafter": "suffix", "rule": "match", "max_batch_size": 2, "dtype": "bf16"}
    assert loaded(**given) == ("suffix", ThroughputLength, "match", 2, torch.bfloat16), (
        "a length belongs to its drafter"
    )
    assert loaded(num_draft_tokens=2)[1] == 2 and loaded(length="heuristic")[1] is HeuristicLength
    assert loaded(max_ngram=3)[0].startswith("prompt_lookup") and loaded(draft=str(folder))[0].startswith("model(")
    here.write_text(f'target = "{near}"\nlength = 3\n')
    assert loaded()[:2] == ("suffix", 3), "a length without a drafter"
    here.write_text(f'target = "{near}"\ndrafter = "none"\n')
    assert loaded()[0] == "none"


@pytest.mark.parametrize(
    ("text", "param", "value"),
    [
        (b'target = "a"\ndraftre = "x"', "setting", "draftre"),
        (b'drafter = "x"', "target", None),
        (b"target = 3", "target", 3),
        (b'target = ""', "target", ""),
        (b'target = "a"\nlength = true', "length", True),
        (b'target = "a"\nlength = 1.5', "length", 1.5),
        (b'target = "a"\nmax_batch_size = 0', "max_batch_size", 0),
        (b'target = "a"\n[measured]\nx = 1\n[other]\ny = 2', "setting", "other"),
        (b'target = "a', "path", ANY),
        (b'target = "\xff"', "path", ANY),
    ],
)
def test_wrong_settings_files(tmp_path: Path, text: bytes, param: str, value: Any) -> None:
    path = tmp_path / "foresay.toml"
    refuses(lambda: foresay.load(path), "path", path)
    path.write_bytes(text)
    refuses(lambda: foresay.load(path), param, value, at="" if param == "path" else f"{path}: ")


def test_names_of_methods() -> None:
    for given, named in (
        ((["suffix", "max_gram"],), ["suffix, throughput", "max_gram, throughput"]),
        ((["self(4)"],), ["self(4), throughput(sampled=4)"]),
        ((["suffix", "none", "suffix"], ["4", "throughput"]), ["suffix, 4", "suffix, throughput"]),
        ((["suffix"], ["12"], "block"), ["suffix, 12, block"]),
    ):
        assert [m.name for m in methods(*given)] == named  # type: ignore[arg-type]
    assert [m.fixed.name for m in methods(["suffix", "max_gram"])] == ["suffix, 12", "max_gram, 10"]
    assert Method("none").name == PLAIN
    for wrong in (("none", "4"), ("sufix",), ("suffix", "thruput"), ("suffix", "4", "blok"), ("suffix", "-1")):
        with pytest.raises(ConfigError):
            Method(*wrong)
