"""Tuning where the best is known, the settings file it ends in, and benchmarks that survive what happens to them."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, UnknownNameError
from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN, Method, methods
from foresay.lengths import ThroughputLength
from foresay.models.table import TableModel
from foresay.records.profile import Profile, Timing
from foresay.records.recording import Record, Recording
from foresay.records.results import Cell, Failure, Prediction, Results, Run
from foresay.spec.settings_file import Settings, read_settings, write_settings
from foresay_lab import tune as lab_tune
from foresay_lab.bench import runners
from foresay_lab.bench.bench import Progress, bench
from foresay_lab.bench.runners import MethodRunner, Outcome, sampling_name
from foresay_lab.bench.settings import BenchSettings
from foresay_lab.data.requests import PromptRequest, RequestBuilder
from foresay_lab.measure.live_run import DraftFailedError, run_live
from foresay_lab.replay.predict import Expected
from foresay_lab.tune import Candidate, Confirmed, Tuner, Tuning, pick
from helpers import tiny
from helpers.families import make
from helpers.recordings import Numbers, loaded, numbered

SIZE = 12


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny.one_thread()


def cycle(period: int = 10) -> TableModel:
    """A target that writes 2, 3, ... and again from the beginning: what came before comes again."""
    table = torch.full((SIZE, SIZE, SIZE), 1e-6)
    for token in range(SIZE):
        table[:, token, 2 + (token - 1) % period] = 1.0
    return TableModel(table)


TARGET = cycle()


def repeating(batch: int = 4) -> Generator:
    return loaded(cycle(), batch=batch, tokenizer=Numbers(SIZE))


def recording(*, repeats: bool, count: int = 6) -> Recording:
    """Texts that n-gram drafters predict from the second round on, or never: de Bruijn-like pairs that do not return."""
    records = []
    for i in range(count):
        if repeats:
            text = [2 + (i + k) % 10 for k in range(80)]
        else:
            # every step is another pair of tokens: whatever followed a token before does not follow it again
            text, seen = [i % SIZE], {}
            for _ in range(40):
                turn = seen[text[-1]] = seen.get(text[-1], -1) + 1
                text.append((text[-1] + 1 + turn) % SIZE)
        records.append(Record(f"p{i}", tuple(text[:20]), tuple(text[20:]), category=f"c{i % 2}"))
    return Recording(tuple(records), SIZE, model="TableModel", params={"max_new_tokens": 60})


def costs(columns: float, *, batches: float = 0.0) -> Profile:
    """A pass of one row and column takes a second, each further column so much more, and each further row."""
    timings = [
        Timing(b, c, 40, s := 1.0 + columns * (c - 1) * b + batches * (b - 1), s, s)
        for b in (1, 2, 4)
        for c in (1, 2, 5, 9, 17)
    ]
    return Profile("TableModel", "", {}, tuple(timings), ((8, 1e-3), (256, 1e-2)))


# -- the search --------------------------------------------------------------------------------------------------------

SUFFIX = methods(["suffix"], ["2", "4", "8", "12"])


def ranked(tuner: Tuner, named: Sequence[Method] = SUFFIX, sizes: Sequence[int] = (1,)) -> list[str]:
    return [one.method.name for one in tuner.search(named, sizes)]


def test_where_columns_cost_nothing_the_longest_draft_wins() -> None:
    tuner = Tuner(repeating(), recording(repeats=True), profile=costs(0.0))
    assert ranked(tuner) == ["suffix, 12", "suffix, 8", "suffix, 4", "suffix, 2", "plain"]
    best, plain = tuner.tuning.candidates[0], tuner.tuning.candidates[-1]
    assert best.speed_up > 5 and best.expected.tokens_per_pass > 6
    assert plain.speed_up == 1 and plain.expected.tokens_per_pass == 1
    assert plain.expected.tokens_per_s == pytest.approx(1.0, rel=0.02), "a token a second, and the prompts"


def test_where_columns_cost_passes_nothing_pays() -> None:
    tuner = Tuner(repeating(), recording(repeats=True), profile=costs(1.5))
    names = ranked(tuner)
    assert names[0] == "plain" and names[1] == "suffix, 2" and names[-1] == "suffix, 12"
    best, plain = pick(tuner.tuning.candidates)
    assert best == [] and plain is not None and plain.method.name == PLAIN


def test_costs_are_those_of_passes_counted_by_hand() -> None:
    """Every draft token holds: 60 tokens are passes of K + 1 of them and one of what is left, each column at 0.06 s."""
    tuner = Tuner(repeating(), recording(repeats=True), profile=costs(0.06))
    ranked(tuner)
    found = {c.method.length: c.expected for c in tuner.tuning.candidates}
    for length in (2, 4, 8):
        passes, left = divmod(60, length + 1)
        seconds = passes * (1 + 0.06 * length) + (1 + 0.06 * (left - 1) if left else 0)
        one = found[str(length)]
        assert one.tokens_per_pass == 60 / (passes + bool(left)), length
        assert one.tokens_per_s == pytest.approx(60 / seconds, rel=0.01), length


def test_where_columns_cost_something_the_best_is_in_between() -> None:
    """Five tokens that come again and one that may be another: long drafts are cut short there, short ones never get so far."""
    records = []
    for i in range(6):
        numbers, text = random.Random(i), []
        while len(text) < 80:
            text += [2, 3, 4, 5, 6, numbers.randrange(7, 12)]
        records.append(Record(f"p{i}", tuple(text[:20]), tuple(text[20:80])))
    interrupted = dataclasses.replace(recording(repeats=True), records=tuple(records))
    tuner = Tuner(repeating(), interrupted, profile=costs(0.15))
    assert ranked(tuner)[0] == "suffix, 8"
    rates = {c.method.length: c.expected.tokens_per_pass for c in tuner.tuning.candidates if c.method.name != PLAIN}
    assert rates["2"] < rates["4"] < rates["8"] < rates["12"], "it writes more per pass, and yet less per second"


def test_where_no_guess_is_right_plain_decoding_wins() -> None:
    tuner = Tuner(repeating(), recording(repeats=False), profile=costs(0.3))
    names = ranked(tuner, methods(["suffix", "prompt_lookup(min_ngram=1)"], ["4", "8"]))
    assert names[0] == "plain"
    tried = tuner.tuning.candidates[1:]
    assert len(tried) == 4 and {c.expected.tokens_per_pass for c in tried} == {1.0}
    assert all(c.speed_up < 0.7 for c in tried)


def test_throughput_follows_the_profile() -> None:
    """The policy that measures is given what passes would cost: it drafts where that pays and hardly where it does not."""
    named = [Method("suffix", "throughput")]
    for columns, pays in ((0.0, True), (3.0, False)):
        tuner = Tuner(repeating(), recording(repeats=True), profile=costs(columns))
        found = next(c for c in tuner.search(named, (1,)) if c.method.name != PLAIN)
        assert (found.speed_up > 1.5) == pays and found.speed_up > 0.6


def test_batch_sizes_and_latency() -> None:
    """Rows cost a tenth of a pass each: the larger batch writes more in all, each of its requests more slowly."""
    tuner = Tuner(repeating(), recording(repeats=True, count=8), profile=costs(0.0, batches=0.2))
    tuner.search(methods(["suffix"], ["8"]), (1, 4))
    best, plain = pick(tuner.tuning.candidates)
    assert [one.batch_size for one in best] == [4, 1] and plain is not None and plain.batch_size == 4
    slow, quick = best[0].expected.latency_s, best[1].expected.latency_s
    assert quick < slow
    best, plain = pick(tuner.tuning.candidates, latency_s=(quick + slow) / 2)
    assert [one.batch_size for one in best] == [1] and plain is None
    assert pick(tuner.tuning.candidates, latency_s=quick / 2) == ([], None)
    assert len(pick(tuner.tuning.candidates, count=1)[0]) == 1


def candidate(name: str, rate: float, plain: float = 10.0, size: int = 1) -> Candidate:
    def at(value: float) -> Expected:
        return Expected(tokens=100, passes=50, row_passes=50 * size, seconds=100 / value, draft_s=0, fill_s=0)

    return Candidate(Method(name), size, at(rate), at(plain))


def test_picking_by_hand() -> None:
    some = [candidate("none", 10), candidate("suffix", 9), candidate("max_gram", 30), candidate("prompt_lookup", 9.8)]
    best, plain = pick(some)
    assert [one.method.drafter for one in best] == ["max_gram", "prompt_lookup"], "what may pay is tried"
    assert plain is some[0]


def test_the_best_must_gain_more_than_plain_decoding_differs_from_itself() -> None:
    one = candidate("suffix", 12)
    tuning = Tuning(confirmed=[Confirmed(one, 11.0, 1.04, 1.0, 1.1)], plain_spread=0.1)
    assert tuning.best is None
    tuning.plain_spread = 0.02
    assert tuning.best is tuning.confirmed[0]
    quicker = Confirmed(one, 12.0, 1.03, 1.0, 1.1)
    tuning.confirmed.append(quicker)
    assert tuning.best is quicker, "tokens per second decide"
    assert Tuning().best is None


def test_what_cannot_be_replayed_is_left_out_and_named() -> None:
    named = [*methods(["suffix"], ["4"]), Method("ngram_store(filler_top_k=3)", "4"), Method("suffix", "4", "typical")]
    tuner = Tuner(repeating(), recording(repeats=True), profile=costs(0.0))
    assert ranked(tuner, named) == ["suffix, 4", "plain"]
    assert set(tuner.tuning.failed) == {"ngram_store(filler_top_k=3), 4", "suffix, 4, typical"}
    assert "filler_top_k" in tuner.tuning.failed["ngram_store(filler_top_k=3), 4"]
    assert "lossy" in tuner.tuning.failed["suffix, 4, typical"]


def test_tuning_refuses_other_recordings() -> None:
    one = recording(repeats=True)
    with pytest.raises(ConfigError, match="tuning needs a greedy recording, and this one was sampled"):
        Tuner(repeating(), dataclasses.replace(one, params={"temperature": 1.0}))
    with pytest.raises(ConfigError, match="the recording is of 'other', and the target is 'TableModel'"):
        Tuner(repeating(), dataclasses.replace(one, model="other"))


def test_confirming_runs_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against plain decoding before and after; categories take turns in what is run. A pass is taken for a second."""
    target = repeating()
    tuner = Tuner(target, recording(repeats=True), profile=costs(0.0))
    tuner.search(methods(["suffix"], ["8"]), (2,))
    runs: list[tuple[str, list[str]]] = []
    honest = run_live

    def watched(generator: Generator, asks: Sequence[PromptRequest], params: SamplingParams) -> Any:
        runs.append((generator.drafter_name, [ask.id for ask in asks]))
        live = honest(generator, asks, params)
        return dataclasses.replace(live, seconds=float(live.stats.num_passes))

    monkeypatch.setattr(runners, "run_live", watched)
    [found] = tuner.confirm(tuner.tuning.candidates, repeats=2, count=4)
    assert found.candidate.method.name == "suffix, 8" and tuner.tuning.confirmed == [found]
    assert [name for name, _ in runs] == ["none", "suffix", "none", "suffix", "none", "suffix", "none"]
    assert runs[2][1] == ["p0", "p1", "p2", "p3"] and len(runs[0][1]) == len(runs[1][1]) == 1
    tokens = min(lab_tune._CONFIRM_TOKENS, 60)
    assert found.low == found.speed_up == found.high == found.tokens_per_s == tokens / math.ceil(tokens / 9)
    assert tuner.tuning.plain_spread == 0


