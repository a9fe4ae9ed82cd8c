"""`foresay check` in use: what passes, what fails and is named, what is refused, and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foresay.cli.typed_errors import typed
from foresay.generation.session import Session
from helpers import tiny

CHECK = ["check", "r.jsonl", "--dtype", "fp32"]


@pytest.fixture(scope="module")
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
def recorded(here: Path, recordings: Path) -> list[dict[str, Any]]:
    """Lines of the recording, the first its header; copies of the files are in the working folder."""
    for path in recordings.iterdir():
        (here / path.name).write_bytes(path.read_bytes())
    return [json.loads(line) for line in Path("r.jsonl").read_text().splitlines()]


def write(lines: list[dict[str, Any]]) -> None:
    Path("r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_recording_passes_and_its_result_against_itself(shell: tiny.Shell) -> None:
    heading, first, second, total, settings, outcome = shell.out(*CHECK, "--save", "c.json").splitlines()
    assert heading.split() == ["category", "prompts", "tokens", "same", "per", "pass"]
    cells = [line.split()[:4] for line in (first, second, total)]
    assert cells == [["a", "3", "144", "3"], ["b", "2", "96", "2"], ["total", "5", "240", "5"]]
    assert settings.startswith("drafter suffix, length 12, rule speculative, model ")
    assert outcome == f"texts: 5 of 5 are the same; tokens per pass: {total.split()[-1]}"
    assert float(total.split()[-1]) > 1
    saved, against = Path("c.json").read_bytes(), [*CHECK, "--against", "c.json"]
    out = shell.out(*against, "--tolerance", "0", "--save", "d.json", "--batch-size", "2")
    assert Path("d.json").read_bytes() == saved == Path("c.json").read_bytes()
    assert out.count("+0.0%") == 4 and out.splitlines()[-1].endswith("(+0.0%)")
    values = json.loads(saved)
    assert {name: one["tokens"] for name, one in values["categories"].items()} == {"a": 144, "b": 96}
    assert (values["drafter"], values["length"], values["rule"]) == ("suffix", "12", "speculative")
    [line] = shell.objects(*against, "--json")
    assert line["passed"] is True and line["texts"] == {"same": 5, "prompts": 5}
    assert line["differences"] == line["notes"] == [] and line["categories"].keys() == {"a", "b"}
    [change] = line["changes"]
    assert change["category"] is None and change["relative"] == 0 and change["now"] == line["tokens_per_pass"]
    assert {"format": "foresay-check", "version": 1, **line["result"]} == values
    lines = shell.out(*CHECK, "--limit", "1").splitlines()
    assert len(lines) == 4 and "texts: 1 of 1 are the same" in lines[-1], "one category has no row of its own"
    for more, message in (
        (["--limit", "1"], "prompts="),
        (["--drafter", "max_gram"], "--drafter max_gram differs from 'suffix'"),
        (["--length", "3"], "--length 3 differs from '12'"),
        (["--rule", "block"], "--rule block differs from 'speculative'"),
        (["--tolerance", "-1"], "--tolerance -1 must be"),
        (["--tolerance", "nan"], "--tolerance nan must be"),
        (["--save", "c.json"], "--save c.json is the file of --against"),
    ):
        assert message in shell.refused(*against, *more), more
    for change, message in ({"model": "other"}, "differs from 'other'"), ({"version": 2}, "c.json is not a result"):
        Path("c.json").write_text(json.dumps(values | change))
        assert message in shell.refused(*against)


def test_methods_and_settings_files(shell: tiny.Shell, folder: Path) -> None:
    """Plain decoding, a perfect draft model, a policy of the row alone; the drafter's own number in place of throughput."""
    for given, length, drafted in (
        (["none"], "length 0,", "tokens per pass: 1.00\n"),
        ([f"model({folder})", "--length", "3"], "length 3,", ""),
        (["max_gram", "--length", "heuristic(3)"], "length heuristic(start=3),", ""),
    ):
        out = shell.out(*CHECK, "--drafter", *given)
        assert length in out and "texts: 5 of 5 are the same" in out and out.endswith(drafted)
    Path("mine.toml").write_text(f'target = "{folder}"\ndrafter = "max_gram"\nlength = "throughput"\ndtype = "fp32"\n')
    code, out, err = shell("check", "r.jsonl", "-m", "mine.toml")
    assert code == 0 and err.startswith("foresay: settings from mine.toml")
    assert "drafter max_gram, length 10, rule speculative" in out


