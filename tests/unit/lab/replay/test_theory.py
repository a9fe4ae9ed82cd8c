"""Closed forms against hand values and against decoding whose acceptance is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foresay.decoding.outcome import Step
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, MaxGram
from foresay.engine import Stats
from foresay.errors import ConfigError, UnknownNameError
from foresay.lab.replay import theory
from foresay.lab.replay.cost_tables import PassCounter, drafter_names, read_costs
from foresay.lab.replay.theory import (
    CostModel,
    acceptance_from_tokens,
    best_length,
    expected_tokens,
    speed_up,
    tokens_per_pass,
)
from foresay.models.table import TableModel
from helpers.support import ModelDrafter, run

P = [0.4, 0.3, 0.2, 0.05, 0.03, 0.02]
Q = [0.2, 0.4, 0.1, 0.1, 0.1, 0.1]
ALPHA = sum(map(min, P, Q))


# -- closed forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "gamma", "tokens"),
    [(0, 5, 1), (1, 5, 6), (0.5, 1, 1.5), (0.5, 3, 1.875), (0.8, 2, 2.44), (0.9, 4, 4.0951), (0.3, 0, 1), (1, 0, 1)],
)
def test_expected_tokens_by_hand(alpha: float, gamma: int, tokens: float) -> None:
    assert expected_tokens(alpha, gamma) == pytest.approx(tokens)


@given(st.floats(0, 1), st.integers(0, 40))
def test_expected_tokens_is_the_sum_of_what_is_reached(alpha: float, gamma: int) -> None:
    reached = [alpha**k for k in range(1, gamma + 1)]
    assert expected_tokens(alpha, gamma) == pytest.approx(tokens_per_pass(reached), rel=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.35, 0.8, 1.0])
@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_expected_tokens_against_coins(alpha: float, gamma: int) -> None:
    heads = np.random.default_rng(1).random((20000, gamma)) < alpha
    tokens = 1 + np.cumprod(heads, axis=1).sum(1)
    error = tokens.std() / math.sqrt(len(tokens))
    assert abs(tokens.mean() - expected_tokens(alpha, gamma)) <= 3.5 * error + 1e-12
    assert abs(tokens.mean() - tokens_per_pass(np.cumprod(heads, axis=1).mean(0).tolist())) < 1e-9


def test_tokens_per_pass_without_independence() -> None:
    assert tokens_per_pass([]) == 1
    assert tokens_per_pass([0.9, 0.9, 0.2]) == 3


def test_speed_up_by_hand() -> None:
    assert speed_up(0.8, 3, 0.1) == pytest.approx(2.952 / 1.3)
    assert speed_up(0.8, 3, 0.1, lambda gamma: 1 + 0.2 * gamma) == pytest.approx(2.952 / 1.9)
    assert speed_up(0.8, 0, 0.1, lambda gamma: 7.0) == 1, "no draft: nothing is scored besides the one token"
    assert speed_up(0, 4, 0) == 1


def test_best_length() -> None:
    assert best_length(0.8, 0.05) == max(range(65), key=lambda g: speed_up(0.8, g, 0.05)) == 8
    assert best_length(1.0, 0.01, high=12) == 12, "a draft that always holds: the longest"
    assert best_length(0.2, 0.5) == 0, "Leviathan et al.: nothing pays where alpha <= c"
    assert best_length(0.0, 0.0) == 0, "the least of several that are equally good"
    assert best_length(0.9, 0.0, lambda gamma: 1.0 + gamma) == 0, "a target that computes every column in turn"


@pytest.mark.parametrize("c", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("alpha", [0.1, 0.39, 0.41, 0.9])
def test_some_draft_pays_exactly_where_alpha_exceeds_its_cost(alpha: float, c: float) -> None:
    assert (best_length(alpha, c) > 0) == (alpha > c)


def test_the_best_length_grows_with_acceptance() -> None:
    lengths = [best_length(alpha / 100, 0.05) for alpha in range(5, 100, 5)]
    assert lengths == sorted(lengths) and lengths[0] == 0 and lengths[-1] > 10


@given(st.floats(0.01, 0.99), st.integers(1, 12))
def test_acceptance_from_tokens_is_the_inverse(alpha: float, gamma: int) -> None:
    assert acceptance_from_tokens(expected_tokens(alpha, gamma), gamma) == pytest.approx(alpha, abs=1e-6)


def test_acceptance_at_the_ends() -> None:
    assert acceptance_from_tokens(1, 4) == pytest.approx(0, abs=1e-11)
    assert acceptance_from_tokens(5, 4) == pytest.approx(1, abs=1e-11)
    assert acceptance_from_tokens(1.5, 1) == pytest.approx(0.5, abs=1e-11)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_tokens(1.1, 3), r"alpha=1.1 must be a finite number in \[0, 1\]"),
        (lambda: expected_tokens(math.nan, 3), "alpha=nan"),
        (lambda: expected_tokens(0.5, -1), "gamma=-1 must be an integer at least 0"),
        (lambda: expected_tokens(0.5, 2.5), "gamma=2.5"),  # type: ignore[arg-type]
        (lambda: speed_up(0.5, 3, -0.1), "c=-0.1"),
        (lambda: best_length(0.5, 0.1, high=-1), "high=-1"),
        (lambda: acceptance_from_tokens(1.5, 0), "gamma=0 must be an integer at least 1"),
        (lambda: acceptance_from_tokens(0.9, 3), r"tokens=0.9 must be a finite number in \[1, 4\]"),
        (lambda: acceptance_from_tokens(4.1, 3), "tokens=4.1"),
    ],
)
def test_bad_values(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


# -- theory against decoding -------------------------------------------------------------------------------------------


def constant(distribution: list[float]) -> TableModel:
    """A table whose every distribution is this one."""
    return TableModel(
        torch.tensor(distribution, dtype=torch.float64).expand(len(distribution), len(distribution), -1).contiguous()
    )


def decoded(gamma: int, count: int = 12, new: int = 320) -> list[Step]:
    """Passes of speculative sampling with acceptance ALPHA at every place, those at the outputs' ends left out."""
    prompts = [[i % len(P)] for i in range(count)]
    params = [SamplingParams(temperature=1.0, seed=100 + i, max_new_tokens=new) for i in range(count)]
    target, draft = constant(P), constant(Q)
    outputs, steps, engine = run(target, prompts, params, drafter=ModelDrafter(draft, len(P)), gamma=gamma)
    assert engine.draft_failures == 0 and all(len(output) == new for output in outputs)
    # a pass with a full budget: whether there is one depends on what is committed, not on what will be accepted
    return [step for step in steps if step.num_drafted == gamma]