def test_a_machine_that_changes_between_runs_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of the shorter drafts are four times as fast as those before them, and so is plain decoding next to them."""
    tuner = Tuner(repeating(), recording(repeats=True), profile=costs(0.0))
    tuner.search(methods(["suffix"], ["8", "2"]), (1,))
    best, _ = pick(tuner.tuning.candidates)
    assert [one.method.name for one in best] == ["suffix, 8", "suffix, 2"]
    honest, scales = run_live, iter([1.0, 1.0, 1.0, 1.0, 0.25, 0.0625])  # warm, plain, 8, plain, 2, plain

    def watched(generator: Generator, asks: Sequence[PromptRequest], params: SamplingParams) -> Any:
        live = honest(generator, asks, params)
        scale = 1.0 if len(asks) < 2 else next(scales)
        return dataclasses.replace(live, seconds=scale * live.stats.num_passes)

    monkeypatch.setattr(runners, "run_live", watched)
    next(scales)
    found = tuner.confirm(best, repeats=1, count=2)
    raw = {one.candidate.method.name: one for one in found}
    assert raw["suffix, 8"].speed_up > raw["suffix, 2"].speed_up > 1
    assert tuner.tuning.confirmed[0] is raw["suffix, 8"]
    tuner.tuning.plain_spread = 0.0
    assert tuner.tuning.best is raw["suffix, 8"]


def test_a_method_without_a_prediction_is_run_live_and_may_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the target's own default, if a replay fails: the search alone would never have tried it."""
    honest = Tuner._expect

    def expect(self: Tuner, method: Method, *given: Any) -> Expected:
        if method.length == "8":
            raise ConfigError("cannot be replayed")
        return honest(self, method, *given)

    monkeypatch.setattr(Tuner, "_expect", expect)
    tuner = Tuner(repeating(), recording(repeats=True), profile=costs(9.0))
    tuner.search(methods(["suffix"], ["4"]), (1,), methods(["suffix"], ["8"]))
    best, plain = pick(tuner.tuning.candidates)
    assert [(one.method.name, one.expected, one.speed_up) for one in best] == [("suffix, 8", None, None)]
    assert plain is not None and plain.method.name == PLAIN
    [found] = tuner.confirm(best, repeats=1, count=2)
    assert found.candidate is best[0] and found.predicted is None
    assert pick(tuner.tuning.candidates, latency_s=0.5) == ([], None), (
        "it is as slow as plain decoding until it is known"
    )


