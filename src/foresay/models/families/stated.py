"""The values of a GGUF file about its model, as families read them: by llama.cpp's keys without the architecture.

Owns the search for a key, and the error for a value that is not allowed. Ranges of single values are those of gguf/values.py,
which checks them before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foresay.errors import ModelLoadError

MOST_GROUPS, MOST_INNER = 1 << 16, 1 << 24
"""Most groups of heads of a layer, and the greatest width inside of it."""
Bytes = npt.NDArray[np.uint8]
INTEGERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}
FLOATS = {6: "f", 12: "d"}
SCALARS = {**INTEGERS, **FLOATS, 7: "?"}
"""Types of values by their numbers in the format, and their forms in `struct`."""
STRING = 8
Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class StoredList:
    """Summary of a list. kind: type number of its elements in the format."""

    kind: int
    count: int
    longest: int
    """Length of the longest string in bytes; 0 for a list of numbers."""
    data: Bytes
    """Its elements as stored, a view of the mapped file."""

    @property
    def are_numbers(self) -> bool:
        """False for texts."""
        return self.kind != STRING

    def numbers(self) -> list[int] | list[float]:
        """Return the elements of a list of numbers."""
        found: list[int] | list[float] = np.frombuffer(self.data, dtype="<" + SCALARS[self.kind]).tolist()
        return found

    def strings(self) -> list[str]:
        """Return the elements of a list of strings. Raises UnicodeDecodeError for one that is not UTF-8."""
        data, at, found = self.data.tobytes(), 0, []
        for _ in range(self.count):
            end = at + 8 + int.from_bytes(data[at : at + 8], "little")
            found.append(data[at + 8 : end].decode())
            at = end
        return found


@dataclass(frozen=True, slots=True)
class Stated:
    """The values and lists of a file by key, with the prefix of its architecture, and the shapes of its tensors by name."""

    path: Path
    architecture: str
    """llama.cpp's name of the family."""
    values: Mapping[str, Value]
    lists: Mapping[str, StoredList]
    shapes: Mapping[str, tuple[int, ...]]

    def __contains__(self, name: str) -> bool:
        """Return True if the file states a value or a list of this name."""
        key = self.key(name)
        return key in self.values or key in self.lists

    def key(self, name: str) -> str:
        """Return the whole key."""
        return f"{self.architecture}.{name}"

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value."""
        return self.values.get(self.key(name), default)

    def numbers(self, name: str) -> list[Any] | None:
        """Return a list of numbers; None if there is none."""
        stored = self.lists.get(self.key(name))
        return stored.numbers() if stored is not None and stored.are_numbers else None

    def flags(self, name: str) -> list[bool] | None:
        """Return a list of numbers as flags; None if there is none."""
        found = self.numbers(name)
        return None if found is None else [bool(one) for one in found]

    def by_layer(self, name: str, layers: int) -> list[int]:
        """Return a value of each layer, of a key that states one for all or one for each."""
        found = self.numbers(name)
        return [int(self.get(name, 0))] * layers if found is None else [int(one) for one in found]

    def positive(self, name: str, most: int) -> int:
        """Return an integer from 1 to `most`. Raises ModelLoadError for another value."""
        value = self.get(name)
        if type(value) is not int or not 1 <= value <= most:
            raise self.invalid(name, f"an integer from 1 to {most}")
        return value

    def invalid(self, name: str, allowed: str) -> ModelLoadError:
        """Return the error for an invalid value. allowed: description of valid ones, with an article."""
        return invalid_value(self.path, self.key(name), self.values, self.lists, allowed)


def invalid_value(
    path: Path, key: str, values: Mapping[str, Value], lists: Mapping[str, StoredList], allowed: str
) -> ModelLoadError:
    """Return the error for an invalid value of a file, by its whole key."""
    stored = lists.get(key)
    found = f"a list of {stored.count}" if stored is not None else shortened(values.get(key, "missing"))
    return ModelLoadError(f"{str(path)!r} cannot be read: its value {key} is {found}; allowed is {allowed}")


def shortened(value: object) -> str:
    """Return the repr of a file's name or value, at most 80 characters long, for an error message of one line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:76] + "...'"
