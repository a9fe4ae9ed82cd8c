"""The head of a GGUF file: its values, and where its tensors lie.

Owns the format of the head (versions 2 and 3, little-endian). Lists of values are walked over and not kept: a vocabulary and its
merges are nearly all of a head, and take other readers seconds. Knows nothing of what a tensor is for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foresay.errors import ModelLoadError

Bytes = npt.NDArray[np.uint8]
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _LIST = 8, 9
_SHORT = 1 << 16
"""Bytes of a value that takes little room."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file holds it. shape: [out, in], or [n]. data: [out, bytes of a row], a view into the mapped file."""

    shape: tuple[int, ...]
    kind: str
    """Its type by llama.cpp's name, such as "Q4_K"."""
    data: Bytes


@dataclass(frozen=True, slots=True)
class GgufHead:
    """A file's values by key, lists left out, and its tensors by name."""

    values: Mapping[str, str | int | float | bool]
    tensors: Mapping[str, StoredTensor]
    short: bytes
    """A whole GGUF file with the values that take little room and no tensors: all that a configuration is made from."""

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the family."""
        return str(self.values.get("general.architecture", ""))


def read_head(path: Path) -> GgufHead:
    """Map a file and read its head. Raises ModelLoadError for a file that is damaged, cut short, or of another version."""
    try:
        return _Reader(np.memmap(path, dtype=np.uint8, mode="r")).whole()
    except (struct.error, ValueError, KeyError, OverflowError) as error:
        why = "it ends within its head" if isinstance(error, struct.error) else str(error)
        raise ModelLoadError(f"{str(path)!r} cannot be read: it is damaged or cut short ({why})") from error


class _Reader:
    """A place in the file that moves on with what is read."""

    def __init__(self, data: Bytes) -> None:
        self._data, self._view, self._at = data, data.data, 0

    def whole(self) -> GgufHead:
        magic, version, num_tensors, num_values = self._numbers("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r}, version {version}")
        values, short = {}, []
        for _ in range(num_values):
            start = self._at
            key = self._string()
            value = self._value(*self._numbers("I"))
            if value is not None:
                values[key] = value
            if self._at - start <= _SHORT:
                short.append(bytes(self._view[start : self._at]))
        named = [(self._string(), *self._place()) for _ in range(num_tensors)]
        step = int(values.get("general.alignment", 32))
        start = -(-self._at // step) * step
        tensors = {name: self._tensor(shape, kind, start + at) for name, shape, kind, at in named}
        return GgufHead(values, tensors, b"".join([struct.pack("<4sIQQ", magic, version, 0, len(short)), *short]))

    def _numbers(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from("<" + form, self._view, self._at)
        self._at += struct.calcsize("<" + form)
        return found

    def _string(self) -> str:
        [size] = self._numbers("Q")
        [text] = self._numbers(f"{size}s")
        return bytes(text).decode()

    def _value(self, kind: int) -> str | int | float | bool | None:
        """A value; None for a list, which is passed by."""
        if kind == _STRING:
            return self._string()
        if kind != _LIST:
            [value] = self._numbers(_SCALARS[kind])
            return value  # type: ignore[no-any-return]
        inner, count = self._numbers("IQ")
        if inner in _SCALARS:
            self._at += count * struct.calcsize(_SCALARS[inner])
            return None
        for _ in range(count):
            if inner == _STRING:
                self._at += struct.unpack_from("<Q", self._view, self._at)[0] + 8
            else:
                self._value(inner)
        return None

    def _place(self) -> tuple[tuple[int, ...], int, int]:
        """A tensor's shape, the number of its type, and where it begins behind the head."""
        [dims] = self._numbers("I")
        shape = self._numbers(f"{dims}Q")
        kind, at = self._numbers("IQ")
        return shape[::-1], kind, at

    def _tensor(self, shape: tuple[int, ...], kind: int, start: int) -> StoredTensor:
        import gguf

        name = gguf.GGMLQuantizationType(kind)
        numbers, size = gguf.GGML_QUANT_SIZES[name]
        rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
        width = columns // numbers * size
        data = self._data[start : start + rows * width]
        if columns % numbers or len(data) < rows * width:
            raise ValueError(f"a tensor {list(shape)} of type {name.name} ends behind the file")
        return StoredTensor(shape, name.name, data.reshape(rows, width))
