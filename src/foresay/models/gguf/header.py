"""The header of a GGUF file: its values and the locations of its tensors.

Owns the format of the header (versions 2 and 3, little-endian). Every count and size is compared with the remaining bytes before
it is used to read or allocate, and every tensor must lie within the file without overlapping another. Lists are skipped until
they are read: the vocabulary and merges make up most of a header. Does not know the purpose of a tensor.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import mmap
import os
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from foresay.errors import ModelLoadError
from foresay.models.families.family import Architecture
from foresay.models.families.stated import SCALARS, STRING, Bytes, Stated, StoredList, shortened
from foresay.models.families.table import architecture_of

_ARRAY = 9
MAX_SHORT_BYTES = 1 << 16
"""Largest entry, key and value, in bytes, that `GgufHeader.short_values` includes."""
_MAX_ENTRIES = 1 << 16
"""Most values or tensors of a file; the largest models have a few thousand."""
_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""Parts of a file that identify it, besides its size and time of modification."""
_MAX_DIMS = 4
"""Most dimensions of a tensor in ggml."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as stored. shape: [out, in] or [n]. data: [out, bytes of a row] uint8, a view of the mapped file."""

    shape: tuple[int, ...]
    kind: str
    """Tensor type by llama.cpp's name, such as "Q4_K"."""
    data: Bytes


@dataclass(frozen=True, eq=False)
class GgufHeader:
    """A file's values and lists by key, and its tensors by name."""

    path: Path
    values: Mapping[str, str | int | float | bool]
    lists: Mapping[str, StoredList]
    tensors: Mapping[str, StoredTensor]
    short_values: bytes
    """A complete GGUF file with only the short values and no tensors; transformers reads the configuration from it."""
    identity: str
    """The file's size, time of modification, and a digest of samples of its bytes, when it was mapped."""

    def is_unchanged(self) -> bool:
        """True if the path still names the file that was mapped, as it was then."""
        try:
            return _state(self.path.stat()) == self.identity.rpartition(" ")[0]
        except OSError:
            return False

    def release_pages(self) -> None:
        """Take the file's pages out of this process's memory; they are read again when they are used."""
        for tensor in self.tensors.values():
            mapped = getattr(tensor.data, "_mmap", None)
            if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)
            return  # all tensors are parts of one map

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model family, or "" if missing."""
        return str(self.values.get("general.architecture", ""))

    @cached_property
    def entry(self) -> Architecture | None:
        """The entry of its architecture; None if the file is not read here."""
        return architecture_of(self.stated)

    @property
    def family(self) -> Architecture:
        """The entry of a file that is read here."""
        assert self.entry is not None, self.architecture
        return self.entry

    @cached_property
    def stated(self) -> Stated:
        """The values about the model, as families read them."""
        shapes = {name: one.shape for name, one in self.tensors.items()}
        return Stated(self.path, self.architecture, self.values, self.lists, shapes)

    @property
    def is_part(self) -> bool:
        """True if the model's tensors are split over several files."""
        count = self.values.get("split.count", 0)
        return isinstance(count, int) and count > 1


def read_header(path: Path) -> GgufHeader:
    """Map a file and read its header. Raises ModelLoadError if it is damaged, truncated or of an unsupported version."""
    try:
        with path.open("rb") as file:
            data, state = np.memmap(file, dtype=np.uint8, mode="r"), _state(os.fstat(file.fileno()))
        return _Reader(data).read(path, f"{state} {_sampled(data)}")
    except (struct.error, ValueError) as error:
        reason = "it ends within its header" if isinstance(error, struct.error) else str(error)
        raise ModelLoadError(
            f"{str(path)!r} cannot be read: it is damaged or truncated ({reason}); download it again"
        ) from error


def _state(found: os.stat_result) -> str:
    return f"{found.st_size} {found.st_mtime_ns}"


def _sampled(data: Bytes) -> str:
    digest = hashlib.sha256()
    for i in range(_SAMPLES):
        start = i * max(0, len(data) - _SAMPLE_BYTES) // (_SAMPLES - 1)
        digest.update(data[start : start + _SAMPLE_BYTES].tobytes())
    return digest.hexdigest()


