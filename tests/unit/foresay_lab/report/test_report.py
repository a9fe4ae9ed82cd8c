"""Reports: numbers against hand computation, honest words, sound files."""

import json
import re
import sys
from dataclasses import asdict
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from click.testing import CliRunner

from foresay.cli.app import app
from foresay.generation.method import PLAIN
from foresay.records.results import Cell, Run, results_writer
from foresay_lab.report import figures, report
from foresay_lab.report.card import escaped
from foresay_lab.report.report import Source, html, read_report
from foresay_lab.report.table import COLUMNS, shortened, wilson
from helpers.refusals import refused

CAME = {"machine": {"processor": "abacus"}, "commit": "cafe", "time": "2026-01-01T00:00:00+00:00"}


def counts(passes, tokens, drafted, tested, accepted, *, lengths=None, at=None, **seconds):
    tested_at, accepted_at = at or ({"0": tested}, {"0": accepted})
    out = {"num_passes": passes, "num_tokens": tokens, "num_drafted": drafted, "num_tested": tested}
    out |= {"num_accepted": accepted, "origins": {"draft": accepted, "bonus": tokens - accepted}}
    out |= {"accepted_lengths": lengths or {"0": passes}, "tested_at": tested_at, "accepted_at": accepted_at}
    return out | {"draft_s": 0.0, "target_s": 0.0, "total_s": 0.0} | seconds


def run(method, seconds, *, repeat=0, dataset="chat", batch=1, sampling="greedy", tokens=100, stats=(), **more):
    return Run(Cell(method, dataset, batch, sampling), repeat, seconds, tokens, stats=dict(stats), **more).as_line()


def failed(method, error, repeat=0):
    return {"kind": "failed", "cell": asdict(Cell(method, "chat", 1)), "repeat": repeat, "error": error}


def write(path, *lines, settings=None, came=CAME):
    with results_writer(path, settings or {"model": "m"}, came) as file:
        for line in lines:
            file.append(line)
    return path


def write_report(results, output, **options):
    return report.write(read_report(results, **options), output)


def plain(seconds=10.0, **more):
    return run(PLAIN, seconds, stats=counts(100, 100, 0, 0, 0, target_s=9.0, total_s=seconds), **more)


def suffix(seconds=5.0, stats=None, **more):
    stats = stats or counts(40, 100, 120, 80, 60, draft_s=0.5, target_s=4.0, total_s=5.0)
    return run("suffix, 4", seconds, stats=stats, **{"plain_seconds": 10.0, "identical": True} | more)


def table(folder, *lines):
    return read_report([write(folder / "r", *lines)]).table


def columns(row):
    return {name: say(row) for name, say in COLUMNS.items()}


def test_the_table_against_hand_computation(tmp_path):
    second = counts(60, 100, 80, 70, 40)
    lines = [suffix(5.0), suffix(4.0, second, repeat=1), suffix(8.0, second, repeat=2)]
    (row, base) = table(tmp_path, *lines, plain(10.0), plain(12.5, repeat=1))
    assert columns(row) == {
        "method": "suffix, 4",
        "data set": "chat",
        "batch": "1",
        "sampling": "greedy",
        "tokens/s": "20.0",  # of 20, 25 and 12.5
        "speed-up": "~2.00x (1.25 to 2.50)",  # more than tokens per pass allow
        "tokens per pass": "1.88",  # 300 / 160
        "acceptance rate": "64%",  # 140 / 220; the mean of the rates would be 63%
        "draft utilization": "50%",  # 140 / 280
        "discard rate": "0.47",  # 140 / 300
        "verification rate": "0.53",  # 160 / 300
        "drafting": "10%",  # 0.5 s of 5 s; the others have no times
        "identical": "yes",
        "exact": "yes",
    }
    assert columns(base)["speed-up"] == "1.00x (0.89 to 1.11)"  # 10 and 8 tokens/s over their median, 9
    assert columns(base)["acceptance rate"] == columns(base)["identical"] == "-"


