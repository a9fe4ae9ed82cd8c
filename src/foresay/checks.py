"""Checks of settings; a ConfigError names the setting, its value and the bound."""

from __future__ import annotations

import math
import os
import sys
from contextlib import suppress
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, TypeVar

from foresay.errors import ConfigError

T = TypeVar("T")


def changed_fields(value: Any, default: Any) -> str:
    """Return the repr of a dataclass with the fields that differ from those of another."""
    pairs = [(one.name, getattr(value, one.name), getattr(default, one.name)) for one in fields(value)]
    return f"{type(value).__name__}({', '.join(f'{name}={own!r}' for name, own, other in pairs if own != other)})"


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` if it is an integer in [low, high]; high=None sets no upper bound."""
    good = isinstance(value, Integral) and not isinstance(value, bool)
    if not good or value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ConfigError(f"must be an integer {bound}", param=name, value=value)
    return int(value)


def check_float(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """Return `value` as a float if it is a finite number in [low, high], or in (low, high] if open_low is set."""
    good = isinstance(value, Real) and not isinstance(value, bool)
    if not good or not (low < value if open_low else low <= value) or value > min(high, sys.float_info.max):
        left, right = ("(" if open_low else "["), (")" if high == math.inf else "]")
        raise ConfigError(f"must be a finite number in {left}{low:g}, {high:g}{right}", param=name, value=value)
    return float(value)


def check_flag(name: str, value: Any) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise ConfigError("must be true or false", param=name, value=value)
    return value


def check_has(name: str, value: T, method: str, kind: str) -> T:
    """Return `value` if it is None or has this method of a protocol. kind: the type that an error names, with its article."""
    if value is not None and not callable(getattr(value, method, None)):
        raise ConfigError(f"must be {kind}, not a {type(value).__name__}", param=name, value=value)
    return value


def gigabytes(variable: str, default: float) -> float:
    """Return the bytes of a number of gigabytes in an environment variable, or of the default. Raises ConfigError for others."""
    number: Any = os.environ.get(variable) or default
    with suppress(ValueError):
        number = float(number)
    return number * 1e9 if number == default else check_float(variable, number, 0.0, 1e9) * 1e9


def check_choice(name: str, value: Any, known: tuple[str, ...]) -> str:
    """Return `value` if it is one of the known strings."""
    if value not in known:
        raise ConfigError(f"must be one of {', '.join(known)}", param=name, value=value)
    return str(value)
