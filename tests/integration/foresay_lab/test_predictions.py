"""Predictions of `tune` against its live runs, on a clock that passes and drafts advance by known costs.

So the costs of a run that the prediction leaves out show to the last digit, and nothing depends on the machine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foresay.decoding import clock as decoding_clock
from foresay.decoding.protocols import ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import SuffixDrafter
from foresay.engine import Engine
from foresay.generation.method import methods
from foresay.models.drafts.files import write_draft
from foresay.models.drafts.head import HeadModel
from foresay.models.huggingface.causal import CausalModel
from foresay_lab import tune
from foresay_lab.candidates import PAYS, Confirmed, pick
from foresay_lab.measure import live_run, profile
from foresay_lab.replay.record import record
from foresay_lab.replay.replay import Replay, expect
from foresay_lab.tune import Tuner
from helpers.families import make
from helpers.heads import random_head
from helpers.recordings import loaded, numbered

Costs = tuple[float, float, float]
PROCESSORS = {"AVX2": (30, 9, 0.4), "AVX-512": (24, 3, 0.4), "AMX": (20, 1, 0.3)}
"""Milliseconds of a pass over one token, of each further one, and of each 100 tokens of context."""
PROMPTS = 4
DRAFT, HEAD, STEP = 0.4, 2.5, 0.3
"""Milliseconds of an n-gram's draft, of a head's pass, and of a step outside of passes and drafts."""


def counted(monkeypatch: pytest.MonkeyPatch, costs: Costs) -> None:
    """A clock that stands still but for what is counted."""
    now = 0.0
    for module in (decoding_clock, live_run, profile, tune):
        monkeypatch.setattr(module, "perf_counter", lambda: now)

    def after(known: Any, milliseconds: Any) -> Any:
        """Return a function that also takes this long. milliseconds: of its arguments."""

        def run(*given: Any, **named: Any) -> Any:
            nonlocal now
            took = milliseconds(*given) / 1e3
            out = known(*given, **named)
            now += took
            return out

        return run

    def of_pass(model: CausalModel, given: ModelInput, cache: Any) -> float:
        read = sum(cache.lengths[given.first_row : given.first_row + len(given.num_tokens)])
        first, further, context = costs
        return first + further * (sum(given.num_tokens) - 1) + context * read / 100

    for owner, name, cost in (
        (CausalModel, "forward", of_pass),
        (HeadModel, "forward", lambda *_: HEAD),
        (SuffixDrafter, "propose", lambda *_: DRAFT),
        (Engine, "step", lambda *_: STEP),
    ):
        monkeypatch.setattr(owner, name, after(getattr(owner, name), cost))


def tuned(folder: Path, batch: int, drafters: list[str], own: list[str]) -> Tuner:
    target = loaded(make("llama"), batch=batch)
    one = record(target, numbered(PROMPTS), folder / "r.jsonl", SamplingParams(max_new_tokens=32, ignore_eos=True))
    tuner = Tuner(target, one, rounds=1)
    tuner.search(methods(drafters, ["2", "6"]), (batch,), methods(own, ["3"]))
    tuner.confirm(pick(tuner.tuning.candidates, count=4)[0], repeats=1, count=PROMPTS)
    return tuner


def error(one: Confirmed) -> float:
    assert one.predicted is not None
    return abs(one.predicted / one.speed_up - 1)


@pytest.mark.parametrize(("name", "batch"), [("AVX2", 1), ("AMX", 1), ("AMX", 4)])
def test_n_grams_are_predicted_within_5_percent(
    name: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the fastest of what was run is chosen, if it gains."""
    counted(monkeypatch, PROCESSORS[name])
    tuning = tuned(tmp_path, batch, ["suffix", "prompt_lookup"], ["suffix"]).tuning
    assert tuning.confirmed and max(map(error, tuning.confirmed)) < 0.05
    fastest = max(tuning.confirmed, key=lambda one: one.speed_up)
    [default] = (one for one in tuning.confirmed if one.candidate.is_default)
    if fastest.speed_up > max(1.0, PAYS * default.speed_up):
        assert tuning.best is fastest
    else:
        assert tuning.best is (default if default.speed_up > 1 / PAYS else None)
    assert name == "AVX2" or batch > 1 or tuning.best is not None


def test_a_head_is_predicted_within_8_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "head").mkdir()
    write_draft(random_head(CausalModel(make("llama"))), tmp_path / "head")
    counted(monkeypatch, PROCESSORS["AVX-512"])
    head = f"head({tmp_path / 'head'})"
    tuning = tuned(tmp_path, 1, ["suffix"], [head, f"hybrid(suffix, {head})"]).tuning
    found = {one.candidate.method.drafter: one for one in tuning.confirmed}
    assert not tuning.failed and {head, f"hybrid(suffix, {head})"} <= found.keys()
    assert max(map(error, found.values())) < 0.08
    assert found[head].speed_up < 0.9, "passes of a head take time"


def test_a_cost_that_is_left_out_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: drafts that take long, and are taken for free."""
    monkeypatch.setitem(globals(), "DRAFT", 4)
    counted(monkeypatch, PROCESSORS["AMX"])

    def worst() -> float:
        return max(map(error, tuned(tmp_path, 1, ["suffix"], ["suffix"]).tuning.confirmed))

    def without(done: Replay, *given: Any) -> Any:
        return expect(replace(done, passes=tuple(replace(one, draft_s=0.0) for one in done.passes)), *given)

    assert worst() < 0.05
    monkeypatch.setattr(tune, "expect", without)
    assert worst() > 0.05