def test_a_method_that_cannot_be_run_is_named_and_the_others_go_on() -> None:
    tuner = Tuner(repeating(), recording(repeats=True), profile=costs(0.0))
    tuner.search(methods(["suffix"], ["8"]), (1,), [Method("head(nowhere)", "2")])
    best, _ = pick(tuner.tuning.candidates)
    assert [one.candidate.method.name for one in tuner.confirm(best, repeats=1, count=2)] == ["suffix, 8"]
    assert set(tuner.tuning.failed) == {"head(nowhere), 2"}


@pytest.mark.parametrize(("seconds", "runs"), [(math.inf, 7), (3.1 * 960, 7), (2.1 * 960, 5), (1.0, 3)])
def test_live_runs_fit_the_time(monkeypatch: pytest.MonkeyPatch, seconds: float, runs: int) -> None:
    """Plain decoding writes a token a second: 8 prompts of 60 tokens twice are 960 s for one turn of one candidate."""
    tuner = Tuner(repeating(), recording(repeats=True, count=8), profile=costs(0.0))
    tuner.search(methods(["suffix"], ["8"]), (1,))
    best, _ = pick(tuner.tuning.candidates)
    sizes, honest = [], run_live

    def watched(generator: Generator, asks: Sequence[PromptRequest], params: SamplingParams) -> Any:
        sizes.append(len(asks))
        return honest(generator, asks, params)

    monkeypatch.setattr(runners, "run_live", watched)
    tuner.confirm(best, repeats=3, seconds=seconds)
    assert len(sizes) - 2 == runs, "after two that warm up"
    assert set(sizes[2:]) == ({8} if seconds > 1 else {1})


