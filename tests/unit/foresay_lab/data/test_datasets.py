"""Data sets: every format and file type, and everything that can be wrong with one."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foresay.errors import ConfigError, UnknownNameError
from foresay_lab.data.datasets import FORMATS, load_items, subset
from foresay_lab.data.items import PromptItem

MMLU = {"question": "Which?", "A": "one", "B": "two", "C": "three", "D": "four"}
MMLU_PROMPT = (
    "A multiple-choice question:\n\nWhich?\n\nA. one\nB. two\nC. three\nD. four\n\n"
    "Which option is right? Answer with its letter first, and then say why in a sentence or two."
)
GSM8K_TASK = "\n\nWork it out step by step, and end with a line that says only: Answer: <number>"


def jsonl(*records: Any) -> str:
    return "\n".join(json.dumps(record) for record in records) + "\n"


def written(tmp_path: Path, name: str, content: str | bytes) -> str:
    """The path of a file that has been written, packed where its name ends so."""
    raw = content.encode() if isinstance(content, str) else content
    path = tmp_path / name
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return str(path)


def refusal(source: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_items(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_json_lines(tmp_path: Path, packed: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    content = jsonl(
        {"prompt": "a\u2028b", "other": 3},
        {"messages": messages, "id": 7, "category": "talk", "followups": ["And?"]},
        {"prompt": "x = ", "raw": True, "id": None, "category": None},
    )
    content = content.replace("\\u2028", "\u2028").replace("\n", "\r\n\r\n", 1)
    source = written(tmp_path, f"my.prompts.jsonl{packed}", f"\ufeff{content}")
    assert load_items(source) == [
        PromptItem("my.prompts-1", "a\u2028b"),
        PromptItem("7", ({"role": "user", "content": "Hello"},), "talk", ("And?",)),
        PromptItem("my.prompts-4", "x = ", raw=True),
    ]


def test_json_lists(tmp_path: Path) -> None:
    records = [
        {"prompt": "a"},
        {"instruction": "Do", "input": " "},
        {"instruction": "Do", "input": "this", "output": "."},
    ]
    expected = [PromptItem("p-1", "a"), PromptItem("p-2", "Do"), PromptItem("p-3", "Do\n\nthis")]
    assert load_items(written(tmp_path, "p.json", "\n" + json.dumps(records, indent=1))) == expected
    assert load_items(written(tmp_path, "p.json.gz", jsonl(*records))) == expected  # lines under the ending .json


def test_text_has_a_prompt_per_line(tmp_path: Path) -> None:
    source = written(tmp_path, "p.txt", "one\r\n\n  \ntwo\x0c ")
    assert load_items(source) == [PromptItem("p-1", "one"), PromptItem("p-4", "two\x0c ")]


def test_csv(tmp_path: Path) -> None:
    source = written(tmp_path, "p.csv", 'id,prompt,raw,category\n,"a ""b""\nc",,\n\nx,d,true,code\r\n')
    assert load_items(source) == [PromptItem("p-2", 'a "b"\nc'), PromptItem("x", "d", "code", raw=True)]


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.csv"])
def test_the_field_may_be_named(tmp_path: Path, name: str) -> None:
    content = "body,prompt\nb,a\n" if name == "p.csv" else jsonl({"prompt": "a", "messages": [], "body": "b"})
    assert [item.prompt for item in load_items(written(tmp_path, name, content), field="body")] == ["b"]


@pytest.mark.parametrize(
    ("format", "record", "expected"),
    [
        ("gsm8k", {"question": "2 + 3?", "answer": "#### 5"}, PromptItem("gsm8k-1", f"2 + 3?{GSM8K_TASK}")),
        ("mmlu", {**MMLU, "answer": "B"}, PromptItem("mmlu-1", MMLU_PROMPT)),
        (
            "mmlu",
            {"question": "Which?", "choices": ["one", "two", "three", "four"], "subject": "old_maps", "answer": 1},
            PromptItem("mmlu-1", MMLU_PROMPT.replace("question:", "question about old maps:"), "old_maps"),
        ),
        (
            "mmlu",
            {"question": "Which?", "choice0": "one", "choice1": "two", "choice2": "three", "choice3": "four"},
            PromptItem("mmlu-1", MMLU_PROMPT),
        ),
        (
            "humaneval",
            {"task_id": "T/0", "prompt": "def f():\n", "test": ""},
            PromptItem("T/0", "def f():\n", raw=True),
        ),
        ("humaneval", {"prompt": "def f():\n"}, PromptItem("humaneval-1", "def f():\n", raw=True)),
        (
            "mt_bench",
            {"question_id": 81, "category": "maths", "turns": ["First.", "Second.", "Third."]},
            PromptItem("mt_bench-81", "First.", "maths", ("Second.", "Third.")),
        ),
        ("mt_bench", {"prompt_id": 5, "prompt": ["First."]}, PromptItem("mt_bench-5", "First.")),
        ("hellaswag", {"prompt": "A man"}, PromptItem("hellaswag-1", "A man", raw=True)),
        (
            "hellaswag",
            {"ctx": "A man", "activity_label": "Rowing", "endings": ["rows"]},
            PromptItem("hellaswag-1", "A man", "Rowing", raw=True),
        ),
        ("alpaca", {"instruction": "Do", "input": "", "output": "x"}, PromptItem("alpaca-1", "Do")),
        ("alpaca", {"instruction": "Do", "input": "this"}, PromptItem("alpaca-1", "Do\n\nthis")),
    ],
)
def test_formats(tmp_path: Path, hub: Any, format: str, record: dict[str, Any], expected: PromptItem) -> None:
    """From lines, from a list and from the hub."""
    hub({"train": [record]})
    for source in (
        written(tmp_path, "a.jsonl", jsonl(record)),
        written(tmp_path, "a.json", json.dumps([record])),
        "owner/set",
    ):
        assert load_items(source, format=format) == [expected]


def test_mmlu_as_csv(tmp_path: Path) -> None:
    second = ["question", "A", "B", "C", "D", "A"]  # cells that are names of columns
    rows = io.StringIO()
    csv.writer(rows).writerows([[*MMLU.values(), "B"], second])
    bare = load_items(written(tmp_path, "a_test.csv", rows.getvalue()), format="mmlu")
    assert [item.id for item in bare] == ["mmlu-1", "mmlu-2"]
    assert bare[0].prompt == MMLU_PROMPT
    headed = load_items(
        written(tmp_path, "b.csv", "subject,question,A,B,C,D,answer\nart,Which?,one,two,three,four,C\n"), format="mmlu"
    )
    assert headed == [PromptItem("mmlu-2", MMLU_PROMPT.replace("question:", "question about art:"), "art")]


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_record_of_another_format(tmp_path: Path, format: str) -> None:
    good = {
        "gsm8k": {"question": "2?"},
        "mmlu": MMLU,
        "humaneval": {"prompt": "def"},
        "mt_bench": {"turns": ["One."]},
        "hellaswag": {"prompt": "A"},
        "alpaca": {"instruction": "Do"},
    }[format]
    source = written(tmp_path, "a.jsonl", jsonl(good, good, {"body": "x", "n": 1}))
    message = refusal(source, format=format)
    assert message.startswith(f"{source}, line 3: no field '") and message.endswith("'; the record has: body, n")


@pytest.mark.parametrize(
    ("format", "record", "message"),
    [
        ("gsm8k", {"question": 3}, "the field 'question' must be a text, not 3"),
        ("gsm8k", {"question": " "}, "the field 'question' is empty"),
        ("mmlu", {**MMLU, "C": ""}, "the field 'C' is empty"),
        ("mmlu", {"question": "Q", "choices": ["a", "b"]}, "the field 'choices' has 2 options instead of 4"),
        ("mmlu", {"question": "Q", "choices": "abcd"}, "the field 'choices' must be a list of texts, not 'abcd'"),
        ("mmlu", {**MMLU, "subject": 3}, "the field 'subject' must be a text, not 3"),
        ("humaneval", {"prompt": "x", "task_id": [1]}, "the field 'task_id' must be a text, not [1]"),
        ("mt_bench", {"turns": []}, "the field 'turns' must be a list of texts, not []"),
        ("mt_bench", {"turns": ["a", 2]}, "the field 'turns[1]' must be a text, not 2"),
        ("mt_bench", {"turns": ["a", ""]}, "the field 'turns[1]' is empty"),
        ("hellaswag", {"ctx": None}, "the field 'ctx' must be a text, not None"),
        ("alpaca", {"instruction": "Do", "input": 3}, "the field 'input' must be a text, not 3"),
        (None, {"prompt": ""}, "the field 'prompt' is empty"),
        (None, {"prompt": "a\ud800"}, "the field 'prompt' has a lone surrogate at character 1"),
        (None, {"prompt": {"a": "b" * 99}}, "the field 'prompt' must be a text, not {'a': '" + "b" * 53 + "..."),
        (None, {"prompt": "a", "raw": "yes"}, "the field 'raw' must be true or false, not 'yes'"),
        (None, {"prompt": "a", "raw": 1}, "the field 'raw' must be true or false, not 1"),
        (None, {"prompt": "a", "category": ["b"]}, "the field 'category' must be a text, not ['b']"),
        (None, {"prompt": "a", "id": True}, "the field 'id' must be a text, not True"),
        (None, {"prompt": "a", "followups": "b"}, "the field 'followups' must be a list of texts, not 'b'"),
        (None, {"prompt": "a", "followups": ["b"], "raw": True}, "raw applies to a text to be continued, not"),
        (None, {"prompt": "a", "messages": []}, "the record has both 'prompt' and 'messages'; choose one with field"),
        (None, {"body": "a"}, "no field 'prompt', 'messages' or 'instruction'; the record has: body; see field and"),
        (None, {}, "no field 'prompt', 'messages' or 'instruction'; the record has: no fields; see field and format"),
        (None, {"messages": []}, "the field 'messages' is an empty list"),
        (None, {"messages": "Hello"}, None),
        (None, {"messages": ["Hello"]}, "messages[0] must be a message with 'role' and 'content'"),
        (None, {"messages": [{"role": "user"}]}, "messages[0] must be a message with 'role' and 'content'"),
        (None, {"messages": [{"role": "me", "content": "a"}]}, "messages[0] has role='me'; known roles: system, user,"),
        (None, {"messages": [{"role": "user", "content": ""}]}, "the field 'messages[0].content' is empty"),
        (
            None,
            {"messages": [{"role": "assistant", "content": "a"}]},
            "the field 'messages' ends with an assistant message",
        ),
        (None, {"messages": [{"role": "user", "content": "a", "n": 1}]}, "the field 'messages[0].n' must be a text"),
    ],
)
def test_fields_that_are_wrong(
    tmp_path: Path, hub: Any, format: str | None, record: dict[str, Any], message: str | None
) -> None:
    source = written(tmp_path, "a.jsonl", "\n" + jsonl(record))
    if message is None:
        assert load_items(source)[0].prompt == "Hello"  # a text under `messages` is a prompt all the same
        return
    assert refusal(source, format=format).startswith(f"{source}, line 2: {message}")
    hub({"test": [record]})
    assert refusal("set", format=format).startswith(f"set (test), row 1: {message}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "a"}\n\n{"prompt"', "a.jsonl, line 3: not JSON: "),
        ("a.jsonl", '{"prompt": "a"}\n["b"]', "a.jsonl, line 2: list instead of a JSON object"),
        ("a.jsonl", "[" * 100_000, "a.jsonl, line 1: not JSON: "),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n\n', "a.jsonl, line 2: not UTF-8 text: byte 0xff"),
        ("a.jsonl.gz", b"\n\xe9", "a.jsonl.gz, line 2: not UTF-8 text: byte 0xe9"),
        (
            "a.json",
            '[{"prompt": "a"},\n {"prompt" "b"}]',
            "a.json, line 2: not JSON: Expecting ':' delimiter at column 12",
        ),
        ("a.json", "[" * 100_000, "a.json: not JSON: "),
        ("a.json", '[{"prompt": "a"}, 3]', "a.json, record 2: int instead of a JSON object"),
        ("a.json", '[{"prompt": "a"}, {"prompt": 3}]', "a.json, record 2: the field 'prompt' must be a text, not 3"),
        ("a.json", '{\n "prompt": "a"\n}', "a.json, line 1: not JSON: "),
        ("a.csv", 'prompt\na\n"b', "a.csv, line 3: not CSV: "),
        ("a.csv", "prompt,id\na,1\n\nb\n", "a.csv, line 4: 1 columns instead of 2: prompt, id"),
        ("a.csv", "prompt,id,prompt\na,1,b\n", "a.csv, line 1: the header row has the column 'prompt' twice"),
        ("a.csv", "a\nb\n", "a.csv, line 2: no field 'prompt', 'messages' or 'instruction'; the record has: a; see"),
        ("a.csv", 'id,prompt\n1,"a\nb"\n1,c\n', "a.csv, line 4: the id '1' is already used in "),
        ("a.csv", "prompt\n", "'{}' contains no prompts"),
        ("a.txt", " \n\n", "'{}' contains no prompts"),
        ("a.json", "", "'{}' contains no prompts"),
        ("a.md", "a", "'{}' must end in .jsonl, .json, .csv or .txt, each with or without .gz"),
        ("a.parquet", b"\xff", "'{}' must end in .jsonl, .json, .csv or .txt, each with or without .gz"),
        ("a", "a", "'{}' must end in .jsonl, .json, .csv or .txt, each with or without .gz"),
        ("a.tar.gz", "a", "'{}' is an archive; unpack it first and name one of its files"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    source = written(tmp_path, name, content)
    where = message.format(source) if "{}" in message else str(tmp_path / message)
    assert refusal(source).startswith(where)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name in ("none.jsonl", "none/x.md", "./none"):
        assert refusal(str(tmp_path / name)) == f"cannot read {str(tmp_path / name)!r}: No such file or directory"
    assert refusal("none.csv") == "cannot read 'none.csv': No such file or directory"
    assert refusal("-") == "cannot read '-': No such file or directory"
    assert refusal(str(tmp_path)) == f"cannot read {str(tmp_path)!r}: Is a directory"
    assert refusal("a\0.txt") == "cannot read 'a\\x00.txt': embedded null byte"
    (tmp_path / "plain.txt.gz").write_bytes(b"plain")
    assert refusal(str(tmp_path / "plain.txt.gz")).endswith("plain.txt.gz': Not a gzipped file (b'pl')")
    packed = gzip.compress(b"a text that is long enough to be cut " * 9)
    (tmp_path / "cut.txt.gz").write_bytes(packed[:30])
    assert "cut.txt.gz': Compressed file ended" in refusal(str(tmp_path / "cut.txt.gz"))
    (tmp_path / "bad.txt.gz").write_bytes(packed[:12] + b"\xff" * 9 + packed[21:])
    assert refusal(str(tmp_path / "bad.txt.gz")).startswith("cannot read ")


def test_mmlu_rows_of_another_length(tmp_path: Path) -> None:
    source = written(tmp_path, "a.csv", "Which?,one,two,three,four,A\nWhich?,one,two,A\n")
    message = f"{source}, line 2: 4 columns instead of 6: question, A, B, C, D, answer"
    assert refusal(source, format="mmlu") == message


def test_ids_that_clash(tmp_path: Path) -> None:
    source = written(tmp_path, "a.jsonl", jsonl({"prompt": "x", "id": "a-3"}, {"prompt": "y"}, {"prompt": "z"}))
    assert refusal(source) == f"{source}, line 3: the id 'a-3' is already used in {source}, line 1"


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    text, lines = written(tmp_path, "a.txt", "a"), written(tmp_path, "a.jsonl", jsonl({"prompt": "a"}))
    with pytest.raises(UnknownNameError, match=r"unknown format 'gsm8'\. Did you mean 'gsm8k'\? Known: alpaca, gsm8k,"):
        load_items(lines, format="gsm8")
    assert (
        refusal(lines, format="gsm8k", field="x")
        == "field='x' cannot be combined with format='gsm8k', which defines its fields; give one of them"
    )
    assert refusal(lines, split="test").startswith("split='test' applies to data sets of the Hugging Face hub, and '")
    for options in ({"format": "gsm8k"}, {"field": "x"}, {"split": "test"}):
        assert refusal("shipped", **options).endswith(" does not apply to the shipped data set; leave it out")
    assert (
        refusal(text, field="x") == f"field='x' does not apply to {text!r}: lines of text have no fields; leave it out"
    )
    assert (
        refusal(text, format="gsm8k")
        == f"format='gsm8k' does not apply to {text!r}: lines of text have no fields; leave it out"
    )


def test_categories(tmp_path: Path) -> None:
    source = written(tmp_path, "a.jsonl", jsonl(*({"prompt": "a", "category": name} for name in ("x", "y", "", "x"))))
    assert [item.id for item in load_items(source, category="x")] == ["a-1", "a-4"]
    with pytest.raises(UnknownNameError, match=r"unknown category 'z'\. Known: x, y\."):
        load_items(source, category="z")
    plain = written(tmp_path, "b.txt", "a")
    assert refusal(plain, category="x") == f"category='x': the prompts of {plain!r} have no categories; leave it out"


# The Hugging Face hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand in for the library; its calls are listed."""

    def install(data: Any) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []

        def load_dataset(*arguments: Any) -> Any:
            asked.append(arguments)
            if isinstance(data, Exception):
                raise data
            return data

        module = ModuleType("datasets")
        module.load_dataset = load_dataset  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", module)
        return asked

    return install


