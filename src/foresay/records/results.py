"""Benchmark results: one file of JSON lines, readable while it grows.

Owns the format and its fields. Runs nothing; lab/report pools and compares results.

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
from foresay.records.document import Stored
from foresay.records.lines import Line, LineWriter, read_lines

FORMAT, VERSION = "foresay-results", 2

Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Duration = Annotated[float, Field(ge=1e-9, le=1e12)]
"""Positive seconds, because rates divide by them."""


class _StatsValues(BaseModel):
    """The counts in `Stats.as_dict()`; its means are derived from them."""

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
class Cell(Stored):
    """The configuration of a run: one method on one data set at one batch size and sampling."""

    method: str
    dataset: str
    batch_size: Annotated[int, Field(ge=1, le=2**31)]
    sampling: str = "greedy"

    def __str__(self) -> str:
        return f"{self.method} on {self.dataset}, batch {self.batch_size}, {self.sampling}"


@dataclass(frozen=True, slots=True)
class PromptResult(Stored):
    """Counts and times of one prompt, under the names of SpecDec++ (Huang et al. 2024) where the meaning is the same.

    Times are in seconds: the prompt's share of the batched steps that it took part in. SpecDec++'s target_time, draft_time and
    their lengths belong to the target and the draft model alone; lab.bench.specdec records them.
    """

    id: str
    category: str
    spec_time: Seconds
    target_s: Seconds
    """Part of spec_time: target passes."""
    draft_s: Seconds
    """Part of spec_time: drafting."""
    num_mismatched_tokens: Count
    """Draft tokens that were not accepted, including untested ones."""
    num_LM_call: Count  # noqa: N815 - the published name
    """Target passes."""
    generated_length: Count
    num_accepted: Count
    """Output tokens that are accepted draft tokens; the target generated the others."""
    num_drafted: Count
    num_tested: Count
    finish_reason: str

    @classmethod
    def of(cls, id: str, category: str, steps: Iterable[Step]) -> PromptResult:
        """Sum up the Steps of one request."""
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


class _Line(Stored):
    __slots__ = ()

    def as_line(self) -> Line:
        """Return the line for the file."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, slots=True)
class Run(_Line):
    """One repeat of one cell."""

    cell: Cell
    repeat: Count
    seconds: Duration
    """Wall-clock time of all prompts, including prefill."""
    tokens: Count
    plain_seconds: Duration | None = None
    """Time of plain decoding for the same number of tokens, from the runs next to this one in time; None without such runs."""
    identical: bool | None = None
    """True if every output equals that of plain decoding; None if it need not (sampling) or was not compared."""
    exact: bool = True
    """True if the rule preserves the target's distribution."""
    stats: Annotated[Mapping[str, Any], AfterValidator(_checked_stats)] = field(default_factory=dict)
    """Stats.as_dict() over all prompts; empty for other engines, which report none."""
    prompts: tuple[PromptResult, ...] = ()
    note: str = ""
    kind: Literal["run"] = "run"

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds

    @property
    def speed_up(self) -> float | None:
        """Speed relative to plain decoding next to this run in time; None if there was none."""
        return None if self.plain_seconds is None else self.plain_seconds / self.seconds


@dataclass(frozen=True, slots=True)
class Failure(_Line):
    """A failed attempt to run a cell."""

    cell: Cell
    repeat: Count
    error: str
    kind: Literal["failed"] = "failed"

    def __str__(self) -> str:
        return f"{self.cell}, repeat {self.repeat}: {self.error}"


@dataclass(frozen=True, slots=True)
class Prediction(_Line):
    """The throughput of a cell, predicted from a replay and a profile."""

    cell: Cell
    tokens_per_s: Seconds
    tokens_per_pass: Seconds
    kind: Literal["prediction"] = "prediction"


@dataclass(frozen=True, slots=True)
class Trace(_Line):
    """One output as (text, origin) pieces; origin is "draft", "residual" or "bonus"."""

    cell: Cell
    id: str
    pieces: tuple[tuple[str, str], ...]
    kind: Literal["trace"] = "trace"


Result = Annotated[Run | Failure | Prediction | Trace, Field(discriminator="kind")]
RESULT: Schema[Result] = Schema(Result, "a result")


@dataclass(slots=True)
class Results:
    """The contents of a results file."""

    settings: dict[str, Any]
    provenance: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)

    def by_cell(self) -> dict[Cell, list[Run]]:
        """Group the runs by cell, in the order in which cells were first run."""
        out: dict[Cell, list[Run]] = {}
        for run in self.runs:
            out.setdefault(run.cell, []).append(run)
        return out

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Results:
        """Read a results file, possibly one that is still being written.

        Raises ConfigError for a file that cannot be read, is not a results file, or has a line that is not a result.
        """
        with read_lines(path, FORMAT, VERSION, RESULT) as (header, lines):
            known = {name: header.get(name, {}) for name in ("settings", "provenance")}
            for name, value in known.items():
                if not isinstance(value, dict):
                    raise ConfigError("must be an object", param=f"{os.fspath(path)}, line 1: {name}", value=value)
            return cls.of(**known, found=(result for _, result in lines))

    @classmethod
    def of(cls, settings: dict[str, Any], provenance: dict[str, Any], found: Iterable[Result]) -> Results:
        """Collect results in file order; a run replaces earlier failures of its cell and repeat."""
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
    """Parse the result in a line of a file. Raises ConfigError if the line is not a result."""
    return RESULT.of(line, "a line of results")


def results_writer(
    path: str | os.PathLike[str], settings: Mapping[str, Any], provenance: Mapping[str, Any]
) -> LineWriter:
    """Open a results file for appending; an existing file with the same settings is resumed.

    Raises ConfigError as LineWriter does: for different settings, and while another process writes the file.
    """
    return LineWriter(path, FORMAT, VERSION, {"settings": dict(settings), "provenance": dict(provenance)}, RESULT)


def median_and_spread(values: Iterable[float]) -> tuple[float, float, float]:
    """Return (median, minimum, maximum) of at least one value."""
    known = sorted(values)
    return statistics.median(known), known[0], known[-1]


def merged(stats: Iterable[Mapping[str, Any]]) -> Stats:
    """Return the sum of several `Stats.as_dict()`."""
    total = Stats()
    for one in stats:
        total.merge(Stats.from_dict(one))
    return total