def test_without_a_plain_run_next_to_it_a_method_is_compared_with_the_plain_cell_of_its_setting(tmp_path):
    """Rows are sorted by speed-up; those without come last."""
    lines = [plain(10.0), run("vllm", 5.0), run("vllm", 5.0, batch=8), plain(5.0, dataset="code")]
    lines += [run("vllm", 2.0, dataset="code", sampling="t=1")]
    rows = {row.group: row for row in table(tmp_path, *lines) if row.cell.method == "vllm"}
    assert rows["chat", 1, "greedy"].speed_up == (2, 2, 2)
    assert rows["chat", 8, "greedy"].speed_up is rows["code", 1, "t=1"].speed_up is None
    assert columns(rows["chat", 8, "greedy"])["speed-up"] == "-"
    lines = [run("b", 5.0, plain_seconds=6.0), run("none", 1.0), run("a", 5.0, plain_seconds=20.0), run("quick", 0.5)]
    (tmp_path / "r").unlink()
    assert [row.cell.method for row in table(tmp_path, *lines)] == ["a", "b", "quick", "none"]


def test_the_summary_names_the_fastest_exact_method_and_its_gain(tmp_path):
    lossy = run("typical", 1.0, plain_seconds=10.0, exact=False, stats=counts(9, 100, 99, 95, 91))
    lines = [plain(), suffix(5.0), suffix(4.9, repeat=1), lossy, run("vllm", 2.5)]
    report = read_report([write(tmp_path / "r", *lines)])
    assert report.summary == [
        "On chat (batch 1, greedy) suffix, 4 was the fastest exact method: 2.02x (2.00 to 2.04) the speed of plain decoding, "
        "20.2 tokens/s instead of 10.0. vllm, another engine, had 4.00x."
    ]
    assert report.warnings == ["Lossy, so the output may differ from the target's: typical."]


def test_the_summary_is_honest_where_no_draft_pays(tmp_path):
    for name, methods, plains in (
        ("its own spread", [9.9, 9.3, 8.9], [10.0, 10.0]),
        ("slower", [11.0, 11.0], [10.0, 10.0]),
        ("the spread of plain", [9.8, 9.8], [10.0, 10.9]),
    ):
        lines = [suffix(seconds, repeat=i) for i, seconds in enumerate(methods)]
        lines += [plain(seconds, repeat=i) for i, seconds in enumerate(plains)]
        lines = [line | {"plain_seconds": None} for line in lines]
        (sentence,) = read_report([write(tmp_path / name, *lines)]).summary
        assert "no exact method gained more" in sentence and "suffix, 4" in sentence
    report = read_report([write(tmp_path / "r", suffix(plain_seconds=None))])
    assert report.summary == ["On chat (batch 1, greedy) no exact method was compared with plain decoding."]


def test_warnings(tmp_path):
    """Where plain decoding itself spreads, and where exact outputs differ."""
    for last, warned in ((10.9, False), (11.5, True)):
        lines = [plain(10.0), plain(10.5, repeat=1), plain(last, repeat=2)]
        warnings = read_report([write(tmp_path / str(last), *lines)]).warnings
        assert bool(warnings) is warned
        assert all("Plain decoding itself varies" in line and "chat (batch 1, greedy)" in line for line in warnings)
    report = read_report([write(tmp_path / "r", suffix(), suffix(identical=False, repeat=1))])
    assert report.warnings == [
        "Outputs differ from plain decoding, although the method is exact: suffix, 4 on chat, batch 1, greedy."
    ]
    assert columns(report.table[0])["identical"] == "no"


def test_wilson_on_known_values(monkeypatch):
    low, high = wilson(8, 10)  # as scipy.stats.binomtest(8, 10).proportion_ci(method="wilson") has it
    assert (low, high) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert wilson(0, 10)[0] == 0 and wilson(10, 10)[1] == pytest.approx(1)
    with refused("hits", 3):
        wilson(3, 2)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with refused("intervals"):
        wilson(1, 2)


