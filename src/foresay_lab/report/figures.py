"""Figures of a benchmark's numbers, as SVG.

Owns the contents, the style and the rendering of figures. Knows neither files nor pages. Imports matplotlib when a figure is
drawn and changes none of its global settings.
"""

from __future__ import annotations

import io
import re
import statistics
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from foresay.engine import Stats
from foresay.errors import ConfigError
from foresay.generation.method import PLAIN
from foresay_lab.report.table import TableRow, shortened, wilson

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Table = Sequence[TableRow]
Drawing = tuple["Figure", str]
"""A figure and its caption."""
Line = tuple[tuple[str, str], str]
"""A line in a figure: (data set, sampling), which is a panel, and the method."""

INK = "#16202a"
"""Colour of axes, labels and error bars; a page replaces it by its text colour."""
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#8a8f98"
SERIES = (BLUE, ORANGE, "#009e73", "#cc79a7", "#56b4e9", "#e69f00", GREY, "#8c5a2b")
"""Okabe and Ito's colours for colour-blind readers, without the ones that are invisible on white or black."""
MARKERS = "os^Dv<P>"
WIDTH, TALLEST, FEWEST_TESTS = 9.0, 150.0, 20


def family(method: str) -> tuple[str, int] | None:
    """Split a method name "NAME, 8" into ("NAME", 8); None if the name contains no draft length."""
    found = re.fullmatch(r"(.+),\s*(\d{1,4})", method, re.DOTALL)
    return (found[1], int(found[2])) if found else None


@dataclass(frozen=True, slots=True)
class Picture:
    """One rendered figure."""

    title: str
    caption: str
    svg: str
    """For inlining in a page: ids are unique across figures, and the text colour is `currentColor`."""


def pictures(table: Table) -> list[Picture]:
    """Render every figure with data in the rows. Raises ConfigError without matplotlib."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks
        return [Picture(title, caption, _svg(name, figure)) for name, title, figure, caption in drawings(table)]


def _svg(name: str, figure: Figure) -> str:
    """Render a figure: text stays text, ids that are referenced differ between figures but not between runs."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", facecolor="none", metadata=no_metadata)
    svg = re.sub(r'<g id="[^"]*"', "<g", out.getvalue())
    return svg[svg.index("<svg") :].replace(INK, "currentColor").strip()


def drawings(table: Table) -> Iterator[tuple[str, str, Figure, str]]:
    """Yield (name, title, figure, caption) of every figure with data in the rows. Raises ConfigError without matplotlib."""
    for name, (title, draw) in FIGURES.items():
        if (drawn := draw(table)) is not None:
            yield name, title, *drawn


def _speed_ups(table: Table) -> Drawing | None:
    known = [row for row in table if row.speed_up]
    if not known:
        return None
    order, labels = _ranked(known), _labels(table)
    figure, panels, note = _grid({row.group for row in known}, 0.25 * len(order) + 0.8, sharex=True)
    for axes, group in panels:
        for row in (row for row in known if row.group == group):
            median, low, high = row.speed_up or (0.0, 0.0, 0.0)
            at, (label, colour, hatch) = order.index(row.cell.method), _kind(row)
            axes.barh(at, median, 0.7, color=colour, edgecolor="white", linewidth=0, hatch=hatch, label=label)
            axes.errorbar(median, at, xerr=[[median - low], [high - median]], ecolor=INK, capsize=2.5, elinewidth=1)
            text: dict[str, Any] = {"textcoords": "offset points", "va": "center", "size": 8, "color": INK}
            axes.annotate(f"{median:.2f}x", (max(high, 1.0), at), (5, 0), **text)
        axes.axvline(1.0, color=INK, linestyle="--", linewidth=1)
        axes.set_xlim(0, 1.2 * max(row.speed_up[2] for row in known if row.speed_up))
        axes.set_yticks(range(len(order)), [labels[method] for method in order])
        axes.set_ylim(len(order) - 0.4, -0.6)
    _finish(figure, panels, "{}, batch {}, {}", "speed-up over plain decoding")
    return figure, f"Median over repeats; whiskers show minimum and maximum. Dashed: plain decoding.{note}"


