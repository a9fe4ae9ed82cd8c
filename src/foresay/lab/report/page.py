"""A report of a benchmark as an HTML page and as Markdown: report.html.j2 and report.md.j2, filled in.

Owns the columns of the table and how Markdown is escaped. The page is self-contained: it loads nothing from outside. Knows
neither files nor how figures are drawn, and draws no conclusions.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from foresay.generation.method import PLAIN
from foresay.lab.report.table import Span, TableRow
from foresay.records.results import Cell, Failure, Trace
from foresay.text.formatting import MEANINGS, percent, yes_no

MOST_TRACES = 12


@dataclass(frozen=True, slots=True)
class Picture:
    """One figure as bytes."""

    name: str
    title: str
    caption: str
    png: bytes
    svg: str
    """For inlining in a page: ids are unique across figures, and ink is `currentColor`."""


@dataclass(frozen=True, slots=True)
class Source:
    """One results file: its name, settings and provenance."""

    name: str
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]

    @property
    def summary(self) -> str:
        """The file's name, with the commit and the time of its runs."""
        origin = [f"{name} {self.provenance[name]}" for name in ("commit", "time") if self.provenance.get(name)]
        return ", ".join([self.name, *origin])

    @property
    def as_json(self) -> str:
        """Settings and provenance, indented."""
        known = {"settings": self.settings, "provenance": self.provenance}
        return json.dumps(known, indent=1, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Report:
    """The content of a page or a Markdown file, figures aside."""

    title: str
    summary: Sequence[str]
    """A sentence for each data set, batch and sampling: which exact method was fastest, and whether it pays."""
    warnings: Sequence[str]
    """Sentences on what makes the numbers doubtful: unlike machines, unsteady plain decoding, differing or lossy outputs."""
    table: Sequence[TableRow]
    failures: Sequence[Failure]
    traces: Sequence[Trace]
    sources: Sequence[Source]


def times(span: Span | None) -> str:
    """A speed-up with its spread, as a table has it."""
    if span is None:
        return "-"
    median, least, greatest = span
    return f"{median:.2f}x" if least == greatest else f"{median:.2f}x ({least:.2f} to {greatest:.2f})"


def _rate_of(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


COLUMNS: Mapping[str, Callable[[TableRow], str]] = {
    "method": lambda row: row.cell.method,
    "data set": lambda row: row.cell.dataset,
    "batch": lambda row: str(row.cell.batch_size),
    "sampling": lambda row: row.cell.sampling,
    "tokens/s": lambda row: f"{row.tokens_per_s[0]:.1f}",
    "speed-up": lambda row: times(row.speed_up),
    "tokens per pass": lambda row: _rate_of(row.stats.block_efficiency if row.stats else None),
    "acceptance rate": lambda row: percent(row.stats.acceptance_rate if row.stats else None),
    "draft utilization": lambda row: percent(row.stats.draft_utilization if row.stats else None),
    "discard rate": lambda row: _rate_of(row.discard_rate),
    "verification rate": lambda row: _rate_of(row.verification_rate),
    "identical": lambda row: yes_no(row.identical),
    "exact": lambda row: "yes" if row.exact else "lossy",
}
"""The table, column by column."""
NAMES = ("method", "data set", "sampling")
"""Columns of words; the others are figures."""
TABLE_NOTE = (
    "tokens/s and speed-up: medians over repeats, with the least and the greatest in parentheses. Acceptance rate: accepted "
    "/ tested. Draft utilization: accepted / drafted. Discard rate: drafted in vain / tokens. Verification rate: passes of "
    "the target / tokens. Identical: every output was that of plain decoding."
)


def html(report: Report, pictures: Sequence[Picture]) -> str:
    """The whole page."""
    return _HTML.get_template("report.html.j2").render(_context(report, pictures))


def markdown(report: Report, pictures: Sequence[Picture]) -> str:
    """The report for a README or an issue; figures are named by their files."""
    return _MARKDOWN.get_template("report.md.j2").render(_context(report, pictures))


def _context(report: Report, pictures: Sequence[Picture]) -> dict[str, Any]:
    """The variables of both templates."""
    return {
        "report": report,
        "pictures": pictures,
        "columns": list(COLUMNS),
        "words": NAMES,
        "rows": [
            {"kind": _kind(row), "cells": {name: cell(row) for name, cell in COLUMNS.items()}} for row in report.table
        ],
        "table_note": TABLE_NOTE,
        "failures": [f"{one.cell}, repeat {one.repeat}: {one.error}" for one in report.failures],
        "traces": _mixed(report.traces)[:MOST_TRACES],
        "num_traces_left": max(0, len(report.traces) - MOST_TRACES),
        "meanings": {str(origin): meaning for origin, meaning in MEANINGS.items()},
    }


def _kind(row: TableRow) -> str:
    return "plain" if row.cell.method == PLAIN else "ours" if row.exact else "lossy"


def _mixed(traces: Sequence[Trace]) -> list[Trace]:
    """Every cell's first trace, then every cell's second, and so on."""
    seen: Counter[Cell] = Counter()
    turns = []
    for trace in traces:
        turns.append(seen[trace.cell])
        seen[trace.cell] += 1
    return [trace for _, trace in sorted(zip(turns, traces, strict=True), key=lambda pair: pair[0])]


def _plain(value: Any) -> str:
    """Text with everything escaped that Markdown would interpret."""
    text = escape(" ".join(str(value).split()), quote=False)
    text = re.sub(r"([\\`*\[\]|~]|(?<!\w)_|_(?!\w))", r"\\\1", text)
    return re.sub(r"^(?=[#+-])", r"\\", text) if text != "-" else text


_HTML = Environment(
    loader=PackageLoader("foresay.lab.report", ""),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_MARKDOWN = _HTML.overlay(autoescape=False, finalize=_plain)