def z_score(steps: list[Step], wanted: float) -> float:
    tokens = np.array([len(step.token_ids) for step in steps])
    return float((tokens.mean() - wanted) / (tokens.std(ddof=1) / math.sqrt(len(tokens))))


@pytest.mark.parametrize("gamma", [1, 2, 4, 8])
def test_theory_against_simulation(gamma: int) -> None:
    assert abs(ALPHA - 0.70) < 1e-9
    steps = decoded(gamma)
    assert len(steps) > 1000
    assert abs(z_score(steps, expected_tokens(ALPHA, gamma))) < 3
    stats = Stats.of(steps)
    assert stats.acceptance_rate is not None and stats.num_tested > 1000
    error = math.sqrt(ALPHA * (1 - ALPHA) / stats.num_tested)
    assert abs(stats.acceptance_rate - ALPHA) < 3 * error
    reached = [stats.accepted_at[k] / len(steps) for k in range(gamma)]
    assert tokens_per_pass(reached) == pytest.approx(stats.block_efficiency)
    assert acceptance_from_tokens(tokens_per_pass(reached), gamma) == pytest.approx(ALPHA, abs=0.05)


def test_the_simulation_would_notice_a_wrong_formula() -> None:
    """Negative control: a formula without the bonus token, and an alpha that is a little off."""
    steps = decoded(4, count=32)
    assert abs(z_score(steps, expected_tokens(ALPHA, 3))) > 5
    assert abs(z_score(steps, expected_tokens(ALPHA + 0.07, 4))) > 5
    assert abs(z_score(steps, expected_tokens(ALPHA, 4) - 0.2)) > 5


