"""JSON of files that may come from anybody: bounded in size and depth, checked against types, with errors of one line.

pydantic's parser reads it. Nesting beyond 200 levels, lone surrogates and bytes that are not UTF-8 are refused, and so are NaN
and infinities, by a schema in its numbers; of a key that an object has twice the last one counts, as in Python and JavaScript.
Knows no format.
"""

from __future__ import annotations

import json
import os
import stat
from functools import cached_property
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json

from foresay.errors import ConfigError

T = TypeVar("T")

MAX_BYTES = 64 << 20
"""The largest file of one JSON value that is read."""


class Schema(Generic[T]):
    """A type that JSON is checked against: a dataclass, a pydantic model, or any annotation."""

    def __init__(self, kind: Any, noun: str) -> None:
        """noun: name of such a value in errors, with its article ("a result")."""
        self._kind, self.noun = kind, noun

    @cached_property
    def _adapter(self) -> TypeAdapter[T]:
        return TypeAdapter(self._kind)

    def read(self, raw: bytes | str, place: str) -> T:
        """The value of some JSON. Types are not converted, except integers to numbers and arrays to tuples.

        place: start of an error's message. Raises ConfigError with the first field that is wrong.
        """
        try:
            return self._adapter.validate_json(raw, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if first["type"] == "json_invalid":
                raise ConfigError(f"{place}: not JSON: {first['msg'].removeprefix('Invalid JSON: ')}") from None
            raise ConfigError(f"{place}: not {self.noun}: {_explained(first)}") from None

    def of(self, value: Any, place: str) -> T:
        """The same for JSON that was parsed already."""
        return self.read(json.dumps(value), place)


def parse_json(raw: bytes | str, place: str = "") -> Any:
    """Any JSON value. Raises ConfigError, which begins with the place, if there is one, and ends with line and column."""
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON: {error}" if place else f"not JSON: {error}") from None


def parse_object(raw: bytes | str, place: str) -> dict[str, Any]:
    """A JSON object. Raises ConfigError as `parse_json` does, and for any other value."""
    value = parse_json(raw, place)
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: a JSON object is needed, not {short(value)}")
    return value


def read_limited(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> bytes:
    """The bytes of a file that has at most `limit` of them.

    Raises ConfigError for a larger one and for what is no file (a device, a pipe), and OSError where it cannot be opened or
    read.
    """
    with open(path, "rb") as file:
        known = os.fstat(file.fileno())
        if not stat.S_ISREG(known.st_mode):
            raise ConfigError(f"{os.fspath(path)!r} is no regular file")
        if known.st_size > limit:
            raise ConfigError(f"{os.fspath(path)!r} is larger than {limit} bytes, the most that is read of such a file")
        return file.read(known.st_size)  # a buffer of that size, whatever the limit is


def short(value: Any) -> str:
    """A value as JSON in at most 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _explained(error: ErrorDetails) -> str:
    """One error of pydantic in one line: the field, what is allowed, and the value."""
    place = ".".join(str(part) for part in error["loc"])
    text = error["msg"].removeprefix("Value error, ")
    if error["type"] == "too_short":
        text = f"Input should have at least {error['ctx']['min_length']} item"
    if text.startswith("Input should"):
        text = f"{place or 'it'} {text.removeprefix('Input ')}"
    elif place:
        text = f"{place}: {text[:1].lower()}{text[1:]}"
    return text if error["type"] in ("missing", "union_tag_not_found") else f"{text}, not {short(error['input'])}"
