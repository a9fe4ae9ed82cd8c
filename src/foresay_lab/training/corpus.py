"""Text corpora, read as a stream: plain text or JSON lines, from files, gzip files or standard input.

Owns the splitting into documents and the amount read at once. Knows no tokenizer.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
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
"""Separators of documents within a file: nothing, every line break, or a blank line. A JSON record is always a document."""
DEFAULT_FIELD = "text"
STDIN = "-"


class CorpusPiece(NamedTuple):
    """A piece of a document's text. more: True if another piece of the document follows."""

    text: str
    more: bool


class CorpusReader:
    """The documents of several files, in order. The constructor checks everything that can be checked before reading."""

    def __init__(self, files: Sequence[str], *, separator: str = "file", field: str | None = None) -> None:
        """Check the files and the settings.

        files: .jsonl files contain JSON records, others text; both may be gzip files (.gz); "-" is standard input.
        separator: one of SEPARATORS. field: name of a record's text field; if set, standard input is read as JSON lines. Raises
        ConfigError for unreadable files, UnknownNameError for an unknown separator.
        """
        if separator not in SEPARATORS:
            raise UnknownNameError("separator", separator, SEPARATORS)
        self.files, self.separator = tuple(files), separator
        self._field = DEFAULT_FIELD if field is None else field
        self._records = frozenset(
            name for name in files if ending(name) == ".jsonl" or (name == STDIN and field is not None)
        )
        if not files:
            raise ConfigError("must be names of files, or '-' for standard input", param="files", value=files)
        if field is not None and (text := [name for name in files if name not in self._records]):
            raise ConfigError(f"applies to .jsonl files only, and {text[0]!r} is not one", param="field", value=field)
        if self.files.count(STDIN) > 1:
            problem = "contain '-', standard input, twice; it can be read only once"
            raise ConfigError(problem, param="files", value=self.files)
        self.position = 0
        """Bytes read so far; compressed bytes for gzip files."""
        sizes = [_size(name) for name in files]
        self.size = None if None in sizes else sum(cast(list[int], sizes))
        """Total size in bytes; None if unknown, as for a pipe."""

    def pieces(self) -> Generator[CorpusPiece, None, None]:
        """Yield the pieces of all documents lazily. Raises ConfigError for invalid UTF-8 or JSON."""
        self.position = 0
        for name in self.files:
            label = _label(name)
            with reading(label), _opened(name) as (raw, stream):
                if name in self._records:
                    texts: Iterator[Iterator[str]] = (iter([text]) for text in _records(stream, label, self._field))
                else:
                    texts = iter([read_blocks(stream, label)])
                start, seekable = self.position, raw.seekable()
                for piece in chain.from_iterable(map(_SPLIT[self.separator], texts)):
                    if seekable:
                        self.position = start + raw.tell()
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
    """Return the bytes of a readable file, or None for a pipe."""
    if name == STDIN:
        if sys.stdin is None:
            raise ConfigError("is closed", param="standard input")
        return None
    with reading(_label(name)):
        status = os.stat(name)
        for failed, code in (
            (stat.S_ISDIR(status.st_mode), errno.EISDIR),
            (not os.access(name, os.R_OK), errno.EACCES),
        ):
            if failed:
                raise OSError(code, os.strerror(code))
    return status.st_size if stat.S_ISREG(status.st_mode) else None


@contextmanager
def _opened(name: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yield the file as stored, and as decompressed."""
    if name == STDIN:
        yield sys.stdin.buffer, sys.stdin.buffer
        return
    with opened(name) as streams:
        yield streams


def _records(stream: BinaryIO, label: str, field: str) -> Iterator[str]:
    """Yield the texts of JSON lines. Empty lines are skipped."""
    for line in numbered(read_lines(stream, label), label):
        value = parse_json(line.text, line.place)
        fields = check_object(value, line.place, f"a JSON object with the field {field!r}")
        text = fields.get(field)
        if not isinstance(text, str):
            known = ", ".join(sorted(key for key, value in fields.items() if isinstance(value, str))) or "none"
            problem = f"is in no text of {line.place} (fields with text: {known}); choose another"
            raise ConfigError(problem, param="field", value=field)
        check_encodable(text, line.place, field)
        yield text
