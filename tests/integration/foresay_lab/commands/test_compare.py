"""`foresay generate --compare`, `foresay info --methods`, and what they have in common with the console."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

import foresay
from foresay.decoding.acceptance import RULES
from foresay.decoding.outcome import Origin, Step
from foresay.drafters import MaxGram, NgramStoreDrafter, PromptLookup, SuffixDrafter
from foresay.engine import Stats
from foresay.generation.generator import Generator
from foresay.generation.method import PLAIN, Method
from foresay.lengths import LENGTHS
from foresay.records.results import Cell, Run
from foresay.spec.recipes import DRAFTERS
from foresay_lab.bench.runners import MethodRunner, PromptBlock
from foresay_lab.commands import comparison as table
from foresay_lab.data.items import PromptItem
from foresay_lab.data.requests import RequestBuilder
from helpers import tiny

PROMPT = "hello world, hello"
DEFAULT = ["prompt_lookup", "max_gram", "ngram_store", "suffix"]


@pytest.fixture(scope="session")
def folder(chat_folder: Path) -> Path:
    return chat_folder


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of the same tokens, without a chat template and with a short context."""
    return tiny.save(tmp_path_factory.mktemp("compare") / "small", tiny.llama(1, context=64))


@pytest.fixture
def base(folder: Path) -> list[str]:
    return ["generate", "--compare", "--model", str(folder), "--dtype", "fp32", "-n", "24"]


def rows(out: str) -> dict[str, list[str]]:
    """The table's cells by method, under its names."""
    shown = [line for line in out[out.index("method ") :].splitlines() if not line.startswith(("~ ", "On this"))]
    shown = [line for line in shown if ": foresay serve " not in line]
    lines = [line.split("  ") for line in shown if line]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    return {line[0]: line[1:] for line in cells}


def test_the_table_of_methods(shell: tiny.Shell, base: list[str]) -> None:
    out = shell.out(*base, PROMPT)
    assert re.search(r"^[KUT].*: foresay serve \S+ --dtype fp32( --drafter .*)?$", out, re.MULTILINE), "loaded as here"
    table = rows(out)
    assert list(table) == ["method", "plain", *DEFAULT]
    columns = "tokens|drafted|accepted|drafts used|tokens/pass|seconds|tokens/s|speed-up|identical"
    assert table["method"] == columns.split("|")
    assert table["plain"][1:5] == ["-", "-", "-", "1.00"] and table["plain"][-2:] == ["1.00x", "-"]
    assert {(table[name][0], table[name][-1]) for name in DEFAULT} == {("24", "yes")}
    assert int(table["suffix"][1]) > 0, "the drafted tokens"
    more = ["--drafter", "suffix(scale=3)", "--drafter", "max_gram", "--drafter", "suffix( scale = 3 )"]
    out = shell.out(*base, *more, PROMPT)
    assert list(rows(out)) == ["method", "plain", "suffix(scale=3)", "max_gram"]
    assert re.search(r"^[KU].*: foresay serve \S+ --dtype fp32( --drafter .*)?$", out, re.MULTILINE), (
        "of those that were run"
    )
    [found] = shell.objects(*base, "--json", "--length", "throughput", PROMPT)
    assert [one["length"] for one in found["methods"]] == [0, *["ThroughputLength"] * 4]