def test_the_prediction_that_is_shown_is_of_what_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts gain more the longer they are; the first 20 of 60 tokens run live are predicted alone."""
    monkeypatch.setattr(lab_tune, "_CONFIRM_TOKENS", 20)
    tuner = Tuner(repeating(), recording(repeats=True), profile=costs(0.06))
    tuner.search(methods(["suffix"], ["8"]), (1,))
    best, _ = pick(tuner.tuning.candidates)
    [found] = tuner.confirm(best, repeats=1, count=2)
    assert found.predicted == pytest.approx(20 / (2 * 1.48 + 1.06), rel=0.01), "9 + 9 + 2 tokens"
    assert best[0].speed_up == pytest.approx(60 / (6 * 1.48 + 1.3), rel=0.01)


def test_confirming_refuses_a_method_that_writes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Tuner(repeating(), recording(repeats=True), profile=costs(0.0))
    tuner.search(methods(["suffix"], ["4"]), (1,))
    honest = Method.generator

    def other(self: Method, target: Generator, size: int) -> Generator:
        return honest(self, loaded(cycle(7), tokenizer=Numbers(SIZE)), size)

    monkeypatch.setattr(Method, "generator", other)
    with pytest.raises(
        ConfigError, match="suffix, 4 generated different output than plain decoding; please report this"
    ):
        tuner.confirm(tuner.tuning.candidates)


def test_a_draft_model_is_heard_once_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foresay_lab.replay.record import record

    target = foresay.load(make("llama"), tokenizer=Numbers(), drafter="none")
    one = record(target, numbered(4), tmp_path / "r.jsonl", SamplingParams(max_new_tokens=16))
    heard = 0
    honest = lab_tune.precompute

    def counted(*args: Any) -> Any:
        nonlocal heard
        heard += 1
        return honest(*args)

    monkeypatch.setattr(lab_tune, "precompute", counted)
    tuner = Tuner(target, one, profile=costs(0.0))
    names = ranked(tuner, methods(["self(1)", "self(2)"], ["2", "4", "confidence(0.5)"]), (1, 2))
    assert heard == 2 and len(names) == 2 * 7 and not tuner.tuning.failed
    assert {"replay", "drafts"} <= set(tuner.tuning.seconds)


def test_a_profile_is_measured_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def noted(target: Generator, **settings: Any) -> Profile:
        asked.update(settings)
        return costs(0.0)

    monkeypatch.setattr(lab_tune, "measure", noted)
    Tuner(repeating(), recording(repeats=True)).search(methods(["suffix"], ["4", "12"]), (5,))
    assert asked["batches"] == [1, 2, 4, 5] and asked["columns"] == [1, 2, 3, 4, 5, 7, 9, 13]
    assert asked["contexts"] == [50], "a prompt of 20 and half of 60"


# -- foresay.toml ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tune") / "tiny")


def test_settings_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "foresay.toml"
    for settings in (
        Settings(target="a"),
        Settings(
            target='q"uo\\te\n\x7f', drafter="suffix(scale=3)", length=8, rule="block", max_batch_size=4, dtype="fp32"
        ),
        Settings(target="ä/日本", length="confidence(0.5)"),
        Settings(target="a.gguf", drafter="suffix", backend="llama.cpp"),
    ):
        write_settings(path, settings, {"speed_up": 1.5, "prompts": 'a "b"', "good": True, "missing": None})
        assert read_settings(path) == settings
    assert [p.name for p in tmp_path.iterdir()] == ["foresay.toml"]
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert "missing" not in path.read_text() and "speed_up = 1.5" in path.read_text()
    with pytest.raises(ConfigError, match=r"cannot write .*No such file"):
        write_settings(tmp_path / "no" / "such", Settings(target="a"), {})


def test_what_a_settings_file_says_is_loaded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder is meant from where the file lies, not from where the program runs."""
    path = folder.parent / "foresay.toml"
    settings = Settings(target="tiny", drafter="max_gram", length=7, rule="block", max_batch_size=3, dtype="fp32")
    write_settings(path, settings, {"speed_up": 2.0})
    monkeypatch.chdir(tmp_path)
    one = foresay.load(path)
    assert (one.drafter_name, one.policy.num_draft_tokens, one.rule.name) == ("max_gram", 7, "block")  # type: ignore[attr-defined]
    assert one.max_batch_size == 3 and one.target.model.model.dtype is torch.float32  # type: ignore[attr-defined]
    given = foresay.load(str(path), drafter="suffix", rule="match", max_batch_size=2, dtype="bf16")
    assert (given.drafter_name, given.rule.name, given.max_batch_size) == ("suffix", "match", 2)
    assert isinstance(given.policy, ThroughputLength), "a length belongs to its drafter"
    assert given.target.model.model.dtype is torch.bfloat16  # type: ignore[attr-defined]
    assert foresay.load(path, num_draft_tokens=2).policy.num_draft_tokens == 2  # type: ignore[attr-defined]
    assert foresay.load(path, length="heuristic").policy.start == 5  # type: ignore[attr-defined]
    assert foresay.load(path, max_ngram=3).drafter_name.startswith("prompt_lookup")
    assert foresay.load(path, str(folder)).drafter_name.startswith("model(")


