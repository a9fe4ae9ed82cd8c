"""Records of a data set: files of JSON, CSV or text, each also as .gz, and data sets of the Hugging Face hub.

Owns the division into records and the positions in error messages. Does not know the meaning of a record's fields.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from foresay.errors import ConfigError
from foresay.text.text_files import (
    bare_name,
    check_encodable,
    check_object,
    decode,
    ending,
    is_packed,
    numbered,
    parse_json,
    read_bytes,
)

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:\S+)?")
"""A data set of the hub: "owner/name" or "name", with ":config" if it has several configurations."""
SPLITS = ("test", "validation", "train")
"""The splits that are tried in this order if no split is given."""
ENDINGS = (".jsonl", ".json", ".csv", ".txt")
ARCHIVES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".zip")


class DataRecord(NamedTuple):
    """The fields of one record, its number, and its position (file and line) for error messages."""

    place: str
    number: int
    """Counted from 1: the line where it begins, its index in a JSON list, or its row in a data set of the hub."""
    fields: Mapping[str, Any]

    def error(self, problem: str) -> ConfigError:
        """Return an error that names the record."""
        return ConfigError(f": {problem}", param=self.place)

    @property
    def names(self) -> str:
        """Names of the fields, for errors."""
        return ", ".join(map(str, self.fields)) or "no fields"

    def checked(self, name: str, value: Any) -> str:
        """Return `value` if it is a text that is not blank and that UTF-8 can encode. Raises ConfigError otherwise."""
        if not isinstance(value, str):
            raise self.error(f"the field {name!r} must be a text, not {shown(value)}")
        if not value.strip():
            raise self.error(f"the field {name!r} is empty")
        check_encodable(value, self.place, name)
        return value

    def _required(self, name: str) -> Any:
        if name not in self.fields:
            raise self.error(f"no field {name!r}; the record has: {self.names}")
        return self.fields[name]

    def text(self, name: str) -> str:
        """Return the text of a required field that must not be empty."""
        return self.checked(name, self._required(name))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the texts of a required field that must be a non-empty list."""
        values = self._required(name)
        if not isinstance(values, list) or not values:
            raise self.error(f"the field {name!r} must be a list of texts, not {shown(values)}")
        return tuple(self.checked(f"{name}[{i}]", value) for i, value in enumerate(values))

    def optional(self, name: str) -> str:
        """Return the text of a field; empty if missing."""
        value = self.fields.get(name)
        return "" if value in (None, "") else self.checked(name, value)

    def label(self, name: str) -> str:
        """Return a text, or an integer as text; empty if missing."""
        value = self.fields.get(name)
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else self.optional(name)


def shown(value: Any) -> str:
    """Return the beginning of a value, for errors."""
    text = repr(value)
    return f"{text[:60]}..." if len(text) > 60 else text


def is_file(source: str) -> bool:
    """True if a source names a file, False if it names a data set of the hub."""
    named = is_packed(source) or ending(source) in ENDINGS or source.lower().endswith(ARCHIVES)
    return named or Path(source).exists() or not HUB_NAME.fullmatch(source)


def stem(source: str) -> str:
    """Return the name of a data set in its item ids: "data/prompts.jsonl.gz" -> prompts, "owner/name:config" -> name."""
    if not is_file(source):
        return PurePath(source.partition(":")[0]).name
    return PurePath(bare_name(source)).stem


def file_records(source: str, columns: Sequence[str] = ()) -> Iterator[DataRecord]:
    """Yield the records of a file; a line of text has the single field `prompt`. Raises ConfigError if it cannot be read.

    columns: names of the columns of a CSV file without header row; a row that contains the first of these names is a header
    row. If empty, the first row is the header row.
    """
    if source.lower().endswith(ARCHIVES):
        raise ConfigError("is an archive; unpack it first and name one of its files", param="path", value=source)
    raw, kind = read_bytes(source), ending(source)
    if kind not in ENDINGS:
        problem = f"must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}, each with or without .gz"
        raise ConfigError(problem, param="path", value=source)
    text = decode(raw, source)
    if kind == ".csv":
        return _csv(text, source, columns)
    return {".jsonl": _json_lines, ".json": _json, ".txt": _text}[kind](text, source)


