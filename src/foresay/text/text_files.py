"""Files of UTF-8 text, plain or gzip: whole, in blocks or line by line, with errors that name the place.

Owns how bytes become text and text becomes JSON. Does not know what a record or a document is.
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
"""A block holds whole lines; a longer line is cut, at a space where it has one."""
MAX_RECORD_BYTES = 256 << 20
"""The longest line that is read as one JSON record."""
FREE_BYTES, MAX_RATIO = 64 << 20, 200
"""A gzip file may unpack to the first, or to so many times its own size; text is packed by 3 to 20."""


class NumberedLine(NamedTuple):
    """One line, its number from 1 and its place as an error names it."""

    number: int
    place: str
    text: str


def is_packed(name: str) -> bool:
    """Whether a file's name ends in .gz."""
    return name.lower().endswith(".gz")


def bare_name(name: str) -> str:
    """The name of the file that a gzip file holds, and that of any other file as it is."""
    return name[:-3] if is_packed(name) else name


def ending(name: str) -> str:
    """The suffix in lower case, .gz aside: "data/A.JSONL.gz" -> .jsonl."""
    return PurePath(bare_name(name)).suffix.lower()


@contextmanager
def reading(label: str) -> Iterator[None]:
    """Turn errors of the operating system while reading a file into a ConfigError that names it."""
    try:
        yield
    except ForesayError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read {label!r}: {reason}") from error


@contextmanager
def opened(name: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The bytes of a file as they are stored, and as they are read."""
    with open(name, "rb") as raw:
        if not is_packed(name):
            yield raw, raw
            return
        with closing(gzip.GzipFile(fileobj=raw)) as stream:
            yield raw, cast(BinaryIO, stream)


def read_bytes(name: str) -> bytes:
    """A whole file, unpacked. Raises ConfigError for one that cannot be read, or that unpacks to far more than its size."""
    with reading(name), opened(name) as (raw, stream):
        if stream is raw:
            return stream.read()
        most = max(FREE_BYTES, MAX_RATIO * os.fstat(raw.fileno()).st_size)
        data = bytearray()
        while block := stream.read(BLOCK_BYTES):
            data += block
            if len(data) > most:
                raise ConfigError(
                    f"{name!r} unpacks to more than {most} bytes, far more than its size; unpack it first"
                )
    return bytes(data)


def decode(raw: bytes, name: str) -> str:
    """A whole file's text. Raises ConfigError with the line of a byte that is not UTF-8."""
    try:
        return _without_mark(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}, line {line}: not UTF-8 text: byte {raw[error.start]:#04x}") from None


def read_blocks(stream: BinaryIO, label: str) -> Iterator[str]:
    """A stream's text in blocks of whole lines. Raises ConfigError with the offset of a byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, rest = 0, ""
    while True:
        raw = stream.read(BLOCK_BYTES)
        waiting = len(decoder.getstate()[0])
        with _utf8(label, offset - waiting):
            text = decoder.decode(raw, final=not raw)
        rest += text if offset else _without_mark(text)
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
    """A stream's lines. Raises ConfigError with the offset of a byte that is not UTF-8, and for a line that is too long."""
    offset = 0
    while raw := stream.readline(MAX_RECORD_BYTES + 1):
        if len(raw) > MAX_RECORD_BYTES:
            raise ConfigError(f"{label} has a line of more than {MAX_RECORD_BYTES} bytes at offset {offset}")
        with _utf8(label, offset):
            text = raw.decode("utf-8")
        yield _without_mark(text).removesuffix("\n")
        offset += len(raw)


def numbered(lines: Iterable[str], label: str) -> Iterator[NumberedLine]:
    """The lines that are not white space, without a trailing carriage return."""
    for number, line in enumerate(lines, 1):
        if line and not line.isspace():
            yield NumberedLine(number, f"{label}, line {number}", line.removesuffix("\r"))


def parse_json(text: str, place: str) -> Any:
    """A line of JSON. Raises ConfigError that names the place."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON: {error}") from None


def check_object(value: Any, place: str, wanted: str = "a JSON object") -> dict[str, Any]:
    """The fields of a JSON object. Raises ConfigError for any other value."""
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: {type(value).__name__} instead of {wanted}")
    return value


def check_encodable(text: str, place: str, field: str) -> None:
    """Raise ConfigError for a text that UTF-8 has no bytes for, as JSON's escapes can make one."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{place}: the field {field!r} has a lone surrogate at character {error.start}") from None


def _without_mark(text: str) -> str:
    return text.removeprefix("\ufeff")


@contextmanager
def _utf8(label: str, start: int) -> Iterator[None]:
    """Name the place of a byte that is not UTF-8; `start`: where in the stream the decoded bytes begin."""
    try:
        yield
    except UnicodeDecodeError as error:
        byte, place = error.object[error.start], start + error.start
        raise ConfigError(f"{label} is not UTF-8 text: byte {byte:#04x} at offset {place}") from None
