"""Records of a data set: files of JSON, CSV or text, each also as .gz, and sets of the Hugging Face hub.

Owns which bytes are a record and the place that an error names. Does not know what a record's fields mean.
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
from foresay.text.text_files import bare_name, check_object, decode, ending, is_packed, numbered, parse_json, read_bytes

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:\S+)?")
"""A set of the hub: "owner/name" or "name", with ":config" where it has several configurations."""
SPLITS = ("test", "validation", "train")
"""The splits of a set of the hub that are tried when no split is given, in this order."""
ENDINGS = (".jsonl", ".json", ".csv", ".txt")
ARCHIVES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".zip")


class DataRecord(NamedTuple):
    """The fields of one record, its number and its place as an error names it."""

    place: str
    number: int
    """Counted from 1: the line where it begins, or which record of a JSON list or row of a set of the hub it is."""
    fields: Mapping[str, Any]


def is_file(source: str) -> bool:
    """Whether a source means a file rather than a set of the hub."""
    named = is_packed(source) or ending(source) in ENDINGS or source.lower().endswith(ARCHIVES)
    return named or Path(source).exists() or not HUB_NAME.fullmatch(source)


def stem(source: str) -> str:
    """What a set is called in the ids of its items: "data/prompts.jsonl.gz" -> prompts, "owner/name:config" -> name."""
    if not is_file(source):
        return PurePath(source.partition(":")[0]).name
    return PurePath(bare_name(source)).stem


def file_records(source: str, columns: Sequence[str] = ()) -> Iterator[DataRecord]:
    """The records of a file; the one field of a line of text is `prompt`. Raises ConfigError for what cannot be read.

    columns: what the columns of a CSV file without header row are called; a header row is recognised by the first of
    these names. Where there are none, the first row is the header row.
    """
    if source.lower().endswith(ARCHIVES):
        raise ConfigError(f"{source!r} is an archive; unpack it first and name one of its files")
    raw, kind = read_bytes(source), ending(source)
    if kind not in ENDINGS:
        raise ConfigError(
            f"{source!r} must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}, each with or without .gz"
        )
    text = decode(raw, source)
    if kind == ".csv":
        return _csv(text, source, columns)
    return {".jsonl": _json_lines, ".json": _json, ".txt": _text}[kind](text, source)


def hub_records(source: str, split: str | None) -> Iterator[DataRecord]:
    """The rows of one split of a set of the hub. Raises ConfigError when it cannot be had, whatever the reason."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise ConfigError(
            f"{source!r} is no file, and to read it from the Hugging Face hub takes: pip install 'foresay[lab]'"
        ) from None
    name, _, config = source.partition(":")
    try:
        data = datasets.load_dataset(name, config or None)
    except Exception as error:  # the library has errors of its own, of its file systems and of its network
        raise _unread(source, error) from error
    chosen = split if split is not None else next((known for known in SPLITS if known in data), None)
    if chosen not in data:
        lacks = f"no split {split!r}" if split is not None else f"none of the splits {', '.join(SPLITS)}"
        raise ConfigError(f"{source!r} has {lacks}; it has: {', '.join(map(str, data))}")
    return _rows(data[chosen], source, f"{source} ({chosen})")


def _rows(rows: Any, source: str, label: str) -> Iterator[DataRecord]:
    try:
        for number, row in enumerate(rows, 1):
            yield DataRecord(f"{label}, row {number}", number, row)
    except Exception as error:  # decoding a row may need libraries that are not there
        raise _unread(source, error) from error


def _unread(source: str, error: Exception) -> ConfigError:
    reason = textwrap.shorten(str(error), 300) or type(error).__name__
    return ConfigError(f"{source!r} is no file and cannot be read from the Hugging Face hub: {reason}")


def _text(text: str, source: str) -> Iterator[DataRecord]:
    for line in numbered(text.split("\n"), source):
        yield DataRecord(line.place, line.number, {"prompt": line.text})


def _json_lines(text: str, source: str) -> Iterator[DataRecord]:
    for line in numbered(text.split("\n"), source):
        fields = check_object(parse_json(line.text, line.place), line.place)
        yield DataRecord(line.place, line.number, fields)


def _json(text: str, source: str) -> Iterator[DataRecord]:
    """A list of records, or lines of them as some sets are distributed under this ending."""
    if not text.lstrip().startswith("["):
        yield from _json_lines(text, source)
        return
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}, line {error.lineno}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not JSON: {error}") from None
    for number, value in enumerate(values, 1):
        place = f"{source}, record {number}"
        yield DataRecord(place, number, check_object(value, place))


def _csv(text: str, source: str, columns: Sequence[str]) -> Iterator[DataRecord]:
    names: Sequence[str] = ()
    for number, place, row in _csv_rows(text, source):
        if not names:
            headed = not columns or columns[0] in row
            names = row if headed else columns
            if (twice := next((name for name, times in Counter(names).items() if times > 1), None)) is not None:
                raise ConfigError(f"{place}: the header row has the column {twice!r} twice")
            if headed:
                continue
        if len(row) != len(names):
            raise ConfigError(f"{place}: {len(row)} columns instead of {len(names)}: {', '.join(names)}")
        yield DataRecord(place, number, dict(zip(names, row, strict=True)))


def _csv_rows(text: str, source: str) -> Iterator[tuple[int, str, list[str]]]:
    """Number and place of the line where a row begins, and the row; empty lines are passed over."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    begin = 1
    try:
        for row in reader:
            if row:
                yield begin, f"{source}, line {begin}", row
            begin = reader.line_num + 1
    except csv.Error as error:
        raise ConfigError(f"{source}, line {begin}: not CSV: {error}") from None
