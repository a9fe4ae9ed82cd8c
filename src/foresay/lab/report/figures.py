"""Figures of a benchmark's numbers.

Owns the contents and the style of figures. Knows neither files nor pages. Imports matplotlib when a figure is drawn and changes
none of its global settings.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from foresay.engine import Stats
from foresay.errors import ConfigError
from foresay.generation.method import PLAIN
from foresay.lab.replay.theory import expected_tokens
from foresay.lab.report.table import TableRow, pareto_front, shortened, wilson

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Key = TypeVar("Key", bound=Hashable)
Point = tuple[float, float]
Drawing = tuple["Figure", str]
"""A figure and its caption."""

INK = "#16202a"
"""Colour of axes, labels and error bars; a page replaces it by its text colour."""
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#8a8f98"
SERIES = (BLUE, ORANGE, "#009e73", "#cc79a7", "#56b4e9", "#e69f00", GREY, "#8c5a2b")
"""Okabe and Ito's colours for colour-blind readers, without the ones that are invisible on white or black."""
MARKERS = "os^Dv<P>"
WIDTH, TALLEST, MOST, MOST_ERRORS, FEWEST_TESTS = 9.0, 150.0, 8, 40, 20


def family(method: str) -> tuple[str, int] | None:
    """Split a method name "NAME, 8" into ("NAME", 8); None if the name contains no draft length."""
    found = re.fullmatch(r"(.+),\s*(\d{1,4})", method, re.DOTALL)
    return (found[1], int(found[2])) if found else None


def drawings(table: Sequence[TableRow]) -> Iterator[tuple[str, str, Figure, str]]:
    """Yield (name, title, figure, caption) of every figure with data in the rows. Raises ConfigError without matplotlib."""
    for name, (title, draw) in FIGURES.items():
        if (drawn := draw(table)) is not None:
            yield name, title, *drawn


def _speed_ups(table: Sequence[TableRow]) -> Drawing | None:
    known = [row for row in table if row.speed_up]
    if not known:
        return None
    names, order, groups = _names(known), _ranked(known), sorted({row.group for row in known})
    figure, panels, note = _grid(groups, 0.25 * len(order) + 0.8, sharex=True, sharey=True)
    for axes, group in panels:
        for row in (row for row in known if row.group == group):
            median, low, high = row.speed_up or (0.0, 0.0, 0.0)
            at, (_, colour, hatch) = order.index(row.cell.method), _kind(row)
            axes.barh(at, median, 0.7, color=colour, edgecolor="white", linewidth=0, hatch=hatch)
            whisker = [[median - low], [high - median]]
            axes.errorbar(median, at, xerr=whisker, ecolor=INK, capsize=2.5, elinewidth=1)
            _note(axes, f"{median:.2f}x", (max(high, 1.0), at), (5, 0), ha="left")
        axes.axvline(1.0, color=INK, linestyle="--", linewidth=1)
        _style(axes, "{}, batch {}, {}".format(*group), "speed-up over plain decoding")
        axes.set_yticks(range(len(order)), [names[method] for method in order])
        axes.set_ylim(len(order) - 0.4, -0.6)
        axes.set_xlim(0, 1.2 * max(row.speed_up[2] for row in known if row.speed_up))
    kinds = dict.fromkeys(map(_kind, known))
    _legend(figure, [(word, {"fc": colour, "ec": "white", "hatch": hatch}) for word, colour, hatch in kinds])
    return figure, f"Median over repeats; whiskers show minimum and maximum. Dashed: plain decoding.{note}"


