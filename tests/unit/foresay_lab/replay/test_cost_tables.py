"""Costs of passes, and how often each model of a method runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, MaxGram
from foresay.engine import Stats
from foresay.errors import ConfigError, UnknownNameError
from foresay.models.table import TableModel
from foresay_lab.replay.cost_tables import COST_TABLES, NO_COST, CostModel, PassCounter, drafter_names, read_costs
from helpers.support import ModelDrafter, run

P = [0.4, 0.3, 0.2, 0.05, 0.03, 0.02]
Q = [0.2, 0.4, 0.1, 0.1, 0.1, 0.1]


def constant(distribution: list[float]) -> TableModel:
    """A table with this distribution in every context."""
    return TableModel(
        torch.tensor(distribution, dtype=torch.float64).expand(len(distribution), len(distribution), -1).contiguous()
    )


def test_swi_of_a_worked_example() -> None:
    """100 tokens from 25 target passes, 75 of one that costs a tenth, 300 of one that costs a hundredth: 100 / (25 + 7.5 + 3)."""
    model = CostModel({"big": 10, "middle": 1, "small": 0.1})
    passes = {"big": 25, "middle": 75, "small": 300, "max_gram": 10**6}
    assert model.swi("big", 100, passes) == pytest.approx(100 / 35.5)
    assert model.swi("big", 100, {"big": 100}) == 1, "plain decoding"
    assert model.swi("big", 100, {"big": 200}) == 0.5
    assert {model.cost(name) for name in NO_COST} == {0}


def test_swi_of_the_published_setting() -> None:
    """FLAN-T5 XXL with base as its draft, by the costs taken from Leviathan et al.: 7 drafted tokens for each of 20."""
    table = COST_TABLES["previous_work"]
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
    assert COST_TABLES[table].cost(name) == cost


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
    assert set(COST_TABLES) == {"model_parameters", "previous_work"}
    sizes = COST_TABLES["model_parameters"].costs
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
    times = COST_TABLES["previous_work"].costs
    assert dict(times) == {"flan-t5-xxl": 1, "flan-t5-large": 0.11, "flan-t5-base": 0.04, "flan-t5-small": 0.02}


def test_reading_cost_tables(tmp_path: Path) -> None:
    assert read_costs("model_parameters") is COST_TABLES["model_parameters"]
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
    """The verifying model scores what prompt lookup drafts: fewer passes than tokens, and prompt lookup makes none."""
    draft = ModelDrafter(constant([0.9, *[0.02] * 5]), len(P))
    cascade = Cascade([draft, MaxGram()], [[4, 0], [0, 3]])
    counter = PassCounter(cascade, ["small", "max_gram"])
    run(constant([0.8, *[0.04] * 5]), [[1, 0, 0]], SamplingParams(max_new_tokens=60), drafter=cascade, gamma=4)
    assert set(counter.passes) == {"small"} and 0 < counter.passes["small"] < 40
    assert dict(PassCounter(MaxGram(), ["max_gram"]).passes) == dict(PassCounter(None, []).passes) == {}
    with pytest.raises(ConfigError, match="the passes of 'mine' cannot be counted"):
        PassCounter(MaxGram(), ["mine"])