def hub_records(source: str, split: str | None) -> Iterator[DataRecord]:
    """Yield the rows of one split of a data set of the hub. Raises ConfigError for any reason that it cannot be loaded."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        text = "is not a file; to read it from the Hugging Face hub: pip install 'foresay[lab]'"
        raise ConfigError(text, param="path", value=source) from None
    name, _, config = source.partition(":")
    try:
        data = datasets.load_dataset(name, config or None)
    except Exception as error:  # the library, its file systems and its network raise many kinds of errors
        raise _unread(source, error) from error
    chosen = split if split is not None else next((known for known in SPLITS if known in data), None)
    if chosen not in data:
        missing = f"no split {split!r}" if split is not None else f"none of the splits {', '.join(SPLITS)}"
        raise ConfigError(f"has {missing}; it has: {', '.join(map(str, data))}", param="path", value=source)
    return _rows(data[chosen], source, f"{source} ({chosen})")


def _rows(rows: Any, source: str, label: str) -> Iterator[DataRecord]:
    try:
        for number, row in enumerate(rows, 1):
            yield DataRecord(f"{label}, row {number}", number, row)
    except Exception as error:  # decoding a row may need libraries that are not installed
        raise _unread(source, error) from error


def _unread(source: str, error: Exception) -> ConfigError:
    reason = textwrap.shorten(str(error), 300) or type(error).__name__
    text = f"is not a file and cannot be read from the Hugging Face hub: {reason}"
    return ConfigError(text, param="path", value=source)


def _text(text: str, source: str) -> Iterator[DataRecord]:
    for line in numbered(text.split("\n"), source):
        yield DataRecord(line.place, line.number, {"prompt": line.text})


def _json_lines(text: str, source: str) -> Iterator[DataRecord]:
    for line in numbered(text.split("\n"), source):
        fields = check_object(parse_json(line.text, line.place), line.place)
        yield DataRecord(line.place, line.number, fields)


def _json(text: str, source: str) -> Iterator[DataRecord]:
    """Yield the records of a list, or of JSON lines, which some data sets use with this suffix."""
    if not text.lstrip().startswith("["):
        yield from _json_lines(text, source)
        return
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        problem = f": not JSON: {error.msg} at column {error.colno}"
        raise ConfigError(problem, param=f"{source}, line {error.lineno}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f": not JSON: {error}", param=source) from None
    for number, value in enumerate(values, 1):
        position = f"{source}, record {number}"
        yield DataRecord(position, number, check_object(value, position))


def _csv(text: str, source: str, columns: Sequence[str]) -> Iterator[DataRecord]:
    """Yield the records of the rows; empty lines are skipped."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names: Sequence[str] = ()
    begin = 1
    try:
        for row in reader:
            number, position, begin = begin, f"{source}, line {begin}", reader.line_num + 1
            if row and not names:
                has_header = not columns or columns[0] in row
                names = row if has_header else columns
                if repeated := [name for name, times in Counter(names).items() if times > 1]:
                    text = f": the header row has the column {repeated[0]!r} twice"
                    raise ConfigError(text, param=position, value=repeated[0])
                if has_header:
                    continue
            if row and len(row) != len(names):
                problem = f": {len(row)} columns instead of {len(names)}: {', '.join(names)}"
                raise ConfigError(problem, param=position, value=len(row))
            if row:
                yield DataRecord(position, number, dict(zip(names, row, strict=True)))
    except csv.Error as error:
        raise ConfigError(f": not CSV: {error}", param=f"{source}, line {begin}") from None