def _draft_lengths(table: Sequence[TableRow]) -> Drawing | None:
    pooled: dict[tuple[str, str], dict[str, dict[int, Stats]]] = {}
    for (dataset, sampling, method), stats in _pooled(table, lambda r: (*_setting(r), r.cell.method)).items():
        if (found := family(method)) and stats.num_passes:
            pooled.setdefault((dataset, sampling), {}).setdefault(found[0], {})[found[1]] = stats
    pooled = {key: {n: of for n, of in families.items() if len(of) > 1} for key, families in pooled.items()}
    shown, left_out = _top(table, {name for families in pooled.values() for name in families}, _family)
    if not shown:
        return None
    figure, panels, note = _grid(sorted(key for key, families in pooled.items() if families), 3.4)
    for axes, key in panels:
        for index, name in enumerate(shown):
            if not (lengths := pooled[key].get(name)):
                continue
            gammas = sorted(lengths)
            measured = [lengths[gamma].block_efficiency for gamma in gammas]
            axes.plot(gammas, measured, color=SERIES[index], marker=MARKERS[index], markersize=5)  # type: ignore[arg-type]
            tested = sum(stats.num_tested for stats in lengths.values())
            if tested:
                alpha = sum(stats.num_accepted for stats in lengths.values()) / tested
                whole = range(gammas[0], gammas[-1] + 1)
                curve = [expected_tokens(alpha, gamma) for gamma in whole]
                axes.plot(whole, curve, "--", color=SERIES[index], alpha=0.7)
        _style(axes, ", ".join(key), "draft length", "tokens per target pass", "both")
        axes.locator_params(axis="x", integer=True)
    _legend(figure, _lines(_short(shown).values()))
    return figure, (
        "Solid: measured, pooled over batch sizes. Dashed: independent acceptance at the pooled rate a of the method, "
        f"(1 - a^(k+1)) / (1 - a).{_left_out(left_out, 'family', 'families')}{note}"
    )


def _positions(table: Sequence[TableRow]) -> Drawing | None:
    counts = _pooled(table, lambda row: (*_setting(row), row.cell.method))
    pooled = {
        key: positions
        for key, stats in counts.items()
        if (positions := [k for k in sorted(stats.tested_at) if stats.tested_at[k] >= FEWEST_TESTS])
    }
    shown, left_out = _top(table, {method for _, _, method in pooled})
    if not shown:
        return None
    figure, panels, note = _grid(sorted({key[:2] for key in pooled if key[2] in shown}), 3.4, sharey=True)
    for axes, key in panels:
        for index, method in enumerate(shown):
            if (*key, method) not in pooled:
                continue
            stats, positions = counts[*key, method], pooled[*key, method]
            bounds = [wilson(stats.accepted_at[k], stats.tested_at[k]) for k in positions]
            shares = [stats.accepted_at[k] / stats.tested_at[k] for k in positions]
            at, low, high = [k + 1 for k in positions], [bound[0] for bound in bounds], [bound[1] for bound in bounds]
            axes.fill_between(at, low, high, color=SERIES[index], alpha=0.15, linewidth=0)
            axes.plot(at, shares, color=SERIES[index], marker=MARKERS[index], markersize=4)
        axes.set_ylim(0, 1.03)
        _style(axes, ", ".join(key), "position in the draft", "accepted / tested", "both")
        axes.locator_params(axis="x", integer=True)
    names = _names(table)
    _legend(figure, _lines(names[method] for method in shown))
    return figure, (
        f"Pooled over batch sizes; bands are 95% Wilson intervals. Positions tested fewer than {FEWEST_TESTS} times are "
        f"left out.{_left_out(left_out, 'method', 'methods')}{note}"
    )


def _accepted_lengths(table: Sequence[TableRow]) -> Drawing | None:
    pooled = {m: s for m, s in _pooled(table, lambda row: row.cell.method).items() if s.num_drafted and s.num_passes}
    shown, left_out = _top(table, set(pooled))
    if not shown:
        return None
    names, longest = _names(table), max(max(pooled[method].accepted_lengths, default=0) for method in shown)
    figure, panels, _ = _grid(shown, 2.0, sharex=True, sharey=True)
    for axes, method in panels:
        stats = pooled[method]
        shares = [stats.accepted_lengths[k] / stats.num_passes for k in range(longest + 1)]
        axes.bar(range(longest + 1), shares, 0.85, color=BLUE)
        _style(axes, names[method], "draft tokens accepted in a pass", "share of passes", "y")
        axes.locator_params(axis="x", integer=True)
    return figure, f"Pooled over data sets, batch sizes and sampling.{_left_out(left_out, 'method', 'methods')}"


