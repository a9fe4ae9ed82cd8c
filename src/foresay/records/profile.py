"""Profiles: how long passes of a model take on a machine, by batch, columns and context.

Owns the file, and how times between the measured ones are interpolated. Measures nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from foresay.decoding.protocols import PREFILL_CHUNK
from foresay.errors import ConfigError
from foresay.files import atomic_write, cache_dir
from foresay.json_files import Schema, parse_object, read_limited

FORMAT, VERSION = "foresay-profile", 1

Count = Annotated[int, Field(ge=0, le=2**40)]
Size = Annotated[int, Field(ge=1, le=2**40)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
_CHECKS = ConfigDict(extra="forbid", allow_inf_nan=False)
"""How a file is checked against the dataclasses below."""

FILLED_TOGETHER = 4
"""Prompts filled together when prefill is timed; a profile has the time of each."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one step of the engine at a batch size, number of columns and context, without drafting."""

    __pydantic_config__ = _CHECKS

    batch: Size
    columns: Size
    """Tokens scored per row: 1 + the draft."""
    context: Count
    """Tokens of a row before the step."""
    seconds: Seconds
    """Median."""
    low: Seconds
    high: Seconds
    """First and third quartile."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The lower bound of a pass's time (roofline): the bytes it must read over the memory bandwidth."""

    __pydantic_config__ = _CHECKS

    weight_bytes: Annotated[int, Field(ge=0, le=2**60)]
    kv_bytes: Count
    """Keys and values of one token."""
    bytes_per_s: Annotated[float, Field(ge=1, le=1e18)]
    """Measured: reading a block far larger than the caches."""

    def seconds(self, batch: int, context: float) -> float:
        """The bound for one pass. context: tokens of a row."""
        return (self.weight_bytes + batch * context * self.kv_bytes) / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Profile:
    """The times of one model on one machine."""

    __pydantic_config__ = _CHECKS

    model: str
    dtype: str
    machine: Mapping[str, Any]
    timings: tuple[Timing, ...]
    fills: tuple[tuple[Count, Seconds], ...]
    """(tokens, seconds) of filling one chunk of a prompt."""
    floor: Floor | None = None
    drafts: Mapping[str, tuple[tuple[Size, Count, Seconds], ...]] = field(default_factory=dict)
    """Drafter -> (batch, tokens drafted, seconds of drafting)."""
    draft_fills: Mapping[str, Seconds] = field(default_factory=dict)
    """Drafter -> seconds it takes to read one token of a prompt."""
    ragged: bool = False
    """Whether a pass takes the time of its real tokens; else that of its widest row."""
    column_cost: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """What the model says that one more token of one row adds to a pass, as a share of it; None where it does not."""
    token_bytes: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """What a token takes in the model's cache; 0 where nobody knows."""

    def clock(self) -> Callable[[int, float, float], float]:
        """(batch, columns, context) -> seconds of a step without its drafting.

        Piecewise linear between the measured points, over columns, then batch; context adds its measured slope. Raises
        ConfigError for a profile without timings.
        """
        if not self.timings:
            raise ConfigError("the profile holds no timings; make one with foresay profile")
        counts = Counter(t.context for t in self.timings)
        base = max(counts, key=lambda context: (counts[context], -context))
        known = {(t.batch, t.columns): t.seconds for t in self.timings if t.context == base}
        sizes = sorted({batch for batch, _ in known})
        curves = [(size, sorted((c, s) for (b, c), s in known.items() if b == size)) for size in sizes]
        slopes = self._slopes(base, known)

        @lru_cache(maxsize=4096)
        def at_base_and_slope(batch: int, columns: float) -> tuple[float, float]:
            at_base = line([(size, line(points, columns)) for size, points in curves], batch)
            return at_base, line([(size, line(points, columns)) for size, points in slopes], batch)

        def seconds(batch: int, columns: float, context: float) -> float:
            at_base, slope = at_base_and_slope(batch, columns)
            return max(at_base + slope * (context - base), 0.1 * at_base)

        return seconds

    def _slopes(self, base: int, known: Mapping[tuple[int, int], float]) -> list[tuple[int, list[tuple[int, float]]]]:
        """For each batch: (columns, seconds for one more token of context)."""
        found: dict[int, dict[int, list[float]]] = {}
        for t in self.timings:
            if t.context != base and (t.batch, t.columns) in known:
                slope = (t.seconds - known[t.batch, t.columns]) / (t.context - base)
                found.setdefault(t.batch, {}).setdefault(t.columns, []).append(slope)
        means = {
            batch: sorted((columns, max(0.0, sum(some) / len(some))) for columns, some in by.items())
            for batch, by in found.items()
        }
        return sorted(means.items()) or [(1, [(1, 0.0)])]

    def fill_seconds(self, tokens: float) -> float:
        """Seconds of the prefill of a prompt of this many tokens, in chunks, where FILLED_TOGETHER such prompts are."""
        whole, rest = divmod(max(0, tokens), PREFILL_CHUNK)
        known = sorted(self.fills)
        return whole * line(known, PREFILL_CHUNK) + (line(known, rest) if rest else 0.0)

    def draft_seconds(self, drafter: str, batch: int, count: int) -> float:
        """Seconds of drafting `count` tokens for a batch. drafter: a key of `drafts`; KeyError for another one."""
        if count == 0:
            return 0.0
        points = self.drafts[drafter]
        sizes = sorted({size for size, _, _ in points})
        at = [(size, line(sorted((k, s) for b, k, s in points if b == size), count)) for size in sizes]
        return line(at, batch)

    def with_drafts(self, name: str, points: Iterable[tuple[int, int, float]], fill: float) -> Profile:
        """A copy with one more drafter's times. points: (batch, tokens drafted, seconds). fill: seconds per prompt token."""
        drafts = {**self.drafts, name: tuple(points)}
        return replace(self, drafts=drafts, draft_fills={**self.draft_fills, name: fill})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile atomically; a missing folder is made. Raises ConfigError where it cannot be written."""
        text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)
        with atomic_write(path, parents=True) as whole:
            whole.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile. Raises ConfigError for a file that cannot be read or is no profile of this version."""
        name = os.fspath(path)
        try:
            values = parse_object(read_limited(path), name)
            if values.pop("format", None) != FORMAT or values.pop("version", None) != VERSION:
                raise ConfigError(f"{name}: not a {FORMAT} of version {VERSION}")
            profile = _PROFILE.of(values, name)
            _check_points(profile, name)
        except OSError as error:
            raise ConfigError(f"cannot read {name!r}: {error.strerror}") from None
        except ConfigError as error:
            raise ConfigError(f"{name!r} is no profile ({error}); make one with foresay profile") from None
        return profile


