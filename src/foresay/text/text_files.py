"""Files of UTF-8 text, plain or gzip: whole, in blocks or line by line, with errors that name the position.

Owns decoding and JSON parsing. Does not know the meaning of a record or a document.
"""

from __future__ import annotations

import codecs
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
MAX_LINE_CHARS = 1 << 20
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
        raise ConfigError(f"cannot read {label!r}: {reason}") from error


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
                raise ConfigError(
                    f"{name!r} unpacks to more than {limit} bytes, far more than its size; unpack it first"
                )
    return bytes(data)


def decode(raw: bytes, name: str) -> str:
    """Decode a whole file. Raises ConfigError with the line of the first byte that is not UTF-8."""
    try:
        return _without_bom(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}, line {line}: not UTF-8 text: byte {raw[error.start]:#04x}") from None


def read_blocks(stream: BinaryIO, label: str) -> Iterator[str]:
    """Yield a stream's text in blocks of whole lines. Raises ConfigError with the offset of a byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, rest = 0, ""
    while True:
        raw = stream.read(BLOCK_BYTES)
        undecoded = len(decoder.getstate()[0])
        with _utf8(label, offset - undecoded):
            text = decoder.decode(raw, final=not raw)
        rest += text if offset else _without_bom(text)
        offset += len(raw)
        if not raw:
            break
        cut = rest.rfind("\n") + 1
        if not cut and len(rest) >= MAX_LINE_CHARS:
            cut = rest.rfind(" ") if rest.rfind(" ") > 0 else len(rest)
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def read_lines(stream: BinaryIO, label: str) -> Iterator[str]:
    """Yield a stream's lines. Raises ConfigError with the offset of a byte that is not UTF-8 or of a line that is too long."""
    offset = 0
    while raw := stream.readline(MAX_RECORD_BYTES + 1):
        if len(raw) > MAX_RECORD_BYTES:
            raise ConfigError(f"{label} has a line of more than {MAX_RECORD_BYTES} bytes at offset {offset}")
        with _utf8(label, offset):
            text = raw.decode("utf-8")
        yield _without_bom(text).removesuffix("\n")
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
        raise ConfigError(f"{place}: not JSON: {error}") from None


def check_object(value: Any, place: str, expected: str = "a JSON object") -> dict[str, Any]:
    """Return the fields of a JSON object. Raises ConfigError for any other value."""
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: {type(value).__name__} instead of {expected}")
    return value


def check_encodable(text: str, place: str, field: str) -> None:
    """Raise ConfigError for a text that UTF-8 cannot encode; JSON escapes can produce one."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{place}: the field {field!r} has a lone surrogate at character {error.start}") from None


def _without_bom(text: str) -> str:
    return text.removeprefix("\ufeff")


@contextmanager
def _utf8(label: str, start: int) -> Iterator[None]:
    """Raise ConfigError with the offset of a byte that is not UTF-8. start: offset of the decoded bytes in the stream."""
    try:
        yield
    except UnicodeDecodeError as error:
        byte, offset = error.object[error.start], start + error.start
        raise ConfigError(f"{label} is not UTF-8 text: byte {byte:#04x} at offset {offset}") from None