def test_a_set_of_the_hub(hub: Any) -> None:
    asked = hub({"train": [{"prompt": "a"}], "validation": [{"prompt": "b"}], "dev": [{"prompt": "c"}, {"body": "d"}]})
    assert load_items("owner/my-set:main") == [PromptItem("my-set-1", "b")]
    assert load_items("set", split="train") == [PromptItem("set-1", "a")]
    assert asked == [("owner/my-set", "main"), ("set", None)]
    assert refusal("o/set", split="dev").startswith("o/set (dev), row 2: no field 'prompt', ")
    assert refusal("o/set", split="none") == "'o/set' has no split 'none'; it has: train, validation, dev"
    assert refusal("o/set", split="") == "'o/set' has no split ''; it has: train, validation, dev"


def test_a_set_of_the_hub_without_a_usual_split(hub: Any) -> None:
    hub({"dev": []})
    assert refusal("o/set") == "'o/set' has none of the splits test, validation, train; it has: dev"
    assert refusal("o/set", split="dev") == "'o/set' contains no prompts"


def test_a_hub_that_cannot_be_reached(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(ConnectionError("no route\n to host"))
    assert refusal("o/set") == "'o/set' is not a file and cannot be read from the Hugging Face hub: no route to host"
    hub(RuntimeError())
    assert refusal("o/set").endswith("the Hugging Face hub: RuntimeError")

    def rows() -> Any:
        yield {"prompt": "a"}
        raise OSError("gone")

    hub({"test": rows()})
    assert refusal("o/set") == "'o/set' is not a file and cannot be read from the Hugging Face hub: gone"
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refusal("o/set") == (
        "'o/set' is not a file; to read it from the Hugging Face hub: pip install 'foresay[lab]'"
    )


def test_a_subset_of_a_file(tmp_path: Path) -> None:
    records = [{"prompt": "p", "id": f"{name}{i}", "category": name} for name in "ab" for i in range(6)]
    source = written(tmp_path, "a.jsonl", jsonl(*records))
    assert [item.id for item in load_items(source, count=5, seed=1)] == [
        item.id for item in subset(load_items(source), 5, seed=1)
    ]
    assert len(load_items(source, category="b", count=6)) == 6
    assert refusal(source, category="b", count=7) == "count=7 must be at most 6, the number of prompts"
    assert refusal(source, count=0) == "count=0 must be an integer at least 1"
    assert refusal(source, count=1, seed=-1) == "seed=-1 must be an integer at least 0"
