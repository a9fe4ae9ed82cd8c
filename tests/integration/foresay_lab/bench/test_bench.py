"""Benchmarks: their order, what they write, and that they survive what happens to them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN, methods
from foresay.records.results import Cell, Failure, Prediction, Results
from foresay_lab.bench.bench import BenchSettings, Progress, bench
from foresay_lab.bench.runners import MethodRunner, sampling_name
from foresay_lab.data.requests import PromptRequest, RequestBuilder
from foresay_lab.measure.live_run import DraftFailedError, Outcome, run_live
from helpers.families import make
from helpers.recordings import Numbers, cycle, loaded, numbered
from helpers.refusals import refuses

SIZE = 12
GREEDY = SamplingParams(max_new_tokens=24)
Change = Callable[[str, int, Callable[[], Outcome]], Outcome]


@pytest.fixture(scope="module")
def generator() -> Generator:
    return loaded(cycle(SIZE), tokenizer=Numbers(SIZE))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "r.jsonl"


@pytest.fixture
def alter(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Replace each run by a function of the method, the number of prompts, and the honest run."""
    honest = MethodRunner.run

    def altered(change: Change) -> None:
        def run(self: MethodRunner, block: Any, some: Any) -> Outcome:
            return change(self.name, len(some), lambda: honest(self, block, some))

        monkeypatch.setattr(MethodRunner, "run", run)

    return altered


def asks(generator: Generator, count: int = 4) -> list[PromptRequest]:
    return RequestBuilder(generator).first(numbered(count, high=SIZE))


def settings(generator: Generator, named: str = "suffix max_gram", **changes: Any) -> BenchSettings:
    values: dict[str, Any] = {
        "methods": methods(named.split(), ["4"]),
        "datasets": {"d": asks(generator)},
        "params": (GREEDY,),
        "repeats": 1,
    }
    return BenchSettings(**{**values, **changes})


def drafted(results: Results) -> list[tuple[str, int]]:
    return [(run.cell.method, run.repeat) for run in results.runs if run.cell.method != PLAIN]


def test_a_benchmark(generator: Generator, path: Path) -> None:
    told = list[Progress]()
    results = bench(generator, settings(generator, repeats=2), path, on_run=told.append)
    # what ran between two plain runs is written when its ratios are known
    order = [run.cell.method for run in results.runs]
    assert order == [PLAIN, PLAIN, "suffix, 4", "max_gram, 4", "suffix, 4", PLAIN, "max_gram, 4"]
    assert [(one.done, one.total) for one in told] == [(i, 4) for i in range(1, 5)]
    for run in results.runs:
        assert run.tokens == 4 * 24 and run.seconds > 0 and run.exact and len(run.prompts) == 4
        assert run.stats["num_tokens"] == run.tokens == sum(p.generated_length for p in run.prompts)
        is_drafted = run.cell.method != PLAIN
        assert (run.identical, run.note) == ((True, "") if is_drafted else (None, ""))
        assert (run.plain_seconds is not None) == is_drafted and (run.stats["num_drafted"] > 0) == is_drafted
    assert {run.cell for run in results.runs} == {Cell(m, "d", 1, "greedy") for m in order}
    assert {(t.cell.method, t.id) for t in results.traces} == {(m, f"p{i}") for m in order[2:4] for i in (0, 1)}
    first = run_live(generator, asks(generator)[:1], GREEDY).outputs[0]
    assert "".join(text for text, _ in results.traces[0].pieces) == "".join(f"{i} " for i in first)
    assert {origin for t in results.traces for _, origin in t.pieces} == {"draft", "residual", "bonus"}
    assert results.settings["datasets"]["d"]["prompts"] == 4 and results.provenance["versions"]["foresay"]


