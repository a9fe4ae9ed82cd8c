"""Benchmark reports: reads results files and writes an HTML page, from the template report.html.j2.

Owns the check that results may be pooled, and the conclusions. The page is self-contained: it loads no other resources. Knows
nothing about the drawing of figures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from foresay.errors import ConfigError, shown
from foresay.files import atomic_write
from foresay.generation.method import PLAIN
from foresay.records.lines import differences
from foresay.records.results import Cell, Failure, Results, Trace
from foresay.text.formatting import MEANINGS
from foresay_lab.data.items import in_turns
from foresay_lab.report.figures import Picture, pictures
from foresay_lab.report.table import COLUMNS, NAMES, TABLE_NOTE, Group, TableRow, grouped, plain_spread, rows, times

Path_ = str | os.PathLike[str]
PAGE = "report.html"
TITLE = "Speculative decoding, measured"
MOST_TRACES = 12
UNSTEADY = 0.10
"""Spread of plain decoding above which a report warns."""


@dataclass(frozen=True, slots=True)
class Source:
    """One results file: its name, settings and provenance."""

    name: str
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]

    @property
    def summary(self) -> str:
        """The file name, the model, the machine, and the date and commit of the runs, as far as the file names them."""
        machine = self.provenance.get("machine")
        machine = machine if isinstance(machine, Mapping) else {}
        model, dtype = self.settings.get("model"), self.settings.get("dtype")
        parts = [
            f"{model} in {dtype}" if model and dtype else model,
            machine.get("processor"),
            f"{machine['threads']} threads" if "threads" in machine else None,
            str(self.provenance.get("time") or "")[:10],
            f"commit {self.provenance['commit']}" if self.provenance.get("commit") else None,
        ]
        return f"{self.name}: {', '.join(str(one) for one in parts if one)}".removesuffix(": ")

    @property
    def as_json(self) -> str:
        """Settings and provenance as indented JSON."""
        known = {"settings": self.settings, "provenance": self.provenance}
        return json.dumps(known, indent=1, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Report:
    """The content of a page, without figures."""

    title: str
    summary: Sequence[str]
    """A sentence per data set, batch size and sampling: the fastest exact method, and if it pays."""
    warnings: Sequence[str]
    """Sentences with reasons to distrust the numbers: different machines, unsteady plain decoding, differing or lossy outputs."""
    table: Sequence[TableRow]
    failures: Sequence[Failure]
    traces: Sequence[Trace]
    sources: Sequence[Source]


def read_report(results: Sequence[Path_], *, title: str | None = None) -> Report:
    """Merge the results of all files of JSON lines into one Report; a cell in two files is pooled if their settings are equal.

    Raises ConfigError if they differ, and for a file without runs.
    """
    if not results:
        raise ConfigError("must name at least one file", param="results", value=())
    whole, sources, owners = Results({}, {}), list[Source](), dict[Cell, Source]()
    seen: dict[str, Path_] = {}
    for path in results:
        if seen.setdefault(os.path.realpath(path), path) is not path:
            raise ConfigError("is given twice; its runs would count double", param="path", value=path)
        one = Results.load(path)
        if not one.runs:
            failed = [f"{failure.cell}: {failure.error}" for failure in one.failures]
            reason = f"; {len(failed)} failed, the first with: {failed[0]}" if failed else ""
            text = f"contains no run{reason}; a report needs at least one finished run"
            raise ConfigError(text, param="path", value=path)
        source = Source(os.fspath(path), one.settings, one.provenance)
        for cell in one.by_cell():
            first = owners.setdefault(cell, source)
            if differing := _disagreeing(first.settings, source.settings):
                text = f"has {cell} with other settings than {source.name!r} ({differing}); "
                text += "report them separately, or rename the method"
                raise ConfigError(text, param="path", value=first.name)
        for name in ("runs", "failures", "traces"):
            getattr(whole, name).extend(getattr(one, name))
        sources.append(source)
    ran = {(run.cell, run.repeat) for run in whole.runs}
    failures = [one for one in whole.failures if (one.cell, one.repeat) not in ran]
    table = rows(whole)
    warnings = [*_source_differences(sources), *_doubts(table)]
    summary = [_conclusion(group, of) for group, of in grouped(table).items()]
    return Report(title or TITLE, summary, warnings, table, failures, whole.traces, sources)


def _disagreeing(first: Any, second: Any) -> str:
    """Return the settings in which two files differ, as text; empty if they agree."""
    pairs = [f"{name}={shown(one)} and {shown(other)}" for name, one, other in differences(first, second)]
    return "; ".join(pairs[:4]) + ("; ..." if len(pairs) > 4 else "")


def _source_differences(sources: Sequence[Source]) -> list[str]:
    """Return warnings about differences between the files that limit their comparison."""
    first, out = sources[0], []
    for other in sources[1:]:
        machines = [source.provenance.get("machine") or {} for source in (first, other)]
        for kind, differing in (
            ("settings", _disagreeing(first.settings, other.settings)),
            ("machines", _disagreeing(*machines) if all(isinstance(one, dict) for one in machines) else ""),
        ):
            if differing:
                out.append(f"{first.name} and {other.name} come from different {kind} ({differing}).")
    return out


def _in_words(group: Group) -> str:
    return "{} (batch {}, {})".format(*group)


def _conclusion(group: Group, of: Sequence[TableRow]) -> str:
    where = f"On {_in_words(group)}"
    methods = [row for row in of if row.exact and row.stats is not None and row.cell.method != PLAIN and row.speed_up]
    if not methods:
        return f"{where} no exact method was compared with plain decoding."
    paying = [row for row in methods if row.speed_up and row.speed_up[0] > 1 and not row.is_noise]
    best = (paying or methods)[0]
    assert best.speed_up is not None
    gain, name = f"{times(best.speed_up)} the speed of plain decoding", best.cell.method
    if paying:
        assert best.plain_per_s is not None
        text = f"{where} {name} was the fastest exact method: {gain}"
        text += f", {best.tokens_per_s[0]:.1f} tokens/s instead of {best.plain_per_s[0]:.1f}."
    else:
        text = f"{where} no exact method gained more than its runs may differ: the best, {name}, had {gain}."
    faster = [row for row in of if row.stats is None and row.speed_up and row.speed_up[0] > best.speed_up[0]]
    if best.repeats == 1:
        text += " It was measured once, so its spread is unknown."
    return text + "".join(f" {row.cell.method}, another engine, had {times(row.speed_up)}." for row in faster[:1])


def _doubts(table: Sequence[TableRow]) -> list[str]:
    """Return warnings about the runs: unsteady plain decoding, differing and lossy outputs."""
    spreads = {group: plain_spread(of) or 0.0 for group, of in grouped(table).items()}
    found = {
        "Plain decoding itself varies, so smaller gains are not significant": [
            f"{_in_words(group)}: {spread:.0%}" for group, spread in spreads.items() if spread > UNSTEADY
        ],
        "Outputs differ from plain decoding, although the method is exact": [
            str(row.cell) for row in table if row.exact and row.identical is False
        ],
        "Lossy, so the output may differ from the target's": sorted(
            {row.cell.method for row in table if not row.exact}
        ),
    }
    return [f"{text}: {'; '.join(some)}." for text, some in found.items() if some]


def write(report: Report, folder: Path_) -> Path:
    """Write the page into a folder, which is made if it is missing. Return its path. Raises ConfigError if that fails."""
    page = html(report, pictures(report.table))
    with atomic_write(Path(folder) / PAGE, parents=True) as whole:
        whole.write_text(page, encoding="utf-8", errors="replace")
    return Path(folder) / PAGE


def html(report: Report, pictures: Sequence[Picture]) -> str:
    """Render the page."""
    environment = Environment(
        loader=PackageLoader("foresay_lab.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html.j2").render(
        report=report,
        pictures=pictures,
        columns=COLUMNS,
        words=NAMES,
        kind=lambda row: "plain" if row.cell.method == PLAIN else "ours" if row.exact else "lossy",
        table_note=TABLE_NOTE,
        traces=in_turns(report.traces, lambda trace: trace.cell)[:MOST_TRACES],
        num_traces_left=max(0, len(report.traces) - MOST_TRACES),
        meanings={str(origin): meaning for origin, meaning in MEANINGS.items()},
    )
