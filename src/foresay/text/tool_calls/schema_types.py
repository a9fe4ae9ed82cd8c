"""The types of values that a JSON schema allows, and the value that a plain text stands for.

Owns the reading of the keywords that name types or values. Checks nothing else of a schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from foresay.text.tool_calls.loose_json import LooseJson
from foresay.text.tool_calls.parsers import as_json

_MAX_PARTS = 256
"""Parts of a schema that are read; one with more allows anything."""
_SHAPES = {"properties": "object", "items": "array"}
_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)


class Allowed:
    """The values that a schema allows."""

    def __init__(self, schema: Any, whole: Mapping[str, Any]) -> None:
        """whole: the schema to which references of this one refer."""
        self._whole, self._left = whole, _MAX_PARTS
        parts = self._alternatives(schema)
        values = [_values(one) for one in parts]
        self._values = [one for some in values for one in some or ()]
        self._types = {kind for one, some in zip(parts, values, strict=True) if some is None for kind in _types(one)}
        self.keywords = frozenset(key for one in parts for key in one)
        """Keywords of the alternatives."""

    @property
    def has_strings(self) -> bool:
        """True if a string is allowed, and anything is not."""
        return "any" not in self._types and (
            "string" in self._types or any(isinstance(one, str) for one in self._values)
        )

    @property
    def is_scalar(self) -> bool:
        """True if only numbers, true, false and null are allowed."""
        values = not any(isinstance(one, str | list | dict) for one in self._values)
        return values and self._types <= {"integer", "number", "boolean", "null"}

    @property
    def texts(self) -> list[str] | None:
        """The texts of all values; None if the schema does not name them."""
        rest = self._types - {"null"}
        texts = [one if isinstance(one, str) else json.dumps(one) for one in self._values]
        return None if rest else [*texts, *(["null"] if "null" in self._types else [])]

    def json_of(self, text: str) -> str:
        """Return the JSON of the value that a text stands for. Where strings are allowed, a text that may be one is one."""
        if text in self._values or (self._types == {"string"} and not self._values):
            return as_json(text)
        if "any" in self._types:
            with suppress(ValueError, RecursionError):
                return as_json(json.loads(text))
            return as_json(text)
        found = LooseJson("")
        rest = found.push(text.strip())
        is_whole = not found.broken and not rest
        found.close()
        if not is_whole or not found.json:
            return as_json(text)
        try:
            value = json.loads(found.json)
            written = as_json(value)
        except (ValueError, RecursionError):
            return as_json(text)
        kind = _type_of(value)
        if any(_type_of(one) == kind and one == value for one in self._values) or (
            value is None and "null" in self._types
        ):
            return written
        if "string" in self._types or (kind == "null" and text.strip().lower() != "null"):
            return as_json(text)
        if kind == "number" and "number" not in self._types and "integer" in self._types and value.is_integer():
            return as_json(int(value))
        return written

    def _alternatives(self, schema: Any) -> list[dict[str, Any]]:
        """Return the schemas of which one applies, without references and combinations."""
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0:
            return [{}]
        out: list[dict[str, Any]] = [
            {key: schema[key] for key in schema if key not in ("$ref", "allOf", "anyOf", "oneOf")}
        ]
        needed = [[self._resolved(schema["$ref"])]] if "$ref" in schema else []
        needed += [[one] for one in _list(schema, "allOf")]
        needed += [some for key in ("anyOf", "oneOf") if (some := _list(schema, key))]
        for some in needed:
            parts = [part for one in some for part in self._alternatives(one)]
            out = [{**one, **part} for one in out for part in parts][:_MAX_PARTS]
        return [*out, {"type": "null"}] if schema.get("nullable") is True else out

    def _resolved(self, reference: Any) -> Any:
        """Return the schema that a reference within the whole schema names."""
        found: Any = self._whole
        for name in str(reference).removeprefix("#").strip("/").split("/") if reference != "#" else ():
            name = name.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        return found


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema names, None if it names none."""
    found = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found if isinstance(found, list) else None


def _types(schema: Mapping[str, Any]) -> set[str]:
    found = schema.get("type")
    if isinstance(found, str):
        return {found}
    if isinstance(found, list) and found:
        return set(map(str, found))
    return next(({kind} for key, kind in _SHAPES.items() if key in schema), {"any"})


def _type_of(value: Any) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")
