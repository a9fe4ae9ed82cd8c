"""Fields of a request: one rule for values that change nothing, and bounds that stop validation early.

Owns how a request's JSON becomes a model of pydantic's, and the first thing that is wrong with it as an error that names the
field. Knows no endpoint and no engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from foresay.server.errors import ApiError

T = TypeVar("T", bound=BaseModel)
Neutral = Mapping[str, Sequence[Any]]
"""Field -> the values that change nothing here: the API's defaults, and requests for what is done anyway."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_LONE = re.compile("[\ud800-\udfff]")
_DEPTH = 8
_SHOWN = 60
"""Characters of a wrong value that its error repeats."""


class Fields(BaseModel):
    """An object of a request. Unknown fields are refused by name; null, and values that change nothing, count as absent."""

    model_config = ConfigDict(extra="forbid")
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _only_what_changes_something(cls, data: Any) -> Any:
        """The object without neutral values, and with one unknown field at most, so that one error is collected for them."""
        if not isinstance(data, dict):
            return data
        known = _names(cls)
        unknown = next((name for name in data if name not in known and not cls._is_neutral(name, data[name])), None)
        given = {name: data[name] for name in known if name in data and not cls._is_neutral(name, data[name])}
        return given if unknown is None else {**given, unknown: data[unknown]}

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        if value is None:
            return True
        return any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in cls.neutral.get(name, ())
        )


@cache
def _names(kind: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


def at_most(limit: int) -> BeforeValidator:
    """A bound of a list or object, checked before its items are: validating millions of them would stop the event loop."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict):
            check_count("items", len(value), limit)
        return value

    return BeforeValidator(check)


def check_count(what: str, count: int, limit: int) -> None:
    """Raise pydantic's error for more than `limit`. what: "items", or what is counted."""
    if count > limit:
        text = "{count} {what}; at most {limit} are allowed"
        raise PydanticCustomError("too_long", text, {"count": count, "what": what, "limit": limit})


def read(kind: type[T], body: bytes) -> T:
    """A request from its body. Raises ApiError (400) for the first thing that is wrong, which names the field."""
    try:
        data = from_json(body)
    except ValueError as error:
        raise _not_json(body, error) from None
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _first(error, data) from None


def _not_json(body: bytes, error: ValueError) -> ApiError:
    """A lone surrogate is JSON, and no text: the error names the field that contains it."""
    if _SURROGATE.search(body):
        try:
            path = _path_of_surrogate(json.loads(body))
        except (ValueError, RecursionError):
            path = ""
        if path:
            text = f"{path}: the text contains a lone surrogate (\\ud800 to \\udfff), which is no character"
            return ApiError(400, text, param=path, code="invalid_text")
    return ApiError(400, f"the body is not JSON: {error}", param="body", code="invalid_json")


def _path_of_surrogate(data: Any) -> str:
    """The field, at most _DEPTH levels deep, that contains the first lone surrogate; empty without one."""
    path: list[str] = []
    while isinstance(data, dict | list) and len(path) < _DEPTH and _has_surrogate(data):
        items: list[tuple[Any, Any]] = list(data.items() if isinstance(data, dict) else enumerate(data))
        while len(items) > 1:  # halves are searched without a call for each of millions of items
            half = items[: len(items) // 2]
            items = half if _has_surrogate(half) else items[len(half) :]
        name, data = items[0]
        path.append(str(name))
        if _LONE.search(str(name)):
            break
    return ".".join(path)


def _has_surrogate(data: Any) -> bool:
    return _LONE.search(json.dumps(data, ensure_ascii=False)) is not None


def _first(error: ValidationError, data: Any) -> ApiError:
    """The first wrong field. Of a field that takes several types, the type that came furthest explains it."""
    errors = [
        (_path(one["loc"], one["type"], data), one) for one in error.errors(include_url=False, include_context=False)
    ]
    top = errors[0][0][:1]
    own = [(path, one) for path, one in errors if path[:1] == top]
    path = max(
        (path for path, _ in own), key=lambda path: (len(path), [part for part in path if isinstance(part, int)])
    )
    found = [one for where, one in own if where == path]
    name = ".".join(map(str, path)) or "body"
    if found[0]["type"] == "extra_forbidden":
        return ApiError(400, f"{name!r} is not supported", param=name, code="unsupported_parameter")
    value = found[0]["input"]
    shown = f"={value!r}" if isinstance(value, str | int | float) and found[0]["type"] != "missing" else ""
    reasons = " / ".join(dict.fromkeys(one["msg"] for one in found))
    return ApiError(400, f"{name}{shown if len(shown) <= _SHOWN else ''}: {reasons}", param=name)


def _path(loc: Sequence[int | str], kind: str, data: Any) -> tuple[int | str, ...]:
    """Where an error lies in the request, without the names that pydantic gives to the types of a union."""
    path: list[int | str] = []
    for i, part in enumerate(loc):
        if isinstance(data, dict) and (part in data or (kind == "missing" and i == len(loc) - 1)):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            continue
        path.append(part)
    return tuple(path)