def test_a_length_without_a_drafter_is_honoured(folder: Path) -> None:
    path = folder.parent / "short.toml"
    path.write_text('target = "tiny"\nlength = 3\n')
    one = foresay.load(path)
    assert (one.drafter_name, one.policy.num_draft_tokens) == ("suffix", 3)  # type: ignore[attr-defined]
    path.write_text('target = "tiny"\ndrafter = "none"\n')
    assert foresay.load(path).drafter_name == "none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('target = "a"\ndraftre = "x"', "unknown setting 'draftre'. Did you mean 'drafter'"),
        ('drafter = "x"', "the key target is missing; it must name a model"),
        ("target = 3", "target=3 must be a non-empty string"),
        ('target = ""', "target='' must be a non-empty string"),
        ('target = "a"\nlength = true', "length=True must be an integer or an expression of a length policy"),
        ('target = "a"\nlength = 1.5', "length=1.5"),
        ('target = "a"\nmax_batch_size = 0', "max_batch_size=0 must be an integer at least 1"),
        ('target = "a', "not valid TOML"),
        ('target = "a"\n[measured]\nx = 1\n[other]\ny = 2', "unknown setting 'other'"),
    ],
)
def test_bad_settings_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "foresay.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        foresay.load(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)
    assert not isinstance(caught.value, UnknownNameError)


