"""Files of JSON lines that are written while something runs, and may be cut short.

Owns what a header is, that a line is there whole or not at all, and that one process writes at a time. Knows nothing of
what the lines hold.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from foresay.errors import ConfigError
from foresay.files import writing

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two writers apart there
    fcntl = None  # type: ignore[assignment]

Line = dict[str, Any]


class LineWriter:
    """Appends JSON lines after a header line; an existing file is resumed where it ended."""

    def __init__(self, path: str | os.PathLike[str], kind: str, version: int, header: Mapping[str, Any]) -> None:
        """Open or create the file.

        kind, version: the file's format. header: the other fields of its first line; an existing file must have the same ones,
        `provenance` aside. Raises ConfigError for another header, a file of another kind or one that cannot be written, and while
        another process writes it.
        """
        self.path, self.kind = Path(path), kind
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
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if not whole:
            begun = json.dumps({"format": self.kind}).encode()[:-1]
            if data[: len(begun)] != begun[: len(data)]:
                raise ConfigError(f"{str(self.path)!r} is no {self.kind}, and is left as it is; name another file")
            self._file.truncate(0)
            self.append(self.header)
            return
        header, *self.lines = [line for _, line in _parsed(data[:whole], str(self.path))]
        _check_header(header, self.kind, self.header["version"], str(self.path))
        for name, theirs, ours in _differences({**header, "provenance": None}, {**self.header, "provenance": None}):
            if not self.lines:  # a run that ended before its first line leaves nothing to go on with
                self._file.truncate(0)
                self.append(self.header)
                return
            raise ConfigError(
                f"{str(self.path)!r} was begun with {name}={_short(theirs)}, and this run has {_short(ours)}; "
                "give the same settings to go on, or another file"
            )
        if whole < len(data):
            self._file.truncate(whole)

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


def read_lines(path: str | os.PathLike[str], kind: str, version: int) -> tuple[Line, Iterator[tuple[int, Line]]]:
    """The header, and (line number, line) of each line after it, parsed lazily.

    A last line without its end, as a killed run leaves it, is left out. Raises ConfigError for a file that cannot be read or is
    of another kind or version, and, while iterating, for a line that is no JSON object.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None
    lines = _parsed(data[: data.rfind(b"\n") + 1], str(path))
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"{str(path)!r} is empty: no {kind}")
    _check_header(first[1], kind, version, str(path))
    return first[1], lines


def _parsed(data: bytes, name: str) -> Iterator[tuple[int, Line]]:
    for number, raw in enumerate(data.splitlines(), 1):
        try:
            line = json.loads(raw)
        except ValueError as error:
            raise ConfigError(f"{name}, line {number}: not JSON ({error})") from None
        if not isinstance(line, dict):
            raise ConfigError(f"{name}, line {number}: a JSON object is needed, not {_short(line)}")
        yield number, line


def _check_header(header: Line, kind: str, version: int, name: str) -> None:
    if header.get("format") != kind:
        raise ConfigError(f"{name}, line 1: not a {kind}; its header has format={_short(header.get('format'))}")
    if header.get("version") != version:
        raise ConfigError(
            f"{name}, line 1: version={_short(header.get('version'))} of {kind}; this foresay reads version {version}"
        )


def _differences(theirs: Any, ours: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, one value, the other) of what differs, by the innermost name, as "settings.dtype"."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in sorted({*theirs, *ours}):
            yield from _differences(theirs.get(key), ours.get(key), f"{name}.{key}" if name else key)
    elif theirs != ours:
        yield name, theirs, ours


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
