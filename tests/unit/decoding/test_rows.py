from __future__ import annotations

import dataclasses
from dataclasses import FrozenInstanceError
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from foresay.decoding.outcome import FinishReason, Origin, Step
from foresay.decoding.proposal import Proposal
from foresay.decoding.rows import Row
from foresay.decoding.sampling_params import MAX_SEED, SamplingChanges, SamplingParams
from foresay.errors import ConfigError, UnknownNameError
from helpers.making import make_row
from helpers.refusals import refused

INF, NAN = float("inf"), float("nan")

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, "max_new_tokens", 0),
    ({"max_new_tokens": 2.0}, "max_new_tokens", 2.0),
    ({"max_new_tokens": True}, "max_new_tokens", True),
    ({"min_new_tokens": -1}, "min_new_tokens", -1),
    ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens", 9),
    ({"temperature": -0.1}, "temperature", -0.1),
    ({"temperature": NAN}, "temperature", ANY),
    ({"temperature": INF}, "temperature", ANY),
    ({"temperature": "hot"}, "temperature", "hot"),
    ({"temperature": True}, "temperature", True),
    ({"top_k": -1}, "top_k", -1),
    ({"top_k": 1.5}, "top_k", 1.5),
    ({"top_p": 0.0}, "top_p", 0.0),
    ({"top_p": 1.01}, "top_p", 1.01),
    ({"top_p": None}, "top_p", None),
    ({"min_p": -0.5}, "min_p", -0.5),
    ({"min_p": 1.5}, "min_p", 1.5),
    ({"repetition_penalty": 0}, "repetition_penalty", 0),
    ({"repetition_penalty": INF}, "repetition_penalty", ANY),
    ({"presence_penalty": 101}, "presence_penalty", 101),
    ({"frequency_penalty": -101}, "frequency_penalty", -101),
    ({"seed": -1}, "seed", -1),
    ({"seed": MAX_SEED + 1}, "seed", 9223372036854775808),
    ({"logprobs": 1001}, "logprobs", 1001),
    ({"logprobs": True}, "logprobs", True),
    ({"ignore_eos": 1}, "ignore_eos", 1),
    ({"stop": ""}, "stop", ""),
    ({"stop": ("a", "")}, "stop", ""),
    ({"stop": (1,)}, "stop", 1),
    ({"stop": b"x"}, "stop", b"x"),
    ({"stop_token_ids": 3}, "stop_token_ids", 3),
    ({"stop_token_ids": "12"}, "stop_token_ids", "12"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids", -1),
    ({"banned_token_ids": (1.5,)}, "banned_token_ids", 1.5),
    ({"allowed_token_ids": 7}, "allowed_token_ids", 7),
    ({"allowed_token_ids": ()}, "allowed_token_ids", ()),
    ({"allowed_token_ids": (1, 2), "banned_token_ids": (2, 1, 3)}, "allowed_token_ids", (1, 2)),
    ({"logit_bias": {-1: 0.5}}, "logit_bias key", -1),
    ({"logit_bias": {"1": 0.5}}, "logit_bias key", "1"),
    ({"logit_bias": {1: INF}}, "logit_bias[1]", ANY),
    ({"logit_bias": {1: 2e4}}, "logit_bias[1]", 20000.0),
]


@pytest.mark.parametrize(("values", "param", "value"), REFUSED, ids=lambda v: str(v)[:50])
def test_a_bad_value_is_named_with_its_bound(values: dict[str, Any], param: str, value: Any) -> None:
    with refused(param, value) as caught:
        SamplingParams(**values)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["logit_bias", "stop", "processors"])
def test_a_value_of_the_wrong_kind_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: 5})


@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": 1, "min_new_tokens": 1},
        {"temperature": 0},
        {"temperature": 1e-3},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 0},
        {"min_p": 1.0},
        {"presence_penalty": -100},
        {"frequency_penalty": 100},
        {"seed": 0},
        {"seed": MAX_SEED},
        {"logprobs": 0},
        {"logprobs": 1000},
        {"logit_bias": {0: -1e4, 1: 1e4}},
        {"allowed_token_ids": [1, 2], "banned_token_ids": [2]},
    ],
    ids=str,
)
def test_the_bounds_themselves_are_allowed(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert all(getattr(params, k) == (tuple(v) if isinstance(v, list) else v) for k, v in values.items())


def test_collections_become_tuples_and_one_string_becomes_one_stop() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 4], banned_token_ids={5}, allowed_token_ids=iter([1]))
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert params.banned_token_ids == (5,)
    assert params.allowed_token_ids == (1,)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_a_mutated_argument_does_not_change_validated_parameters() -> None:
    bias = {1: 0.5}
    params = SamplingParams(logit_bias=bias)
    bias[-7] = float("nan")
    assert dict(params.logit_bias) == {1: 0.5}