def test_the_draft_length_in_a_name():
    for method, found in (
        ("suffix, 8", ("suffix", 8)),
        ("cascade(a, b; k=[[4, 8]]), 16", ("cascade(a, b; k=[[4, 8]])", 16)),
        ("a, 3, 4", ("a, 3", 4)),
        ("cascade(k=[[4, 8]])", None),
        ("suffix", None),
        ("suffix, 8x", None),
        (", 8", None),
    ):
        assert figures.family(method) == found


def drawn(folder, *lines):
    return {name: figure for name, _, figure, _ in figures.drawings(table(folder, *lines))}


def test_without_lengths_and_counts_their_figures_are_left_out(tmp_path):
    for lines, names in (
        ([run("x", 1.0)], []),
        ([run("x", 1.0, plain_seconds=2.0)], ["speed-up"]),
        ([plain(), suffix()], ["speed-up", "acceptance"]),
    ):
        (tmp_path / "r").unlink(missing_ok=True)
        assert list(drawn(tmp_path, *lines)) == names


def test_tokens_per_pass_against_length_with_the_closed_form(tmp_path):
    lines = [run(f"max_gram, {n}", 5.0, stats=counts(50, tokens, 50 * n, 60, 30)) for n, tokens in ((2, 75), (4, 90))]
    (axes,) = drawn(tmp_path, *lines, suffix())["draft-length"].axes
    measured, closed = axes.lines
    assert measured.get_xydata().tolist() == [[2, 1.5], [4, 1.8]]
    assert closed.get_xydata().tolist() == [[2, 1.75], [3, 1.875], [4, 1.9375]]  # alpha = 60 / 120


def test_acceptance_by_position_leaves_out_what_was_hardly_tested(tmp_path):
    at = ({"0": 100, "1": 40, "2": 19}, {"0": 80, "1": 10, "2": 19})
    (axes,) = drawn(tmp_path, suffix(stats=counts(100, 200, 200, 159, 109, at=at)), plain())["acceptance"].axes
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[1, 0.8], [2, 0.25]]]
    band = axes.collections[0].get_paths()[0].get_extents()
    assert band.y0 == pytest.approx(wilson(10, 40)[0]) and band.y1 == pytest.approx(wilson(80, 100)[1])


def test_at_most_eight_methods_and_how_many_are_left_out(tmp_path):
    lines = [run(f"m{i:02}", 5.0, plain_seconds=20.0 - i, stats=counts(50, 100, 90, 60, 50)) for i in range(11)]
    found = {name: (figure, caption) for name, _, figure, caption in figures.drawings(table(tmp_path, *lines))}
    figure, caption = found["acceptance"]
    assert "3 slower methods left out." in caption
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"m{i:02}" for i in range(8)]


@pytest.mark.parametrize("count", [1, 30])
def test_labels_do_not_overlap(tmp_path, count):
    lines = []
    for i in range(count):
        stats = counts(50 - i, 100, 60 + 3 * i, 55, 50, draft_s=0.1, target_s=1.0, total_s=1.3)
        name = f"cascade(model=some-long-name-{i}, max_gram; k=[[{i}, 8], [0, 8]])"
        lines += [run(name, 5.0 + i / 9, plain_seconds=20.0, dataset=one, stats=stats) for one in ("chat", "code")]
    pictures = drawn(tmp_path, *lines)
    bars, lines = pictures["speed-up"], pictures["acceptance"]
    bars.draw_without_rendering()
    shown = [text for text in bars.axes[0].get_yticklabels() if text.get_text() and text.get_visible()]
    labels = [text.get_window_extent(bars.canvas.get_renderer()) for text in shown]
    assert len(labels) == count and all(label.x0 >= 0 for label in labels)
    assert not any(a.overlaps(b) for a, b in pairwise(labels))
    lines.draw_without_rendering()
    (legend,) = lines.legends
    frame = legend.get_window_extent(lines.canvas.get_renderer())
    assert frame.x1 <= lines.bbox.x1 and frame.height < 0.5 * lines.bbox.height
    assert len(legend.get_texts()) == min(count, 8)
    assert all(axes.get_window_extent().height > 150 for axes in lines.axes)