def _draft_lengths(table: Table) -> Drawing | None:
    lengths: dict[Line, dict[int, Stats]] = {}
    for (group, method), stats in _pooled(table).items():
        if (found := family(method)) and stats.num_passes:
            lengths.setdefault((group, found[0]), {})[found[1]] = stats
    lengths = {key: of for key, of in lengths.items() if len(of) > 1}
    shown, left_out = _top(table, {name for _, name in lengths}, family)
    if not shown:
        return None
    figure, panels, note = _grid({group for group, _ in lengths}, 3.4)
    for axes, of, look in _lines(table, panels, shown, lengths):
        gammas = sorted(of)
        axes.plot(gammas, [of[gamma].block_efficiency or 0.0 for gamma in gammas], **look)
        if tested := sum(stats.num_tested for stats in of.values()):
            alpha, whole = sum(stats.num_accepted for stats in of.values()) / tested, range(gammas[0], gammas[-1] + 1)
            curve = [sum(alpha**k for k in range(gamma + 1)) for gamma in whole]
            axes.plot(whole, curve, "--", color=look["color"], alpha=0.7)
    _finish(figure, panels, "{}, {}", "draft length", "tokens per target pass")
    return figure, (
        "Solid: measured, pooled over batch sizes. Dashed: independent acceptance at the pooled rate a of the method, "
        f"(1 - a^(k+1)) / (1 - a).{left_out}{note}"
    )


def _positions(table: Table) -> Drawing | None:
    rates: dict[Line, list[tuple[int, float, float, float]]] = {}
    for key, stats in _pooled(table).items():
        often = [(k, n) for k, n in sorted(stats.tested_at.items()) if n >= FEWEST_TESTS]
        if often:
            rates[key] = [(k + 1, stats.accepted_at[k] / n, *wilson(stats.accepted_at[k], n)) for k, n in often]
    shown, left_out = _top(table, {method for _, method in rates})
    if not shown:
        return None
    figure, panels, note = _grid({group for group, method in rates if method in shown}, 3.4)
    for axes, points, look in _lines(table, panels, shown, rates):
        at, accepted, low, high = zip(*points, strict=True)
        axes.fill_between(at, low, high, color=look["color"], alpha=0.15, linewidth=0)
        axes.plot(at, accepted, **look)
        axes.set_ylim(0, 1.03)
    _finish(figure, panels, "{}, {}", "position in the draft", "accepted / tested")
    return figure, (
        f"Pooled over batch sizes; bands are 95% Wilson intervals. Positions tested fewer than {FEWEST_TESTS} times are "
        f"left out.{left_out}{note}"
    )


FIGURES: Mapping[str, tuple[str, Callable[[Table], Drawing | None]]] = {
    "speed-up": ("Speed-up by method", _speed_ups),
    "draft-length": ("Tokens per pass by draft length", _draft_lengths),
    "acceptance": ("Acceptance by position in the draft", _positions),
}
"""Name of a figure -> (title, function that draws it)."""


def _pooled(table: Table) -> dict[Line, Stats]:
    """Sum the counts of a method on a data set with one sampling over batch sizes."""
    out: dict[Line, Stats] = {}
    for row in table:
        if row.stats is not None:
            key = (row.cell.dataset, row.cell.sampling), row.cell.method
            out.setdefault(key, Stats()).merge(row.stats)
    return out


def _ranked(table: Table) -> list[str]:
    """Return the methods by decreasing mean speed-up."""
    gains: dict[str, list[float]] = {}
    for row in table:
        gains.setdefault(row.cell.method, []).append(row.speed_up[0] if row.speed_up else 0.0)
    return sorted(gains, key=lambda method: (-statistics.fmean(gains[method]), method))


def _top(table: Table, among: set[str], split: Callable[[str], Any] = lambda name: None) -> tuple[list[str], str]:
    """Return as many of the fastest names `among` as there are colours, and a note on the others. split: into families."""
    names = dict.fromkeys((split(method) or (method,))[0] for method in _ranked(table))
    order = [name for name in names if name in among]
    rest = len(order) - len(SERIES)
    return order[: len(SERIES)], f" {rest} slower {'method' if rest == 1 else 'methods'} left out." if rest > 0 else ""


