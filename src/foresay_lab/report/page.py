"""A benchmark report as an HTML page, from the template report.html.j2.

Owns the columns of the table. The page is self-contained: it loads no other resources. Knows
neither files nor the drawing of figures, and draws no conclusions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from foresay.generation.method import PLAIN
from foresay.records.results import Failure, Trace
from foresay.text.formatting import MEANINGS, NOISE, percent, yes_no
from foresay_lab.data.items import in_turns
from foresay_lab.report.figures import Picture
from foresay_lab.report.table import Span, TableRow

MOST_TRACES = 12


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


def times(span: Span | None) -> str:
    """Format a speed-up with its spread for a table."""
    if span is None:
        return "-"
    median, low, high = span
    return f"{median:.2f}x" if low == high else f"{median:.2f}x ({low:.2f} to {high:.2f})"


def _two_decimals(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


COLUMNS: Mapping[str, Callable[[TableRow], str]] = {
    "method": lambda row: row.cell.method,
    "data set": lambda row: row.cell.dataset,
    "batch": lambda row: str(row.cell.batch_size),
    "sampling": lambda row: row.cell.sampling,
    "tokens/s": lambda row: f"{row.tokens_per_s[0]:.1f}",
    "speed-up": lambda row: NOISE * row.is_noise + times(row.speed_up),
    "tokens per pass": lambda row: _two_decimals(row.stats.block_efficiency if row.stats else None),
    "acceptance rate": lambda row: percent(row.stats.acceptance_rate if row.stats else None),
    "draft utilization": lambda row: percent(row.stats.draft_utilization if row.stats else None),
    "discard rate": lambda row: _two_decimals(row.stats.discard_rate if row.stats else None),
    "verification rate": lambda row: _two_decimals(row.stats.verification_rate if row.stats else None),
    "drafting": lambda row: percent(row.drafting),
    "identical": lambda row: yes_no(row.identical),
    "exact": lambda row: "yes" if row.exact else "lossy",
}
"""Column of the table -> its text for a row."""
NAMES = ("method", "data set", "sampling")
"""Columns of text; the others are numbers."""
TABLE_NOTE = (
    "tokens/s and speed-up: medians over repeats, with minimum and maximum in parentheses; ~ marks a speed-up that is noise: "
    "within the spread of its runs or of plain decoding, or above tokens per pass. Acceptance rate: accepted "
    "/ tested. Draft utilization: accepted / drafted. Discard rate: draft tokens not accepted / tokens. Verification rate: "
    "target passes / tokens. Drafting: share of the time. Identical: every output equals that of plain decoding."
)


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
