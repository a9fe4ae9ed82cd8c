"""Profiles: seconds per step of a model on one machine, by batch size, tokens per pass and context length.

Owns the file format and the interpolation between measured points. Measures nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from foresay.decoding.capabilities import PREFILL_CHUNK
from foresay.errors import ConfigError
from foresay.files import cache_dir
from foresay.json_files import Schema
from foresay.records import document
from foresay.records.document import Stored

FORMAT, VERSION = "foresay-profile", 1

Count = Annotated[int, Field(ge=0, le=2**40)]
Size = Annotated[int, Field(ge=1, le=2**40)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]

FILLED_TOGETHER = 4
"""Prompts that are prefilled together when prefill is timed; a profile has the time per prompt."""


@dataclass(frozen=True, slots=True)
class Timing(Stored):
    """Seconds of one engine step, without drafting, at one batch size, number of tokens per pass and context length."""

    batch: Size
    columns: Size
    """Tokens scored per row: the draft length plus one."""
    context: Count
    """Tokens of each row before the step."""
    seconds: Seconds
    """Median over repeats."""
    low: Seconds
    high: Seconds
    """First and third quartile."""


@dataclass(frozen=True, slots=True)
class Floor(Stored):
    """The lower bound of the time of a forward pass (roofline): the bytes that it must read / the memory bandwidth."""

    weight_bytes: Annotated[int, Field(ge=0, le=2**60)]
    kv_bytes: Count
    """Bytes of the keys and values of one token."""
    bytes_per_s: Annotated[float, Field(ge=1, le=1e18)]
    """Measured memory bandwidth, reading a block far larger than the processor caches."""

    def seconds(self, batch: int, context: float) -> float:
        """Return the lower bound of one forward pass. context: tokens per row."""
        return (self.weight_bytes + batch * context * self.kv_bytes) / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Profile(Stored):
    """The times of one model on one machine."""

    model: str
    dtype: str
    machine: Mapping[str, Any]
    timings: tuple[Timing, ...]
    fills: tuple[tuple[Count, Seconds], ...]
    """(tokens, seconds) of the prefill of one chunk of a prompt."""
    floor: Floor | None = None
    drafts: Mapping[str, tuple[tuple[Size, Count, Seconds], ...]] = field(default_factory=dict)
    """Drafter -> (batch, tokens drafted, seconds of drafting)."""
    draft_fills: Mapping[str, Seconds] = field(default_factory=dict)
    """Drafter -> seconds of the prefill of one prompt token."""
    ragged: bool = False
    """True if the time of a pass depends on its real tokens, False if it depends on its longest row."""
    column_cost: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """The relative cost of one more token of one row, as the model reports it: a share of a pass. None if it reports none."""
    token_bytes: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """Bytes of one token in the model's cache; 0 if unknown."""

    def clock(self) -> Callable[[int, float, float], float]:
        """Return a function (batch, columns, context) -> seconds of a step without drafting.

        Interpolates linearly between measured points over columns, then over batch, and adds the measured slope over context.
        Raises ConfigError for a profile without timings.
        """
        if not self.timings:
            raise ConfigError("contains no timings; make one with foresay profile", param="profile")
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
        """Return (columns, seconds per additional token of context) for each batch size."""
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
        """Return the prefill seconds of one prompt, in chunks, if FILLED_TOGETHER such prompts are prefilled together."""
        whole, rest = divmod(max(0, tokens), PREFILL_CHUNK)
        known = sorted(self.fills)
        return whole * line(known, PREFILL_CHUNK) + (line(known, rest) if rest else 0.0)

    def draft_seconds(self, drafter: str, batch: int, count: int) -> float:
        """Return the seconds of drafting `count` tokens for a batch. drafter: a key of `drafts`; raises KeyError for others."""
        if count == 0:
            return 0.0
        points = self.drafts[drafter]
        sizes = sorted({size for size, _, _ in points})
        at = [(size, line(sorted((k, s) for b, k, s in points if b == size), count)) for size in sizes]
        return line(at, batch)

    def with_drafts(self, name: str, points: Iterable[tuple[int, int, float]], fill: float) -> Profile:
        """Return a copy with one more drafter. points: (batch, tokens drafted, seconds). fill: seconds per prompt token."""
        drafts = {**self.drafts, name: tuple(points)}
        return replace(self, drafts=drafts, draft_fills={**self.draft_fills, name: fill})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile atomically and create missing folders. Raises ConfigError if it cannot be written."""
        document.save(self, path, FORMAT, VERSION, parents=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile. Raises ConfigError for a file that cannot be read or is not a profile of this version."""
        return _checked(document.load(path, FORMAT, VERSION, _PROFILE, "foresay profile"), os.fspath(path))


_PROFILE: Schema[Profile] = Schema(Profile, "a profile")


def _checked(profile: Profile, name: str) -> Profile:
    """Raise ConfigError if a point has two times, because interpolation needs distinct points."""
    points: list[tuple[str, list[Any]]] = [("fills", [tokens for tokens, _ in profile.fills])]
    points += [(f"drafts.{drafter}", [(b, n) for b, n, _ in some]) for drafter, some in profile.drafts.items()]
    for label, known in points:
        if len(set(known)) < len(known):
            raise ConfigError(f"is not a profile ({label} has two times for the same point)", param="path", value=name)
    return profile


def line(points: Sequence[tuple[int, float]], x: float) -> float:
    """Interpolate linearly at x. points: (x, y) sorted by x.

    Outside the points, extend the end segments, but not below the last y on the right or half of the smaller y on the left.
    """
    if len(points) <= 1:
        return points[0][1] if points else 0.0
    right = min(max(bisect_left([p[0] for p in points], x), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    value = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return max(value, y1) if x > x1 else max(value, min(y0, y1) / 2) if x < x0 else value


def profile_path(model: str, dtype: str, machine: Mapping[str, Any]) -> Path:
    """Return the cache path of a profile, by model, dtype and machine (threads included)."""
    where = str(Path(model).resolve()) if Path(model).exists() else model
    key = json.dumps([where, dtype, machine], sort_keys=True)
    name = "".join(c if c.isalnum() or c in "-._" else "-" for c in Path(model).name)[:40]
    return cache_dir() / "profiles" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
