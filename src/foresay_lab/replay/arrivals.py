"""Arrival times of requests: random, in bursts, or from a file.

Owns the times, in seconds from 0, in order. Knows neither the requests nor the engine.
"""

from __future__ import annotations

import math
import os
import random
from typing import Any

from foresay.checks import check_float, check_int
from foresay.errors import ConfigError
from foresay.json_files import Schema
from foresay.text.text_files import decode, numbered, read_bytes


def poisson(rate: float, count: int, seed: int = 0) -> list[float]:
    """Return `count` arrivals of a Poisson process with `rate` requests per second, i.e. with exponential gaps."""
    check_float("rate", rate, 1e-6, 1e6)
    check_int("count", count, 1)
    rng, now, out = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        out.append(now)
    return out


def bursts(rate: float, count: int, size: int, seed: int = 0) -> list[float]:
    """Return `count` arrivals at `rate` requests per second, in bursts of `size`; bursts are a Poisson process."""
    check_int("size", size, 1)
    times = poisson(rate / size, math.ceil(check_int("count", count, 1) / size), seed)
    return [time for time in times for _ in range(size)][:count]


def from_trace(path: str | os.PathLike[str]) -> list[float]:
    """Read times from a file: a number per line, or JSON objects with a `timestamp` in seconds; the first becomes 0.

    Raises ConfigError, with the line, for any other content, and for a file without times.
    """
    name = os.fspath(path)
    lines = numbered(decode(read_bytes(name), name).splitlines(), name)
    out = [_time(line.text, f"{name}:{line.number}") for line in lines]
    if not out:
        raise ConfigError("contains no arrivals", param="path", value=name)
    first = min(out)
    return sorted(time - first for time in out)


_TIME: Schema[float | dict[str, Any]] = Schema(float | dict[str, Any], "a time")


def _time(line: str, where: str) -> float:
    try:
        found = _TIME.read(line, where)
        value = found["timestamp"] if isinstance(found, dict) else found
        return check_float("timestamp", value, -1e15, 1e15)
    except (ConfigError, KeyError):
        raise ConfigError(": neither seconds nor an object with a timestamp in seconds", param=where) from None