def test_settings_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        foresay.load(tmp_path / "none.toml")
    (tmp_path / "x.toml").write_bytes(b'target = "\xff"')
    with pytest.raises(ConfigError, match="not valid TOML"):
        foresay.load(tmp_path / "x.toml")


# -- methods -------------------------------------------------------------------------------------------------------------


def test_methods_by_name() -> None:
    assert [m.name for m in methods(["suffix", "max_gram"])] == ["suffix, throughput", "max_gram, throughput"]
    assert methods(["self(4)"])[0].name == "self(4), throughput(sampled=4)"
    assert [m.fixed.name for m in methods(["suffix", "max_gram"])] == ["suffix, 12", "max_gram, 10"]
    assert [m.name for m in methods(["suffix", "none", "suffix"], ["4", "throughput"])] == [
        "suffix, 4",
        "suffix, throughput",
    ]
    assert methods(["suffix"], ["12"], "block")[0].name == "suffix, 12, block" and Method("none").name == PLAIN
    with pytest.raises(ConfigError, match="no methods to compare"):
        methods(["none"])
    with pytest.raises(ConfigError, match="drafter='none' drafts nothing, but length='4' was given"):
        Method("none", "4")
    for bad in (("sufix",), ("suffix", "thruput"), ("suffix", "4", "blok"), ("suffix", "-1")):
        with pytest.raises(ConfigError):
            Method(*bad)


def test_names_of_sampling() -> None:
    assert sampling_name(SamplingParams()) == "greedy"
    assert sampling_name(SamplingParams(temperature=0.8, top_p=0.9, top_k=5)) == "t=0.8 top_k=5 top_p=0.9"


# -- benchmarks ----------------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(max_new_tokens=24)


def asks(generator: Generator, count: int = 4) -> list[PromptRequest]:
    return RequestBuilder(generator).first(numbered(count, high=SIZE))


def settings(generator: Generator, **changes: Any) -> BenchSettings:
    values: dict[str, Any] = {
        "methods": methods(["suffix", "max_gram"], ["4"]),
        "datasets": {"d": asks(generator)},
        "params": (GREEDY,),
        "repeats": 2,
    }
    return BenchSettings(**{**values, **changes})


def order(results: Results) -> list[str]:
    return [run.cell.method for run in results.runs]


def test_a_benchmark(tmp_path: Path) -> None:
    generator, told = repeating(), list[Progress]()
    results = bench(generator, settings(generator), tmp_path / "r.jsonl", on_run=told.append)
    # what ran between two plain runs is written when its ratios are known
    assert order(results) == [PLAIN, PLAIN, "suffix, 4", "max_gram, 4", "suffix, 4", PLAIN, "max_gram, 4"]
    assert [(one.done, one.total) for one in told] == [(i, 4) for i in range(1, 5)]
    for run in results.runs:
        assert run.tokens == 4 * 24 and run.seconds > 0 and run.exact and len(run.prompts) == 4
        assert run.stats["num_tokens"] == run.tokens == sum(p.generated_length for p in run.prompts)
        drafted = run.cell.method != PLAIN
        assert (run.identical, run.note) == ((True, "") if drafted else (None, ""))
        assert (run.plain_seconds is not None) == drafted and (run.stats["num_drafted"] > 0) == drafted
    assert {run.cell for run in results.runs} == {
        Cell(m, "d", 1, "greedy") for m in (PLAIN, "suffix, 4", "max_gram, 4")
    }
    assert {(t.cell.method, t.id) for t in results.traces} == {
        (m, f"p{i}") for m in ("suffix, 4", "max_gram, 4") for i in (0, 1)
    }
    assert "".join(text for text, _ in results.traces[0].pieces) == "".join(
        f"{i} " for i in run_live(generator, asks(generator)[:1], GREEDY).outputs[0]
    )
    assert {origin for t in results.traces for _, origin in t.pieces} == {"draft", "residual", "bonus"}
    assert results.settings["datasets"]["d"]["prompts"] == 4 and results.provenance["versions"]["foresay"]


