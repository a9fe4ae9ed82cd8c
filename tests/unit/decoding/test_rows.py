from __future__ import annotations

import dataclasses
from dataclasses import FrozenInstanceError
from typing import Any
from unittest.mock import ANY

import pytest

from foresay.decoding.sampling_params import MAX_SEED, SamplingChanges, SamplingParams
from foresay.errors import ConfigError, UnknownNameError
from helpers.refusals import refused

INF, NAN = float("inf"), float("nan")

REFUSED: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (0, 2.0, True),
    "min_new_tokens": (-1,),
    "temperature": (-0.1, NAN, INF, "hot", True),
    "top_k": (-1, 1.5),
    "top_p": (0.0, 1.01, None),
    "min_p": (-0.5, 1.5),
    "repetition_penalty": (0, INF),
    "presence_penalty": (101,),
    "frequency_penalty": (-101,),
    "seed": (-1, MAX_SEED + 1),
    "logprobs": (1001, True),
    "ignore_eos": (1,),
    "stop": ("", b"x", 5),
    "stop_token_ids": (3, "12"),
    "allowed_token_ids": (7, ()),
    "logit_bias": (5,),
    "processors": (5,),
}
PARTS: list[tuple[dict[str, Any], str, Any]] = [
    ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens", 9),
    ({"stop": ("a", "")}, "stop", ""),
    ({"stop": (1,)}, "stop", 1),
    ({"stop_token_ids": (-1,)}, "stop_token_ids", -1),
    ({"banned_token_ids": (1.5,)}, "banned_token_ids", 1.5),
    ({"allowed_token_ids": (1, 2), "banned_token_ids": (2, 1, 3)}, "allowed_token_ids", (1, 2)),
    ({"logit_bias": {-1: 0.5}}, "logit_bias key", -1),
    ({"logit_bias": {"1": 0.5}}, "logit_bias key", "1"),
    ({"logit_bias": {1: INF}}, "logit_bias[1]", INF),
    ({"logit_bias": {1: 2e4}}, "logit_bias[1]", 20000.0),
]
"""Values of which a part is refused, or next to another one."""


@pytest.mark.parametrize(
    ("values", "param", "value"),
    [*(({name: one}, name, one) for name, each in REFUSED.items() for one in each), *PARTS],
    ids=lambda v: str(v)[:50],
)
def test_a_bad_value_is_named_with_its_bound(values: dict[str, Any], param: str, value: Any) -> None:
    with refused(param, ANY if value != value else value) as caught:
        SamplingParams(**values)
    assert isinstance(caught.value, ConfigError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": 1, "min_new_tokens": 1, "temperature": 0, "top_p": 1, "min_p": 0, "seed": 0, "logprobs": 0},
        {"temperature": 1e-3, "top_p": 1e-9, "min_p": 1.0, "seed": MAX_SEED, "logprobs": 1000},
        {"presence_penalty": -100, "frequency_penalty": 100, "logit_bias": {0: -1e4, 1: 1e4}},
        {"allowed_token_ids": (1, 2), "banned_token_ids": (2,)},
    ],
    ids=str,
)
def test_the_bounds_themselves_are_allowed(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values
    assert params.greedy == (params.temperature == 0)


def test_collections_become_tuples_and_one_string_becomes_one_stop() -> None:
    bias = {1: 0.5}
    params = SamplingParams(
        stop="end", stop_token_ids=[3, 4], banned_token_ids={5}, allowed_token_ids=iter([1]), logit_bias=bias
    )
    assert (params.stop, params.stop_token_ids, params.banned_token_ids) == (("end",), (3, 4), (5,))
    assert params.allowed_token_ids == (1,) and SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    bias[-7] = float("nan")
    assert dict(params.logit_bias) == {1: 0.5}
    with pytest.raises(FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]


def test_of_changes_only_what_is_named() -> None:
    base = SamplingParams(temperature=0.7, top_k=5, stop="x")
    changed = SamplingParams.of(base, top_k=9)
    assert (changed.temperature, changed.top_k, changed.stop, base.top_k) == (0.7, 9, ("x",), 5)
    assert SamplingParams.of(base) == base and SamplingParams.of() == SamplingParams()
    assert SamplingParams.of(None, seed=3) == SamplingParams(seed=3)
    assert SamplingParams.of(SamplingParams(max_new_tokens=9), max_tokens=7).max_new_tokens == 7
    refusals: list[tuple[dict[str, int], str, int]] = [
        ({"min_new_tokens": 500}, "min_new_tokens", 500),
        ({"max_tokens": 7, "max_new_tokens": 8}, "max_tokens", 7),
        ({"max_tokens": 0}, "max_new_tokens", 0),
    ]
    for changes, param, value in refusals:
        with refused(param, value):
            SamplingParams.of(base, **changes)
    for name, near in (("temprature", "temperature"), ("max_new_token", "max_new_tokens")):
        with refused("parameter", name, UnknownNameError) as caught:
            SamplingParams.of(None, **{name: 1})
        assert f"Did you mean {near!r}?" in str(caught.value)


def test_keyword_arguments_are_typed_as_the_fields_are_named() -> None:
    names = {f.name for f in dataclasses.fields(SamplingParams)} | {"max_tokens"}
    assert set(SamplingChanges.__annotations__) == set(SamplingChanges.__optional_keys__) == names