class _Reader:
    """Reads a header from front to back."""

    def __init__(self, data: Bytes) -> None:
        self._data, self._view, self._at = data, data.data, 0

    def read(self, path: Path, identity: str) -> GgufHeader:
        magic, version, num_tensors, num_values = self._numbers("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r}, version {version}; b'GGUF' of version 2 or 3 is supported")
        self._check_count("the number of values", num_values, 13, _MAX_ENTRIES)
        values: dict[str, Any] = {}
        lists: dict[str, StoredList] = {}
        short = []
        for _ in range(num_values):
            start = self._at
            key = self._string("a key")
            if key in values or key in lists:
                raise ValueError(f"the value {shortened(key)} appears twice")
            value = self._value(key, *self._numbers("I"))
            if isinstance(value, StoredList):
                lists[key] = value
            else:
                values[key] = value
            if self._at - start <= MAX_SHORT_BYTES:
                short.append(bytes(self._view[start : self._at]))
        tensors = self._tensors(num_tensors, _alignment(values))
        header = struct.pack("<4sIQQ", magic, version, 0, len(short))
        return GgufHeader(path, values, lists, tensors, b"".join([header, *short]), identity)

    def _check_count(self, name: str, count: int, size: int, limit: int | None = None) -> None:
        """Raise ValueError for a count of items of at least `size` bytes that exceeds `limit` or the rest of the file."""
        room = max(0, len(self._data) - self._at) // size
        if count > room:
            raise ValueError(
                f"it ends within its header: {name} is {count}, but at most {room} fit in the rest of the file"
            )
        if limit is not None and count > limit:
            raise ValueError(f"{name} is {count}; at most {limit} are supported")

    def _numbers(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from("<" + form, self._view, self._at)
        self._at += struct.calcsize("<" + form)
        return found

    def _string(self, name: str) -> str:
        [size] = self._numbers("Q")
        self._check_count(f"the length of {name}", size, 1)
        text = bytes(self._view[self._at : self._at + size])
        self._at += size
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{name} is {text[:40]!r}, which is not UTF-8") from None

    def _value(self, key: str, kind: int) -> str | int | float | bool | StoredList:
        """Read a value; the elements of a list are skipped."""
        if kind == STRING:
            return self._string(f"the value of {shortened(key)}")
        if kind == _ARRAY:
            return self._list(key)
        if kind not in SCALARS:
            raise ValueError(f"the value {shortened(key)} is of type {kind}; types 0 to 12 are supported")
        [value] = self._numbers(SCALARS[kind])
        return value  # type: ignore[no-any-return]

    def _list(self, key: str) -> StoredList:
        inner, count = self._numbers("IQ")
        longest, start = 0, self._at
        if inner in SCALARS:
            size = struct.calcsize(SCALARS[inner])
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
                        f"it ends within its header: a string of the list {shortened(key)} exceeds the file"
                    )
        else:
            raise ValueError(f"the list {shortened(key)} is of type {inner}; lists of numbers or strings are supported")
        return StoredList(inner, count, longest, self._data[start : self._at])

    def _tensors(self, count: int, step: int) -> dict[str, StoredTensor]:
        self._check_count("the number of tensors", count, 24, _MAX_ENTRIES)
        found = [(self._string("a tensor's name"), *self._tensor_entry()) for _ in range(count)]
        named = {name: (shape, kind, at) for name, shape, kind, at in found}
        if len(named) < count:
            [(twice, _)] = Counter(name for name, *_ in found).most_common(1)
            raise ValueError(f"the tensor {shortened(twice)} appears twice")
        start = -(-self._at // step) * step
        tensors, spans = {}, []
        for name, (shape, kind, at) in named.items():
            if at % step:
                raise ValueError(f"the tensor {shortened(name)} begins at {at}, which is not a multiple of {step}")
            tensors[name] = self._tensor(name, shape, kind, start + at)
            spans.append((at, at + tensors[name].data.nbytes, name))
        for (_, end, one), (begin, _, other) in itertools.pairwise(sorted(spans)):
            if begin < end:
                raise ValueError(f"the tensors {shortened(one)} and {shortened(other)} overlap")
        return tensors

    def _tensor_entry(self) -> tuple[tuple[int, ...], int, int]:
        """Read a tensor's shape, type number and offset from the end of the header."""
        [dims] = self._numbers("I")
        if dims > _MAX_DIMS:
            raise ValueError(f"a tensor has {dims} dimensions; at most {_MAX_DIMS} are supported")
        shape = self._numbers(f"{dims}Q")
        kind, at = self._numbers("IQ")
        return shape[::-1], kind, at

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> StoredTensor:
        import gguf

        try:
            form = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise ValueError(f"the tensor {shortened(name)} is of type {kind}, which is unknown to ggml") from None
        numbers, size = gguf.GGML_QUANT_SIZES[form]
        if not shape or 0 in shape:
            raise ValueError(f"the tensor {shortened(name)} has shape {list(shape)}; it needs dimensions of at least 1")
        rows, columns = math.prod(shape[:-1]), shape[-1]
        width = columns // numbers * size
        if columns % numbers or start + rows * width > len(self._data):
            raise ValueError(
                f"the tensor {shortened(name)} {list(shape)} of type {form.name} extends past the end of the file"
            )
        return StoredTensor(shape, form.name, self._data[start : start + rows * width].reshape(rows, width))


def _alignment(values: Mapping[str, Any]) -> int:
    """Return the alignment of tensor offsets, in bytes. Raises ValueError for an invalid one."""
    step = values.get("general.alignment", 32)
    if type(step) is not int or step < 1 or step & (step - 1) or step > 1 << 20:
        raise ValueError(f"general.alignment is {step!r}; it must be a power of two up to {1 << 20}")
    return step
