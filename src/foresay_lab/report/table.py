"""Numbers per cell of a benchmark: counts are pooled over repeats before they are divided.

Owns medians, spreads, rates, intervals, the columns of the table, and the shortening of names. Knows neither figures nor
pages, and draws no conclusions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from foresay.checks import check_int
from foresay.engine import Stats
from foresay.errors import ConfigError
from foresay.generation.method import PLAIN
from foresay.records.results import Cell, Results, Run, median_and_spread, merged
from foresay.text.formatting import NOISE, is_noise, percent, yes_no

Span = tuple[float, float, float]
"""(median, minimum, maximum)."""

Group = tuple[str, int, str]
"""(data set, batch size, sampling): methods are compared within a group."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """The numbers of one cell over all its repeats."""

    cell: Cell
    repeats: int
    tokens_per_s: Span
    plain_per_s: Span | None
    """Tokens per second of the plain decoding next to the runs in time."""
    speed_up: Span | None
    stats: Stats | None
    """Sum of the counts of all repeats; None for other engines, which report none."""
    identical: bool | None
    exact: bool
    is_noise: bool = False
    """True for a speed-up that is noise by the spread of its own runs or of plain decoding's; see `is_noise`."""

    @property
    def group(self) -> Group:
        """The group of the row; rows of one group are compared with each other."""
        return _group(self.cell)

    @property
    def drafting(self) -> float | None:
        """Share of the time that drafting took."""
        return self.stats.draft_s / self.stats.total_s if self.stats and self.stats.total_s else None


def rows(results: Results) -> list[TableRow]:
    """Return a row for each cell with runs, sorted by decreasing speed-up, rows without speed-up last.

    Raises ConfigError for results with unusable numbers.
    """
    cells = results.by_cell()
    plain = {
        _group(cell): median_and_spread(run.tokens_per_s for run in of)
        for cell, of in cells.items()
        if cell.method == PLAIN
    }
    out = [_row(cell, of, plain.get(_group(cell))) for cell, of in cells.items()]
    spreads = {group: plain_spread(of) or 0.0 for group, of in grouped(out).items()}
    out = [replace(row, is_noise=_is_noise(row, spreads[row.group])) for row in out]
    return sorted(out, key=lambda row: (row.speed_up is None, -(row.speed_up or row.tokens_per_s)[0], row.cell))


def grouped(table: Sequence[TableRow]) -> dict[Group, list[TableRow]]:
    """Return the rows of each group."""
    return {group: [row for row in table if row.group == group] for group in sorted({row.group for row in table})}


def plain_spread(of: Sequence[TableRow]) -> float | None:
    """Return (maximum - minimum) / median of plain decoding's tokens per second in a group, or None if it was not run."""
    spans = [row.plain_per_s for row in of if row.plain_per_s]
    if not spans or not (middle := median_and_spread(span[0] for span in spans)[0]):
        return None
    return (max(span[2] for span in spans) - min(span[1] for span in spans)) / middle


def _is_noise(row: TableRow, spread: float) -> bool:
    if row.speed_up is None or row.stats is None or row.cell.method == PLAIN:
        return False
    middle, low, high = row.speed_up
    return is_noise(middle, max(high - low, spread), row.stats.block_efficiency)


def _row(cell: Cell, runs: Sequence[Run], plain: Span | None) -> TableRow:
    rates = [run.tokens_per_s for run in runs]
    paired = [(run, run.plain_seconds) for run in runs if run.plain_seconds is not None]
    speed_up: Span | None = None
    if paired:
        speed_up = median_and_spread(seconds / run.seconds for run, seconds in paired)
        plain = median_and_spread(run.tokens / seconds for run, seconds in paired)
    elif plain is not None and plain[0]:
        speed_up = median_and_spread(rate / plain[0] for rate in rates)
    compared = [run.identical for run in runs if run.identical is not None]
    return TableRow(
        cell=cell,
        repeats=len(runs),
        tokens_per_s=median_and_spread(rates),
        plain_per_s=plain,
        speed_up=speed_up,
        stats=merged(run.stats for run in runs) if all(run.stats for run in runs) else None,
        identical=all(compared) if compared else None,
        exact=all(run.exact for run in runs),
    )


def _group(cell: Cell) -> Group:
    return cell.dataset, cell.batch_size, cell.sampling


def wilson(hits: int, tries: int) -> tuple[float, float]:
    """Return the 95% Wilson interval of hits / tries, with tries >= 1. Raises ConfigError without the extra `lab`."""
    try:
        from scipy.stats import binomtest
    except ImportError:
        raise ConfigError("need scipy: pip install 'foresay[lab]'", param="intervals") from None
    check_int("tries", tries, 1)
    low, high = binomtest(check_int("hits", hits, 0, tries), tries).proportion_ci(method="wilson")
    return float(low), float(high)


def shortened(names: Iterable[str], size: int) -> dict[str, str]:
    """Map each name to a unique label of one line and about `size` characters, without the middle of a long name."""
    labels: dict[str, str] = {}
    for name in dict.fromkeys(names):
        text = " ".join(name.encode("utf-8", "replace").decode().split()) or "?"
        cut = text if len(text) <= size else f"{text[: size // 2]}…{text[-(size // 2 - 1) :]}"
        number = sum(label == cut or label.startswith(f"{cut} (") for label in labels.values())
        labels[name] = f"{cut} ({number + 1})" if number else cut
    return labels


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
