"""What a report shows of a benchmark: each cell's numbers, the table, and the page.

Owns how runs become a `Row` (counts are pooled, then divided), the columns of the table, and the HTML, in which nothing
refers to anything outside. Knows neither files nor how figures are drawn, and draws no conclusions.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from foresay.checks import flag, integer, number
from foresay.core import Origin
from foresay.engine import Stats
from foresay.errors import ConfigError
from foresay.records.results import PLAIN, Cell, Failure, Results, Run, Trace, median_and_spread, merged

Span = tuple[float, float, float]
"""(median, least, greatest)."""
Group = tuple[str, int, str]
"""What methods are compared within: data set, batch, sampling."""

MOST_TRACES = 12


@dataclass(frozen=True, slots=True)
class Row:
    """What one cell comes to."""

    cell: Cell
    repeats: int
    tokens_per_s: Span
    plain_per_s: Span | None
    """Tokens per second of the plain decoding that it is compared with."""
    speed_up: Span | None
    stats: Stats | None
    """Counts of all repeats; None for another engine, which tells none."""
    identical: bool | None
    exact: bool
    expected: float | None
    """Tokens per second that were predicted."""

    @property
    def group(self) -> Group:
        """What it is compared within."""
        return self.cell.dataset, self.cell.batch_size, self.cell.sampling

    @property
    def discard_rate(self) -> float | None:
        """Drafted and not used / tokens."""
        stats = self.stats
        return (stats.num_drafted - stats.num_accepted) / stats.num_tokens if stats and stats.num_tokens else None

    @property
    def verification_rate(self) -> float | None:
        """Target passes / tokens."""
        return self.stats.num_passes / self.stats.num_tokens if self.stats and self.stats.num_tokens else None


def rows(results: Results) -> list[Row]:
    """One for each cell that was run, the greatest speed-up first and those without any last."""
    cells = results.by_cell()
    for cell in cells:
        _check_cell(cell)
    plain = {_group(cell): median_and_spread(map(_rate, of)) for cell, of in cells.items() if cell.method == PLAIN}
    expected = {one.cell: number("tokens_per_s", one.tokens_per_s, 0, math.inf) for one in results.predictions}
    out = [_row(cell, of, plain.get(_group(cell)), expected.get(cell)) for cell, of in cells.items()]
    return sorted(out, key=lambda row: (row.speed_up is None, -(row.speed_up or row.tokens_per_s)[0], row.cell))


def _row(cell: Cell, runs: Sequence[Run], plain: Span | None, expected: float | None) -> Row:
    rates = [_rate(run) for run in runs]
    paired = [(run, _seconds("plain_seconds", run, run.plain_seconds)) for run in runs if run.plain_seconds is not None]
    speed_up: Span | None = None
    if paired:
        speed_up = median_and_spread(seconds / run.seconds for run, seconds in paired)
        plain = median_and_spread(run.tokens / seconds for run, seconds in paired)
    elif plain is not None and plain[0]:
        speed_up = median_and_spread(rate / plain[0] for rate in rates)
    told = [run.identical for run in runs if run.identical is not None]
    try:
        stats = merged(run.stats for run in runs) if all(run.stats for run in runs) else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"the stats of {cell} cannot be read ({error!r}); measure that cell again") from None
    return Row(
        cell=cell,
        repeats=len(runs),
        tokens_per_s=median_and_spread(rates),
        plain_per_s=plain,
        speed_up=speed_up,
        stats=stats,
        identical=all(told) if told else None,
        exact=all(flag("exact", run.exact) for run in runs),
        expected=expected,
    )


def _rate(run: Run) -> float:
    """Tokens per second of a run whose numbers are numbers."""
    return integer(f"tokens of {run.cell}", run.tokens, 0) / _seconds("seconds", run, run.seconds)


def _seconds(name: str, run: Run, value: Any) -> float:
    return number(f"{name} of {run.cell}", value, 0, math.inf, open_low=True)


def _check_cell(cell: Cell) -> None:
    for name in ("method", "dataset", "sampling"):
        if not isinstance(value := getattr(cell, name), str):
            raise ConfigError(f"{name}={value!r} of a cell must be a text; measure that cell again")
    integer(f"batch_size of {cell.method!r}", cell.batch_size, 1)


def _group(cell: Cell) -> Group:
    return cell.dataset, cell.batch_size, cell.sampling


def wilson(hits: int, tries: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval of a share, at 95% as it stands; at least one try."""
    integer("tries", tries, 1)
    share, square = integer("hits", hits, 0, tries) / tries, z * z / tries
    middle = share + square / 2
    half = math.sqrt(square * (share * (1 - share) + square / 4))
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one equals or undercuts on both axes, from left to right."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(points)):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def shortened(names: Iterable[str], size: int) -> dict[str, str]:
    """Each name in one line of about `size` characters: the middle goes, or what those that would look alike share."""
    whole = {name: " ".join(name.encode("utf-8", "replace").decode().split()) or "?" for name in names}
    cut = {name: text if len(text) <= size else f"{text[: size - 13]}…{text[-12:]}" for name, text in whole.items()}
    alike: dict[str, list[str]] = {}
    for name, text in cut.items():
        alike.setdefault(text, []).append(name)
    for names_of in alike.values():
        if len(names_of) > 1:
            letters = zip(*(whole[name] for name in names_of), strict=False)
            shared = next((i for i, column in enumerate(letters) if len(set(column)) > 1), 0)
            for name in names_of:
                cut[name] = f"{whole[name][:9]}…{whole[name][max(9, shared - 4) :][: size - 11]}…"
    taken: Counter[str] = Counter()
    for name, text in cut.items():
        taken[text] += 1
        cut[name] = text if taken[text] == 1 else f"{text} ({taken[text]})"
    return cut


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
    table: Sequence[Row]
    failures: Sequence[Failure]
    traces: Sequence[Trace]
    sources: Sequence[Source]


def times(span: Span | None) -> str:
    """A speed-up with its spread, as a table has it."""
    if span is None:
        return "-"
    median, least, greatest = span
    return f"{median:.2f}x" if least == greatest else f"{median:.2f}x ({least:.2f} to {greatest:.2f})"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _rate_of(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _yes(value: bool | None) -> str:
    return {None: "-", True: "yes", False: "no"}[value]


COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "method": lambda row: row.cell.method,
    "data set": lambda row: row.cell.dataset,
    "batch": lambda row: str(row.cell.batch_size),
    "sampling": lambda row: row.cell.sampling,
    "tokens/s": lambda row: f"{row.tokens_per_s[0]:.1f}",
    "speed-up": lambda row: times(row.speed_up),
    "tokens per pass": lambda row: _rate_of(row.stats.block_efficiency if row.stats else None),
    "acceptance rate": lambda row: _share(row.stats.acceptance_rate if row.stats else None),
    "draft utilization": lambda row: _share(row.stats.draft_utilization if row.stats else None),
    "discard rate": lambda row: _rate_of(row.discard_rate),
    "verification rate": lambda row: _rate_of(row.verification_rate),
    "identical": lambda row: _yes(row.identical),
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
MEANINGS = {
    Origin.DRAFT: "guessed by the drafter and accepted",
    Origin.RESIDUAL: "the target's, where a guess was rejected",
    Origin.BONUS: "the target's, where every guess held or none was made",
}
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


def _table(table: Sequence[Row]) -> str:
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
