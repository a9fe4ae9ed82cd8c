"""Reading corpora: what is a document, how much is read at a time, and every file that cannot be read."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from foresay.errors import ConfigError, UnknownNameError
from foresay.text.text_files import BLOCK_BYTES, MAX_LINE_BYTES
from foresay_lab.training.corpus import CorpusReader


def joined(reader: CorpusReader) -> list[str]:
    """The documents, whole."""
    documents, text = [], ""
    for piece in reader.pieces():
        text += piece.text
        if not piece.more:
            documents.append(text)
            text = ""
    assert text == ""
    return [document for document in documents if document]


@pytest.mark.parametrize(
    ("separator", "expected"),
    [
        ("file", ["a b\r\nc\n\n \t\nd\x0c\u2028e", "f"]),
        ("line", ["a b", "c", " \t", "d\x0c\u2028e", "f"]),
        ("blank-line", ["a b\r\nc\n", "d\x0c\u2028e", "f"]),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_what_ends_a_document(tmp_path: Path, separator: str, expected: list[str], packed: bool) -> None:
    ending = ".gz" if packed else ""
    names = [str(tmp_path / f"{i}.txt{ending}") for i in range(2)]
    for name, text in zip(names, ("\ufeffa b\r\nc\n\n \t\nd\x0c\u2028e", "f"), strict=True):
        raw = text.encode()
        Path(name).write_bytes(gzip.compress(raw) if packed else raw)
    reader = CorpusReader(names, separator=separator)
    assert joined(reader) == expected
    assert reader.position == reader.size == sum(Path(name).stat().st_size for name in names)
    assert joined(reader) == expected  # it can be read again


@pytest.mark.parametrize("separator", ["file", "line", "blank-line"])
def test_blocks_do_not_change_a_text(tmp_path: Path, separator: str) -> None:
    """Lines of many lengths in several scripts, over several blocks, one of them longer than is read at a time."""
    generator = np.random.default_rng(0)
    lines = ["né 東京 " * int(n) + "x" for n in generator.integers(1, 400, 200)]
    lines[50] = "long " * (MAX_LINE_BYTES // 4)
    lines[60] = "東" * (MAX_LINE_BYTES + 7)
    text = "\n".join(lines)
    assert len(text.encode()) > 20 * BLOCK_BYTES
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    reader = CorpusReader([str(tmp_path / "a.txt")], separator=separator)
    assert joined(reader) == (lines if separator == "line" else [text])
    longest = max(len(piece.text) for piece in reader.pieces())
    assert longest <= MAX_LINE_BYTES + BLOCK_BYTES


def test_json_lines(tmp_path: Path) -> None:
    records = [{"text": "a\nb", "body": "x"}, {"text": "", "body": "y\n\nz"}, {"text": "c", "body": "w"}]
    content = "\n\n".join(json.dumps(record) for record in records).encode()
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    names = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.gz")]
    assert joined(CorpusReader(names)) == ["a\nb", "c"] * 2
    assert joined(CorpusReader(names[:1], separator="line")) == ["a", "b", "c"]
    assert joined(CorpusReader(names[:1], separator="blank-line", field="body")) == ["x", "y\n", "z", "w"]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def gives(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    gives(b"a\nb")
    reader = CorpusReader(["-"], separator="line")
    assert joined(reader) == ["a", "b"] and reader.size is None
    gives(b'{"body": "a"}\n')
    assert joined(CorpusReader(["-"], field="body")) == ["a"]
    gives(b"a\xff")
    with pytest.raises(ConfigError, match="standard input is not UTF-8 text: byte 0xff at offset 1"):
        joined(CorpusReader(["-"]))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="standard input is closed"):
        CorpusReader(["-"])


@pytest.mark.parametrize("offset", [0, 5, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 17])
@pytest.mark.parametrize("packed", [False, True])
def test_a_byte_that_is_not_utf8_is_named(tmp_path: Path, offset: int, packed: bool) -> None:
    raw = bytearray(b"abcdefg\n" * (BLOCK_BYTES // 2))
    raw[offset] = 0xE9
    path = tmp_path / ("a.txt.gz" if packed else "a.txt")
    path.write_bytes(gzip.compress(raw) if packed else raw)
    with pytest.raises(ConfigError) as caught:
        joined(CorpusReader([str(path)]))
    assert str(caught.value) == f"{path} is not UTF-8 text: byte 0xe9 at offset {offset}"


def test_a_character_cut_off_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\n" + "東".encode()[:2])
    with pytest.raises(ConfigError, match=r"a\.txt is not UTF-8 text: byte 0xe6 at offset 2"):
        joined(CorpusReader([str(path)]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not JSON: "),
        ("[1]", "line 3: list instead of a JSON object with the field 'text'"),
        ('{"body": "x", "n": 3}', "line 3: no text in the field 'text' (fields with text: body); see --field"),
        ('{"text": 3}', "line 3: no text in the field 'text' (fields with text: none); see --field"),
        ('{"text": "a\\ud800"}', "line 3: the field 'text' has a lone surrogate at character 1"),
    ],
)
def test_records_that_are_wrong(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n' + line + "\n")
    with pytest.raises(ConfigError) as caught:
        joined(CorpusReader([str(path)]))
    assert str(caught.value).startswith(f"{path}, {message}")
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}')
    with pytest.raises(ConfigError, match=r"a\.jsonl is not UTF-8 text: byte 0xff at offset 24"):
        joined(CorpusReader([str(path)]))


def test_readers_that_cannot_be(tmp_path: Path) -> None:
    text = str(tmp_path / "a.txt")
    Path(text).write_text("a")
    with pytest.raises(UnknownNameError, match=r"unknown separator 'lines'\. Did you mean 'line'\?"):
        CorpusReader([text], separator="lines")
    with pytest.raises(ConfigError, match="no files to read"):
        CorpusReader([])
    with pytest.raises(ConfigError, match=r"field='text' applies to \.jsonl files only, and '.*a\.txt' is not one"):
        CorpusReader([text], field="text")
    with pytest.raises(ConfigError, match="standard input can be read only once"):
        CorpusReader(["-", "-"])
    with pytest.raises(ConfigError, match=r"cannot read '.*nothing': No such file or directory"):
        CorpusReader([text, str(tmp_path / "nothing")])
    with pytest.raises(ConfigError, match=r"cannot read '.*': Is a directory"):
        CorpusReader([str(tmp_path)])


@pytest.mark.parametrize("damage", ["no gzip", "cut", "flipped"])
def test_gzip_files_that_are_damaged(tmp_path: Path, damage: str) -> None:
    raw = bytearray(gzip.compress(np.random.default_rng(0).integers(97, 120, 9000).astype(np.uint8).tobytes()))
    raw[60] ^= 0xFF
    content = {"no gzip": b"plain text", "cut": gzip.compress(b"abc " * 99)[:-9], "flipped": bytes(raw)}[damage]
    path = tmp_path / "a.txt.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot read '.*a\.txt\.gz': "):
        joined(CorpusReader([str(path)]))