def test_plain_decoding_is_never_far(tmp_path: Path) -> None:
    """Between any two of its runs lie three of others at most, and each ratio is with those next to it."""
    generator = repeating()
    path = tmp_path / "r.jsonl"
    many = settings(generator, methods=methods(["suffix"], ["1", "2", "3", "4", "5"]), repeats=2)
    results = bench(generator, many, path)
    plain = [i for i, name in enumerate(order(results)) if name == PLAIN]
    assert len(plain) == 1 + math.ceil(10 / 3)
    for i, run in enumerate(results.runs):
        if run.cell.method != PLAIN:
            near = [results.runs[k] for k in plain]
            assert min(n.seconds / n.tokens for n in near) <= (run.plain_seconds or 0) / run.tokens + 1e-12
            assert (run.plain_seconds or 0) / run.tokens <= max(n.seconds / n.tokens for n in near) + 1e-12, i


def test_predictions_are_written_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, path = repeating(), tmp_path / "r.jsonl"
    predicted = [Prediction(Cell("suffix, 4", "d", 1), 100.0, 3.0)]
    for _ in range(2):
        bench(generator, settings(generator, repeats=1), path, predictions=predicted)
    kinds = [json.loads(line).get("kind") for line in path.read_text().splitlines()]
    assert kinds[1] == "prediction" and kinds.count("prediction") == 1
    assert Results.load(path).predictions == predicted


def test_a_benchmark_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, path = repeating(), tmp_path / "r.jsonl"
    wanted = settings(generator, methods=methods(["suffix", "max_gram", "prompt_lookup"], ["4"]), repeats=2)
    honest, count = MethodRunner.run, 0

    def stopped(self: MethodRunner, block: Any, some: Any) -> Outcome:
        nonlocal count
        count += len(some) > 1 and self.name != PLAIN
        if count == 4:
            raise KeyboardInterrupt
        return honest(self, block, some)

    monkeypatch.setattr(MethodRunner, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        bench(generator, wanted, path)
    monkeypatch.setattr(MethodRunner, "run", honest)
    first = [(run.cell.method, run.repeat) for run in Results.load(path).runs if run.cell.method != PLAIN]
    assert first == [("suffix, 4", 0), ("max_gram, 4", 0), ("prompt_lookup, 4", 0)]
    told: list[Progress] = []
    results = bench(generator, wanted, path, on_run=told.append)
    runs = [(run.cell.method, run.repeat) for run in results.runs if run.cell.method != PLAIN]
    assert sorted(runs) == sorted((m.name, r) for m in wanted.methods for r in (0, 1)), "none twice, none missing"
    assert [one.done for one in told] == [4, 5, 6]
    before = path.read_bytes()
    bench(generator, wanted, path)
    assert path.read_bytes() == before, "nothing is missing: nothing runs, not even plain decoding"
    more = bench(generator, settings(generator, methods=wanted.methods, repeats=3), path)
    assert sum(run.cell.method != PLAIN for run in more.runs) == 9, "more repeats go on"


def test_a_failing_method_does_not_lose_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, path = repeating(), tmp_path / "r.jsonl"
    honest = MethodRunner.run

    def failing(self: MethodRunner, block: Any, some: Any) -> Outcome:
        if self.name == "max_gram, 4":
            raise DraftFailedError("the drafter failed:\n  ValueError: no")
        if self.name == "prompt_lookup, 4" and len(some) > 1:
            raise RuntimeError("CUDA out of memory")
        return honest(self, block, some)

    monkeypatch.setattr(MethodRunner, "run", failing)
    wanted = settings(generator, methods=methods(["max_gram", "suffix", "prompt_lookup"], ["4"]), repeats=1)
    told: list[Progress] = []
    results = bench(generator, wanted, path, on_run=told.append)
    assert order(results).count("suffix, 4") == 1 and len(told) == 3
    assert {(f.cell.method, f.error) for f in results.failures} == {
        ("max_gram, 4", "the drafter failed: ValueError: no"),
        ("prompt_lookup, 4", "RuntimeError: CUDA out of memory"),
    }
    assert sum(isinstance(one.last, Failure) for one in told) == 2
    monkeypatch.setattr(MethodRunner, "run", honest)
    again = bench(generator, wanted, path)
    assert {run.cell.method for run in again.runs} == {PLAIN, "suffix, 4", "max_gram, 4", "prompt_lookup, 4"}
    assert order(again).count("suffix, 4") == 1, "what failed is tried again, what ran is not"


def test_other_outputs_are_flagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = repeating()
    honest = MethodRunner.run

    def differing(self: MethodRunner, block: Any, some: Any) -> Outcome:
        out = honest(self, block, some)
        if self.name == "suffix, 4" and len(some) > 1:
            out.outputs[2] = [*out.outputs[2][:-1], 0]
        return out

    monkeypatch.setattr(MethodRunner, "run", differing)
    results = bench(generator, settings(generator, repeats=1), tmp_path / "r.jsonl")
    flags = {run.cell.method: (run.identical, run.note) for run in results.runs}
    assert flags["suffix, 4"] == (False, "3 of 4 outputs equal those of plain decoding")
    assert flags["max_gram, 4"] == (True, "")


def test_plain_decoding_that_does_not_repeat_itself_ends_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, honest, turn = repeating(), MethodRunner.run, 0

    def drifting(self: MethodRunner, block: Any, some: Any) -> Outcome:
        nonlocal turn
        turn += 1
        out = honest(self, block, some)
        if self.name == PLAIN:
            out.outputs[0][-1] = turn
        return out

    monkeypatch.setattr(MethodRunner, "run", drifting)
    with pytest.raises(AssertionError, match="plain decoding is not deterministic"):
        bench(generator, settings(generator), tmp_path / "r.jsonl")


def test_sampled_and_lossy_runs_need_not_be_identical(tmp_path: Path) -> None:
    generator = repeating()
    hot = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3)
    wanted = settings(
        generator, params=(GREEDY, hot), methods=methods(["suffix"], ["4"], "typical"), repeats=1, batch_sizes=(1, 4)
    )
    results = bench(generator, wanted, tmp_path / "r.jsonl")
    cells = {run.cell: run for run in results.runs if run.cell.method != PLAIN}
    assert {(c.batch_size, c.sampling) for c in cells} == {(1, "greedy"), (4, "greedy"), (1, "t=1"), (4, "t=1")}
    assert all(not run.exact for run in cells.values())
    assert all((run.identical is None) == (c.sampling != "greedy") for c, run in cells.items())