def _labels(table: Table) -> dict[str, str]:
    """Return the label of each method: shortened, and marked if the method is lossy."""
    lossy = {row.cell.method for row in table if not row.exact}
    short = shortened([row.cell.method for row in table], 34)
    return {name: f"{_plain_text(text)}{' (lossy)' if name in lossy else ''}" for name, text in short.items()}


def _plain_text(text: str) -> str:
    """Return a label without mathtext; a leading "_" would hide it in a legend."""
    return f"{' ' if text.startswith('_') else ''}{text}".replace("$", r"\$")


def _lines(
    table: Table, panels: Sequence[tuple[Axes, Key]], names: Sequence[str], of: Mapping[tuple[Key, str], Value]
) -> Iterator[tuple[Axes, Value, dict[str, Any]]]:
    """Yield (panel, value, colour, marker and label) for each line with a value. of: (key of the panel, name) -> value."""
    labels = _labels(table)
    for axes, key in panels:
        for name, colour, marker in zip(names, SERIES, MARKERS, strict=False):
            if (value := of.get((key, name))) is not None:
                label = labels.get(name) or _plain_text(name)
                yield axes, value, {"color": colour, "marker": marker, "markersize": 5, "label": label}


def _kind(row: TableRow) -> tuple[str, str, str | None]:
    """Return (kind of the method, colour, hatch)."""
    if row.cell.method == PLAIN:
        return "plain decoding", INK, None
    if row.stats is None:
        return "another engine", GREY, None
    return ("exact", BLUE, None) if row.exact else ("lossy: the output may differ", ORANGE, "////")


def check_matplotlib() -> None:
    """Raise ConfigError without matplotlib, which draws the figures."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("of a report need matplotlib: pip install 'foresay[lab]'", param="figures") from None


def _grid(among: set[Any], height: float, sharex: bool = False) -> tuple[Figure, list[tuple[Axes, Any]], str]:
    """Return (figure, a panel per key, a note for the caption), with two panels per line; panels that do not fit are left out."""
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    keys, columns = sorted(among), min(2, len(among))
    shown = keys[: columns * max(1, int(TALLEST / height))]
    lines = -(-len(shown) // columns)
    figure = Figure(figsize=(WIDTH, height * lines + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False, sharex=sharex, sharey=True).ravel().tolist()
    for spare in axes[len(shown) :]:
        spare.remove()
    left = len(keys) - len(shown)
    return figure, list(zip(axes, shown, strict=False)), f" {left} more panels are left out." if left else ""


def _finish(figure: Figure, panels: Sequence[tuple[Axes, Any]], title: str, x: str, y: str = "") -> None:
    """Set titles, labels, grids and spines of all panels, and a legend of all labels above them.

    title: format of a panel's key. x: with a label of y, its values are integers. y: empty for bars of methods.
    """
    for axes, key in panels:
        text = title.format(*key)
        axes.set_title(_plain_text(shortened([text], 60)[text]), color=INK, size=9.5, weight="bold")
        axes.set_xlabel(x, color=INK, size=9)
        axes.set_ylabel(y, color=INK, size=9)
        axes.tick_params(colors=INK, labelsize=8.5, length=3, labelbottom=True)
        axes.grid(axis="both" if y else "x", color=INK, alpha=0.15, linewidth=0.7)
        if y:
            axes.locator_params(axis="x", integer=True)
        axes.set_axisbelow(True)
        axes.set_facecolor("none")
        for side, spine in axes.spines.items():
            spine.set(edgecolor=INK, visible=side in ("left", "bottom"))
    pairs = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes]
    handles: dict[str, Any] = {label: handle for some in pairs for handle, label in some}
    if handles:
        columns = max(1, min(4, int(72 * WIDTH / (45 + 5.4 * max(map(len, handles))))))
        look: dict[str, Any] = {"fontsize": 8.5, "frameon": False, "labelcolor": INK, "ncols": columns}
        figure.legend(handles.values(), handles, loc="outside upper left", **look)
