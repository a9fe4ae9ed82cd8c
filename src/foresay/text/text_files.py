"""Files of UTF-8 text, plain or gzip: whole, in blocks or line by line, with errors that name the position.

Owns decoding and JSON parsing. Does not know the meaning of a record or a document.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import PurePath
from typing import Any, BinaryIO, NamedTuple, cast

from foresay.errors import ConfigError, ForesayError

BLOCK_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20
"""A block contains whole lines; a longer line is cut, at a space if it has one."""
MAX_RECORD_BYTES = 256 << 20
"""The longest line that is read as one JSON record."""
FREE_BYTES, MAX_RATIO = 64 << 20, 200
"""A gzip file may unpack to the larger of FREE_BYTES and MAX_RATIO times its size; text compresses 3 to 20 times."""


class NumberedLine(NamedTuple):
    """One line, its number from 1, and its position (file and line) for error messages."""

    number: int
    place: str
    text: str


def is_packed(name: str) -> bool:
    """True if a file name ends in .gz."""
    return name.lower().endswith(".gz")


def bare_name(name: str) -> str:
    """Return the name without .gz."""
    return name[:-3] if is_packed(name) else name


def ending(name: str) -> str:
    """Return the suffix in lower case, without .gz: "data/A.JSONL.gz" -> .jsonl."""
    return PurePath(bare_name(name)).suffix.lower()


@contextmanager
def reading(label: str) -> Iterator[None]:
    """Turn operating system and decompression errors while reading a file into a ConfigError that names it."""
    try:
        yield
    except ForesayError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:  # ValueError: not a valid file name
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot be read: {reason}", param="path", value=label) from error


@contextmanager
def opened(name: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yield two streams of a file: its stored bytes and its unpacked bytes."""
    with open(name, "rb") as raw:
        if not is_packed(name):
            yield raw, raw
            return
        with closing(gzip.GzipFile(fileobj=raw)) as stream:
            yield raw, cast(BinaryIO, stream)


def read_bytes(name: str) -> bytes:
    """Read a whole file, unpacked. Raises ConfigError if it cannot be read or unpacks to far more than its size."""
    with reading(name), opened(name) as (raw, stream):
        if stream is raw:
            return stream.read()
        limit = max(FREE_BYTES, MAX_RATIO * os.fstat(raw.fileno()).st_size)
        data = bytearray()
        while block := stream.read(BLOCK_BYTES):
            data += block
            if len(data) > limit:
                text = f"unpacks to more than {limit} bytes, far more than its size; unpack it first"
                raise ConfigError(text, param="path", value=name)
    return bytes(data)


def decode(raw: bytes, name: str) -> str:
    """Decode a whole file. Raises ConfigError with the line of the first byte that is not UTF-8."""
    try:
        return _without_bom(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f": not UTF-8 text: byte {raw[error.start]:#04x}", param=f"{name}, line {line}") from None


def read_blocks(stream: BinaryIO, label: str) -> Iterator[str]:
    """Yield a stream's text in blocks of whole lines. Raises ConfigError with the offset of a byte that is not UTF-8."""
    offset, rest = 0, b""
    while raw := stream.read(BLOCK_BYTES):
        rest += raw
        cut = rest.rfind(b"\n") + 1
        if not cut and len(rest) >= MAX_LINE_BYTES:
            last = max(i for i in range(len(rest) - 4, len(rest)) if rest[i] & 0xC0 != 0x80 or i == len(rest) - 4)
            cut = rest.rfind(b" ") if rest.rfind(b" ") > 0 else last  # not within a character
        if cut:
            yield _decoded(rest[:cut], label, offset)
            offset, rest = offset + cut, rest[cut:]
    if rest:
        yield _decoded(rest, label, offset)


def read_lines(stream: BinaryIO, label: str) -> Iterator[str]:
    """Yield a stream's lines. Raises ConfigError with the offset of a byte that is not UTF-8 or of a line that is too long."""
    offset = 0
    while raw := stream.readline(MAX_RECORD_BYTES + 1):
        if len(raw) > MAX_RECORD_BYTES:
            text = f"has a line of more than {MAX_RECORD_BYTES} bytes at offset {offset}"
            raise ConfigError(text, param="path", value=label)
        yield _decoded(raw, label, offset).removesuffix("\n")
        offset += len(raw)


def numbered(lines: Iterable[str], label: str) -> Iterator[NumberedLine]:
    """Yield the lines that are not blank, without a trailing carriage return."""
    for number, line in enumerate(lines, 1):
        if line and not line.isspace():
            yield NumberedLine(number, f"{label}, line {number}", line.removesuffix("\r"))


def parse_json(text: str, place: str) -> Any:
    """Parse one line of JSON. Raises ConfigError that names its position."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f": not JSON: {error}", param=place) from None


def check_object(value: Any, place: str, expected: str = "a JSON object") -> dict[str, Any]:
    """Return the fields of a JSON object. Raises ConfigError for any other value."""
    if not isinstance(value, dict):
        raise ConfigError(f": {type(value).__name__} instead of {expected}", param=place, value=value)
    return value


def check_encodable(text: str, place: str, field: str) -> None:
    """Raise ConfigError for a text that UTF-8 cannot encode; JSON escapes can produce one."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        problem = f"has a lone surrogate at character {error.start}"
        raise ConfigError(problem, param=f"{place}: the field {field!r}") from None


def _without_bom(text: str) -> str:
    return text.removeprefix("\ufeff")


def _decoded(raw: bytes, label: str, offset: int) -> str:
    """Decode a part of a stream. Raises ConfigError with the offset of a byte that is not UTF-8. offset: of the part."""
    try:
        return raw.decode("utf-8") if offset else _without_bom(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        byte, at = raw[error.start], offset + error.start
        raise ConfigError(f"is not UTF-8 text: byte {byte:#04x} at offset {at}", param="path", value=label) from None
