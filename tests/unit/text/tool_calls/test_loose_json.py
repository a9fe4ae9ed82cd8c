"""An object that arrives in pieces: its end and its members, wherever it is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from foresay.text.tool_calls.loose_json import LooseJson


def anything(chance: random.Random, depth: int = 0) -> Any:
    texts = ['a"b', "}]{[", "\\", '\\\\"', "ü\n😀", ",:", ""]
    kind = chance.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [anything(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind == 6:
        return {f"{chance.choice(texts)}{i}": anything(chance, depth + 1) for i in range(chance.randrange(4))}
    return [chance.choice(texts), chance.random(), chance.randrange(-9, 99), True, None][kind]


@pytest.mark.parametrize("seed", range(40))
def test_members_of_any_object_cut_anywhere(seed: int) -> None:
    chance = random.Random(seed)
    value = {f"k{i}": anything(chance) for i in range(chance.randrange(5))}
    text = " \n" + json.dumps(value, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 2])) + " rest {"
    found, at, grown = LooseJson(), 0, dict.fromkeys(value, "")
    rest = ""
    while at < len(text):
        step = chance.randrange(1, 9)
        if found.done:
            rest += text[at : at + step]
        else:
            rest += found.push(text[at : at + step])
        for name, now in found.members.items():
            assert now.startswith(grown[name].rstrip()), "a member only grows"
            grown[name] = now
        at += step
    assert rest == " rest {" and found.done and not found.broken
    assert {name: found.value(name) for name in found.members} == value == json.loads(found.text)
    assert found.complete == set(value)


@pytest.mark.parametrize("text", ["x", "[1]", '"a"', "{1: 2}", "{a b}", "{a}", '{"a" "b": 1}'])
def test_what_is_no_object(text: str) -> None:
    found = LooseJson()
    found.push(text)
    assert found.broken and not found.done


def test_an_object_that_is_cut_short() -> None:
    found = LooseJson()
    assert found.push('{"a": "x}", "b": [1, {') == ""
    assert not found.done and found.complete == {"a"} and found.members["b"] == "[1, {"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "He wrote "hi" ok"}', {"a": 'He wrote "hi" ok'}),
        ('{"a": "He wrote "hi"", "b": 1}', {"a": 'He wrote "hi"', "b": 1}),
        ('{"a": [""x" y" ]}', {"a": ['"x" y']}),
        ('{"a": "" , "b": ""}', {"a": "", "b": ""}),
        ("{'a': 'it's', 'b': ['x' 'y']}", {"a": "it's", "b": ["x' 'y"]}),
        ('{"a": "x" </en y"}', {"a": 'x" </en y'}),
        ('{a: "x", b_2 : {$c: [y]}}', {"a": "x", "b_2": {"$c": ["y"]}}),
    ],
)
def test_quotes_in_texts_and_words_as_keys(text: str, value: Any) -> None:
    for step in range(1, len(text) + 1):
        found = LooseJson(ends=["</end>"])
        rest = "".join(found.push(text[at : at + step]) for at in range(0, len(text), step))
        assert (json.loads(found.json), rest, found.done) == (value, "", True)


@pytest.mark.parametrize("text", ["(a='x' y')", "(a={b: 1})", "(a='x' if y else 'z')"])
def test_python_has_no_such_texts_and_keys(text: str) -> None:
    found = LooseJson("(")
    found.push(text)
    assert found.broken


def test_the_end_after_a_text() -> None:
    text = '{"a": "x"\n</end>}'
    for step in range(1, len(text) + 1):
        found, rest = LooseJson(ends=["</end>"]), ""
        for at in range(0, len(text), step):
            rest += text[at : at + step] if found.broken else found.push(text[at : at + step])
        assert found.broken and rest == "</end>}" and found.text + rest == text
        found.close()
        assert json.loads(found.json) == {"a": "x"}
