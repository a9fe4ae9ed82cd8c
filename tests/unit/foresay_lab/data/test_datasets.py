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
from unittest.mock import ANY

import pytest

from foresay.errors import ConfigError, UnknownNameError
from foresay_lab.data.datasets import FORMATS, load_items, subset
from foresay_lab.data.items import PromptItem
from helpers.refusals import refused, refuses

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


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand in for the library of the Hugging Face hub; its calls are listed."""

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


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_json_lines_and_lists(tmp_path: Path, packed: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    content = jsonl(
        {"prompt": "a\u2028b", "other": 3},
        {"messages": messages, "id": 7, "category": "talk", "followups": ["And?"]},
        {"prompt": "x = ", "raw": True, "id": None, "category": None},
    )
    content = content.replace("\\u2028", "\u2028").replace("\n", "\r\n\r\n", 1)
    assert load_items(written(tmp_path, f"my.prompts.jsonl{packed}", f"\ufeff{content}")) == [
        PromptItem("my.prompts-1", "a\u2028b"),
        PromptItem("7", ({"role": "user", "content": "Hello"},), "talk", ("And?",)),
        PromptItem("my.prompts-4", "x = ", raw=True),
    ]
    records = [
        {"prompt": "a"},
        {"instruction": "Do", "input": " "},
        {"instruction": "Do", "input": "this", "output": "."},
    ]
    expected = [PromptItem("p-1", "a"), PromptItem("p-2", "Do"), PromptItem("p-3", "Do\n\nthis")]
    for text in ("\n" + json.dumps(records, indent=1), jsonl(*records)):  # lines under the ending .json, too
        assert load_items(written(tmp_path, f"p.json{packed}", text)) == expected


def test_text_and_csv(tmp_path: Path) -> None:
    source = written(tmp_path, "p.txt", "one\r\n\n  \ntwo\x0c ")
    assert load_items(source) == [PromptItem("p-1", "one"), PromptItem("p-4", "two\x0c ")]
    source = written(tmp_path, "p.csv", 'id,prompt,raw,category\n,"a ""b""\nc",,\n\nx,d,true,code\r\n')
    assert load_items(source) == [PromptItem("p-2", 'a "b"\nc'), PromptItem("x", "d", "code", raw=True)]
    record = jsonl({"prompt": "a", "messages": [], "body": "b"})
    for name, content in (("p.jsonl", record), ("p.json", record), ("p.csv", "body,prompt\nb,a\n")):
        assert [item.prompt for item in load_items(written(tmp_path, name, content), field="body")] == ["b"]
    # a text under `messages` is a prompt all the same
    assert load_items(written(tmp_path, "m.jsonl", jsonl({"messages": "Hello"})))[0].prompt == "Hello"


CHOICES = ["one", "two", "three", "four"]
RECORDS: list[tuple[str, dict[str, Any], PromptItem]] = [
    ("gsm8k", {"question": "2 + 3?", "answer": "#### 5"}, PromptItem("gsm8k-1", f"2 + 3?{GSM8K_TASK}")),
    ("mmlu", {**MMLU, "answer": "B"}, PromptItem("mmlu-1", MMLU_PROMPT)),
    (
        "mmlu",
        {"question": "Which?", "choices": CHOICES, "subject": "old_maps", "answer": 1},
        PromptItem("mmlu-1", MMLU_PROMPT.replace("question:", "question about old maps:"), "old_maps"),
    ),
    (
        "mmlu",
        {"question": "Which?", **{f"choice{i}": text for i, text in enumerate(CHOICES)}},
        PromptItem("mmlu-1", MMLU_PROMPT),
    ),
    ("humaneval", {"task_id": "T/0", "prompt": "def f():\n"}, PromptItem("T/0", "def f():\n", raw=True)),
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
]


def test_formats(tmp_path: Path, hub: Any) -> None:
    """From lines, from a list and from the hub; a record of another format is named."""
    assert {format for format, _, _ in RECORDS} == set(FORMATS)
    for format, record, expected in RECORDS:
        hub({"train": [record]})
        lines, listed = (
            written(tmp_path, *file) for file in (("a.jsonl", jsonl(record)), ("a.json", json.dumps([record])))
        )
        for source in (lines, listed, "owner/set"):
            assert load_items(source, format=format) == [expected]
        other = written(
            tmp_path, "b.jsonl", jsonl(record, record | {"task_id": "2", "prompt_id": 6, "question_id": 7}, {"n": 1})
        )
        message = refusal(other, format=format)
        assert message.startswith(f"{other}, line 3: no field '") and message.endswith("'; the record has: n")


def test_mmlu_as_csv(tmp_path: Path) -> None:
    second = ["question", "A", "B", "C", "D", "A"]  # cells that are names of columns
    rows = io.StringIO()
    csv.writer(rows).writerows([[*MMLU.values(), "B"], second])
    bare = load_items(written(tmp_path, "a_test.csv", rows.getvalue()), format="mmlu")
    assert [item.id for item in bare] == ["mmlu-1", "mmlu-2"] and bare[0].prompt == MMLU_PROMPT
    text = "subject,question,A,B,C,D,answer\nart,Which?,one,two,three,four,C\n"
    headed = load_items(written(tmp_path, "b.csv", text), format="mmlu")
    assert headed == [PromptItem("mmlu-2", MMLU_PROMPT.replace("question:", "question about art:"), "art")]
    source = written(tmp_path, "a.csv", "Which?,one,two,three,four,A\nWhich?,one,two,A\n")
    with refused(f"{source}, line 2", 4):
        load_items(source, format="mmlu")


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [fields]}


@pytest.mark.parametrize(
    ("format", "record", "named"),
    [
        ("gsm8k", {"question": 3}, "'question' must be a text, not 3"),
        ("gsm8k", {"question": " "}, "'question' is empty"),
        ("mmlu", {**MMLU, "C": ""}, "'C' is empty"),
        ("mmlu", {"question": "Q", "choices": ["a", "b"]}, "'choices' has 2 options"),
        ("mmlu", {"question": "Q", "choices": "abcd"}, "'choices' must be a list of texts, not 'abcd'"),
        ("mmlu", {**MMLU, "subject": 3}, "'subject' must be a text, not 3"),
        ("humaneval", {"prompt": "x", "task_id": [1]}, "'task_id' must be a text, not [1]"),
        ("mt_bench", {"turns": []}, "'turns' must be a list of texts, not []"),
        ("mt_bench", {"turns": ["a", 2]}, "'turns[1]' must be a text, not 2"),
        ("mt_bench", {"turns": ["a", ""]}, "'turns[1]' is empty"),
        ("hellaswag", {"ctx": None}, "'ctx' must be a text, not None"),
        ("alpaca", {"instruction": "Do", "input": 3}, "'input' must be a text, not 3"),
        (None, {"prompt": "a\ud800"}, "'prompt' has a lone surrogate at character 1"),
        (None, {"prompt": {"a": "b" * 99}}, "'prompt' must be a text, not {'a': '" + "b" * 53 + "..."),
        (None, {"prompt": "a", "raw": "yes"}, "'raw' must be true or false, not 'yes'"),
        (None, {"prompt": "a", "raw": 1}, "'raw' must be true or false, not 1"),
        (None, {"prompt": "a", "category": ["b"]}, "'category' must be a text, not ['b']"),
        (None, {"prompt": "a", "id": True}, "'id' must be a text, not True"),
        (None, {"prompt": "a", "followups": "b"}, "'followups' must be a list of texts, not 'b'"),
        (None, {"prompt": "a", "followups": ["b"], "raw": True}, "raw applies to a text"),
        (None, {"prompt": "a", "messages": []}, "both 'prompt' and 'messages'"),
        (None, {"body": "a"}, "no field 'prompt', 'messages' or 'instruction'; the record has: body"),
        (None, {}, "the record has: no fields"),
        (None, {"messages": []}, "'messages' is an empty list"),
        (None, {"messages": ["Hello"]}, "messages[0] must be a message"),
        (None, message(role="user"), "messages[0] must be a message"),
        (None, message(role="me", content="a"), "messages[0] has role='me'"),
        (None, message(role="user", content=""), "'messages[0].content' is empty"),
        (None, message(role="assistant", content="a"), "'messages' ends with an assistant message"),
        (None, message(role="user", content="a", n=1), "'messages[0].n' must be a text"),
    ],
)
def test_fields_that_are_wrong(
    tmp_path: Path, hub: Any, format: str | None, record: dict[str, Any], named: str
) -> None:
    hub({"test": [record]})
    source = written(tmp_path, "a.jsonl", "\n" + jsonl(record))
    for name, position in ((source, f"{source}, line 2: "), ("set", "set (test), row 1: ")):
        text = refusal(name, format=format)
        assert text.startswith(position) and named in text


@pytest.mark.parametrize(
    ("name", "content", "param"),
    [
        ("a.jsonl", '{"prompt": "a"}\n\n{"prompt"', ", line 3"),
        ("a.jsonl", '{"prompt": "a"}\n["b"]', ", line 2"),
        ("a.jsonl", "[" * 100_000, ", line 1"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n\n', ", line 2"),
        ("a.jsonl", jsonl({"prompt": "x", "id": "a-3"}, {"prompt": "y"}, {"prompt": "z"}), ", line 3: id"),
        ("a.jsonl.gz", b"\n\xe9", ", line 2"),
        ("a.json", '[{"prompt": "a"},\n {"prompt" "b"}]', ", line 2"),
        ("a.json", "[" * 100_000, ""),
        ("a.json", '[{"prompt": "a"}, 3]', ", record 2"),
        ("a.json", '[{"prompt": "a"}, {"prompt": 3}]', ", record 2"),
        ("a.json", '{\n "prompt": "a"\n}', ", line 1"),
        ("a.csv", 'prompt\na\n"b', ", line 3"),
        ("a.csv", "prompt,id\na,1\n\nb\n", ", line 4"),
        ("a.csv", "prompt,id,prompt\na,1,b\n", ", line 1"),
        ("a.csv", "a\nb\n", ", line 2"),
        ("a.csv", 'id,prompt\n1,"a\nb"\n1,c\n', ", line 4: id"),
        *((name, text, None) for name, text in (("a.csv", "prompt\n"), ("a.txt", " \n\n"), ("a.json", ""))),
        *((name, "a", None) for name in ("a.md", "a.parquet", "a", "a.tar.gz")),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, name: str, content: str | bytes, param: str | None) -> None:
    source = written(tmp_path, name, content)
    refuses(lambda: load_items(source), "path" if param is None else source + param, source if param is None else ANY)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    packed = gzip.compress(b"a text that is long enough to be cut " * 9)
    damaged = {"plain": b"plain", "cut": packed[:30], "bad": packed[:12] + b"\xff" * 9 + packed[21:]}
    for name, data in damaged.items():
        (tmp_path / f"{name}.txt.gz").write_bytes(data)
    names = ("none.jsonl", "none/x.md", "./none", "", *(f"{name}.txt.gz" for name in damaged))
    for name in (*(str(tmp_path / one) for one in names), "none.csv", "-", "a\0.txt"):
        refuses(lambda name=name: load_items(name), "path", name)  # type: ignore[misc]


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    text, lines = written(tmp_path, "a.txt", "a"), written(tmp_path, "a.jsonl", jsonl({"prompt": "a"}))
    refuses(lambda: load_items(lines, format="gsm8"), "format", "gsm8", UnknownNameError)
    for source, options, param in (
        (lines, {"format": "gsm8k", "field": "x"}, "field"),
        (lines, {"split": "test"}, "split"),
        *(("shipped", {name: value}, name) for name, value in (("format", "gsm8k"), ("field", "x"), ("split", "test"))),
        (text, {"field": "x"}, "field"),
        (text, {"format": "gsm8k"}, "format"),
        (text, {"category": "x"}, "category"),
    ):
        refuses(lambda: load_items(source, **options), param, options[param])  # type: ignore[arg-type] # noqa: B023


def test_categories_and_subsets(tmp_path: Path) -> None:
    source = written(tmp_path, "a.jsonl", jsonl(*({"prompt": "a", "category": name} for name in ("x", "y", "", "x"))))
    assert [item.id for item in load_items(source, category="x")] == ["a-1", "a-4"]
    refuses(lambda: load_items(source, category="z"), "category", "z", UnknownNameError)
    records = [{"prompt": "p", "id": f"{name}{i}", "category": name} for name in "ab" for i in range(6)]
    source = written(tmp_path, "a.jsonl", jsonl(*records))
    assert load_items(source, count=5, seed=1) == subset(load_items(source), 5, seed=1)
    assert len(load_items(source, category="b", count=6)) == 6
    for options, param, value in (
        ({"category": "b", "count": 7}, "count", 7),
        ({"count": 0}, "count", 0),
        ({"count": 1, "seed": -1}, "seed", -1),
    ):
        refuses(lambda: load_items(source, **options), param, value)  # type: ignore[arg-type] # noqa: B023


def test_a_set_of_the_hub(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub({"train": [{"prompt": "a"}], "validation": [{"prompt": "b"}], "dev": [{"prompt": "c"}, {"body": "d"}]})
    assert load_items("owner/my-set:main") == [PromptItem("my-set-1", "b")]
    assert load_items("set", split="train") == [PromptItem("set-1", "a")]
    assert asked == [("owner/my-set", "main"), ("set", None)]
    assert refusal("o/set", split="dev").startswith("o/set (dev), row 2: no field 'prompt', ")
    for split in ("none", ""):
        refuses(lambda split=split: load_items("o/set", split=split), "path", "o/set")  # type: ignore[misc]
    hub({"dev": []})
    for usual in (None, "dev"):
        refuses(lambda split=usual: load_items("o/set", split=split), "path", "o/set")  # type: ignore[misc]

    def rows() -> Any:
        yield {"prompt": "a"}
        raise OSError("gone")

    for data, reason in (
        (ConnectionError("no route\n to host"), "no route to host"),
        (RuntimeError(), "RuntimeError"),
        ({"test": rows()}, "gone"),
    ):
        hub(data)
        assert reason in refusal("o/set")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'foresay[lab]'" in refusal("o/set")