@pytest.mark.parametrize("columns", [40, 80])
def test_on_a_terminal(shell: tiny.Shell, base: list[str], columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs are counted in one bar, and no figures of the shown text confuse; a narrow one has paragraphs."""
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, shown = shell.watched(*base, PROMPT)
    assert code == 0 and " tokens/pass, accepted " not in shown
    assert re.search(r"Comparing .*\d+/11", shown), "five warm-ups, plain decoding before and after, four methods"
    if columns == 80:
        assert max(map(len, out[out.index("method ") : out.index("On this prompt")].splitlines())) <= 80
    else:
        assert "method " not in out
        lines = out[out.index("\nplain\n") + 1 : out.index("On this prompt")].splitlines()
        lines = [line for line in lines if not line.startswith("~ ")]
        assert lines[::2] == ["plain", *DEFAULT]
        for line in lines[1::2]:
            assert line.startswith("  tokens 24, drafted ") and line.endswith(("yes", "identical -"))


def test_json_with_a_draft_and_repeats(shell: tiny.Shell, base: list[str], folder: Path, small: Path) -> None:
    args = ["--json", "--repeats", "3", "--draft", str(small), "--length", "3", "--raw", PROMPT]
    [record] = shell.objects(*base, *args)
    names = ["plain", "draft alone", *DEFAULT, f"model({small})"]
    assert [one["method"] for one in record["methods"]] == names
    plain, alone, *others = record["methods"]
    assert record["text"] == plain["text"] and record["repeats"] == 3 and plain["length"] == 0
    for one, model in ((plain, folder), (alone, small)):
        expected = foresay.load(model, drafter="none", dtype="fp32").generate(PROMPT, max_new_tokens=24)
        assert one["token_ids"] == expected.token_ids
    assert alone["identical"] is None and alone["exact"] is None
    for one in others:
        assert one["identical"] is one["exact"] is True and one["length"] == 3
        assert len(one["all_seconds"]) == 3 and one["seconds"] == sorted(one["all_seconds"])[1]
        ratios = [before / after for before in plain["all_seconds"] for after in one["all_seconds"]]
        assert min(ratios) <= one["speed_up"] <= max(ratios)


def test_noise_is_no_gain(folder: Path) -> None:
    """Plain decoding took 1.0 and 1.1 s, and the method has two tokens per pass."""
    model = foresay.load(folder, drafter="suffix", dtype="fp32")
    step = Step(0, (1, 2), (Origin.DRAFT, Origin.BONUS), 1, 1)
    generation = dataclasses.replace(model.generate(PROMPT, max_new_tokens=4), stats=Stats.of([step] * 12))
    block = PromptBlock("", RequestBuilder(model).first([PromptItem("a", PROMPT)]), 1, foresay.SamplingParams())

    def row(name: str, drafter: str, *times: float) -> table.Row:
        one = table.Row(name, MethodRunner(model, Method(drafter)))
        one.runner.prepare(block)
        cell = Cell("m", "", 1, "")
        one.runs.extend(
            Run(cell, i, seconds, 24, exact=True, identical=True, plain_seconds=1.0) for i, seconds in enumerate(times)
        )
        one.generations.append(generation)
        return one

    plain = row(PLAIN, "none", 1.0, 1.1)
    for seconds, noise in ((0.8, False), (0.97, True), (1.0, True), (1.09, True), (1.3, False), (0.1, True)):
        fast = row("suffix", "suffix", seconds)
        spread = table.plain_spread([plain, fast])
        assert spread == pytest.approx(0.1)
        assert table.record(fast, spread)["noise"] is noise, "0.1 s is a larger gain than tokens per pass allow"
        assert table._cells(fast, spread)[-2].startswith("~") is noise
    assert table.record(plain, spread)["noise"] is False


def test_repeats_learn_nothing_from_each_other(shell: tiny.Shell, base: list[str]) -> None:
    """A store that outlives requests would know the whole output the second time."""
    keeping = "ngram_store(keep=true)"
    given = [*base, "--json", "--drafter", "ngram_store", "--drafter", keeping, PROMPT]
    once, thrice = (
        {one["method"]: one["stats"]["num_passes"] for one in json.loads(shell(*given, *more)[1])["methods"]}
        for more in ([], ["--repeats", "3"])
    )
    assert once == thrice and once[keeping] == once["ngram_store"]


@pytest.mark.parametrize(
    ("args", "sampled_plain", "code", "identical"),
    [
        (["-t", "1"], False, 0, "sampled"),
        (["-t", "1", "--rule", "coupled"], False, 0, "yes"),
        ([], True, 1, "no"),
        (["--rule", "lenience(2)"], True, 0, "no"),  # a lossy rule may differ
    ],
)
def test_a_difference_under_an_exact_rule_is_1(
    shell: tiny.Shell,
    base: list[str],
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    sampled_plain: bool,
    code: int,
    identical: str,
) -> None:
    """Sampled outputs need not be the same. sampled_plain: plain decoding samples, whatever its parameters."""
    honest = Generator.session

    def other(generator: Generator, **options: Any) -> Any:
        session: Any = honest(generator, **options)
        if sampled_plain and generator.drafter_name == "none":
            session.submit = functools.partial(session.submit, temperature=2.0, seed=0)
        return session

    monkeypatch.setattr(Generator, "session", other)
    found, out, _ = shell(*base, *args, PROMPT)
    assert found == code
    assert {cells[-1] for name, cells in rows(out).items() if name in DEFAULT} == {identical}
    assert code == 0 or sum(": token " in one and "plain decoding has" in one for one in out.splitlines()) == 4


def test_what_fails_is_named_in_its_row(
    shell: tiny.Shell, base: list[str], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that cannot read the prompt, and a drafter that fails; the command fails where no method runs."""
    code, out, _ = shell(*base, "--draft", str(small), "x" * 80)
    assert code == 0 and rows(out)["draft alone"][-1] == "failed"
    assert "draft alone failed: the prompt has 80 tokens; the model's context is 64" in out

    def fail(*args: object) -> None:
        raise ValueError("out of order")

    for broken in ([MaxGram], [NgramStoreDrafter, PromptLookup, SuffixDrafter]):
        for drafter in broken:
            monkeypatch.setattr(drafter, "draft_tokens", fail)
        code, out, _ = shell(*base, PROMPT)
        outcomes = [rows(out)[name][-1] for name in DEFAULT]
        assert (code, outcomes.count("failed")) == ((0, 1) if broken == [MaxGram] else (1, 4))
        assert outcomes.count("yes") == 4 - outcomes.count("failed")
        assert "max_gram failed: the drafter failed: ValueError: out of order" in out


def test_wrong_options_are_named_before_anything_is_loaded(shell: tiny.Shell) -> None:
    for args, message in (
        (["--drafter", "sufix"], "--drafter sufix"),
        (["--drafter", "suffix(scale=0)"], "scale=0 must be"),
        (["--drafter", "suffix", "--rule", "exact"], "--rule exact"),
        (["--drafter", "suffix", "--length", "long"], "--length long"),
        (["--drafter", "none", "--drafter", "suffix"], "--drafter none is plain decoding, which is always compared"),
        (["--repeats", "0"], "--repeats 0 must be an integer"),
    ):
        refused = shell.refused("generate", "--compare", "--model", "./nowhere", *args, PROMPT)
        assert message in refused and "nowhere" not in refused


def test_methods_lists_what_may_be_written(shell: tiny.Shell) -> None:
    out = shell.out("info", "--methods")
    named = [line.strip().split("(")[0] for line in out.splitlines() if line.startswith("  ") and line[2] != " "]
    assert named == [*DRAFTERS, *RULES, *LENGTHS]
    assert "  confidence(threshold=0.4, low=1, high=20)\n" in out


def test_generate_takes_expressions(shell: tiny.Shell, base: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And marks a lossy output."""
    given = ["generate", *base[2:], PROMPT]
    [plain] = shell.objects(*given, "--json", "--drafter", "none")
    for args in (
        ["--drafter", "suffix(scale=3)"],
        ["--drafter", "max_gram", "--length", "heuristic"],
        ["--length", "throughput", "--rule", "block"],
    ):
        [one] = shell.objects(*given, "--json", *args)
        assert one["text"] == plain["text"] and one["exact"] is True
    lossy = [*given, "--rule", "lenience(2)"]
    assert json.loads(shell(*lossy, "--json")[1])["exact"] is False
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    assert "not exact (lossy rule)" in shell(*lossy)[2]
    assert "not exact" not in shell(*given, "--rule", "block")[2]
