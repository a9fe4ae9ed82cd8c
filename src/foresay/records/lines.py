"""Files of JSON lines that are written while something runs, and may be cut short.

Owns what a header is, that a line is there whole or not at all, and that one process writes at a time. Knows nothing of
what the lines hold.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from foresay.errors import ConfigError
from foresay.files import writing
from foresay.json_files import Schema, parse_object, short

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two writers apart there
    fcntl = None  # type: ignore[assignment]

Line = dict[str, Any]
T = TypeVar("T")

MAX_LINE_BYTES = 256 << 20
"""The longest line that is read."""


class LineWriter:
    """Appends JSON lines after a header line; an existing file is resumed where it ended."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        kind: str,
        version: int,
        header: Mapping[str, Any],
        schema: Schema[Any] | None = None,
    ) -> None:
        """Open or create the file.

        kind, version: the file's format. header: the other fields of its first line; an existing file must have the same ones,
        `provenance` aside. schema: type of every other line of an existing file. Raises ConfigError for another header, a line
        that is not of the schema, a file of another kind or one that cannot be written, and while another process writes it.
        """
        self.path, self.kind, self._schema = Path(path), kind, schema
        # as it will be read back: tuples are lists there, and keys texts
        self.header: Line = json.loads(json.dumps({"format": kind, "version": version, **header}))
        self.lines: list[Line] = []
        """The lines that the file held when it was opened, without the header."""
        try:
            self._file: BinaryIO = open(self.path, "a+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}") from None
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
            raise ConfigError(
                f"another process is writing {str(self.path)!r}; let it end, or name another file"
            ) from None

    def _resume(self) -> None:
        """Read what is there, and cut off a line that was never finished."""
        self._file.seek(0)
        name, whole, header = str(self.path), 0, None
        for number, raw in _whole_lines(self._file, name):
            whole += len(raw)
            line = parse_object(raw, f"{name}, line {number}")
            if header is None:
                header = line
                _check_header(header, self.kind, self.header["version"], name)
                continue
            if self._schema is not None:
                self._schema.read(raw, f"{name}, line {number}")
            self.lines.append(line)
        if header is None:
            self._begin()
            return
        for field, theirs, ours in _differences({**header, "provenance": None}, {**self.header, "provenance": None}):
            if not self.lines:  # a run that ended before its first line leaves nothing to go on with
                self._file.truncate(0)
                self.append(self.header)
                return
            raise ConfigError(
                f"{name!r} was begun with {field}={short(theirs)}, and this run has {short(ours)}; "
                "give the same settings to go on, or another file"
            )
        self._file.truncate(whole)

    def _begin(self) -> None:
        """Write the header into a file without a whole line: an empty one, or one whose own header was cut short."""
        begun = json.dumps({"format": self.kind}).encode()[:-1]
        self._file.seek(0)
        found = self._file.read(len(begun))
        if found != begun[: len(found)]:
            raise ConfigError(f"{str(self.path)!r} is no {self.kind}, and is left as it is; name another file")
        self._file.truncate(0)
        self.append(self.header)

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line; it is on the disk when this returns. Raises ConfigError where that cannot be done."""
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
    """The header, and (line number, value) of each line after it, read as they are asked for while the file is open.

    schema: type of the lines after the header. A last line without its end, as a killed run leaves it, is left out. Raises
    ConfigError for a file that cannot be read or is of another kind or version, and, while iterating, for a line that is not of
    the schema.
    """
    name = str(path)
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"cannot read {name!r}: {error.strerror}") from None
    with file:
        lines = _whole_lines(file, name)
        first = next(lines, None)
        if first is None:
            raise ConfigError(f"{name!r} is empty: no {kind}")
        header = parse_object(first[1], f"{name}, line 1")
        _check_header(header, kind, version, name)
        yield header, ((number, schema.read(raw, f"{name}, line {number}")) for number, raw in lines)


def _whole_lines(file: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of each line that has its end."""
    number = 0
    while True:
        number += 1
        try:
            raw = file.readline(MAX_LINE_BYTES)
        except OSError as error:
            raise ConfigError(f"cannot read {name!r}: {error.strerror}") from None
        if not raw.endswith(b"\n"):
            if len(raw) == MAX_LINE_BYTES:
                raise ConfigError(f"{name}, line {number}: longer than {MAX_LINE_BYTES} bytes")
            return
        yield number, raw


def _check_header(header: Line, kind: str, version: int, name: str) -> None:
    if header.get("format") != kind:
        raise ConfigError(f"{name}, line 1: not a {kind}; its header has format={short(header.get('format'))}")
    if header.get("version") != version:
        raise ConfigError(
            f"{name}, line 1: version={short(header.get('version'))} of {kind}; this foresay reads version {version}"
        )


def _differences(theirs: Any, ours: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, one value, the other) of what differs, by the innermost name, as "settings.dtype"."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in sorted({*theirs, *ours}):
            yield from _differences(theirs.get(key), ours.get(key), f"{name}.{key}" if name else key)
    elif theirs != ours:
        yield name, theirs, ours