def test_parameters_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=0.01).greedy


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {0: 0.0}},
        {"allowed_token_ids": (1,)},
        {"banned_token_ids": (1,)},
        {"processors": (lambda ids, scores: scores,)},
    ],
    ids=lambda v: next(iter(v)),
)
def test_processes_is_true_for_each_thing_that_changes_logits(values: dict[str, Any]) -> None:
    assert SamplingParams(**values).processes


def test_what_acts_after_the_temperature_is_not_processing() -> None:
    assert not SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, seed=1, stop="x").processes


def test_of_changes_only_what_is_named() -> None:
    base = SamplingParams(temperature=0.7, top_k=5, stop="x")
    changed = SamplingParams.of(base, top_k=9)
    assert (changed.temperature, changed.top_k, changed.stop) == (0.7, 9, ("x",))
    assert base.top_k == 5
    assert SamplingParams.of(base) == base
    assert SamplingParams.of(None, seed=3) == SamplingParams(seed=3)
    assert SamplingParams.of() == SamplingParams()


def test_of_validates_the_combination() -> None:
    with refused("min_new_tokens", 20):
        SamplingParams.of(SamplingParams(min_new_tokens=20), max_new_tokens=10)


@pytest.mark.parametrize(("name", "near"), [("temprature", "temperature"), ("max_new_token", "max_new_tokens")])
def test_an_unknown_parameter_gets_the_nearest_name(name: str, near: str) -> None:
    with refused("parameter", name, UnknownNameError) as caught:
        SamplingParams.of(None, **{name: 1})
    assert f"Did you mean {near!r}?" in str(caught.value)


def test_a_row_grows_and_counts() -> None:
    row = make_row([7, 8], limit=700)
    row.extend(range(600))
    assert row.tokens.tolist() == [7, 8, *range(600)]
    assert (row.size, row.prompt_length, row.num_new, row.remaining) == (602, 2, 600, 98)


def test_a_rows_stop_tokens_join_the_models_unless_ignored() -> None:
    model_eos = frozenset({2})
    assert make_row(eos=model_eos, stop_token_ids=(5,)).eos == {2, 5}
    assert make_row(eos=model_eos, stop_token_ids=(5,), ignore_eos=True).eos == {5}


def test_rows_of_one_batch_do_not_share_a_buffer() -> None:
    prompt = [1, 2, 3]
    one, two = (Row(i, prompt, SamplingParams(), limit=99) for i in range(2))
    one.extend([4])
    assert two.tokens.tolist() == [1, 2, 3]
    assert prompt == [1, 2, 3]


def test_an_empty_proposal_has_no_width() -> None:
    proposal = Proposal.empty(3, torch.device("cpu"))
    assert (proposal.width, list(proposal.num_tokens)) == (0, [0, 0, 0])


def test_a_step_adds_up_what_was_tested_at_each_depth() -> None:
    assert Step(0, (1,), (Origin.BONUS,), 4, 2, (1, 1, 1)).num_tested == 3
    assert Step(0, (1,), (Origin.BONUS,), 6, 1, (3, 2)).num_tested == 5, "a tree tries several at one depth"
    assert Step(0, (1,), (Origin.BONUS,), 0, 0).num_tested == 0


def test_enums_read_as_plain_words() -> None:
    assert [str(origin) for origin in Origin] == ["draft", "residual", "bonus"]
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "cancelled", "error"]


def test_keyword_arguments_are_typed_as_the_fields_are_named() -> None:
    names = {f.name for f in dataclasses.fields(SamplingParams)}
    assert set(SamplingChanges.__annotations__) == names | {"max_tokens"}
    assert set(SamplingChanges.__optional_keys__) == names | {"max_tokens"}


def test_max_tokens_is_another_name() -> None:
    assert SamplingParams.of(max_tokens=7).max_new_tokens == 7
    assert SamplingParams.of(SamplingParams(max_new_tokens=9), max_tokens=7).max_new_tokens == 7
    with refused("max_tokens", 7):
        SamplingParams.of(max_tokens=7, max_new_tokens=8)
    with refused("max_new_tokens", 0):
        SamplingParams.of(max_tokens=0)