def test_stop_strings_stop_every_run(tmp_path: Path) -> None:
    generator = repeating()
    params = SamplingParams(max_new_tokens=24, stop=("5 ",))
    results = bench(generator, settings(generator, params=(params,), repeats=1), tmp_path / "r.jsonl")
    for run in results.runs:
        assert run.identical in (None, True) and run.tokens < 4 * 12
        assert {p.finish_reason for p in run.prompts} == {"stop"}


def test_bad_benchmarks(tmp_path: Path) -> None:
    generator = repeating()
    for changes, message in [
        ({"datasets": {}}, "no prompts to run"),
        ({"datasets": {"d": []}}, "no prompts to run"),
        ({"repeats": 0}, "repeats=0 must be at least 1"),
        ({"batch_sizes": (1, 0)}, "batch_size=0 must be at least 1"),
        (
            {"params": (GREEDY, SamplingParams(max_new_tokens=3))},
            "two of the params have the name 'greedy' in the results",
        ),
        ({"params": (SamplingParams(processors=(lambda ids, scores: scores,)),)}, "processors cannot be stored"),
    ]:
        with pytest.raises(ConfigError, match=message):
            settings(generator, **changes)
    path = tmp_path / "r.jsonl"
    bench(generator, settings(generator, repeats=1), path)
    with pytest.raises(ConfigError, match=r"started with settings.datasets.d.digest="):
        bench(generator, settings(generator, datasets={"d": asks(generator, 3)}), path)
    other = settings(generator, params=(SamplingParams(max_new_tokens=24, banned_token_ids=(3,)),))
    with pytest.raises(ConfigError, match=r"started with settings\.params="):
        bench(generator, other, path)


def test_a_live_run_is_decoding(tmp_path: Path) -> None:
    generator = foresay.load(make("llama"), tokenizer=Numbers(), drafter="suffix", max_batch_size=2)
    some = RequestBuilder(generator).first(numbered(3))
    live = run_live(generator, some, SamplingParams(max_new_tokens=20))
    wanted = generator.generate([list(ask.token_ids) for ask in some], max_new_tokens=20)
    assert live.outputs == [one.token_ids for one in wanted] and live.tokens == sum(map(len, live.outputs))
    assert [p.id for p in live.prompts(some)] == ["p0", "p1", "p2"] and live.stats.num_tokens == live.tokens
    hot = SamplingParams(max_new_tokens=20, temperature=0.7)
    assert run_live(generator, some, hot).outputs == run_live(generator, some, hot).outputs, (
        "seeds of their own, repeated"
    )
    assert run_live(generator, [some[0], some[0]], hot).outputs[0] != run_live(generator, [some[0]] * 2, hot).outputs[1]
    assert isinstance(Run(Cell("a", "b", 1), 0, 2.0, 4).tokens_per_s, float)
