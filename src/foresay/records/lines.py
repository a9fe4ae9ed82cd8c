"""Files of JSON lines that are written during a run and may end in an incomplete line.

Owns the header, the handling of incomplete lines and the lock that admits one writing process. Knows nothing about the
contents of the lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from foresay.errors import ConfigError, shown
from foresay.files import unreadable, writing
from foresay.json_files import Schema, parse_object

try:
    import fcntl
except ImportError:  # Windows: no lock there
    fcntl = None  # type: ignore[assignment]

Line = dict[str, Any]
T = TypeVar("T")

MAX_LINE_BYTES = 256 << 20
"""Length limit of a line."""


class LineWriter:
    """Writer that appends JSON lines after a header line and resumes an existing file at its end."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        kind: str,
        version: int,
        header: Mapping[str, Any],
        schema: Schema[Any] | None = None,
    ) -> None:
        """Open or create the file.

        kind, version: the file's format. header: the other fields of its first line; an existing file must have the same ones
        except `provenance`. schema: type of the other lines of an existing file. Raises ConfigError for a different header, a
        line that violates the schema, a file of another kind or one that cannot be written, and while another process writes it.
        """
        self.path, self.kind, self._schema = Path(path), kind, schema
        # as it will be read back: tuples become lists, and keys strings
        self.header: Line = json.loads(json.dumps({"format": kind, "version": version, **header}))
        self.lines: list[Line] = []
        """The lines of the file when it was opened, without the header."""
        try:
            self._file: BinaryIO = open(self.path, "a+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", param="path", value=path) from None
        try:
            self._lock()
            self._resume()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            text = "is being written by another process; wait for it to end, or name another file"
            raise ConfigError(text, param="path", value=self.path) from None

    def _resume(self) -> None:
        """Read the existing lines and cut off an incomplete last line."""
        self._file.seek(0)
        name, complete_bytes, header = str(self.path), 0, None
        for number, raw in _whole_lines(self._file, name):
            complete_bytes += len(raw)
            line = parse_object(raw, f"{name}, line {number}")
            if header is None:
                header = line
                _check_header(header, self.kind, self.header["version"], name)
                continue
            if self._schema is not None:
                self._schema.read(raw, f"{name}, line {number}")
            self.lines.append(line)
        if header is None:
            self._write_header()
            return
        for field, stored, current in differences({**header, "provenance": None}, {**self.header, "provenance": None}):
            if not self.lines:  # a run that ended before its first line has nothing to resume
                self._file.truncate(0)
                self.append(self.header)
                return
            text = (
                f"was started with {field}={shown(stored)}, and this run has {shown(current)}; "
                "give the same settings to resume it, or name another file"
            )
            raise ConfigError(text, param="path", value=name)
        self._file.truncate(complete_bytes)

    def _write_header(self) -> None:
        """Write the header into a file without a complete line: an empty file, or one with an incomplete header."""
        prefix = json.dumps({"format": self.kind}).encode()[:-1]
        self._file.seek(0)
        found = self._file.read(len(prefix))
        if found != prefix[: len(found)]:
            raise ConfigError(f"is not a {self.kind}, and is unchanged; name another", param="path", value=self.path)
        self._file.truncate(0)
        self.append(self.header)

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line and flush it to the disk. Raises ConfigError if it cannot be written."""
        data = json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with writing(self.path):
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()

    def __enter__(self) -> LineWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def read_lines(
    path: str | os.PathLike[str], kind: str, version: int, schema: Schema[T]
) -> Iterator[tuple[Line, Iterator[tuple[int, T]]]]:
    """Yield the header and an iterator over (line number, value) of the later lines, read lazily while the file is open.

    schema: type of the lines after the header. An incomplete last line, as a killed run leaves it, is skipped. Raises
    ConfigError for a file that cannot be read or is of another kind or version, and, while iterating, for a line that violates
    the schema.
    """
    name = str(path)
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise unreadable(path, error) from None
    with file:
        lines = _whole_lines(file, name)
        first = next(lines, None)
        if first is None:
            raise ConfigError(f"is empty, not a {kind}", param="path", value=name)
        header = parse_object(first[1], f"{name}, line 1")
        _check_header(header, kind, version, name)
        yield header, ((number, schema.read(raw, f"{name}, line {number}")) for number, raw in lines)


def _whole_lines(file: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield (number, bytes) of each complete line."""
    number = 0
    while True:
        number += 1
        try:
            raw = file.readline(MAX_LINE_BYTES)
        except OSError as error:
            raise unreadable(name, error) from None
        if not raw.endswith(b"\n"):
            if len(raw) == MAX_LINE_BYTES:
                raise ConfigError(f": longer than {MAX_LINE_BYTES} bytes", param=f"{name}, line {number}")
            return
        yield number, raw


def _check_header(header: Line, kind: str, version: int, name: str) -> None:
    if header.get("format") != kind:
        raise ConfigError(f"must be {kind!r}", param=f"{name}, line 1: format", value=header.get("format"))
    if header.get("version") != version:
        text = f"of {kind} is not read; this foresay reads version {version}"
        raise ConfigError(text, param=f"{name}, line 1: version", value=header.get("version"))


def differences(stored: Any, current: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, one value, the other value) of each difference, with names such as "settings.dtype"."""
    if isinstance(stored, dict) and isinstance(current, dict):
        for key in sorted({*stored, *current}):
            yield from differences(stored.get(key), current.get(key), f"{name}.{key}" if name else key)
    elif stored != current:
        yield name, stored, current