_PROFILE: Schema[Profile] = Schema(Profile, "a profile")


def _check_points(profile: Profile, name: str) -> None:
    """Raise ConfigError where two times are of the same point, between which nothing can be interpolated."""
    points: list[tuple[str, list[Any]]] = [("fills", [tokens for tokens, _ in profile.fills])]
    points += [(f"drafts.{drafter}", [(b, n) for b, n, _ in some]) for drafter, some in profile.drafts.items()]
    for what, known in points:
        if len(set(known)) < len(known):
            raise ConfigError(f"{name}: {what} has two times of the same point")


def line(points: Sequence[tuple[int, float]], x: float) -> float:
    """Piecewise linear interpolation at x. points: (x, y) sorted by x.

    Extrapolated along the end segments, but never below the last y to the right, nor below half the lesser y to the left.
    """
    if len(points) <= 1:
        return points[0][1] if points else 0.0
    right = min(max(bisect_left([p[0] for p in points], x), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    value = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return max(value, y1) if x > x1 else max(value, min(y0, y1) / 2) if x < x0 else value


def profile_path(model: str, dtype: str, machine: Mapping[str, Any]) -> Path:
    """Where a profile is kept: by model, dtype and machine, threads included."""
    where = str(Path(model).resolve()) if Path(model).exists() else model
    key = json.dumps([where, dtype, machine], sort_keys=True)
    name = "".join(c if c.isalnum() or c in "-._" else "-" for c in Path(model).name)[:40]
    return cache_dir() / "profiles" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
