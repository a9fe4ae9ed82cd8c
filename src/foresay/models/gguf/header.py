"""The head of a GGUF file: its values, and where its tensors lie.

Owns the format of the head (versions 2 and 3, little-endian). Every count and size in it is compared with the bytes that are left
before anything is read or made by it, and every tensor lies within the file, apart from the others. Lists of values are walked
over and not kept: a vocabulary and its merges are nearly all of a head, and take other readers seconds. Knows nothing of what a
tensor is for.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foresay.errors import ModelLoadError

Bytes = npt.NDArray[np.uint8]
INTEGERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}
FLOATS = {6: "f", 12: "d"}
_SCALARS = {**INTEGERS, **FLOATS, 7: "?"}
STRING, _LIST = 8, 9
_SHORT = 1 << 16
"""Bytes of a value that takes little room."""
_MOST = 1 << 16
"""Values or tensors of a file: the largest models have some thousands."""
_DIMS = 4
"""Dimensions of a tensor in ggml."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file holds it. shape: [out, in], or [n]. data: [out, bytes of a row], a view into the mapped file."""

    shape: tuple[int, ...]
    kind: str
    """Its type by llama.cpp's name, such as "Q4_K"."""
    data: Bytes


@dataclass(frozen=True, slots=True)
class StoredList:
    """A list of values. kind: the number of their type in the format."""

    kind: int
    count: int
    longest: int
    """Bytes of the longest text of a list of texts, else 0."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A file's values by key, lists left out, and its tensors by name."""

    path: Path
    values: Mapping[str, str | int | float | bool]
    lists: Mapping[str, StoredList]
    tensors: Mapping[str, StoredTensor]
    short: bytes
    """A whole GGUF file with the values that take little room and no tensors: all that a configuration is made from."""

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the family."""
        return str(self.values.get("general.architecture", ""))

    @property
    def is_part(self) -> bool:
        """Whether the model's tensors are spread over several files."""
        count = self.values.get("split.count", 0)
        return isinstance(count, int) and count > 1


def read_header(path: Path) -> GgufHeader:
    """Map a file and read its head. Raises ModelLoadError for a file that is damaged, cut short, or of another version."""
    try:
        return _Reader(np.memmap(path, dtype=np.uint8, mode="r")).whole(path)
    except (struct.error, ValueError) as error:
        why = "it ends within its head" if isinstance(error, struct.error) else str(error)
        raise ModelLoadError(f"{str(path)!r} cannot be read: it is damaged or cut short ({why})") from error


