"""Values of calls: objects that arrive in pieces, wherever they are cut, and plain texts by the schemas that real tools have."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.text.tool_calls.loose_json import LooseJson
from foresay.text.tool_calls.schema_types import Allowed

TEXTS = st.sampled_from(['a"b', "}]{[", "\\", '\\\\"', "ü\n😀", ",:", ""])
ANYTHING = st.recursive(
    TEXTS | st.floats(0, 1) | st.integers(-9, 99) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(value=st.dictionaries(st.sampled_from("abcd"), ANYTHING), ascii=st.booleans(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_members_of_any_object_cut_anywhere(value: dict[str, Any], ascii: bool, data: st.DataObject) -> None:
    text = " \n" + json.dumps(value, ensure_ascii=ascii, indent=data.draw(st.sampled_from([None, 2]))) + " rest {"
    steps = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=9))
    found, at, grown, rest = LooseJson(), 0, dict.fromkeys(value, ""), ""
    for step in itertools.cycle(steps):
        if at >= len(text):
            break
        part = text[at : at + step]
        rest += part if found.done else found.push(part)
        for name, now in found.members.items():
            assert now.startswith(grown[name].rstrip()), "a member only grows"
            grown[name] = now
        at += len(part)
    assert rest == " rest {" and found.done and not found.broken
    assert {name: found.value(name) for name in found.members} == value == json.loads(found.text)
    assert found.complete == set(value)


def test_an_object_that_is_cut_short_or_none() -> None:
    found = LooseJson()
    assert found.push('{"a": "x}", "b": [1, {') == ""
    assert not found.done and found.complete == {"a"} and found.members["b"] == "[1, {"
    others = ["x", "[1]", '"a"', "{1: 2}", "{a b}", "{a}", '{"a" "b": 1}']
    python = ["(a='x' y')", "(a={b: 1})", "(a='x' if y else 'z')"]
    for opening, texts in (("{", others), ("(", python)):
        for text in texts:
            found = LooseJson(opening)
            found.push(text)
            assert found.broken and not found.done, text


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
        ('{"a": "x"\n</end>}', {"a": "x"}),
    ],
)
def test_quotes_in_texts_words_as_keys_and_an_end_after_a_text(text: str, value: Any) -> None:
    for step in range(1, len(text) + 1):
        found, rest = LooseJson(ends=["</end>"]), ""
        for at in range(0, len(text), step):
            rest += text[at : at + step] if found.broken else found.push(text[at : at + step])
        ends = "</end>" in text
        assert (rest, found.broken, found.done) == ("</end>}" if ends else "", ends, not ends)
        assert found.text + rest == text
        found.close()
        assert json.loads(found.json) == value


STRING, NULL, ARRAY = {"type": "string"}, {"type": "null"}, {"type": "array"}
WHOLE: dict[str, Any] = {
    "$defs": {"text": STRING, "map": {"type": "object"}, "self": {"anyOf": [{"$ref": "#/$defs/self"}, NULL]}, "a/b": NULL},
}  # fmt: skip
VALUES: list[tuple[Any, dict[str, Any]]] = [
    (STRING, {"5": "5", "null": "null", '"x"': '"x"'}),
    ({"type": ["string", "null"]}, {"5": "5", "null": None}),
    ({"anyOf": [STRING, NULL]}, {"None": None, "[1]": "[1]"}),
    ({"oneOf": [STRING, ARRAY]}, {"[1]": "[1]"}),
    ({"type": "string", "nullable": True}, {"null": None}),
    ({"$ref": "#/$defs/text"}, {"true": "true"}),
    ({"allOf": [{"$ref": "#/$defs/text"}], "description": "a text"}, {"1": "1"}),
    ({"anyOf": [{"$ref": "#/$defs/map"}, NULL]}, {"{'a': True}": {"a": True}}),
    ({"anyOf": [{"type": "integer"}, NULL]}, {"None": None, "7": 7}),
    ({"type": "integer"}, {"7.0": 7, "NaN": "NaN"}),
    ({"type": "number"}, {"7.5": 7.5}),
    ({"type": "boolean"}, {"False": False, "perhaps": "perhaps"}),
    (ARRAY, {"[1, 2,]": [1, 2], "[" * 5000: "[" * 5000}),
    ({"type": "object"}, {"{'a': '\"'}": {"a": '"'}}),
    ({"properties": {"a": {}}}, {'{"a": 1}': {"a": 1}}),
    ({"enum": ["1", 1, None]}, {"1": "1"}),
    ({"enum": ["a", 1, True]}, {"1": 1, "True": True, "b": "b"}),
    ({"const": 3}, {"3": 3}),
    ({"enum": ["null"]}, {"null": "null"}),
    ({}, {"3": 3, "True": "True"}),
    (None, {"x": "x"}),
    ({"$ref": "#/$defs/none"}, {"3": 3}),
    ({"$ref": "#/$defs/a~1b"}, {"null": None}),
    ({"$ref": "#/$defs/self"}, {"null": None}),
]
"""Values of texts by schema."""


def test_values() -> None:
    for schema, text, value in ((schema, *one) for schema, values in VALUES for one in values.items()):
        found = json.loads(Allowed(schema, WHOLE).json_of(text))
        assert found == value and type(found) is type(value), (schema, text[:20])
    many: dict[str, Any] = {"anyOf": [{"$ref": "#"}] * 300}
    assert Allowed(many, many).json_of("3") == "3", "a schema of many parts allows anything"
