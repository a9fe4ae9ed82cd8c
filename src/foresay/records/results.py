"""Results of benchmarks: one file of JSON lines, readable while it grows.

Owns the format and its fields. Runs nothing, and pools or compares nothing (lab/report does).

{"format": "foresay-results", "version": 2, "settings": {...}, "provenance": {...}}
{"kind": "run", "cell": {...}, "repeat": 0, "seconds": ..., "plain_seconds": ..., "prompts": [...], "stats": {...}, ...}
{"kind": "failed", "cell": {...}, "repeat": 0, "error": "one line"}
{"kind": "prediction", "cell": {...}, "tokens_per_s": ..., "tokens_per_pass": ...}
{"kind": "trace", "cell": {...}, "id": "chat-01", "pieces": [["text", "draft"], ...]}
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from foresay.decoding.outcome import Step
from foresay.engine import Stats
from foresay.errors import ConfigError
from foresay.json_files import Schema
from foresay.records.lines import Line, LineWriter, read_lines

FORMAT, VERSION = "foresay-results", 2

Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Duration = Annotated[float, Field(ge=1e-9, le=1e12)]
"""Seconds that something took; rates divide by it."""
_CHECKS = ConfigDict(extra="forbid", allow_inf_nan=False)
"""How a line of a file is checked against the dataclasses below."""


class _StatsValues(BaseModel):
    """Counts of `Stats.as_dict()`; its means are derived from them."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    num_passes: Count
    num_tokens: Count
    num_drafted: Count
    num_tested: Count
    num_accepted: Count
    origins: dict[str, Count]
    accepted_lengths: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Count]
    tested_at: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Count]
    accepted_at: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Count]
    draft_s: Seconds
    target_s: Seconds
    total_s: Seconds


