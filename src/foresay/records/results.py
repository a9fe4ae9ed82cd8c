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
from typing import Any

from foresay.decoding.outcome import Step
from foresay.engine import Stats
from foresay.errors import ConfigError
from foresay.records.lines import Line, LineWriter, read_lines

FORMAT, VERSION = "foresay-results", 2


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """What a run measures: one method on one data set at one batch size and sampling."""

    method: str
    dataset: str
    batch_size: int
    sampling: str = "greedy"

    def __str__(self) -> str:
        return f"{self.method} on {self.dataset}, batch {self.batch_size}, {self.sampling}"


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt's counts and times, under SpecDec++'s names (Huang et al. 2024) where they mean the same.

    Times are seconds, the prompt's share of the batched steps it took part in. SpecDec++'s target_time, draft_time and their
    lengths are of the target and the draft model alone; lab.bench.specdec records those.
    """

    id: str
    category: str
    spec_time: float
    target_s: float
    """Of spec_time, the target's passes."""
    draft_s: float
    """Of spec_time, drafting."""
    num_mismatched_tokens: int
    """Draft tokens that were not accepted, untested ones included."""
    num_LM_call: int  # noqa: N815 - the published name
    """Target passes."""
    generated_length: int
    num_accepted: int
    """Output tokens that are accepted draft tokens; the target drew the others."""
    num_drafted: int
    num_tested: int
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

    cell: Cell
    repeat: int
    seconds: float
    """Wall-clock of all prompts, prefill included."""
    tokens: int
    plain_seconds: float | None = None
    """Time of plain decoding for as many tokens, from the runs next to this one in time; None where there was none."""
    identical: bool | None = None
    """Whether every output equals plain decoding's; None where it need not (sampling) or was not compared."""
    exact: bool = True
    """Whether the rule preserves the target's law."""
    stats: Mapping[str, Any] = field(default_factory=dict)
    """Stats.as_dict() over all prompts; empty for another engine, which reports none."""
    prompts: tuple[PromptResult, ...] = ()
    note: str = ""

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
        return {"kind": "run", **asdict(self)}


@dataclass(frozen=True, slots=True)
class Failure:
    """A cell that could not be run."""

    cell: Cell
    repeat: int
    error: str

    def as_line(self) -> Line:
        """The line for the file."""
        return {"kind": "failed", **asdict(self)}


@dataclass(frozen=True, slots=True)
class Prediction:
    """The throughput of a cell predicted from a replay and a profile."""

    cell: Cell
    tokens_per_s: float
    tokens_per_pass: float

    def as_line(self) -> Line:
        """The line for the file."""
        return {"kind": "prediction", **asdict(self)}


@dataclass(frozen=True, slots=True)
class Trace:
    """One output as (text, origin) pieces; origin is "draft", "residual" or "bonus"."""

    cell: Cell
    id: str
    pieces: tuple[tuple[str, str], ...]

    def as_line(self) -> Line:
        """The line for the file."""
        return {"kind": "trace", **asdict(self)}


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
        header, lines = read_lines(path, FORMAT, VERSION)
        results = cls(dict(header.get("settings", {})), dict(header.get("provenance", {})))
        for number, line in lines:
            try:
                results.add(line)
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{os.fspath(path)}, line {number}: not a result ({error})") from None
        return results

    def add(self, line: Line) -> None:
        """Add one line of a file; a run replaces an earlier failure of its cell and repeat.

        Raises KeyError, TypeError or ValueError for a line that is not a result.
        """
        result = read_result(line)
        if isinstance(result, Run):
            self.runs.append(result)
            of = (result.cell, result.repeat)
            self.failures = [one for one in self.failures if (one.cell, one.repeat) != of]
        elif isinstance(result, Failure):
            self.failures.append(result)
        elif isinstance(result, Prediction):
            self.predictions.append(result)
        else:
            self.traces.append(result)


def read_result(line: Line) -> Run | Failure | Prediction | Trace:
    """What a line of a file says. Raises KeyError, TypeError or ValueError for one that is not a result."""
    line = dict(line)
    kind, cell = line.pop("kind"), Cell(**line.pop("cell"))
    if kind == "run":
        return Run(cell, prompts=tuple(PromptResult(**one) for one in line.pop("prompts", ())), **line)
    if kind == "failed":
        return Failure(cell, **line)
    if kind == "prediction":
        return Prediction(cell, **line)
    if kind == "trace":
        return Trace(cell, pieces=tuple((text, origin) for text, origin in line.pop("pieces")), **line)
    raise ValueError(f"kind={kind!r}")


def results_writer(
    path: str | os.PathLike[str], settings: Mapping[str, Any], provenance: Mapping[str, Any]
) -> LineWriter:
    """A results file to append to; an existing one is resumed when its settings are the same.

    Raises ConfigError as LineWriter does: for other settings, and while another process writes the file.
    """
    return LineWriter(path, FORMAT, VERSION, {"settings": dict(settings), "provenance": dict(provenance)})


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