def test_plain_decoding_is_never_far(generator: Generator, path: Path) -> None:
    """Between any two of its runs lie three of others at most, and each ratio is with those next to it. Stops end every run."""
    params = (replace(GREEDY, stop=("5 ",)),)
    many = settings(generator, params=params, methods=methods(["suffix"], ["1", "2", "3", "4", "5"]), repeats=2)
    predicted = [Prediction(Cell("suffix, 4", "d", 1), 100.0, 3.0)]
    runs = bench(generator, many, path, predictions=predicted).runs
    plain = [run.seconds / run.tokens for run in runs if run.cell.method == PLAIN]
    assert len(plain) == 1 + math.ceil(10 / 3)
    for run in runs:
        assert run.identical in (None, True) and run.tokens < 4 * 12
        assert {p.finish_reason for p in run.prompts} == {"stop"}
        if run.plain_seconds is not None:
            assert min(plain) - 1e-12 <= run.plain_seconds / run.tokens <= max(plain) + 1e-12
    bench(generator, many, path, predictions=predicted)
    kinds = [json.loads(line).get("kind") for line in path.read_text().splitlines()]
    assert kinds[1] == "prediction" and kinds.count("prediction") == 1, "before anything runs, once"
    assert Results.load(path).predictions == predicted


def test_a_benchmark_goes_on_with_what_is_missing(
    generator: Generator, path: Path, alter: Callable[[Change], None]
) -> None:
    wanted = settings(generator, "suffix max_gram prompt_lookup", repeats=2)
    ran: list[str] = []

    def stopped(name: str, count: int, run: Callable[[], Outcome]) -> Outcome:
        ran.extend([name] * (count > 1 and name != PLAIN))
        if len(ran) == 4:
            raise KeyboardInterrupt
        return run()

    alter(stopped)
    with pytest.raises(KeyboardInterrupt):
        bench(generator, wanted, path)
    alter(lambda name, count, run: run())
    assert drafted(Results.load(path)) == [("suffix, 4", 0), ("max_gram, 4", 0), ("prompt_lookup, 4", 0)]
    told: list[Progress] = []
    runs = drafted(bench(generator, wanted, path, on_run=told.append))
    assert sorted(runs) == sorted((m.name, r) for m in wanted.methods for r in (0, 1)), "none twice, none missing"
    assert [one.done for one in told] == [4, 5, 6]
    before = path.read_bytes()
    bench(generator, wanted, path)
    assert path.read_bytes() == before, "nothing is missing: nothing runs, not even plain decoding"
    more = bench(generator, settings(generator, methods=wanted.methods, repeats=3), path)
    assert len(drafted(more)) == 9, "more repeats go on"


def test_a_failing_method_does_not_lose_the_others(
    generator: Generator, path: Path, alter: Callable[[Change], None]
) -> None:
    """It is tried again, and what ran is not; other outputs are flagged."""

    def failing(name: str, count: int, run: Callable[[], Outcome]) -> Outcome:
        if name == "max_gram, 4":
            raise DraftFailedError("the drafter failed:\n  ValueError: no")
        if name == "prompt_lookup, 4" and count > 1:
            raise RuntimeError("CUDA out of memory")
        out = run()
        if name == "suffix, 4" and count > 1:
            out.outputs[2] = [*out.outputs[2][:-1], 0]
        return out

    alter(failing)
    wanted, seen = settings(generator, "max_gram suffix prompt_lookup"), list[Progress]()
    results = bench(generator, wanted, path, on_run=seen.append)
    assert drafted(results) == [("suffix, 4", 0)] and len(seen) == 3
    assert {(f.cell.method, f.error) for f in results.failures} == {
        ("max_gram, 4", "the drafter failed: ValueError: no"),
        ("prompt_lookup, 4", "RuntimeError: CUDA out of memory"),
    }
    assert sum(isinstance(one.last, Failure) for one in seen) == 2
    alter(lambda name, count, run: run())
    runs = {run.cell.method: run for run in bench(generator, wanted, path).runs if run.cell.method != PLAIN}
    assert sorted((run.cell.method, run.repeat) for run in runs.values()) == sorted((m.name, 0) for m in wanted.methods)
    different = "3 of 4 outputs equal those of plain decoding"
    assert (runs["suffix, 4"].identical, runs["suffix, 4"].note) == (False, different)
    assert (runs["max_gram, 4"].identical, runs["max_gram, 4"].note) == (True, "")


