"""JSON of untrusted files: limited size and depth, validated against types, with one-line errors.

Parsed by pydantic. Nesting beyond 200 levels, lone surrogates, bytes that are not UTF-8, NaN and infinities are refused; the
last of duplicate keys counts, as in Python and JavaScript. Knows no format.
"""

from __future__ import annotations

import json
import os
import stat
from functools import cached_property
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json

from foresay.errors import ConfigError, shown

T = TypeVar("T")

MAX_BYTES = 64 << 20
"""Maximum size of a file with one JSON value."""


class Schema(Generic[T]):
    """A type that JSON is validated against: a dataclass, a pydantic model, or any annotation."""

    def __init__(self, kind: Any, noun: str) -> None:
        """noun: name of such a value in errors, with its article ("a result")."""
        self._kind, self.noun = kind, noun

    @cached_property
    def _adapter(self) -> TypeAdapter[T]:
        return TypeAdapter(self._kind)

    def read(self, raw: bytes | str, source: str) -> T:
        """Parse and validate JSON. Types are not converted, except integers to floats and arrays to tuples.

        source: start of an error's message. Raises ConfigError with the first wrong field.
        """
        try:
            return self._adapter.validate_json(raw, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if first["type"] == "json_invalid":
                raise ConfigError(f": not JSON: {first['msg'].removeprefix('Invalid JSON: ')}", param=source) from None
            raise self._refusal(first, source) from None

    def _refusal(self, error: ErrorDetails, source: str) -> ConfigError:
        field = ".".join(map(str, error["loc"]))
        param, value = f"{source}: {field}" if field else source, error["input"]
        text = " ".join(error["msg"].removeprefix("Value error, ").split())
        if field and text.startswith("Input "):
            return ConfigError(f"{text.removeprefix('Input ')}; this is not {self.noun}", param=param, value=value)
        return ConfigError(f": not {self.noun}: {text[:1].lower()}{text[1:]}", param=param, value=value)

    def of(self, value: Any, source: str) -> T:
        """Validate JSON that is already parsed."""
        return self.read(json.dumps(value), source)


def parse_json(raw: bytes | str, source: str = "it") -> Any:
    """Parse any JSON value. Raises ConfigError, which starts with the source and ends with line and column."""
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ConfigError(f"is not JSON: {error}", param=source) from None


def parse_object(raw: bytes | str, source: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ConfigError as `parse_json` does, and for any other value."""
    value = parse_json(raw, source)
    if not isinstance(value, dict):
        raise ConfigError(f": a JSON object is needed, not {shown(value)}", param=source, value=value)
    return value


def read_limited(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> bytes:
    """Read a file of at most `limit` bytes.

    Raises ConfigError for a larger file and for devices and pipes, and OSError if it cannot be opened or read.
    """
    with open(path, "rb") as file:
        known = os.fstat(file.fileno())
        if not stat.S_ISREG(known.st_mode):
            raise ConfigError("is no regular file", param="path", value=path)
        if known.st_size > limit:
            raise ConfigError(f"is larger than {limit} bytes, the maximum for such a file", param="path", value=path)
        return file.read(known.st_size)  # allocates the file's size, not the limit
