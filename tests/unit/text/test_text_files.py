"""Files of text: names, lines, and what reads the same whether it is read whole or as a stream; and values as text."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest

from foresay.errors import UnknownNameError
from foresay.text.formatting import percent, yes_no
from foresay.text.text_files import (
    NumberedLine,
    bare_name,
    decode,
    ending,
    numbered,
    opened,
    read_blocks,
    read_bytes,
    read_lines,
    reading,
)
from helpers.refusals import refused


def test_names_and_endings() -> None:
    for name, bare, kind in (
        ("data/A.JSONL.GZ", "data/A.JSONL", ".jsonl"), ("a.b.txt.gz", "a.b.txt", ".txt"), ("a.gz", "a", ""), ("-", "-", ""),
    ):  # fmt: skip
        assert (bare_name(name), ending(name)) == (bare, kind)


def test_lines_are_numbered_and_empty_ones_are_passed_over() -> None:
    lines = ["a", "", " \t\r", "b\x0c \r"]
    assert list(numbered(lines, "f")) == [NumberedLine(1, "f, line 1", "a"), NumberedLine(4, "f, line 4", "b\x0c ")]


@pytest.mark.parametrize("text", ["", "\n", "a\u2028b\r\n\n東 京", "a\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_whole_in_blocks_and_by_line(tmp_path: Path, text: str, packed: bool) -> None:
    raw = f"\ufeff{text}".encode()
    path = str(tmp_path / ("a.GZ" if packed else "a"))
    Path(path).write_bytes(gzip.compress(raw) if packed else raw)
    assert decode(read_bytes(path), path) == text
    with opened(path) as (_, stream):
        assert "".join(read_blocks(stream, path)) == text
    with opened(path) as (stored, stream):
        assert list(numbered(read_lines(stream, path), path)) == list(numbered(text.split("\n"), path))
        assert stored.tell() == Path(path).stat().st_size


def test_a_byte_that_is_not_utf8_is_named_by_line_or_by_offset() -> None:
    raw = b"ab\ncd\xe9\n"
    with refused("f, line 2"):
        decode(raw, "f")
    for read in (read_blocks, read_lines):
        with refused("path", "f"):
            list(read(io.BytesIO(raw), "f"))


def test_an_error_of_ours_stays_as_it_is() -> None:
    with refused("field", "a", UnknownNameError), reading("f"):
        raise UnknownNameError("field", "a", ["b"])


def test_values_as_text() -> None:
    assert [percent(value) for value in (None, 0.0, 0.126, 1.0)] == ["-", "0%", "13%", "100%"]
    assert [yes_no(value) for value in (True, False, None)] == ["yes", "no", "-"]