def test_long_names_stay_short_and_apart():
    names = [f"cascade(model=some-long-name-{i}, max_gram; k=[[4, 8], [0, 8]])" for i in range(30)]
    short = shortened([*names, "suffix", "a  b\n c", "", "x" * 90], 34)
    assert len(set(short.values())) == 34 and max(map(len, short.values())) <= 34 + 5
    assert (short["suffix"], short["a  b\n c"], short[""]) == ("suffix", "a b c", "?")
    assert short["x" * 90] == "x" * 17 + "…" + "x" * 16


class Page(HTMLParser):
    """Every tag with its attributes, and whether what was opened was closed."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


NASTY = "<script>alert('1')</script> & $x$ _--!> | 模型"


def test_the_page(tmp_path):
    """It parses, refers to nothing outside, escapes everything, and reports who wrote each piece and where it came from."""
    cell = asdict(Cell(NASTY, "chat", 1))
    stats = counts(40, 100, 120, 80, 60, draft_s=0.5, target_s=4.0, total_s=5.0)
    lines = [plain(), suffix(), run("suffix, 8", 4.0, stats=stats, exact=False, identical=False)]
    lines += [run(NASTY, 6.0, stats=stats, plain_seconds=10.0), run("_hidden", 7.0, stats=stats)]
    lines += [failed("max_gram", f"OutOfMemory: {NASTY}")]
    lines += [{"kind": "prediction", "cell": cell, "tokens_per_s": 15.0, "tokens_per_pass": 2.0}]
    pieces = [["<b>a</b> ", "draft"], ["b", "residual"], [" c", "bonus"], ["?", NASTY]]
    lines += [{"kind": "trace", "cell": cell, "id": NASTY, "pieces": pieces}]
    source = write(tmp_path / "results.jsonl", *lines, settings={"model": NASTY})
    text = write_report([source], tmp_path / "out" / "report", title=f"T {NASTY}").read_text()
    page = Page(text)
    assert not {"script", "b", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        for name in {"src", "href", "xlink:href"} & set(attributes):
            assert attributes[name].startswith("#")
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"@import|url\((?!#)", text)
    assert NASTY in page.texts
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:href="|url\()#([^")]+)', text)
    assert used and set(used) <= set(ids)
    # words in figures are text, in the colour of the page
    assert "speed-up over plain decoding" in page.texts
    assert figures.INK not in text[text.index("<svg") :] and "fill: currentColor" in text
    titled = {attributes["class"]: attributes["title"] for _, attributes in page.tags if "title" in attributes}
    assert titled["draft"] == "drafted and accepted"
    assert titled["residual"] == "from the target, in place of a rejected draft token"
    assert titled["bonus"] == "from the target, after a fully accepted draft or without a draft"
    assert titled[""] == f"by {NASTY}"
    words = "".join(page.texts)
    assert '"processor": "abacus"' in words and "max_gram on chat, batch 1, greedy, repeat 0: OutOfMemory" in words


def test_the_same_results_give_the_same_bytes(tmp_path):
    source = write(tmp_path / "r", plain(), suffix())
    first, second = (write_report([source], tmp_path / name) for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_files_are_merged_and_a_cell_of_both_is_pooled(tmp_path):
    """Other settings and machines of other cells are reported; those of the same cell, and a file given twice, refused."""
    a, other = write(tmp_path / "a", plain(), suffix(5.0)), {"model": "n"}
    report = read_report([a, write(tmp_path / "b", suffix(4.0), run("vllm", 5.0))])
    rows = {row.cell.method: row for row in report.table}
    assert rows["suffix, 4"].speed_up == (2.25, 2.0, 2.5) and rows["suffix, 4"].stats.num_tokens == 200
    assert rows["vllm"].speed_up == (2, 2, 2) and not report.warnings
    slate = {"machine": {"processor": "slate"}}
    found = read_report([a, write(tmp_path / "c", run("x", 1.0), settings=other, came=slate)]).warnings
    assert "settings (model='m' and 'n')" in found[0] and "machines (processor='abacus' and 'slate')" in found[1]
    for one in (write(tmp_path / "d", suffix(), settings=other), tmp_path / "." / "a"):
        with refused("path"):
            read_report([a, one])


def test_files_without_runs_are_refused(tmp_path):
    """A last line that is cut short is left out, and so is a failure that was made good."""
    (tmp_path / "empty").touch()
    failures = write(tmp_path / "failed", failed("a", "boom"), failed("b", "bang"))
    for file in (tmp_path / "empty", write(tmp_path / "header"), failures):
        with refused("path"):
            read_report([file])
    with refused("results", ()):
        read_report([])
    lines = [failed("suffix, 4", "busy"), suffix(), failed("suffix, 4", "busy again", repeat=1)]
    path = write(tmp_path / "r", *lines)
    path.write_text(path.read_text() + json.dumps(plain())[:40])
    report = read_report([path])
    assert len(report.table) == 1 and [one.error for one in report.failures] == ["busy again"]


def test_numbers_that_are_none_are_refused(tmp_path):
    cell = {"method": "x", "dataset": "chat", "batch_size": 1}
    for change, param, value in (
        ({"seconds": 0.0}, "run.seconds", 0.0),
        ({"plain_seconds": -1}, "run.plain_seconds", -1),
        ({"tokens": 1.5}, "run.tokens", 1.5),
        ({"exact": "yes"}, "run.exact", "yes"),
        ({"stats": {"num_tokens": 1}}, "run.stats.num_passes", {"num_tokens": 1}),
        ({"cell": cell | {"method": 4}}, "run.cell.method", 4),
        ({"cell": cell | {"batch_size": "1"}}, "run.cell.batch_size", "1"),
    ):
        path = write(tmp_path / param, suffix() | change)
        with refused(param, value, at=f"{path}, line 2"):
            read_report([path])


def test_traces_of_many_cells_come_before_many_of_one(tmp_path):
    def trace(method, i):
        return {"kind": "trace", "cell": asdict(Cell(method, "chat", 1)), "id": f"p{i}", "pieces": [["x", "draft"]]}

    lines = [trace(method, i) for method in ("a", "b") for i in range(10)]
    text = html(read_report([write(tmp_path / "r", suffix(), *lines)]), [])
    assert re.findall(r"<h3>(p\d): (\w)", text)[:3] == [("p0", "a"), ("p0", "b"), ("p1", "a")]
    assert "The results files contain 8 more outputs." in text


def test_text_and_sources_as_they_are_shown():
    assert escaped("a_b *c* `d` [e](f) _g_ <h> # i | j") == r"a_b \*c\* \`d\` \[e\](f) \_g\_ &lt;h&gt; # i \| j"
    settings, machine = {"model": "org/name", "dtype": "bfloat16"}, {"processor": "AMD EPYC", "threads": 2}
    whole = Source("r.jsonl", settings, {"machine": machine, "time": "2026-11-27T17:12:24+00:00", "commit": "0123"})
    assert whole.summary == "r.jsonl: org/name in bfloat16, AMD EPYC, 2 threads, 2026-11-27, commit 0123"
    assert Source("r.jsonl", {}, {"machine": None}).summary == "r.jsonl"


def test_reports_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    source = write(tmp_path / "r", suffix())
    with refused("path"):
        write_report([source], tmp_path / "file")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with refused("figures"):
        write_report([source], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_prints_paths_and_the_summary_however_narrow_the_terminal(tmp_path):
    source = write(tmp_path / "r", run("vllm", 1.0, plain_seconds=2.0))
    arguments = ["report", str(source), "--output", str(tmp_path / "out"), "--title", "Mine"]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "40"}, catch_exceptions=False)
    assert done.stdout.splitlines() == [
        str(tmp_path / "out" / "report.html"),
        "On chat (batch 1, greedy) no exact method was compared with plain decoding.",
    ]
    assert "<title>Mine</title>" in (tmp_path / "out" / "report.html").read_text()