def test_other_outputs_fail_and_are_named(shell: tiny.Shell, recorded: list[dict[str, Any]], tmp_path: Path) -> None:
    """A changed token, a shorter recording, and another model."""
    [line] = [line for line in recorded if line.get("id") == "t3"]
    assert line["output"][7] != 40
    line["output"][7] = 40
    write(recorded)
    code, out, err = shell(*CHECK)
    assert (code, err) == (1, "") and "texts: 4 of 5 are the same" in out.splitlines()[-1]
    [shown] = [line for line in out.splitlines() if line.startswith("DIFFERENT OUTPUT")]
    assert shown.startswith("DIFFERENT OUTPUT: prompt 't3', token 7: recorded 'E' (40), now ")
    assert [row.split()[3] for row in out.splitlines()[1:4]] == ["3", "1", "4"]
    code, out, _ = shell(*CHECK, "--json")
    [found] = json.loads(out)["differences"]
    assert code == 1 and (found["id"], found["position"], found["recorded"]) == ("t3", 7, 40)
    recorded[1]["output"] = recorded[1]["output"][:20]
    write(recorded)
    code, out, _ = shell(*CHECK)
    assert code == 1 and ", token 20: recorded the end, now '" in out
    other = tiny.save(tmp_path / "other", tiny.llama(1))
    code, out, err = shell(*CHECK, "-m", str(other))
    assert (code, err) == (1, "") and "DIFFERENT OUTPUT: prompt 't" in out
    assert "note: the recording is of model " in out and f"this run '{other}'" in out


def test_a_worse_draft_fails(shell: tiny.Shell, tmp_path: Path) -> None:
    """A draft model that was replaced: the outputs are the same, and tokens per pass fell; a rise is no failure."""
    command = [*CHECK, "--drafter", "model(draft)", "--length", "3"]
    for seed, file in ((0, "c.json"), (1, "d.json")):
        tiny.save(tmp_path / "draft", tiny.llama(seed))
        assert shell(*command, "--save", file)[0] == 0
    code, out, err = shell(*command, "--against", "c.json")
    assert (code, err) == (1, "") and "DIFFERENT" not in out
    assert "FEWER TOKENS PER PASS: total: " in out and out.splitlines()[-1].startswith("texts: 5 of 5 are the same")
    code, out, _ = shell(*command, "--against", "c.json", "--tolerance", "0.9")
    assert code == 0 and "FEWER" not in out
    tiny.save(tmp_path / "draft")
    code, out, _ = shell(*command, "--against", "d.json")
    assert code == 0 and "more tokens per pass: total: " in out


def test_sampled_outputs(shell: tiny.Shell) -> None:
    sampled = ["check", "sampled.jsonl", "--dtype", "fp32"]
    assert "texts: 5 of 5 are the same" in shell.out(*sampled, "--drafter", "self(1)", "--rule", "match")
    drafted = [*sampled, "--drafter", "self(1)"]
    assert "cannot be compared: under rule 'speculative' the text of a seed" in shell.refused(*drafted)
    shell.out(*drafted, "--save", "c.json")
    lines = shell.out(*drafted, "--against", "c.json").splitlines()
    assert "same" not in lines[0] and lines[-1].endswith("(+0.0%)")
    assert lines[-1].startswith("texts: not compared (under rule 'speculative' the text of a seed depends on")
    [line] = shell.objects(*drafted, "--against", "c.json", "--json")
    assert line["texts"] is None and "rule 'speculative'" in line["not_compared"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["check", "tokens.jsonl", *CHECK[2:]], "has another tokenizer"),
        (["check", "larger.jsonl", *CHECK[2:]], "has 4000 tokens"),
        (["check", "unnamed.jsonl", *CHECK[2:]], "RECORDING unnamed.jsonl "),
        (["check", "none.jsonl"], "RECORDING none.jsonl "),
        (["check", "empty.jsonl"], "contains no outputs"),
        (["check", "cache.json"], "lacks sampling parameters"),
        (["check", "log.txt"], "contains outputs alone"),
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
def test_wrong_files_and_options_are_refused(
    shell: tiny.Shell, recorded: list[dict[str, Any]], args: list[str], message: str
) -> None:
    header, *lines = recorded
    changed: dict[str, dict[str, Any]] = {"tokens": {"tokenizer": "0" * 64}, "unnamed": {"model": ""}}
    changed["larger"] = {"tokenizer": "0" * 64, "vocab_size": 4000}
    for name, change in changed.items():
        text = "".join(json.dumps(line) + "\n" for line in (header | change, *lines))
        Path(f"{name}.jsonl").write_text(text)
    Path("empty.jsonl").write_text(json.dumps(header) + "\n")
    Path("cache.json").write_text('{"1_2": "1_2_3"}')
    Path("log.txt").write_text("tensor([[1, 2]])\n")
    assert message in shell.refused(*args) and not Path("texts").exists()


def test_a_terminal_sees_progress_and_ctrl_c_writes_nothing(shell: tiny.Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, shown = shell.watched(*CHECK)
    assert code == 0 and "texts: 5 of 5 are the same" in out and "Checking" in shown
    step, left = Session.step, [None, None]

    def interrupted(session: Session) -> Any:
        """In the third step."""
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return step(session)

    monkeypatch.setattr(Session, "step", interrupted)
    assert shell(*CHECK, "--save", "c.json") == (130, "", "")
    assert not left and not Path("c.json").exists()
