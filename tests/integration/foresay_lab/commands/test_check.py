"""`foresay check` in use: what passes, what fails and is named, what is refused, and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foresay.cli.typed_errors import typed
from foresay.generation.session import Session
from foresay.records.recording import Recording
from helpers import tiny

CHECK = ["check", "r.jsonl", "--dtype", "fp32"]


@pytest.fixture(scope="session")
def recordings(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a greedy recording of two categories, and a sampled one."""
    path, texts = tmp_path_factory.mktemp("recordings"), ["hello world, hello", "one two three one two", "abc abc abc"]
    lines = [{"id": f"t{i}", "prompt": text, "category": "ab"[i % 2]} for i, text in enumerate([*texts, "hello", "x"])]
    (path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    which = ["--model", str(folder), "--dtype", "fp32", "--prompts", str(path / "p.jsonl")]
    tiny.printed("record", str(path / "r.jsonl"), *which, "-n", "48")
    tiny.printed("record", str(path / "sampled.jsonl"), *which, "-n", "24", "-t", "1", "--seed", "3")
    return path


@pytest.fixture(autouse=True)
def _recorded(here: Path, recordings: Path) -> None:
    """Copies of the recordings in the working folder."""
    for path in recordings.iterdir():
        (here / path.name).write_bytes(path.read_bytes())


def edited(change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change the lines of the recording; the first one is its header."""
    lines = [json.loads(line) for line in Path("r.jsonl").read_text().splitlines()]
    change(lines)
    Path("r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def replaced(path: str, **changes: Any) -> None:
    """Change fields of a file of one JSON object."""
    Path(path).write_text(json.dumps(json.loads(Path(path).read_text()) | changes))


# -- what passes -------------------------------------------------------------------------------------------------------


def test_a_recording_passes(shell: tiny.Shell) -> None:
    heading, first, second, total, settings, outcome = shell.out(*CHECK).splitlines()
    assert heading.split() == ["category", "prompts", "tokens", "same", "per", "pass"]
    assert [line.split()[:4] for line in (first, second, total)] == [
        ["a", "3", "144", "3"],
        ["b", "2", "96", "2"],
        ["total", "5", "240", "5"],
    ]
    assert settings.startswith("drafter suffix, length 12, rule speculative, model ")
    assert outcome == f"texts: 5 of 5 are the same; tokens per pass: {total.split()[-1]}"
    assert float(total.split()[-1]) > 1


def test_a_saved_result_passes_against_itself(shell: tiny.Shell) -> None:
    shell.out(*CHECK, "--save", "c.json")
    saved, against = Path("c.json").read_bytes(), [*CHECK, "--against", "c.json"]
    out = shell.out(*against, "--tolerance", "0", "--save", "d.json", "--batch-size", "2")
    assert Path("d.json").read_bytes() == saved == Path("c.json").read_bytes()
    assert out.count("+0.0%") == 4 and out.splitlines()[-1].endswith("(+0.0%)")
    values = json.loads(saved)
    assert {name: one["tokens"] for name, one in values["categories"].items()} == {"a": 144, "b": 96}
    assert (values["drafter"], values["length"], values["rule"]) == ("suffix", "12", "speculative")
    [line] = shell.objects(*against, "--json")
    assert line["passed"] is True and line["texts"] == {"same": 5, "prompts": 5} and line["differences"] == []
    [change] = line["changes"]
    assert change["category"] is None and change["relative"] == 0 and change["now"] == line["tokens_per_pass"]
    assert {"format": "foresay-check", "version": 1, **line["result"]} == values
    lines = shell.out(*CHECK, "--limit", "1").splitlines()
    assert len(lines) == 4 and "texts: 1 of 1 are the same" in lines[-1], "one category has no row of its own"
    assert "prompts=" in shell.refused(*against, "--limit", "1")


@pytest.mark.parametrize(
    ("drafter", "length", "shown"),
    [
        ("none", None, "length 0,"),
        ("cascade(self=1, max_gram; k=[[2, 2], [0, 2]])", None, "length 4,"),
        ("model(TARGET)", "3", "length 3,"),
        ("max_gram", "heuristic(3)", "length heuristic(start=3),"),
    ],
)
def test_methods(shell: tiny.Shell, folder: Path, drafter: str, length: str | None, shown: str) -> None:
    """Plain decoding, a cascade, a perfect draft model, and a policy of the row alone."""
    drafter = drafter.replace("TARGET", str(folder))
    out = shell.out(*CHECK, "--drafter", drafter, *([] if length is None else ["--length", length]))
    assert shown in out and "texts: 5 of 5 are the same" in out
    assert drafter != "none" or out.rstrip().endswith("tokens per pass: 1.00")


def test_the_model_of_a_settings_file(shell: tiny.Shell, folder: Path) -> None:
    """Its drafter is used; its length adapts, so the drafter's own number of tokens replaces it."""
    Path("mine.toml").write_text(f'target = "{folder}"\ndrafter = "max_gram"\nlength = "throughput"\ndtype = "fp32"\n')
    code, out, err = shell("check", "r.jsonl", "-m", "mine.toml")
    assert code == 0 and err.startswith("foresay: settings from mine.toml")
    assert "drafter max_gram, length 10, rule speculative" in out


# -- what fails --------------------------------------------------------------------------------------------------------


def test_a_changed_token_fails_and_is_named(shell: tiny.Shell) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        line = next(line for line in lines if line.get("id") == "t3")
        assert line["output"][7] != 40
        line["output"][7] = 40

    edited(change)
    [record] = [one for one in Recording.load("r.jsonl").records if one.id == "t3"]
    code, out, err = shell(*CHECK)
    assert (code, err) == (1, "")
    assert "texts: 4 of 5 are the same" in out.splitlines()[-1]
    [line] = [line for line in out.splitlines() if line.startswith("DIFFERENT OUTPUT")]
    assert line.startswith("DIFFERENT OUTPUT: prompt 't3', token 7: recorded 'E' (40), now ")
    assert [row.split()[3] for row in out.splitlines()[1:4]] == ["3", "1", "4"]
    code, out, _ = shell(*CHECK, "--json")
    [found] = json.loads(out)["differences"]
    assert code == 1 and (found["id"], found["position"], found["recorded"]) == ("t3", 7, record.output[7])


def test_a_shorter_recording_fails_at_its_end(shell: tiny.Shell) -> None:
    edited(lambda lines: lines[1].update(output=lines[1]["output"][:20]))
    code, out, _ = shell(*CHECK)
    assert code == 1 and ", token 20: recorded the end, now '" in out


def test_another_model_fails(shell: tiny.Shell, tmp_path: Path) -> None:
    other = tiny.save(tmp_path / "other", tiny.llama(1))
    code, out, err = shell(*CHECK, "-m", str(other))
    assert (code, err) == (1, "") and "DIFFERENT OUTPUT: prompt 't0'" in out
    assert "note: the recording is of model " in out and f"this run '{other}'" in out


def test_a_worse_draft_fails(shell: tiny.Shell, tmp_path: Path) -> None:
    """A draft model that was replaced: the outputs are the same, and tokens per pass fell."""
    tiny.save(tmp_path / "draft")
    command = [*CHECK, "--drafter", "model(draft)", "--length", "3"]
    assert shell(*command, "--save", "c.json")[0] == 0
    tiny.save(tmp_path / "draft", tiny.llama(1))
    code, out, err = shell(*command, "--against", "c.json")
    assert (code, err) == (1, "") and "DIFFERENT" not in out
    assert "FEWER TOKENS PER PASS: total: " in out and out.splitlines()[-1].startswith("texts: 5 of 5 are the same")
    code, out, _ = shell(*command, "--against", "c.json", "--tolerance", "0.9")
    assert code == 0 and "FEWER" not in out
    assert shell(*command, "--save", "d.json")[0] == 0
    tiny.save(tmp_path / "draft")
    code, out, _ = shell(*command, "--against", "d.json")
    assert code == 0 and "more tokens per pass: total: " in out, "a rise is no failure"


# -- sampled recordings ------------------------------------------------------------------------------------------------


def test_sampled_outputs(shell: tiny.Shell) -> None:
    sampled = ["check", "sampled.jsonl", "--dtype", "fp32"]
    for drafter, rule in (("suffix", "speculative"), ("self(1)", "match")):
        code, out, err = shell(*sampled, "--drafter", drafter, "--rule", rule)
        assert (code, err) == (0, "") and "texts: 5 of 5 are the same" in out
    drafted = [*sampled, "--drafter", "self(1)"]
    assert "cannot be compared: under rule 'speculative' the text of a seed" in shell.refused(*drafted)
    assert shell(*drafted, "--save", "c.json")[0] == 0
    code, out, err = shell(*drafted, "--against", "c.json")
    assert (code, err) == (0, "") and "same" not in out.splitlines()[0]
    assert out.splitlines()[-1].startswith(
        "texts: not compared (under rule 'speculative' the text of a seed depends on"
    )
    assert out.splitlines()[-1].endswith("(+0.0%)")
    assert json.loads(shell(*drafted, "--against", "c.json", "--json")[1])["texts"] is None


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"tokenizer": "0" * 64}, "has another tokenizer"),
        ({"tokenizer": "0" * 64, "vocab_size": 4000}, "has 4000 tokens"),
        ({"model": ""}, "RECORDING r.jsonl "),
    ],
)
def test_recordings_of_something_else_are_refused(shell: tiny.Shell, header: dict[str, Any], message: str) -> None:
    edited(lambda lines: lines[0].update(header))
    assert message in shell.refused(*CHECK)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["check", "none.jsonl"], "RECORDING none.jsonl "),
        (["check", "empty.jsonl"], "contains no outputs"),
        (["check", "cache.json"], "lacks sampling parameters"),
        (["check", "log.txt"], "contains outputs alone"),
        ([*CHECK, "--length", "throughput"], f"--length {typed('throughput')} "),
        ([*CHECK, "--length", "throughput(high=8)"], f"--length {typed('throughput(high=8)')} "),
        ([*CHECK, "--drafter", "suffix(memory=texts)"], "keeps texts in a folder"),
        ([*CHECK, "--drafter", "sufix"], "--drafter sufix"),
        ([*CHECK, "--limit", "0"], "--limit 0 must be"),
        ([*CHECK, "--tolerance", "0.1"], "--tolerance 0.1 is for --against"),
        ([*CHECK, "--rule", "typical"], "cannot be compared: rule 'typical' is lossy"),
        ([*CHECK, "--save", "none/c.json"], "the folder 'none'"),
        ([*CHECK, "--save", "."], "is a folder"),
        ([*CHECK, "--against", "none.json"], "--against none.json "),
    ],
)
def test_wrong_files_and_options_are_refused(shell: tiny.Shell, args: list[str], message: str) -> None:
    Path("empty.jsonl").write_text(Path("r.jsonl").read_text().splitlines()[0] + "\n")
    Path("cache.json").write_text('{"1_2": "1_2_3"}')
    Path("log.txt").write_text("tensor([[1, 2]])\n")
    assert message in shell.refused(*args) and not Path("texts").exists()


