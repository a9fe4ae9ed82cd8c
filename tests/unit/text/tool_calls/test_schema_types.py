"""Values of plain texts by the schemas that real tools have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foresay.text.tool_calls.schema_types import Allowed

STRING, NULL, ARRAY = {"type": "string"}, {"type": "null"}, {"type": "array"}
WHOLE: dict[str, Any] = {
    "$defs": {"text": STRING, "map": {"type": "object"}, "self": {"anyOf": [{"$ref": "#/$defs/self"}, NULL]}, "a/b": NULL},
}  # fmt: skip
VALUES: list[tuple[Any, str, Any]] = [
    (STRING, "5", "5"),
    (STRING, "null", "null"),
    (STRING, '"x"', '"x"'),
    ({"type": ["string", "null"]}, "5", "5"),
    ({"type": ["string", "null"]}, "null", None),
    ({"anyOf": [STRING, NULL]}, "None", None),
    ({"anyOf": [STRING, NULL]}, "[1]", "[1]"),
    ({"oneOf": [STRING, ARRAY]}, "[1]", "[1]"),
    ({"type": "string", "nullable": True}, "null", None),
    ({"$ref": "#/$defs/text"}, "true", "true"),
    ({"allOf": [{"$ref": "#/$defs/text"}], "description": "a text"}, "1", "1"),
    ({"anyOf": [{"$ref": "#/$defs/map"}, NULL]}, "{'a': True}", {"a": True}),
    ({"anyOf": [{"type": "integer"}, NULL]}, "None", None),
    ({"anyOf": [{"type": "integer"}, NULL]}, "7", 7),
    ({"type": "integer"}, "7.0", 7),
    ({"type": "number"}, "7.5", 7.5),
    ({"type": "integer"}, "NaN", "NaN"),
    ({"type": "boolean"}, "False", False),
    ({"type": "boolean"}, "perhaps", "perhaps"),
    ({"type": "array"}, "[1, 2,]", [1, 2]),
    ({"type": "object"}, "{'a': '\"'}", {"a": '"'}),
    ({"properties": {"a": {}}}, '{"a": 1}', {"a": 1}),
    ({"enum": ["1", 1, None]}, "1", "1"),
    ({"enum": ["a", 1, True]}, "1", 1),
    ({"enum": ["a", 1, True]}, "True", True),
    ({"enum": ["a", 1, True]}, "b", "b"),
    ({"const": 3}, "3", 3),
    ({"enum": ["null"]}, "null", "null"),
    ({}, "3", 3),
    ({}, "True", "True"),
    (None, "x", "x"),
    ({"$ref": "#/$defs/none"}, "3", 3),
    ({"$ref": "#/$defs/a~1b"}, "null", None),
    ({"$ref": "#/$defs/self"}, "null", None),
    ({"type": "array"}, "[" * 5000, "[" * 5000),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_values(schema: Any, text: str, value: Any) -> None:
    found = json.loads(Allowed(schema, WHOLE).json_of(text))
    assert found == value and type(found) is type(value)


def test_a_schema_of_many_parts_allows_anything() -> None:
    many: dict[str, Any] = {"anyOf": [{"$ref": "#"}] * 300}
    assert Allowed(many, many).json_of("3") == "3"


@pytest.mark.parametrize(
    ("schema", "texts", "has_strings"),
    [
        (STRING, None, True), ({"anyOf": [STRING, NULL]}, None, True), ({"enum": ["a", 1]}, ["a", "1"], True),
        ({"anyOf": [{"enum": ["a"]}, NULL]}, ["a", "null"], True), ({"type": "integer"}, None, False), ({}, None, False),
    ],
)  # fmt: skip
def test_texts_of_a_grammar(schema: Any, texts: list[str] | None, has_strings: bool) -> None:
    allowed = Allowed(schema, WHOLE)
    assert allowed.texts == texts and allowed.has_strings == has_strings
