"""Files with one JSON object of a format and version.

Owns writing and reading such a file. Knows none of the formats.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any, TypeVar

from pydantic import ConfigDict

from foresay.errors import ConfigError
from foresay.files import atomic_write, unreadable
from foresay.json_files import Schema, parse_object, read_limited

T = TypeVar("T")


class Stored:
    """Base of dataclasses that are read from files: without further fields, infinities and NaN."""

    __slots__ = ()
    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)


def save(value: Any, path: str | os.PathLike[str], format: str, version: int, *, parents: bool = False) -> None:
    """Write a dataclass atomically. parents: create missing folders. Raises ConfigError if it cannot be written."""
    text = json.dumps({"format": format, "version": version, **asdict(value)}, indent=1, ensure_ascii=False)
    with atomic_write(path, parents=parents) as whole:
        whole.write_text(text + "\n", encoding="utf-8")


def load(path: str | os.PathLike[str], format: str, version: int, schema: Schema[T], command: str) -> T:
    """Read a file. command: that makes one, for errors. Raises ConfigError for a file that cannot be read or is another one."""
    name = os.fspath(path)
    try:
        values = parse_object(read_limited(path), name)
        for field, wanted in (("format", format), ("version", version)):
            if (found := values.pop(field, None)) != wanted:
                raise ConfigError(f"must be {wanted!r}", param=field, value=found)
        return schema.of(values, name)
    except OSError as error:
        raise unreadable(path, error) from None
    except ConfigError as error:
        reason = str(error).removeprefix(name).lstrip(": ")
        text = f"is not {schema.noun} ({reason}); make it with {command}"
        raise ConfigError(text, param="path", value=path) from None
