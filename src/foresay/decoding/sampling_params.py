"""Sampling parameters of one request, validated at construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

import torch

from foresay.checks import changed_fields, check_float, check_int
from foresay.errors import ConfigError, UnknownNameError

LogitsProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A pure function of (token ids [1, L], scores [1, V]) -> scores [1, V], as transformers defines it."""

MAX_SEED = 2**63 - 1


class _Int(int):
    """An integer that no caller gave."""

    __slots__ = ()


class _Float(float):
    """A number that no caller gave."""

    __slots__ = ()


def not_given(value: Any) -> Any:
    """Return a number that is equal, and that the model's generation config may replace: see `SamplingParams.given`."""
    return _Int(value) if isinstance(value, int) else _Float(value)


class _TokenIds(tuple[int, ...]):
    """Token ids that were checked, which may be many."""

    __slots__ = ()


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, _TokenIds):
        return value
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        raise ConfigError("must be a sequence of token ids", param=name, value=value)
    ids = tuple(value)
    for token in ids:
        check_int(name, token, 0)
    return _TokenIds(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Raises:
        ConfigError: A value out of its bounds; the message names the field, the value and the bound.
    """

    max_new_tokens: int = _Int(256)
    """Maximum number of tokens to generate; the context limit may end the request earlier."""
    min_new_tokens: int = _Int(0)
    """No stop token, and no stop string, ends the output before this many tokens."""
    temperature: float = _Float(0.0)
    """0 is greedy; otherwise logits are divided by it."""
    top_k: int = _Int(0)
    """Keep the k likeliest tokens (ties with the k-th stay); 0 keeps all."""
    top_p: float = _Float(1.0)
    """Keep the smallest set of likeliest tokens whose mass reaches this share."""
    min_p: float = _Float(0.0)
    """Keep tokens at least this share as likely as the likeliest."""
    repetition_penalty: float = _Float(1.0)
    """Logits of tokens in prompt or output: divided by it when positive, multiplied when negative."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    allowed_token_ids: tuple[int, ...] | None = None
    """If given, no other token is ever generated."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that are never generated."""
    processors: tuple[LogitsProcessor, ...] = ()
    """transformers LogitsProcessors, applied after the penalties and biases, before the temperature."""
    seed: int | None = None
    """Seed of the request's random numbers; None draws one and reports it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, in addition to the model's end-of-sequence tokens; the stop token stays in the ids."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; the text is cut before the first of them."""
    prediction: tuple[int, ...] = ()
    """Tokens that the output probably repeats, from its beginning or in parts: n-gram drafters draft them."""
    owner: str = ""
    """Owner of the request's text: drafters that keep texts never draft from those of another owner."""
    cache_salt: str = ""
    """Keys and values of a common prefix are shared only with requests of the same salt."""
    keep_prompt: bool = False
    """Keep the prompt's keys and values in the folder `keep_prompts` of `load`, if there is one, though it is used once."""
    visible_token_ids: tuple[int, ...] = ()
    """Special tokens that are part of the text; others are left out of it."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence tokens (stop_token_ids still stop)."""
    logprobs: int | None = None
    """Report the log-probability of each token, and of this many likeliest ones, under the raw logits."""

    def __repr__(self) -> str:
        """Return what differs from the defaults."""
        return changed_fields(self, SamplingParams())

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, 1)
        check_int("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                "exceeds {max_new_tokens}; lower it or raise the other",
                param="min_new_tokens",
                value=self.min_new_tokens,
                max_new_tokens=self.max_new_tokens,
            )
        check_float("temperature", self.temperature, 0.0, math.inf)
        check_int("top_k", self.top_k, 0)
        check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        check_float("presence_penalty", self.presence_penalty, -100.0, 100.0)
        check_float("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        self._check_tokens()
        if self.seed is not None:
            check_int("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, 1000)
        for name in ("owner", "cache_salt"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ConfigError("must be a string", param=name, value=value)
            if any("\ud800" <= one <= "\udfff" for one in value):
                raise ConfigError("must be a text that UTF-8 can encode", param=name, value=value)
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError("must be True or False", param="ignore_eos", value=self.ignore_eos)

    def _check_tokens(self) -> None:
        """Copy the collections, so that later changes by the caller have no effect, and refuse contradictions."""
        put = object.__setattr__
        stop = (self.stop,) if isinstance(self.stop, str) else self._items("stop")
        if bad := [text for text in stop if not isinstance(text, str) or not text]:
            raise ConfigError("must be a non-empty string", param="stop", value=bad[0])
        put(self, "stop", stop)
        put(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        put(self, "banned_token_ids", _token_ids("banned_token_ids", self.banned_token_ids))
        put(self, "visible_token_ids", _token_ids("visible_token_ids", self.visible_token_ids))
        put(self, "prediction", _token_ids("prediction", self.prediction))
        put(self, "processors", self._items("processors"))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not set(allowed) - set(self.banned_token_ids):
                raise ConfigError(
                    "is empty, or all of it is in {banned_token_ids}: no token can be generated",
                    param="allowed_token_ids",
                    value=self.allowed_token_ids,
                    banned_token_ids=...,
                )
            put(self, "allowed_token_ids", allowed)
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError("must map token ids to numbers", param="logit_bias", value=self.logit_bias)
        for token, bias in self.logit_bias.items():
            check_int("logit_bias key", token, 0)
            check_float(f"logit_bias[{token}]", bias, -1e4, 1e4)
        put(self, "logit_bias", dict(self.logit_bias))

    def _items(self, name: str) -> tuple[Any, ...]:
        value = getattr(self, name)
        if not isinstance(value, list | tuple):
            raise ConfigError("must be a list or a tuple", param=name, value=value)
        return tuple(value)

    @property
    def greedy(self) -> bool:
        """True if the distribution is a point mass."""
        return self.temperature == 0

    @property
    def processes(self) -> bool:
        """True if a parameter other than min_new_tokens changes the logits before the temperature."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.banned_token_ids
            or self.processors
        )

    def given(self, name: str) -> bool:
        """True unless the field's number is the default, which the model's generation config may replace.

        Args:
            name: Name of a field that is a number.
        """
        return not isinstance(getattr(self, name), _Int | _Float)

    @classmethod
    def of(cls, params: SamplingParams | None = None, **changes: Any) -> SamplingParams:
        """Return parameters with some fields changed.

        Args:
            params: The parameters to change; None for the defaults.
            **changes: New values by name; max_tokens is another name of max_new_tokens.

        Raises:
            UnknownNameError: A name that is no field; the message suggests the nearest one.
            ConfigError: A value out of its bounds, max_tokens and max_new_tokens together, or `params` of another type.
        """
        if params is not None and not isinstance(params, cls):
            text = "must be SamplingParams; pass their fields by name, such as generate(prompt, temperature=0.7)"
            raise ConfigError(text, param="params", value=params)
        if "max_tokens" in changes:
            if "max_new_tokens" in changes:
                problem = "and {max_new_tokens} are the same; give one of them"
                raise ConfigError(problem, param="max_tokens", value=changes["max_tokens"], max_new_tokens=...)
            changes["max_new_tokens"] = changes.pop("max_tokens")
        known = {f.name for f in fields(cls)}
        for name in changes:
            if name not in known:
                raise UnknownNameError("parameter", name, known)
        values = {name: getattr(params, name) for name in known} if params is not None else {}
        return cls(**{**values, **changes})


class SamplingChanges(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream` and `astream`: the fields of SamplingParams."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int] | None
    banned_token_ids: Sequence[int]
    processors: Sequence[LogitsProcessor]
    seed: int | None
    stop_token_ids: Sequence[int]
    stop: str | Sequence[str]
    prediction: Sequence[int]
    owner: str
    cache_salt: str
    keep_prompt: bool
    visible_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    max_tokens: int
    """The same as max_new_tokens."""
