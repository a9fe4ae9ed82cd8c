"""Fields of a request: values without effect, limits checked before validation, and errors that name a field.

Owns how a request's JSON becomes a pydantic model, and how its first validation error becomes an API error. Knows no endpoint
and no engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictStr, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from foresay.server.errors import ApiError, FieldError
from foresay.server.hints import ignore

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
Neutral = Mapping[str, Sequence[Any]]
"""Field -> values without effect: the API's defaults, and requests for behaviour that this server always has."""


class _Anything:
    """Equal to every value that is not true or false."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


ANYTHING = _Anything()
"""A value of `Neutral` for fields that have no effect whatever their value."""
MAX_ITEMS = 1024
"""Limit on the items of a list or the entries of an object."""
MAX_MESSAGES = 4096
"""Limit on a chat's messages plus their parts."""
MAX_TOOLS = 128
"""OpenAI's limit on the tools of a request."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_HUGE = re.compile(rb"\d[eE]\+?\d{3}")
"""Begins every number that may be too large for a float."""
_LONE = re.compile("[\ud800-\udfff]")
_OBJECT = re.compile(r"a valid dictionary or (instance of \w+|object to extract fields from)")
_DEPTH = 8


class Fields(BaseModel):
    """An object of a request. Unknown fields are rejected by name; null and values without effect count as absent."""

    model_config = ConfigDict(extra="forbid")
    neutral: ClassVar[Neutral] = {}
    hints: ClassVar[Mapping[str, str]] = {}
    """Fields that are accepted with any value, ignored and reported -> their names in reports."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        """Return the object without neutral values, and with the first unknown field only, since one error is enough."""
        if not isinstance(data, dict):
            return data
        for name in [name for name in data if name in cls.hints and not cls._is_neutral(name, data[name])]:
            ignore(cls.hints[name])
        data = {name: value for name, value in data.items() if name not in cls.hints}
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


def limit_parts(limit: int, *names: str) -> BeforeValidator:
    """Limit the number of items in a list plus those in their lists of some names, before any of them is validated."""

    def check(value: Any) -> Any:
        if isinstance(value, list):
            inner = [one.get(name) for one in value if isinstance(one, dict) for name in names]
            check_count(
                "messages and parts", len(value) + sum(len(one) for one in inner if isinstance(one, list)), limit
            )
        return value

    return BeforeValidator(check)


def typed(default: str = "") -> BeforeValidator:
    """Give an object without a type the default; one that is no type, so that the error names the types."""

    def check(value: Any) -> Any:
        return {**value, "type": default} if isinstance(value, dict) and value.get("type") is None else value

    return BeforeValidator(check)


def at_most(limit: int) -> BeforeValidator:
    """Limit the size of a list or object before its items are validated: millions of items would block the event loop."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict):
            check_count("items", len(value), limit)
        return value

    return BeforeValidator(check)


def check_count(what: str, count: int, limit: int) -> None:
    """Raise pydantic's error if `count` exceeds `limit`. what: the noun for the message, such as "items"."""
    if count > limit:
        text = "{count} {what}; at most {limit} are allowed"
        raise PydanticCustomError("too_long", text, {"count": count, "what": what, "limit": limit})


Items = Annotated[list[T], Field(fail_fast=True), at_most(MAX_ITEMS)]
Parts = Annotated[list[T], Field(fail_fast=True), at_most(MAX_MESSAGES)]
Tools = Annotated[list[T], Field(fail_fast=True), at_most(MAX_TOOLS)]
Object = Annotated[dict[str, Any], at_most(MAX_ITEMS)]
Salt = Annotated[StrictStr, Field(min_length=1)]
Number = Annotated[float, Field(strict=True)]


def joined(content: str | Sequence[Any] | None) -> str:
    """Return the text of a content, whole or in parts; parts of other kinds have none."""
    return content if isinstance(content, str) else "".join(getattr(part, "text", "") for part in content or ())


def read(kind: type[Model], body: bytes) -> Model:
    """Parse a request body. Raises ApiError (400) for the first error, which names the field."""
    try:
        data = from_json(body, allow_inf_nan=False)
        if _HUGE.search(body):
            json.dumps(data, allow_nan=False)
    except ValueError as error:
        raise _not_json(body, error) from None
    return validated(kind, data)


def validated(kind: type[Model], data: Any) -> Model:
    """Return an object's fields. Raises ApiError (400) for the first error, which names the field."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _first(error, data) from None


def _not_json(body: bytes, error: ValueError) -> ApiError:
    """Return the error of a body that cannot be parsed. A lone surrogate is valid JSON but no text: its error names the field."""
    if _SURROGATE.search(body):
        try:
            path = _path_of_surrogate(json.loads(body))
        except (ValueError, RecursionError):
            path = ""
        if path:
            text = ": the text contains a lone surrogate (\\ud800 to \\udfff), which is not a character"
            return FieldError(path, text, code="invalid_text")
    return FieldError("body", f"is not JSON: {error}", code="invalid_json")


def _path_of_surrogate(data: Any) -> str:
    """Return the path of the first lone surrogate, at most _DEPTH levels deep; empty without one."""
    path: list[str] = []
    while isinstance(data, dict | list) and len(path) < _DEPTH and _has_surrogate(data):
        items: list[tuple[Any, Any]] = list(data.items() if isinstance(data, dict) else enumerate(data))
        while len(items) > 1:  # binary search, instead of one call for each of millions of items
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
    """Return the first wrong field. If a field accepts several types, the type whose validation got furthest explains it."""
    errors = [
        (_path(one["loc"], one["type"], data), one) for one in error.errors(include_url=False, include_context=False)
    ]
    errors = [one for one in errors if len(one[0]) == 1 and one[1]["type"] == "extra_forbidden"][:1] or errors
    top = errors[0][0][:1]
    own = [(path, one) for path, one in errors if path[:1] == top]
    path = max(
        (path for path, _ in own), key=lambda path: (len(path), [part for part in path if isinstance(part, int)])
    )
    found = [one for where, one in own if where == path]
    name = ".".join(map(str, path)) or "body"
    if found[0]["type"] == "extra_forbidden":
        return FieldError(name, "is not supported", code="unsupported_parameter")
    value = found[0]["input"]
    reasons = " / ".join(dict.fromkeys(_OBJECT.sub("an object", one["msg"]) for one in found))
    if not reasons.startswith("Input "):
        return FieldError(name, f": {reasons}")
    shown: dict[str, Any] = (
        {"value": value} if isinstance(value, str | int | float) else {}
    )  # not a list of a million items
    return FieldError(name, reasons.replace("Input ", ""), **shown)


def _path(loc: Sequence[int | str], kind: str, data: Any) -> tuple[int | str, ...]:
    """Return the path of an error in the request, without the names that pydantic gives to the types of a union."""
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
