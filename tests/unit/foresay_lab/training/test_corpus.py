"""Reading corpora: what is a document, how much is read at a time, and every file that cannot be read."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from foresay.errors import UnknownNameError
from foresay.text.text_files import BLOCK_BYTES, MAX_LINE_BYTES
from foresay_lab.training.corpus import CorpusReader
from helpers.refusals import refused, refuses


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


@pytest.mark.parametrize("packed", [False, True])
def test_what_ends_a_document(tmp_path: Path, packed: bool) -> None:
    names = [str(tmp_path / f"{i}.txt{'.gz' * packed}") for i in range(2)]
    for name, text in zip(names, ("\ufeffa b\r\nc\n\n \t\nd\x0c\u2028e", "f"), strict=True):
        Path(name).write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    for separator, expected in (
        ("file", ["a b\r\nc\n\n \t\nd\x0c\u2028e", "f"]),
        ("line", ["a b", "c", " \t", "d\x0c\u2028e", "f"]),
        ("blank-line", ["a b\r\nc\n", "d\x0c\u2028e", "f"]),
    ):
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
    refuses(lambda: joined(CorpusReader(["-"])), "path", "standard input")
    monkeypatch.setattr(sys, "stdin", None)
    refuses(lambda: CorpusReader(["-"]), "standard input")


@pytest.mark.parametrize("packed", [False, True])
def test_a_byte_that_is_not_utf8_is_named(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("a.txt.gz" if packed else "a.txt")
    for offset in (0, 5, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 17):
        raw = bytearray(b"abcdefg\n" * (BLOCK_BYTES // 2))
        raw[offset] = 0xE9
        path.write_bytes(gzip.compress(raw, 1) if packed else raw)
        with refused("path", str(path)) as caught:
            joined(CorpusReader([str(path)]))
        assert f"byte 0xe9 at offset {offset}" in str(caught.value)


def test_records_that_are_wrong(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for line, param, value in (
        ("{", f"{path}, line 3", None),
        ("[1]", f"{path}, line 3", [1]),
        ('{"body": "x", "n": 3}', "field", "text"),
        ('{"text": 3}', "field", "text"),
        ('{"text": "a\\ud800"}', f"{path}, line 3: the field 'text'", None),
    ):
        path.write_text('{"text": "a"}\n\n' + line + "\n")
        with refused(param, value) as caught:
            joined(CorpusReader([str(path)]))
        assert f"{path}, line 3" in str(caught.value)
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}')
    refuses(lambda: joined(CorpusReader([str(path)])), "path")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    raw = bytearray(gzip.compress(np.random.default_rng(0).integers(97, 120, 9000).astype(np.uint8).tobytes()))
    raw[60] ^= 0xFF
    contents = {
        "a.txt": b"a\n" + "東".encode()[:2],  # a character that is cut off
        "no-gzip.gz": b"plain text",
        "cut.gz": gzip.compress(b"abc " * 99)[:-9],
        "flipped.gz": bytes(raw),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name in (*contents, "nothing", ""):
        refuses(lambda name=name: joined(CorpusReader([str(tmp_path / name)])), "path")  # type: ignore[misc]
    text = str(tmp_path / "a.txt")
    refuses(lambda: CorpusReader([text], separator="lines"), "separator", "lines", UnknownNameError)
    refuses(lambda: CorpusReader([]), "files", [])
    refuses(lambda: CorpusReader([text], field="text"), "field", "text")
    refuses(lambda: CorpusReader(["-", "-"]), "files", ("-", "-"))