def _checked_stats(values: dict[str, Any]) -> dict[str, Any]:
    if values:
        _StatsValues.model_validate(values)
    return values


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """What a run measures: one method on one data set at one batch size and sampling."""

    __pydantic_config__ = _CHECKS

    method: str
    dataset: str
    batch_size: Annotated[int, Field(ge=1, le=2**31)]
    sampling: str = "greedy"

    def __str__(self) -> str:
        return f"{self.method} on {self.dataset}, batch {self.batch_size}, {self.sampling}"


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt's counts and times, under SpecDec++'s names (Huang et al. 2024) where they mean the same.

    Times are seconds, the prompt's share of the batched steps it took part in. SpecDec++'s target_time, draft_time and their
    lengths are of the target and the draft model alone; lab.bench.specdec records those.
    """

    __pydantic_config__ = _CHECKS

    id: str
    category: str
    spec_time: Seconds
    target_s: Seconds
    """Of spec_time, the target's passes."""
    draft_s: Seconds
    """Of spec_time, drafting."""
    num_mismatched_tokens: Count
    """Draft tokens that were not accepted, untested ones included."""
    num_LM_call: Count  # noqa: N815 - the published name
    """Target passes."""
    generated_length: Count
    num_accepted: Count
    """Output tokens that are accepted draft tokens; the target drew the others."""
    num_drafted: Count
    num_tested: Count
    finish_reason: str

    @classmethod
    def of(cls, id: str, category: str, steps: Iterable[Step]) -> PromptResult:
        """From one request's Steps."""
        steps = list(steps)
        stats = Stats.of(steps)
        return cls(
            id=id,
            category=category,
            spec_time=stats.total_s,
            target_s=stats.target_s,
            draft_s=stats.draft_s,
            num_mismatched_tokens=stats.num_drafted - stats.num_accepted,
            num_LM_call=stats.num_passes,
            generated_length=stats.num_tokens,
            num_accepted=stats.num_accepted,
            num_drafted=stats.num_drafted,
            num_tested=stats.num_tested,
            finish_reason=str(steps[-1].finish_reason) if steps and steps[-1].finish_reason else "",
        )

    @property
    def stats(self) -> Stats:
        """The totals as Stats, without counts per position or per step, which are not recorded."""
        return Stats(
            num_passes=self.num_LM_call,
            num_tokens=self.generated_length,
            num_drafted=self.num_drafted,
            num_tested=self.num_tested,
            num_accepted=self.num_accepted,
            draft_s=self.draft_s,
            target_s=self.target_s,
            total_s=self.spec_time,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One repeat of one cell."""

    __pydantic_config__ = _CHECKS

    cell: Cell
    repeat: Count
    seconds: Duration
    """Wall-clock of all prompts, prefill included."""
    tokens: Count
    plain_seconds: Duration | None = None
    """Time of plain decoding for as many tokens, from the runs next to this one in time; None where there was none."""
    identical: bool | None = None
    """Whether every output equals plain decoding's; None where it need not (sampling) or was not compared."""
    exact: bool = True
    """Whether the rule preserves the target's law."""
    stats: Annotated[Mapping[str, Any], AfterValidator(_checked_stats)] = field(default_factory=dict)
    """Stats.as_dict() over all prompts; empty for another engine, which reports none."""
    prompts: tuple[PromptResult, ...] = ()
    note: str = ""
    kind: Literal["run"] = "run"

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds

    @property
    def speed_up(self) -> float | None:
        """Speed relative to plain decoding next to it in time; None where there was none."""
        return None if self.plain_seconds is None else self.plain_seconds / self.seconds

    def as_line(self) -> Line:
        """The line for the file."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Failure:
    """A cell that could not be run."""

    __pydantic_config__ = _CHECKS

    cell: Cell
    repeat: Count
    error: str
    kind: Literal["failed"] = "failed"

    def as_line(self) -> Line:
        """The line for the file."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The throughput of a cell predicted from a replay and a profile."""

    __pydantic_config__ = _CHECKS

    cell: Cell
    tokens_per_s: Seconds
    tokens_per_pass: Seconds
    kind: Literal["prediction"] = "prediction"

    def as_line(self) -> Line:
        """The line for the file."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Trace:
    """One output as (text, origin) pieces; origin is "draft", "residual" or "bonus"."""

    __pydantic_config__ = _CHECKS

    cell: Cell
    id: str
    pieces: tuple[tuple[str, str], ...]
    kind: Literal["trace"] = "trace"

    def as_line(self) -> Line:
        """The line for the file."""
        return asdict(self)


Result = Annotated[Run | Failure | Prediction | Trace, Field(discriminator="kind")]
RESULT: Schema[Result] = Schema(Result, "a result")


@dataclass(slots=True)
class Results:
    """Everything a results file holds."""

    settings: dict[str, Any]
    provenance: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)

    def by_cell(self) -> dict[Cell, list[Run]]:
        """Runs by cell, in the order cells were first run."""
        out: dict[Cell, list[Run]] = {}
        for run in self.runs:
            out.setdefault(run.cell, []).append(run)
        return out

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Results:
        """Read a results file, also one that is still being written.

        Raises ConfigError for a file that cannot be read, is no results file, or has a line that is not a result.
        """
        with read_lines(path, FORMAT, VERSION, RESULT) as (header, lines):
            known = {name: header.get(name, {}) for name in ("settings", "provenance")}
            for name, value in known.items():
                if not isinstance(value, dict):
                    raise ConfigError(f"{os.fspath(path)}, line 1: {name}={value!r} must be an object")
            return cls.of(**known, found=(result for _, result in lines))

    @classmethod
    def of(cls, settings: dict[str, Any], provenance: dict[str, Any], found: Iterable[Result]) -> Results:
        """Results in the order of a file; a run replaces earlier failures of its cell and repeat."""
        results = cls(settings, provenance)
        failed: dict[tuple[Cell, int], list[Failure]] = {}
        for one in found:
            if isinstance(one, Run):
                results.runs.append(one)
                failed.pop((one.cell, one.repeat), None)
            elif isinstance(one, Failure):
                failed.setdefault((one.cell, one.repeat), []).append(one)
            elif isinstance(one, Prediction):
                results.predictions.append(one)
            else:
                results.traces.append(one)
        results.failures = [one for some in failed.values() for one in some]
        return results


def read_result(line: Line) -> Result:
    """The result in a line of a file. Raises ConfigError for a line that is none."""
    return RESULT.of(line, "a line of results")


def results_writer(
    path: str | os.PathLike[str], settings: Mapping[str, Any], provenance: Mapping[str, Any]
) -> LineWriter:
    """A results file to append to; an existing one is resumed when its settings are the same.

    Raises ConfigError as LineWriter does: for other settings, and while another process writes the file.
    """
    return LineWriter(path, FORMAT, VERSION, {"settings": dict(settings), "provenance": dict(provenance)}, RESULT)


def median_and_spread(values: Iterable[float]) -> tuple[float, float, float]:
    """(median, least, greatest) of at least one value."""
    known = sorted(values)
    return statistics.median(known), known[0], known[-1]


def merged(stats: Iterable[Mapping[str, Any]]) -> Stats:
    """Counts of several `Stats.as_dict()` added up."""
    total = Stats()
    for one in stats:
        total.merge(Stats.from_dict(one))
    return total