def _rates(table: Sequence[TableRow]) -> Drawing | None:
    known = [row for row in table if row.discard_rate is not None]
    if not any(row.discard_rate for row in known):
        return None
    order, names = _ranked(known), _names(known)
    figure, panels, note = _grid(sorted({row.group for row in known}), 3.6, head=0.1 * len(order))
    key = [(f"{i}  {names[method]}", {"color": "none"}) for i, method in enumerate(order, 1)]
    _legend(figure, key, handlelength=0.0, handletextpad=0.0)
    spots: list[tuple[Axes, Sequence[Point], Sequence[str], Sequence[Point]]] = []
    for axes, group in panels:
        of = [row for row in known if row.group == group]
        points = [(row.discard_rate or 0.0, row.verification_rate or 0.0) for row in of]
        front = pareto_front(points)
        axes.step(*zip(*front, strict=True), where="post", color=ORANGE, linewidth=1.5)
        colours = [ORANGE if point in front else BLUE for point in points]
        axes.scatter([x for x, _ in points], [y for _, y in points], s=26, zorder=3, color=colours)
        axes.margins(0.12)
        _style(axes, "{}, batch {}, {}".format(*group), "discarded / tokens", "passes / tokens", "both")
        spots.append((axes, points, [str(order.index(row.cell.method) + 1) for row in of], front))
    figure.draw_without_rendering()
    for spot in spots:
        _number(*spot)
    return (
        figure,
        f"Smaller is better. The line is the Pareto front: no other method is better on both axes.{note}",
    )


def _number(axes: Axes, points: Sequence[Point], labels: Sequence[str], front: Sequence[Point]) -> None:
    """Label each point at the nearest position where the label overlaps no point, no other label and not the front."""
    corners = [corner for (x, y), (a, b) in pairwise(front) for corner in ((x, y), (a, y), (a, b))]
    spots, bends = (axes.transData.transform(of) * 72 / axes.figure.dpi for of in (points, corners or points))
    taken = [(x, y, 4.0, 4.0) for x, y in spots]
    taken += [
        (x, y, 1.5, 1.5) for a, b in pairwise(bends) for x, y in (a + (b - a) * i / 40 for i in range(41)) if corners
    ]
    tries = [(r, turn * math.pi / 8) for r in (9, 14, 20, 27, 35, 44, 54) for turn in range(16)]
    for point, (x, y), label in zip(points, spots, labels, strict=True):
        wide, high = 3.0 * len(label), 5.0
        for radius, angle in tries:
            dx, dy = radius * math.cos(angle), radius * math.sin(angle)
            if all(abs(x + dx - a) > wide + w or abs(y + dy - b) > high + h for a, b, w, h in taken):
                break
        taken.append((x + dx, y + dy, wide, high))
        leader = {"arrowstyle": "-", "color": INK, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 0, "shrinkB": 2}
        _note(axes, label, point, (dx, dy), ha="center", arrowprops=leader if radius > 14 else None)


def _times(table: Sequence[TableRow]) -> Drawing | None:
    keyed = _pooled(table, lambda row: (row.cell.batch_size, row.cell.sampling, row.cell.method))
    pooled = {key: stats for key, stats in keyed.items() if stats.num_tokens and stats.total_s > 0}
    if not pooled:
        return None
    known = [row for row in table if (row.cell.batch_size, row.cell.sampling, row.cell.method) in pooled]
    names, order = _names(known), _ranked(known)
    figure, panels, note = _grid(sorted({key[:2] for key in pooled}), 0.25 * len(order) + 0.8, sharey=True)
    parts = {"drafting": ORANGE, "target passes": BLUE, "the rest": GREY}
    for axes, (batch, sampling) in panels:
        for at, method in enumerate(order):
            if (stats := pooled.get((batch, sampling, method))) is None:
                continue
            rest, left = max(0.0, stats.total_s - stats.draft_s - stats.target_s), 0.0
            for seconds, colour in zip((stats.draft_s, stats.target_s, rest), parts.values(), strict=True):
                axes.barh(at, 1000 * seconds / stats.num_tokens, 0.7, left, color=colour)
                left += 1000 * seconds / stats.num_tokens
        _style(axes, f"batch {batch}, {sampling}", "ms per token")
        axes.set_yticks(range(len(order)), [names[method] for method in order])
        axes.set_ylim(len(order) - 0.4, -0.6)
    _legend(figure, [(label, {"color": colour}) for label, colour in parts.items()])
    return figure, f"Pooled over data sets. The rest: verification, sampling, bookkeeping.{note}"


