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
    found = [line for line in out[out.index("method ") :].splitlines() if line and not line.startswith("~ ")]
    lines = [line.split("  ") for line in found]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    return {line[0]: line[1:] for line in cells}


def test_the_usual_methods(shell: tiny.Shell, base: list[str]) -> None:
    code, out, err = shell(*base, PROMPT)
    table = rows(out)
    assert (code, err) == (0, "")
    assert list(table) == ["method", "plain", *DEFAULT]
    assert table["method"] == [
        *("tokens", "seconds", "tokens/s", "drafted", "accepted", "drafts used", "tokens/pass", "speed-up", "identical")
    ]
    assert table["plain"][3:] == ["-", "-", "-", "1.00", "1.00x", "-"]
    for name in DEFAULT:
        assert table[name][0] == "24" and table[name][-1] == "yes"
    assert int(table["suffix"][3]) > 0, "the drafted tokens"


@pytest.mark.parametrize("columns", [40, 80])
def test_on_a_terminal(base: list[str], columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of the text that is shown are next to it, not below the table, and the methods are counted."""
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, shown = tiny.foresay_watched(*base, PROMPT)
    assert code == 0 and shown.count(" tokens/pass, accepted ") == 1
    after = shown[shown.index(" tokens/pass, accepted ") :]
    assert re.search(r"\(method \d\s+of\s+5\)", after) and "of 1" not in after, "decoding begins after them"
    assert ("method " in out.decode()) == (columns == 80), "else a paragraph for each"


def test_chosen_methods_and_a_draft(shell: tiny.Shell, base: list[str], small: Path) -> None:
    more = ["--drafter", "suffix(scale=3)", "--drafter", "max_gram", "--drafter", "suffix( scale = 3 )"]
    code, out, _ = shell(*base, *more, PROMPT)
    assert code == 0 and list(rows(out)) == ["method", "plain", "suffix(scale=3)", "max_gram"]
    code, out, _ = shell(*base, "--draft", str(small), PROMPT)
    table = rows(out)
    assert code == 0
    assert list(table) == ["method", "plain", "draft alone", *DEFAULT, f"model({small})"]
    assert table["draft alone"][-1] == "another"
    assert table[f"model({small})"][-1] == "yes"


def test_json(shell: tiny.Shell, base: list[str], folder: Path, small: Path) -> None:
    args = ["--json", "--repeats", "3", "--draft", str(small), "--length", "3", "--raw", PROMPT]
    code, out, err = shell(*base, *args)
    record = json.loads(out)
    by_name = {one["method"]: one for one in record.pop("methods")}
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert record["text"] == by_name["plain"]["text"] and record["repeats"] == 3
    plain = by_name["plain"]
    expected = foresay.load(folder, drafter="none", dtype="fp32").generate(PROMPT, max_new_tokens=24)
    assert plain["token_ids"] == expected.token_ids and plain["length"] == 0
    own = foresay.load(small, drafter="none", dtype="fp32").generate(PROMPT, max_new_tokens=24)
    assert by_name["draft alone"]["token_ids"] == own.token_ids
    assert by_name["draft alone"]["identical"] is None and by_name["draft alone"]["exact"] is None
    for name in (*DEFAULT, f"model({small})"):
        one = by_name[name]
        assert one["identical"] is one["exact"] is True and one["length"] == 3
        assert len(one["all_seconds"]) == 3 and one["seconds"] == sorted(one["all_seconds"])[1]
        ratios = [before / after for before in plain["all_seconds"] for after in one["all_seconds"]]
        assert min(ratios) <= one["speed_up"] <= max(ratios)


@pytest.mark.parametrize(
    ("seconds", "noise"),
    [(0.8, False), (0.97, True), (1.0, True), (1.09, True), (1.3, False), (0.1, True)],
    ids=["a gain", "a little", "nothing", "a little less", "a loss", "more than tokens per pass"],
)
def test_noise_is_no_gain(seconds: float, noise: bool, folder: Path) -> None:
    """Plain decoding took 1.0 and 1.1 s, and the method has two tokens per pass."""
    model = foresay.load(folder, drafter="suffix", dtype="fp32")
    step = Step(0, (1, 2), (Origin.DRAFT, Origin.BONUS), 1, 1)
    generation = dataclasses.replace(model.generate(PROMPT, max_new_tokens=4), stats=Stats.of([step] * 12))
    cell = Cell("m", "", 1, "")
    plain, fast = (table.Row(name, MethodRunner(model, Method(name))) for name in ("none", "suffix"))
    rows = [dataclasses.replace(plain, name=PLAIN), fast]
    block = PromptBlock("", RequestBuilder(model).first([PromptItem("a", PROMPT)]), 1, foresay.SamplingParams())
    for row in rows:
        row.runner.prepare(block)
    for row, times in zip(rows, ((1.0, 1.1), (seconds,)), strict=True):
        row.runs.extend(
            Run(cell, i, one, 24, exact=True, identical=True, plain_seconds=1.0) for i, one in enumerate(times)
        )
        row.generations.append(generation)
    spread = table.plain_spread(rows)
    assert spread == pytest.approx(0.1)
    assert table.record(fast, spread)["noise"] is noise
    assert table._cells(fast, spread)[-2].startswith("~") is noise
    assert table.record(rows[0], spread)["noise"] is False


def test_repeats_learn_nothing_from_each_other(shell: tiny.Shell, base: list[str]) -> None:
    """A store that outlives requests would know the whole output the second time."""
    keeping = "ngram_store(keep=true)"
    given = ["--drafter", "ngram_store", "--drafter", keeping]
    once, thrice = (
        {one["method"]: one["stats"]["num_passes"] for one in json.loads(shell(*base, *args, PROMPT)[1])["methods"]}
        for args in (["--json", *given], ["--json", *given, "--repeats", "3"])
    )
    assert once == thrice and once[keeping] == once["ngram_store"]


def test_a_length_for_all(shell: tiny.Shell, base: list[str]) -> None:
    found = json.loads(shell(*base, "--json", "--length", "throughput", PROMPT)[1])["methods"]
    assert [one["length"] for one in found] == [0, *["ThroughputLength"] * 4]


def test_sampled_outputs_need_not_be_the_same(shell: tiny.Shell, base: list[str]) -> None:
    _, out, _ = shell(*base, "-t", "1", PROMPT)
    assert {cells[-1] for name, cells in rows(out).items() if name in DEFAULT} == {"sampled"}
    code, out, _ = shell(*base, "-t", "1", "--rule", "coupled", PROMPT)
    assert code == 0
    assert {cells[-1] for name, cells in rows(out).items() if name in DEFAULT} == {"yes"}


def tampered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make plain decoding sample, whatever its parameters."""
    honest = Generator.session

    def other(generator: Generator, **options: Any) -> Any:
        session: Any = honest(generator, **options)
        if generator.drafter_name == "none":
            session.submit = functools.partial(session.submit, temperature=2.0, seed=0)
        return session

    monkeypatch.setattr(Generator, "session", other)


def test_a_difference_under_an_exact_rule_is_1(
    shell: tiny.Shell, base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tampered(monkeypatch)
    code, out, _ = shell(*base, PROMPT)
    assert code == 1
    assert {cells[-1] for name, cells in rows(out).items() if name in DEFAULT} == {"no"}
    assert sum(": token " in line and "plain decoding has" in line for line in out.splitlines()) == 4


def test_a_difference_under_a_lossy_rule_is_allowed(
    shell: tiny.Shell, base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tampered(monkeypatch)
    code, out, _ = shell(*base, "--rule", "lenience(2)", PROMPT)
    table = rows(out)
    assert code == 0
    assert {table[name][-1] for name in DEFAULT} == {"no"}


def test_a_drafter_that_fails_is_told_in_its_row(
    shell: tiny.Shell, base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from foresay.drafters import MaxGram

    def broken(*args: object) -> None:
        raise ValueError("out of order")

    monkeypatch.setattr(MaxGram, "draft_tokens", broken)
    code, out, _ = shell(*base, PROMPT)
    assert code == 0
    assert rows(out)["max_gram"][-1] == "failed" and rows(out)["suffix"][-1] == "yes"
    assert "max_gram failed: the drafter failed: ValueError: out of order" in out


def test_no_method_that_runs_is_1(shell: tiny.Shell, base: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from foresay.drafters import MaxGram, NgramStoreDrafter, PromptLookup, SuffixDrafter

    def broken(*args: object) -> None:
        raise ValueError("out of order")

    for drafter in (MaxGram, NgramStoreDrafter, PromptLookup, SuffixDrafter):
        monkeypatch.setattr(drafter, "draft_tokens", broken)
    code, out, _ = shell(*base, PROMPT)
    assert code == 1
    assert {cells[-1] for name, cells in rows(out).items() if name in DEFAULT} == {"failed"}


def test_a_draft_that_cannot_read_the_prompt_is_told_in_its_row(
    shell: tiny.Shell, base: list[str], small: Path
) -> None:
    code, out, _ = shell(*base, "--draft", str(small), "x" * 80)
    assert code == 0
    assert rows(out)["draft alone"][-1] == "failed"
    assert "draft alone failed: the prompt has 80 tokens; the model's context is 64" in out


def test_a_narrow_terminal_has_a_paragraph_per_method(
    shell: tiny.Shell, base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = shell(*base, PROMPT)
    table = out[out.index("method") :]
    assert max(map(len, table.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = shell(*base, PROMPT)
    lines = [line for line in out[out.index("\nplain\n") + 1 :].splitlines() if not line.startswith("~ ")]
    assert lines[::2] == ["plain", *DEFAULT]
    assert all(
        line.startswith("  tokens 24, seconds ") and line.endswith(("yes", "identical -")) for line in lines[1::2]
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--drafter", "sufix"], "--drafter sufix"),
        (["--drafter", "suffix(scale=0)"], "scale=0 must be"),
        (["--drafter", "suffix", "--rule", "exact"], "--rule exact"),
        (["--drafter", "suffix", "--length", "long"], "--length long"),
        (["--drafter", "none", "--drafter", "suffix"], "--drafter none is plain decoding, which is always compared"),
        (["--repeats", "0"], "--repeats 0 must be an integer"),
    ],
)
def test_wrong_options_are_named_before_anything_is_loaded(shell: tiny.Shell, args: list[str], message: str) -> None:
    refused = shell.refused("generate", "--compare", "--model", "./nowhere", *args, PROMPT)
    assert message in refused and "nowhere" not in refused


# -- methods ---------------------------------------------------------------------------------------------------------


def test_methods_lists_what_may_be_written(shell: tiny.Shell) -> None:
    code, out, err = shell("info", "--methods")
    assert (code, err) == (0, "")
    named = [line.strip().split("(")[0] for line in out.splitlines() if line.startswith("  ") and line[2] != " "]
    assert named == [*DRAFTERS, *RULES, *LENGTHS]
    assert "  confidence(threshold=0.4, low=1, high=20)\n" in out


# -- generate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ["--drafter", "suffix(scale=3)"],
        ["--drafter", "max_gram", "--length", "heuristic"],
        ["--length", "throughput", "--rule", "block"],
    ],
)
def test_generate_takes_expressions(shell: tiny.Shell, base: list[str], args: list[str]) -> None:
    plain = json.loads(shell("generate", *base[2:], "--json", "--drafter", "none", PROMPT)[1])
    one = json.loads(shell("generate", *base[2:], "--json", *args, PROMPT)[1])
    assert one["text"] == plain["text"] and one["exact"] is True


def test_generate_marks_a_lossy_output(shell: tiny.Shell, base: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["generate", *base[2:], "--rule", "lenience(2)", PROMPT]
    assert json.loads(shell(*args, "--json")[1])["exact"] is False
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    assert "not exact (lossy rule)" in shell(*args)[2]
    assert "not exact" not in shell(*args, "--rule", "block")[2]
