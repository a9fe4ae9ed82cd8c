"""What a report shows of a benchmark: each cell's numbers, the table, and the page.

Owns how runs become a `TableRow` (counts are pooled, then divided), the columns of the table, and the HTML, in which nothing
refers to anything outside. Knows neither files nor how figures are drawn, and draws no conclusions.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from foresay.decoding.outcome import Origin
from foresay.generation.method import PLAIN
from foresay.lab.report.table import Span, TableRow
from foresay.records.results import Cell, Failure, Trace
from foresay.text.wording import MEANINGS, percent, yes_no

MOST_TRACES = 12


@dataclass(frozen=True, slots=True)
class Picture:
    """One figure as it is written out."""

    name: str
    title: str
    caption: str
    png: bytes
    svg: str
    """For the middle of a page: ids of its own, and `currentColor` for ink."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file of results, and where it came from."""

    name: str
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a page or a Markdown file says."""

    title: str
    summary: Sequence[str]
    """A sentence for each data set, batch and sampling: which exact method was fastest, and whether it pays."""
    warnings: Sequence[str]
    """What a reader must know before believing the numbers."""
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
_STYLE = """
:root { color-scheme: light dark; --text: #16202a; --back: #ffffff; --soft: #eef1f5; --line: #cbd2da; --warn: #9a4b00;
  --draft: #08713f; --residual: #b3261e; --bonus: #005f8a; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ec; --back: #14181d; --soft: #20262d; --line: #3b444e;
  --warn: #ffb870; --draft: #6fdc9f; --residual: #ff9a90; --bonus: #6fc8f2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
.summary { background: var(--soft); border-radius: 6px; padding: .8rem 1rem .8rem 2rem; margin: 0; }
.warning { color: var(--warn); font-weight: 600; }
.note, figcaption { font-size: .85rem; opacity: .85; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .82rem; overflow-wrap: normal; }
th, td { padding: .3rem .35rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th { vertical-align: bottom; } td:not(.words) { white-space: nowrap; font-variant-numeric: tabular-nums; }
.words { text-align: left; } td.words { overflow-wrap: anywhere; min-width: 3.5rem; }
tr > :first-child { position: sticky; left: 0; background: var(--back); min-width: 11rem; }
@media (max-width: 40rem) { tr > :first-child { min-width: 7.5rem; } }
tr.plain td { background: var(--soft); } tr.lossy td:first-child { font-style: italic; }
figure { margin: 0 0 1rem; } figure svg { display: block; width: 100%; min-width: 620px; max-width: 900px; height: auto; }
.trace { white-space: pre-wrap; background: var(--soft); border-radius: 6px; padding: .7rem; font-size: .9rem;
  max-height: 20rem; overflow-y: auto; }
.draft { color: var(--draft); } .residual { color: var(--residual); font-weight: 700; }
.bonus { color: var(--bonus); text-decoration: underline; text-underline-offset: 3px; }
pre { white-space: pre-wrap; font-size: .8rem; background: var(--soft); padding: .7rem; border-radius: 6px; }
"""


def html(report: Report, pictures: Sequence[Picture]) -> str:
    """The whole page."""
    title = escape(report.title)
    parts = [
        f"<h1>{title}</h1>",
        _list(report.summary, "summary"),
        *(f'<p class="warning">{escape(line)}</p>' for line in report.warnings),
        f'<h2>All cells</h2><div class="wide">{_table(report.table)}</div><p class="note">{escape(TABLE_NOTE)}</p>',
        _failed(report.failures),
        *map(_figure, pictures),
        _traces(report.traces),
        "<h2>Where it came from</h2>",
        *map(_source, report.sources),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _list(lines: Sequence[str], kind: str) -> str:
    return f'<ul class="{kind}">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def _table(table: Sequence[TableRow]) -> str:
    def cell(tag: str, name: str, text: str) -> str:
        kind = ' class="words"' if name in NAMES else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    head = "".join(cell("th", name, name) for name in COLUMNS)
    lines = [f"<table><thead><tr>{head}</tr></thead><tbody>"]
    for row in table:
        kind = "plain" if row.cell.method == PLAIN else "ours" if row.exact else "lossy"
        lines.append(f'<tr class="{kind}">{"".join(cell("td", name, say(row)) for name, say in COLUMNS.items())}</tr>')
    return "\n".join([*lines, "</tbody></table>"])


def _failed(failures: Sequence[Failure]) -> str:
    said = [f"{one.cell}, repeat {one.repeat}: {one.error}" for one in failures]
    return f"<h2>Failed</h2>{_list(said, 'failed')}" if said else ""


def _figure(picture: Picture) -> str:
    return (
        f'<h2>{escape(picture.title)}</h2><figure><div class="wide">{picture.svg}</div>'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _traces(traces: Sequence[Trace]) -> str:
    """Traces of as many cells as there is room for, each piece in its origin's colour."""
    if not traces:
        return ""
    legend = "<br>".join(f'<span class="{o}">{o}</span>: {escape(MEANINGS[o])}' for o in Origin)
    lines = [f"<h2>Who wrote what</h2><p>{legend}</p>"]
    for trace in _mixed(traces)[:MOST_TRACES]:
        pieces = "".join(_piece(text, origin) for text, origin in trace.pieces)
        lines.append(f'<h3>{escape(f"{trace.id}: {trace.cell}")}</h3><div class="trace">{pieces}</div>')
    if left := len(traces) - MOST_TRACES:
        lines.append(f'<p class="note">{left} more are in the file.</p>' if left > 0 else "")
    return "\n".join(lines)


def _mixed(traces: Sequence[Trace]) -> list[Trace]:
    """Every cell's first trace, then every cell's second, and so on."""
    seen: Counter[Cell] = Counter()
    turns = []
    for trace in traces:
        turns.append(seen[trace.cell])
        seen[trace.cell] += 1
    return [trace for _, trace in sorted(zip(turns, traces, strict=True), key=lambda pair: pair[0])]


def _piece(text: str, origin: str) -> str:
    known = origin if origin in list(Origin) else ""
    said = escape(MEANINGS[Origin(known)] if known else f"by {origin}")
    return f'<span class="{known}" title="{said}">{escape(str(text))}</span>'


def _source(source: Source) -> str:
    told = json.dumps({"settings": source.settings, "provenance": source.provenance}, indent=1, ensure_ascii=False)
    return f"<details><summary>{escape(source.name)}</summary><pre>{escape(told)}</pre></details>"