def test_plain_decoding_that_does_not_repeat_itself_ends_the_benchmark(
    generator: Generator, path: Path, alter: Callable[[Change], None]
) -> None:
    turns = iter(range(99))

    def drifting(name: str, count: int, run: Callable[[], Outcome]) -> Outcome:
        out = run()
        if name == PLAIN:
            out.outputs[0][-1] = next(turns)
        return out

    alter(drifting)
    with pytest.raises(AssertionError, match="plain decoding is not deterministic"):
        bench(generator, settings(generator, repeats=2), path)


def test_sampled_and_lossy_runs_need_not_be_identical(generator: Generator, path: Path) -> None:
    hot = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3)
    lossy = methods(["suffix"], ["4"], "typical")
    wanted = settings(generator, params=(GREEDY, hot), methods=lossy, batch_sizes=(1, 4))
    cells = {run.cell: run for run in bench(generator, wanted, path).runs if run.cell.method != PLAIN}
    assert {(c.batch_size, c.sampling) for c in cells} == {(1, "greedy"), (4, "greedy"), (1, "t=1"), (4, "t=1")}
    assert not any(run.exact for run in cells.values())
    assert all((run.identical is None) == (c.sampling != "greedy") for c, run in cells.items())
    assert sampling_name(SamplingParams(temperature=0.8, top_p=0.9, top_k=5)) == "t=0.8 top_k=5 top_p=0.9"


def test_settings_that_are_refused(generator: Generator, path: Path) -> None:
    processed = SamplingParams(processors=(lambda ids, scores: scores,))
    changed: list[tuple[dict[str, Any], str, Any]] = [
        ({"datasets": {}}, "datasets", None),
        ({"datasets": {"d": []}}, "datasets", None),
        ({"repeats": 0}, "repeats", 0),
        ({"batch_sizes": (1, 0)}, "batch_size", 0),
        ({"params": (GREEDY, SamplingParams(max_new_tokens=3))}, "params", "greedy"),
        ({"params": (processed,)}, "processors", None),
    ]
    for changes, param, value in changed:
        refuses(lambda: settings(generator, **changes), param, value)  # noqa: B023
    bench(generator, settings(generator), path)
    other = {"datasets.d.digest": {"datasets": {"d": asks(generator, 3)}}}
    other["params"] = {"params": (replace(GREEDY, banned_token_ids=(3,)),)}  # type: ignore[dict-item]
    for name, changes in other.items():
        with pytest.raises(ConfigError, match=rf"started with settings\.{name}="):
            bench(generator, settings(generator, **changes), path)


def test_a_live_run_is_decoding() -> None:
    generator = foresay.load(make("llama"), tokenizer=Numbers(), drafter="suffix", max_batch_size=2)
    some = RequestBuilder(generator).first(numbered(3))
    live = run_live(generator, some, SamplingParams(max_new_tokens=20))
    wanted = generator.generate([list(ask.token_ids) for ask in some], max_new_tokens=20)
    assert live.outputs == [one.token_ids for one in wanted] and live.tokens == sum(map(len, live.outputs))
    assert [p.id for p in live.prompts(some)] == ["p0", "p1", "p2"] and live.stats.num_tokens == live.tokens
    hot = SamplingParams(max_new_tokens=20, temperature=0.7)
    one, again, twice = (run_live(generator, asked, hot).outputs for asked in (some, some, [some[0]] * 2))
    assert one == again and twice[0] != twice[1], "seeds of their own, repeated"
