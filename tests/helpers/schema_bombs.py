"""Schemas of a few bytes that take much to compile, or try to."""

from __future__ import annotations

from typing import Any


def _multiple(number: float, kind: str = "integer") -> dict[str, Any]:
    return {"type": kind, "multipleOf": number}


def _pattern(text: str) -> dict[str, Any]:
    return {"type": "string", "pattern": text}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _doubled(how: str) -> dict[str, Any]:
    """25 definitions, each of which names the next one twice."""
    each = {f"a{i}": {how: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(25)}
    return {"$defs": {**each, "a25": {"type": "integer"}}, "$ref": "#/$defs/a0"}


PRODUCT = {"allOf": [_multiple(9973, "number"), _multiple(9967, "number")]}
"""Each of the two is taken; together they make an automaton of 99,400,891 states."""
BOMBS: dict[str, dict[str, Any]] = {
    "a large multiple": _multiple(9_999_991),
    "a large multiple, with decimals": _multiple(9999.991, "number"),
    "a product of multiples": PRODUCT,
    "one of many multiples": {"anyOf": [_multiple(number) for number in range(900, 1000)]},
    "a list of multiples": {"type": "array", "prefixItems": [_multiple(9900 + i) for i in range(90)], "minItems": 90},
    "nested objects": _nested(12),
    "a large enumeration": {"enum": [f"value{i}" for i in range(4500)]},
    "numbers one by one": {"enum": list(range(9000))},
    "many alternatives": {"anyOf": [{"type": "object", "required": [f"k{i}"]} for i in range(1000)]},
    "many properties": {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(1800)}},
    "a reference to itself": {"$ref": "#"},
    "references in a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "lists of lists": _doubled("prefixItems") | {"type": "array"},
    "all of all": _doubled("allOf"),
    "any of any": _doubled("anyOf"),
    "repeated repetitions": _pattern("^(a{1,1000}){1,1000}$"),
    "repetitions of anything": _pattern("^(.{1,1000}x){1,1000}$"),
    "a billion letters": _pattern("^a{1000000000}$"),
    "a determinized choice": _pattern("^(a|b)*a(a|b){1000}$"),
    "parentheses": _pattern("(" * 20_000 + "a" + ")" * 20_000),
    "optional letters": _pattern("a?" * 10_000 + "a" * 10_000),
    "an intersection": {"allOf": [_pattern(f"^(..{{{i}}})*$") for i in (2, 3, 5, 7, 11, 13, 17, 19, 23)]},
    "a billion items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "a billion characters": {"type": "string", "minLength": 10**9},
    "large bounds": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "blanks of its own": {"x-guidance": {"whitespace_pattern": "(a|b)*a(a|b){25}"}, "type": "array"},
}