def _predictions(table: Sequence[TableRow]) -> Drawing | None:
    known = [row for row in table if row.expected and row.tokens_per_s[0]]
    if not known:
        return None
    errors = {row.cell: (row.expected or 0.0) / row.tokens_per_s[0] - 1 for row in known}
    worst = sorted(known, key=lambda row: -abs(errors[row.cell]))[:MOST_ERRORS]
    shown = sorted(worst, key=lambda row: errors[row.cell])
    low = 0.2 * len(shown) + 0.8
    figure = _figure(4.4 + low)
    upper, lower = (half.subplots() for half in figure.subfigures(2, 1, height_ratios=[4.4, low]))
    limit = 1.08 * max(max(row.expected or 0.0, row.tokens_per_s[0]) for row in known)
    upper.fill_between([0, limit], [0, 0.9 * limit], [0, 1.1 * limit], color=INK, alpha=0.1, linewidth=0)
    upper.plot([0, limit], [0, limit], "--", color=INK, linewidth=1)
    upper.scatter([row.expected or 0.0 for row in known], [row.tokens_per_s[0] for row in known], s=22, color=BLUE)
    upper.set(xlim=(0, limit), ylim=(0, limit))
    _style(upper, "", "predicted tokens/s", "measured tokens/s", "both")
    names, groups = _names(known, 26), _short([_group(row) for row in known], 26)
    for at, row in enumerate(shown):
        error = 100 * errors[row.cell]
        lower.barh(at, error, 0.7, color=BLUE if abs(error) <= 10 else ORANGE)
    lower.set_yticks(range(len(shown)), [f"{names[row.cell.method]}, {groups[_group(row)]}" for row in shown])
    lower.set_ylim(-0.6, len(shown) - 0.4)
    lower.axvline(0, color=INK, linewidth=1)
    _style(lower, "", "predicted / measured - 1, %")
    left = (
        f"the largest errors; {len(known) - len(shown)} smaller ones are left out." if len(known) > len(shown) else ""
    )
    return figure, f"Dashed: prediction equals measurement; the band is ±10%. Below: {left or 'the error of each row.'}"


FIGURES: Mapping[str, tuple[str, Callable[[Sequence[TableRow]], Drawing | None]]] = {
    "speed-up": ("Speed-up by method", _speed_ups),
    "draft-length": ("Tokens per pass by draft length", _draft_lengths),
    "acceptance": ("Acceptance by position in the draft", _positions),
    "accepted-lengths": ("Accepted draft tokens per pass", _accepted_lengths),
    "pareto": ("Discarded draft tokens and target passes", _rates),
    "time": ("Time per token by part", _times),
    "predictions": ("Predicted and measured throughput", _predictions),
}
"""File name of a figure -> (title, function that draws it)."""


def _pooled(table: Iterable[TableRow], key: Callable[[TableRow], Key]) -> dict[Key, Stats]:
    """Sum the counts of rows with the same key."""
    out: dict[Key, Stats] = {}
    for row in table:
        if row.stats is not None:
            out.setdefault(key(row), Stats()).merge(row.stats)
    return out


def _setting(row: TableRow) -> tuple[str, str]:
    return row.cell.dataset, row.cell.sampling


def _group(row: TableRow) -> str:
    return "{}, batch {}, {}".format(*row.group)


def _family(method: str) -> str:
    return found[0] if (found := family(method)) else method


def _ranked(table: Iterable[TableRow]) -> list[str]:
    """Return the methods by decreasing mean speed-up."""
    gains: dict[str, list[float]] = {}
    for row in table:
        gains.setdefault(row.cell.method, []).append(row.speed_up[0] if row.speed_up else 0.0)
    return sorted(gains, key=lambda method: (-statistics.fmean(gains[method]), method))


