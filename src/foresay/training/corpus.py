"""Text corpora, read as a stream: plain text or JSON lines, from files, gzip files or standard input.

Owns what is a document and how much is read at a time. Knows no tokenizer.
"""

from __future__ import annotations

import codecs
import errno
import gzip
import io
import json
import os
import stat
import sys
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import PurePath
from typing import BinaryIO, NamedTuple, cast

from foresay.errors import ConfigError, UnknownNameError

SEPARATORS = ("file", "line", "blank-line")
"""What ends a document besides the end of a file or of a JSON record: nothing, every line, or a line of white space."""
DEFAULT_FIELD = "text"
BLOCK_BYTES = 1 << 16
MAX_LINE_CHARS = 1 << 20
"""A longer line is read in pieces, cut at a space where it has one."""
STDIN = "-"


class CorpusPiece(NamedTuple):
    """Some text of a document; `more` of the document follows, or it ends here."""

    text: str
    more: bool


class CorpusReader:
    """The documents of several files, in order. Everything about the files that can be known beforehand is checked at once."""

    def __init__(self, files: Sequence[str], *, separator: str = "file", field: str | None = None) -> None:
        """Check what is asked for.

        files: .jsonl files hold JSON records, others text; both may be gzip files (.gz); "-" is standard input.
        separator: one of SEPARATORS. field: where a record has its text; with it standard input is JSON lines. Raises
        ConfigError for files that cannot be read.
        """
        if separator not in SEPARATORS:
            raise UnknownNameError("separator", separator, SEPARATORS)
        self.files, self.separator = tuple(files), separator
        self._field = DEFAULT_FIELD if field is None else field
        self._records = frozenset(name for name in files if _is_records(name) or (name == STDIN and field is not None))
        if not files:
            raise ConfigError("no files to read; '-' is standard input")
        if field is not None and (text := [name for name in files if name not in self._records]):
            raise ConfigError(f"field={field!r} belongs to .jsonl files, and {text[0]!r} is none")
        if self.files.count(STDIN) > 1:
            raise ConfigError("standard input can be read only once")
        self.position = 0
        """Bytes read so far, of gzip files as they are compressed."""
        sizes = [_size(name) for name in files]
        self.size = None if None in sizes else sum(cast(list[int], sizes))
        """Bytes there are; None where that is not known, as for a pipe."""

    def pieces(self) -> Generator[CorpusPiece, None, None]:
        """The pieces of all documents, read as they are asked for. Raises ConfigError for what is no UTF-8 text or JSON."""
        self.position = 0
        for name in self.files:
            with _reading(name), _opened(name) as (raw, stream):
                if name in self._records:
                    texts: Iterator[Iterator[str]] = (iter([text]) for text in _records(stream, name, self._field))
                else:
                    texts = iter([_blocks(stream, name)])
                yield from self._followed(texts, raw)

    def _followed(self, texts: Iterable[Iterator[str]], raw: BinaryIO) -> Iterator[CorpusPiece]:
        """The pieces of one file's texts; the position is kept."""
        before, seekable = self.position, raw.seekable()
        for text in texts:
            for piece in _SPLIT[self.separator](text):
                if seekable:
                    self.position = before + raw.tell()
                yield piece


def _whole(blocks: Iterable[str]) -> Iterator[CorpusPiece]:
    for block in blocks:
        yield CorpusPiece(block, True)
    yield CorpusPiece("", False)


def _lines(blocks: Iterable[str]) -> Iterator[CorpusPiece]:
    unfinished = False
    for block in blocks:
        *lines, rest = block.split("\n")
        for line in lines:
            yield CorpusPiece(line.removesuffix("\r"), False)
        if unfinished := bool(rest):
            yield CorpusPiece(rest, True)
    if unfinished:
        yield CorpusPiece("", False)


def _paragraphs(blocks: Iterable[str]) -> Iterator[CorpusPiece]:
    for block in blocks:
        paragraph: list[str] = []
        for line in io.StringIO(block):  # split at "\n" only
            if line.isspace():
                yield CorpusPiece("".join(paragraph), False)
                paragraph = []
            else:
                paragraph.append(line)
        if paragraph:
            yield CorpusPiece("".join(paragraph), True)
    yield CorpusPiece("", False)


_SPLIT = {"file": _whole, "line": _lines, "blank-line": _paragraphs}


def _is_records(name: str) -> bool:
    return PurePath(name.removesuffix(".gz")).suffix == ".jsonl"


def _label(name: str) -> str:
    return "standard input" if name == STDIN else name


def _size(name: str) -> int | None:
    """Bytes of a file that can be read, None of a pipe."""
    if name == STDIN:
        if sys.stdin is None:
            raise ConfigError("standard input is closed")
        return None
    with _reading(name):
        status = os.stat(name)
        for wrong, code in ((stat.S_ISDIR(status.st_mode), errno.EISDIR), (not os.access(name, os.R_OK), errno.EACCES)):
            if wrong:
                raise OSError(code, os.strerror(code))
    return status.st_size if stat.S_ISREG(status.st_mode) else None


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn what the system says against a file into an error that names it."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read {_label(name)!r}: {reason}") from error


@contextmanager
def _opened(name: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The file as it is stored, and as it is read."""
    if name == STDIN:
        yield sys.stdin.buffer, sys.stdin.buffer
        return
    with open(name, "rb") as raw:
        if not name.endswith(".gz"):
            yield raw, raw
            return
        with closing(gzip.GzipFile(fileobj=raw)) as stream:
            yield raw, cast(BinaryIO, stream)


def _blocks(stream: BinaryIO, name: str) -> Iterator[str]:
    """The text in blocks of whole lines."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, rest = 0, ""
    while True:
        raw = stream.read(BLOCK_BYTES)
        waiting = len(decoder.getstate()[0])
        with _utf8(name, offset - waiting):
            text = decoder.decode(raw, final=not raw)
        rest += text.removeprefix("\ufeff") if not offset else text
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


def _records(stream: BinaryIO, name: str, field: str) -> Iterator[str]:
    """The texts of JSON lines; empty lines are passed over."""
    offset = 0
    for number, raw in enumerate(stream, 1):
        with _utf8(name, offset):
            line = raw.decode("utf-8").removeprefix("\ufeff")
        offset += len(raw)
        if not line.isspace():
            yield _text_of(line, f"{_label(name)}, line {number}", field)


def _text_of(line: str, place: str, field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{place}: {type(record).__name__} instead of a JSON object with the field {field!r}")
    text = record.get(field)
    if not isinstance(text, str):
        known = ", ".join(sorted(key for key, value in record.items() if isinstance(value, str))) or "none"
        raise ConfigError(f"{place}: no text in the field {field!r} (fields with text: {known}); see --field")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{place}: the field {field!r} has a lone surrogate at character {error.start}") from None
    return text


@contextmanager
def _utf8(name: str, start: int) -> Iterator[None]:
    """Name the place of a byte that is not UTF-8; `start`: where in the file the decoded bytes begin."""
    try:
        yield
    except UnicodeDecodeError as error:
        byte, place = error.object[error.start], start + error.start
        raise ConfigError(f"{_label(name)} is not UTF-8 text: byte {byte:#04x} at offset {place}") from None
