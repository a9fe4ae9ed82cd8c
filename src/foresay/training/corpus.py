"""Text corpora, read as a stream: plain text or JSON lines, from files, gzip files or standard input.

Owns what is a document and how much is read at a time. Knows no tokenizer.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple, cast

from foresay.errors import ConfigError, UnknownNameError
from foresay.text.text_files import (
    check_encodable,
    check_object,
    ending,
    numbered,
    opened,
    parse_json,
    read_blocks,
    read_lines,
    reading,
)

SEPARATORS = ("file", "line", "blank-line")
"""What ends a document besides the end of a file or of a JSON record: nothing, every line, or a line of white space."""
DEFAULT_FIELD = "text"
STDIN = "-"


class CorpusPiece(NamedTuple):
    """Some text of a document; `more` of the document follows, or it ends here."""

    text: str
    more: bool


class CorpusReader:
    """The documents of several files, in order. What can be checked before reading is checked when it is made."""

    def __init__(self, files: Sequence[str], *, separator: str = "file", field: str | None = None) -> None:
        """Check the files and how they are to be read.

        files: .jsonl files hold JSON records, others text; both may be gzip files (.gz); "-" is standard input.
        separator: one of SEPARATORS. field: where a record has its text; with it standard input is JSON lines. Raises
        ConfigError for files that cannot be read, UnknownNameError for another separator.
        """
        if separator not in SEPARATORS:
            raise UnknownNameError("separator", separator, SEPARATORS)
        self.files, self.separator = tuple(files), separator
        self._field = DEFAULT_FIELD if field is None else field
        self._records = frozenset(
            name for name in files if ending(name) == ".jsonl" or (name == STDIN and field is not None)
        )
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
        """Bytes in all; None where that is not known, as for a pipe."""

    def pieces(self) -> Generator[CorpusPiece, None, None]:
        """The pieces of all documents, read lazily. Raises ConfigError for what is no UTF-8 text or JSON."""
        self.position = 0
        for name in self.files:
            label = _label(name)
            with reading(label), _opened(name) as (raw, stream):
                if name in self._records:
                    texts: Iterator[Iterator[str]] = (iter([text]) for text in _records(stream, label, self._field))
                else:
                    texts = iter([read_blocks(stream, label)])
                yield from self._followed(texts, raw)

    def _followed(self, texts: Iterable[Iterator[str]], raw: BinaryIO) -> Iterator[CorpusPiece]:
        """The pieces of one file's texts; `position` follows."""
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


def _label(name: str) -> str:
    return "standard input" if name == STDIN else name


def _size(name: str) -> int | None:
    """Bytes of a file that can be read, None of a pipe."""
    if name == STDIN:
        if sys.stdin is None:
            raise ConfigError("standard input is closed")
        return None
    with reading(_label(name)):
        status = os.stat(name)
        for wrong, code in ((stat.S_ISDIR(status.st_mode), errno.EISDIR), (not os.access(name, os.R_OK), errno.EACCES)):
            if wrong:
                raise OSError(code, os.strerror(code))
    return status.st_size if stat.S_ISREG(status.st_mode) else None


@contextmanager
def _opened(name: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The file as it is stored, and as it is read."""
    if name == STDIN:
        yield sys.stdin.buffer, sys.stdin.buffer
        return
    with opened(name) as streams:
        yield streams


def _records(stream: BinaryIO, label: str, field: str) -> Iterator[str]:
    """The texts of JSON lines; empty lines are passed over."""
    for line in numbered(read_lines(stream, label), label):
        value = parse_json(line.text, line.place)
        fields = check_object(value, line.place, f"a JSON object with the field {field!r}")
        text = fields.get(field)
        if not isinstance(text, str):
            known = ", ".join(sorted(key for key, value in fields.items() if isinstance(value, str))) or "none"
            raise ConfigError(f"{line.place}: no text in the field {field!r} (fields with text: {known}); see --field")
        check_encodable(text, line.place, field)
        yield text