def _top(table: Iterable[TableRow], among: Collection[str], name: Callable[[str], str] = str) -> tuple[list[str], int]:
    """Return the fastest MOST of the names `among`, and the number of the others."""
    order = [one for one in dict.fromkeys(map(name, _ranked(table))) if one in among]
    return order[:MOST], len(order[MOST:])


def _left_out(count: int, one: str, more: str) -> str:
    return f" {count} slower {one if count == 1 else more} left out." if count else ""


def _short(names: Iterable[str], size: int = 34) -> dict[str, str]:
    """Return the label of each name: shortened, without mathtext."""
    return {name: text.replace("$", r"\$") for name, text in shortened(names, size).items()}


def _names(table: Sequence[TableRow], size: int = 34) -> dict[str, str]:
    """Return the label of each method: shortened, and marked if the method is lossy."""
    short = _short({row.cell.method: None for row in table}, size)
    lossy = {row.cell.method for row in table if not row.exact}
    return {name: f"{text} (lossy)" if name in lossy else text for name, text in short.items()}


def _kind(row: TableRow) -> tuple[str, str, str | None]:
    """Return (kind of the method, colour, hatch)."""
    if row.cell.method == PLAIN:
        return "plain decoding", INK, None
    if row.stats is None:
        return "another engine", GREY, None
    return ("exact", BLUE, None) if row.exact else ("lossy: the output may differ", ORANGE, "////")


def _figure(height: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a report's figures need matplotlib: pip install 'foresay[lab]'") from None
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _grid(
    keys: Sequence[Key], height: float, head: float = 0.6, sharex: bool = False, sharey: bool = False
) -> tuple[Figure, list[tuple[Axes, Key]], str]:
    """Return (figure, a panel per key, a note for the caption), with two panels per line; panels that do not fit are left out."""
    columns = min(2, len(keys))
    capacity = columns * max(1, int(TALLEST / height))
    shown, left = keys[:capacity], len(keys[capacity:])
    lines = -(-len(shown) // columns)
    figure = _figure(height * lines + max(head, 0.6))
    grid = figure.subplots(lines, columns, squeeze=False, sharex=sharex, sharey=sharey).ravel().tolist()
    for spare in grid[len(shown) :]:
        spare.remove()
    for axes in grid[: len(shown)]:
        axes.tick_params(labelbottom=True)
    return figure, list(zip(grid, shown, strict=False)), f" {left} more panels are left out." if left else ""


def _style(axes: Axes, title: str, x: str, y: str = "", grid: Literal["x", "y", "both"] = "x") -> None:
    """Set title, labels, grid and spines, equally for every panel."""
    axes.set_title(_short([title], 60)[title] if title else "", color=INK, size=9.5, weight="bold")
    axes.set_xlabel(x, color=INK, size=9)
    axes.set_ylabel(y, color=INK, size=9)
    axes.tick_params(colors=INK, labelsize=8.5, length=3)
    axes.grid(axis=grid, color=INK, alpha=0.15, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    for side, spine in axes.spines.items():
        spine.set(edgecolor=INK, visible=side in ("left", "bottom"))


def _legend(figure: Figure, entries: Iterable[tuple[str, Mapping[str, Any]]], **more: Any) -> None:
    """Add a legend above all panels. entries: (label, properties of its patch or, with a marker, of its line)."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    looks = dict(entries)
    handles = [Line2D([], [], **look) if "marker" in look else Patch(**look) for look in looks.values()]
    labels = [f" {label}" if label.startswith("_") else label for label in looks]  # a leading "_" would hide the label
    columns = max(1, min(4, int(72 * WIDTH / (45 + 5.4 * max(map(len, labels))))))
    common: dict[str, Any] = {"fontsize": 8.5, "frameon": False, "labelcolor": INK, "ncols": columns}
    figure.legend(handles, labels, loc="outside upper left", **common, **more)


def _lines(labels: Iterable[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the legend entries of lines, one per label."""
    return [(label, {"color": SERIES[i], "marker": MARKERS[i], "markersize": 5}) for i, label in enumerate(labels)]


def _note(axes: Axes, text: str, point: tuple[float, float], offset: tuple[float, float], **more: Any) -> None:
    """Add a small text next to a point."""
    axes.annotate(text, point, offset, textcoords="offset points", va="center", size=8, color=INK, **more)