# -- cost models -------------------------------------------------------------------------------------------------------


def test_swi_of_a_worked_example() -> None:
    """100 tokens from 25 target passes, 75 of a model a tenth as dear, 300 of one a hundredth: 100 / (25 + 7.5 + 3)."""
    model = CostModel({"big": 10, "middle": 1, "small": 0.1})
    passes = {"big": 25, "middle": 75, "small": 300, "max_gram": 10**6}
    assert model.swi("big", 100, passes) == pytest.approx(100 / 35.5)
    assert model.swi("big", 100, {"big": 100}) == 1, "plain decoding"
    assert model.swi("big", 100, {"big": 200}) == 0.5
    assert {model.cost(name) for name in theory.NO_COST} == {0}


def test_swi_of_the_published_setting() -> None:
    """FLAN-T5 XXL with base as its draft, by the costs taken from Leviathan et al.: 7 drafted tokens for each of 20."""
    table = theory.COST_TABLES["previous_work"]
    assert table.swi("flan-t5-xxl", 60, {"flan-t5-xxl": 20, "flan-t5-base": 140}) == pytest.approx(60 / (20 + 5.6))


def test_unknown_names_and_bad_values() -> None:
    model = CostModel({"big": 10, "free": 0})
    with pytest.raises(UnknownNameError, match=r"unknown model in this cost table 'bgi'\. Did you mean 'big'"):
        model.swi("big", 10, {"big": 1, "bgi": 3})
    with pytest.raises(ConfigError, match=r"passes=\{'free': 3\} must include passes of the target 'big'"):
        model.swi("big", 10, {"free": 3})
    with pytest.raises(ConfigError, match="with a positive total cost"):
        model.swi("free", 10, {"free": 3})
    with pytest.raises(ConfigError, match="num_tokens=0 must be an integer at least 1"):
        model.swi("big", 0, {"big": 3})
    with pytest.raises(ConfigError, match="passes of 'big'=-1"):
        model.swi("big", 10, {"big": -1})
    with pytest.raises(ConfigError, match="cost of 'big'=-1"):
        CostModel({"big": -1})
    with pytest.raises(ConfigError, match="cost of 'big'='10'"):
        CostModel({"big": "10"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("table", "name", "cost"),
    [
        ("model_parameters", "google/flan-t5-base", 220),
        ("model_parameters", "google/flan-t5-xxl", 11300),
        ("previous_work", "google/flan-t5-small", 0.02),
        ("model_parameters", "JackFram/llama-160m", 160),
        ("model_parameters", "JackFram/llama-68m", 68),
        ("model_parameters", "huggyllama/llama-7b", 70000),
        ("model_parameters", "llama_7b", 70000),
        ("model_parameters", "/models/flan-t5-xl/", 3000),
    ],
)
def test_hub_ids_match_a_tables_names_by_their_last_part(table: str, name: str, cost: float) -> None:
    assert theory.COST_TABLES[table].cost(name) == cost


def test_a_last_part_that_is_there_twice_must_cost_the_same() -> None:
    table = CostModel({"a/m": 3, "b/m": 3, "a/n": 3, "b/n": 4, "small": 1})
    assert table.cost("m") == table.cost("c/m") == 3
    assert table.cost("a/n") == 3 and table.cost("b/n") == 4, "a whole name is that entry"
    with pytest.raises(ConfigError, match=r"'c/n' may be 'a/n' or 'b/n' of this cost table, whose costs differ; give"):
        table.cost("c/n")
    with pytest.raises(UnknownNameError, match=r"unknown model in this cost table 'x/smal'\. Did you mean 'small'"):
        table.cost("x/smal")


def test_the_sources_tables() -> None:
    """As printed: Chen et al. 2023; its entry for llama 7b is ten times too large, and is kept as published."""
    assert set(theory.COST_TABLES) == {"model_parameters", "previous_work"}
    sizes = theory.COST_TABLES["model_parameters"].costs
    assert dict(sizes) == {
        "flan-t5-small": 60,
        "flan-t5-base": 220,
        "flan-t5-large": 770,
        "flan-t5-xl": 3000,
        "flan-t5-xxl": 11300,
        "llama-68m": 68,
        "llama-160m": 160,
        "llama-7b": 70000,
    }
    times = theory.COST_TABLES["previous_work"].costs
    assert dict(times) == {"flan-t5-xxl": 1, "flan-t5-large": 0.11, "flan-t5-base": 0.04, "flan-t5-small": 0.02}
    with pytest.raises(TypeError):
        sizes["llama-7b"] = 7000  # type: ignore[index]


def test_reading_cost_tables(tmp_path: Path) -> None:
    assert read_costs("model_parameters") is theory.COST_TABLES["model_parameters"]
    path = tmp_path / "costs.json"
    path.write_text('{"me": 3, "you": 1.5}')
    assert dict(read_costs(str(path)).costs) == {"me": 3, "you": 1.5}
    for text, message in (
        ("[1]", "not an object of model name -> cost of a pass: it should be an object, not"),
        ("{", "not JSON"),
        ('{"me": null}', "me should be a valid number, not null"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_costs(str(path))
    with pytest.raises(ConfigError, match="'model_parmeters' is not one of model_parameters, previous_work"):
        read_costs("model_parmeters")


def test_names_of_drafters_in_cost_tables() -> None:
    assert drafter_names("suffix(scale=3)") == ["suffix"]
    assert drafter_names("model(llama-68m)") == ["llama-68m"] and drafter_names("self(6)") == ["self(6)"]
    cascade = "cascade(model=llama-160m, self=2, max_gram, k=[[3, 2, 1], [0, 2, 1], [0, 0, 1]])"
    assert drafter_names(cascade) == ["llama-160m", "self(2)", "max_gram"]


@pytest.mark.parametrize("rows", [1, 5])
def test_passes_are_counted_row_by_row(rows: int) -> None:
    """One for each token a model drafts, as the target's are one for each row it scores."""
    drafter = ModelDrafter(constant(Q), len(P))
    counter = PassCounter(drafter, ["small"])
    params = SamplingParams(temperature=1.0, seed=1, max_new_tokens=30)
    _, steps, _ = run(constant(P), [[1], [2, 3], [4], [5], [0]], params, drafter=drafter, gamma=3, max_batch_size=rows)
    stats = Stats.of(steps)
    assert dict(counter.passes) == {"small": stats.num_drafted}


def test_passes_of_a_cascade() -> None:
    """Its reviewer scores what the look-up guesses: fewer passes than tokens it writes, and look-ups make none."""
    draft = ModelDrafter(constant([0.9, *[0.02] * 5]), len(P))
    cascade = Cascade([draft, MaxGram()], [[4, 0], [0, 3]])
    counter = PassCounter(cascade, ["small", "max_gram"])
    run(constant([0.8, *[0.04] * 5]), [[1, 0, 0]], SamplingParams(max_new_tokens=60), drafter=cascade, gamma=4)
    assert set(counter.passes) == {"small"} and 0 < counter.passes["small"] < 40
    assert dict(PassCounter(MaxGram(), ["max_gram"]).passes) == dict(PassCounter(None, []).passes) == {}
    with pytest.raises(ConfigError, match="the passes of 'mine' cannot be counted"):
        PassCounter(MaxGram(), ["mine"])