class _Reader:
    """A place in the file that moves on with what is read."""

    def __init__(self, data: Bytes) -> None:
        self._data, self._view, self._at = data, data.data, 0

    def whole(self, path: Path) -> GgufHeader:
        magic, version, num_tensors, num_values = self._numbers("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r}, version {version}; versions 2 and 3 are read")
        self._check_count("the number of values", num_values, 13, _MOST)
        values: dict[str, Any] = {}
        lists: dict[str, StoredList] = {}
        short = []
        for _ in range(num_values):
            start = self._at
            key = self._string("a key")
            if key in values or key in lists:
                raise ValueError(f"the value {shortened(key)} occurs twice")
            value = self._value(key, *self._numbers("I"))
            if isinstance(value, StoredList):
                lists[key] = value
            else:
                values[key] = value
            if self._at - start <= _SHORT:
                short.append(bytes(self._view[start : self._at]))
        tensors = self._tensors(num_tensors, _alignment(values))
        head = struct.pack("<4sIQQ", magic, version, 0, len(short))
        return GgufHeader(path, values, lists, tensors, b"".join([head, *short]))

    def _check_count(self, what: str, count: int, size: int, most: int | None = None) -> None:
        """Refuse a count of parts, of `size` bytes at least, that the rest of the file cannot hold."""
        room = max(0, len(self._data) - self._at) // size
        if count > room:
            raise ValueError(f"it ends within its head: {what} is {count}, and the rest of it has room for {room}")
        if most is not None and count > most:
            raise ValueError(f"{what} is {count}; at most {most} are read")

    def _numbers(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from("<" + form, self._view, self._at)
        self._at += struct.calcsize("<" + form)
        return found

    def _string(self, what: str) -> str:
        [size] = self._numbers("Q")
        self._check_count(f"the length of {what}", size, 1)
        text = bytes(self._view[self._at : self._at + size])
        self._at += size
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{what} is {text[:40]!r}, which is not UTF-8") from None

    def _value(self, key: str, kind: int) -> str | int | float | bool | StoredList:
        """A value; a list is passed by."""
        if kind == STRING:
            return self._string(f"the value of {shortened(key)}")
        if kind == _LIST:
            return self._list(key)
        if kind not in _SCALARS:
            raise ValueError(f"the value {shortened(key)} is of type {kind}; types 0 to 12 are read")
        [value] = self._numbers(_SCALARS[kind])
        return value  # type: ignore[no-any-return]

    def _list(self, key: str) -> StoredList:
        inner, count = self._numbers("IQ")
        longest = 0
        if inner in _SCALARS:
            size = struct.calcsize(_SCALARS[inner])
            self._check_count(f"the length of the list {shortened(key)}", count, size)
            self._at += count * size
        elif inner == STRING:
            self._check_count(f"the length of the list {shortened(key)}", count, 8)
            for _ in range(count):
                [size] = struct.unpack_from("<Q", self._view, self._at)
                longest = max(longest, size)
                self._at += 8 + size
            if self._at > len(self._data):
                raise ValueError(
                    f"it ends within its head: the last text of the list {shortened(key)} ends past its end"
                )
        else:
            raise ValueError(f"the list {shortened(key)} is of type {inner}; lists of numbers or texts are read")
        return StoredList(inner, count, longest)

    def _tensors(self, count: int, step: int) -> dict[str, StoredTensor]:
        self._check_count("the number of tensors", count, 24, _MOST)
        found = [(self._string("a tensor's name"), *self._place()) for _ in range(count)]
        named = {name: (shape, kind, at) for name, shape, kind, at in found}
        if len(named) < count:
            [(twice, _)] = Counter(name for name, *_ in found).most_common(1)
            raise ValueError(f"the tensor {shortened(twice)} occurs twice")
        start = -(-self._at // step) * step
        tensors, spans = {}, []
        for name, (shape, kind, at) in named.items():
            if at % step:
                raise ValueError(f"the tensor {shortened(name)} begins at {at}, which is no multiple of {step}")
            tensors[name] = self._tensor(name, shape, kind, start + at)
            spans.append((at, at + tensors[name].data.nbytes, name))
        for (_, end, one), (begin, _, other) in itertools.pairwise(sorted(spans)):
            if begin < end:
                raise ValueError(f"the tensors {shortened(one)} and {shortened(other)} overlap")
        return tensors

    def _place(self) -> tuple[tuple[int, ...], int, int]:
        """A tensor's shape, the number of its type, and where it begins behind the head."""
        [dims] = self._numbers("I")
        if dims > _DIMS:
            raise ValueError(f"a tensor has {dims} dimensions; at most {_DIMS} are read")
        shape = self._numbers(f"{dims}Q")
        kind, at = self._numbers("IQ")
        return shape[::-1], kind, at

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> StoredTensor:
        import gguf

        try:
            form = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise ValueError(f"the tensor {shortened(name)} is of type {kind}, which ggml does not know") from None
        numbers, size = gguf.GGML_QUANT_SIZES[form]
        if not shape or 0 in shape:
            raise ValueError(f"the tensor {shortened(name)} has the shape {list(shape)}; dimensions are at least 1")
        rows, columns = math.prod(shape[:-1]), shape[-1]
        width = columns // numbers * size
        if columns % numbers or start + rows * width > len(self._data):
            raise ValueError(
                f"the tensor {shortened(name)} {list(shape)} of type {form.name} ends past the end of the file"
            )
        return StoredTensor(shape, form.name, self._data[start : start + rows * width].reshape(rows, width))


def _alignment(values: Mapping[str, Any]) -> int:
    """What the places of tensors are multiples of."""
    step = values.get("general.alignment", 32)
    if type(step) is not int or step < 1 or step & (step - 1) or step > 1 << 20:
        raise ValueError(f"general.alignment is {step!r}; a power of two up to {1 << 20} is read")
    return step


def shortened(value: object) -> str:
    """A name or value of a file for a message of one line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:76] + "...'"