def test_wrong_results_are_refused(shell: tiny.Shell) -> None:
    shell.out(*CHECK, "--save", "c.json")
    against = [*CHECK, "--against", "c.json"]
    for more, message in (
        (["--drafter", "max_gram"], "--drafter max_gram differs from 'suffix'"),
        (["--length", "3"], "--length 3 differs from '12'"),
        (["--rule", "block"], "--rule block differs from 'speculative'"),
        (["--tolerance", "-1"], "--tolerance -1 must be"),
        (["--tolerance", "nan"], "--tolerance nan must be"),
        (["--save", "c.json"], "--save c.json is the file of --against"),
    ):
        assert message in shell.refused(*against, *more), more
    replaced("c.json", model="other")
    assert "differs from 'other'" in shell.refused(*against)
    replaced("c.json", version=2)
    assert "--against c.json is not a result" in shell.refused(*against)


# -- terminals and signals ---------------------------------------------------------------------------------------------


def test_a_terminal_sees_progress(shell: tiny.Shell) -> None:
    code, out, shown = shell.watched(*CHECK)
    assert code == 0 and "texts: 5 of 5 are the same" in out and "Checking" in shown


def test_ctrl_c_writes_nothing(shell: tiny.Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the third step."""
    step, left = Session.step, [None, None]

    def interrupted(session: Session) -> Any:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return step(session)

    monkeypatch.setattr(Session, "step", interrupted)
    assert shell(*CHECK, "--save", "c.json") == (130, "", "")
    assert not left and not Path("c.json").exists()
