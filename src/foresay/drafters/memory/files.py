"""Files of one owner's texts: indexed segments, and a log of the texts that are in none of them yet.

A process may be killed between any two writes: a segment and the list of segments replace older files atomically, and what an
incomplete record of the log contains is dropped. Damaged files are dropped as well: they cost drafts, never output.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from foresay.drafters.memory.segment import SEPARATOR, Segment, Tokens
from foresay.errors import ConfigError
from foresay.files import atomic_write
from foresay.json_files import Schema, read_limited

logger = logging.getLogger("foresay")
_MAGIC = b"FSMEM001"
_HEADER = struct.Struct("<8sQII")
"""Magic, tokens, checksum, and unused."""
_RECORD = struct.Struct("<II")
"""Bytes of a text, and their checksum."""
_LIST = "segments.json"
_NAME = re.compile(r"[0-9]{1,19}\.(segment|log)")
_TOKEN_BYTES = 8
"""Bytes of a token in a segment: itself and its index."""
_MAX_RECORD = 1 << 26
_MAP_FROM = 4 << 20
"""Size in bytes from which a segment is mapped."""
_SCHEMA: Schema[dict[str, Any]] = Schema(dict[str, str | list[str]], "a list of segments")


class Files:
    """The files in one folder."""

    def __init__(self, folder: Path, *, writes: bool) -> None:
        """writes: False to change nothing. Raises OSError for a folder that cannot be read or created."""
        self.folder, self._writes = folder, writes
        self.names: list[str] = []
        """Names of the segments, oldest first."""
        self._log_name = "0.log"
        if writes:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.read_list()
        if writes:
            self._remove_unlisted()

    def read_list(self) -> bool:
        """Read the list of segments; return True if it has changed. Raises OSError."""
        before = (self.names, self._log_name)
        try:
            found = _SCHEMA.read(read_limited(self.folder / _LIST), str(self.folder / _LIST))
            names, log = list(found.get("segments", ())), str(found.get("log", "0.log"))
        except FileNotFoundError:
            names, log = [], "0.log"
        except ConfigError as error:
            logger.warning("the memory starts empty: %s", error)
            names, log = [], "0.log"
        if all(_NAME.fullmatch(name) for name in [*names, log]):
            self.names, self._log_name = names, log
        return before != (self.names, self._log_name)

    def segments(self) -> list[Segment]:
        """Return the listed segments. A damaged one is no longer listed. Raises OSError for one that cannot be opened now."""
        opened = [(name, self._opened(name)) for name in self.names]
        self.names = [name for name, segment in opened if segment is not None]
        return [segment for _, segment in opened if segment is not None]

    def log(self) -> list[Tokens]:
        """Return the texts of the log. A writer cuts an incomplete record off. Raises OSError."""
        texts, end = [], 0
        try:
            data = (self.folder / self._log_name).read_bytes()
        except FileNotFoundError:
            return []
        for text, end in _records(data):  # noqa: B007
            texts.append(text)
        if self._writes and end < len(data):
            os.truncate(self.folder / self._log_name, end)
        return texts

    def append(self, text: Tokens) -> None:
        """Append a text to the log. Raises OSError."""
        data = text.astype("<u4").tobytes()
        record = _RECORD.pack(len(data), zlib.crc32(data)) + data
        with open(self.folder / self._log_name, "ab", buffering=0) as log:
            start = log.tell()
            if log.write(record) != len(record):
                log.truncate(start)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, segment: Segment) -> str:
        """Write a segment and return its name. It is not listed yet. Raises ConfigError if the file system refuses."""
        name = f"{self._next_number()}.segment"
        order = np.asarray(segment.order, dtype=np.uint32).tobytes()
        data = bytes(segment.reversed)
        with atomic_write(self.folder / name) as path, path.open("wb") as file:
            file.write(_HEADER.pack(_MAGIC, segment.size, zlib.crc32(order, zlib.crc32(data)), 0))
            file.write(data)
            file.write(order)
            file.flush()
            os.fsync(file.fileno())
        return name

    def replace_list(self, names: list[str]) -> None:
        """Replace the list of segments, begin an empty log, and remove files that are no longer listed.

        Raises ConfigError if the file system refuses.
        """
        log = f"{self._next_number()}.log"
        text = TypeAdapter(dict[str, Any]).dump_json({"segments": names, "log": log})
        with atomic_write(self.folder / _LIST) as path:
            path.write_bytes(text)
        self.names, self._log_name = names, log
        self._remove_unlisted()

    def log_size(self) -> int:
        """Return the size of the log in bytes; 0 if there is none."""
        try:
            return (self.folder / self._log_name).stat().st_size
        except FileNotFoundError:
            return 0

    def _next_number(self) -> int:
        taken = [int(path.name.partition(".")[0]) for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        return 1 + max([*taken, int(self._log_name.partition(".")[0])])

    def _remove_unlisted(self) -> None:
        for path in self.folder.iterdir():
            if _NAME.fullmatch(path.name) and path.name not in (*self.names, self._log_name):
                path.unlink(missing_ok=True)

    def _opened(self, name: str) -> Segment | None:
        try:
            return _mapped(self.folder / name)
        except (FileNotFoundError, ValueError) as error:
            logger.warning("%s is not used: %s", self.folder / name, error)
            return None


def _mapped(path: Path) -> Segment:
    """Return a segment over a file: mapped if it is large, since each map has a descriptor, else read.

    Raises OSError, and ValueError for a file that is not complete.
    """
    with path.open("rb") as file:
        is_large = os.fstat(file.fileno()).st_size >= _MAP_FROM
        data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if is_large else file.read()
    if len(data) < _HEADER.size:
        raise ValueError("it is too short")
    magic, size, checksum, _ = _HEADER.unpack_from(data)
    if magic != _MAGIC or len(data) != _HEADER.size + size * _TOKEN_BYTES:
        raise ValueError("it is no segment of this version, or incomplete")
    view = memoryview(data)[_HEADER.size :]
    if zlib.crc32(view) != checksum:
        raise ValueError("its checksum is wrong")
    order = view[size * _TOKEN_BYTES // 2 :]
    if size and int(np.frombuffer(order, dtype=np.uint32).max()) >= size:
        raise ValueError("its index is wrong")
    return Segment(view[: size * _TOKEN_BYTES // 2], order)


def _records(data: bytes) -> Iterator[tuple[Tokens, int]]:
    """Yield (text, end in bytes) of each complete record of a log."""
    at = 0
    while at + _RECORD.size <= len(data):
        size, checksum = _RECORD.unpack_from(data, at)
        body = data[at + _RECORD.size : at + _RECORD.size + size]
        if len(body) < size or size % 4 or not 4 < size <= _MAX_RECORD or zlib.crc32(body) != checksum:
            return
        text = np.frombuffer(body, dtype="<u4").astype(np.uint32)
        if text[-1] != SEPARATOR:
            return
        at += _RECORD.size + size
        yield text, at
