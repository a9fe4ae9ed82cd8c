"""The files of n-gram tables: what is written comes back, and everything that a file can get wrong is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from foresay.drafters.ngram_table import MAX_VOCAB_SIZE, TOKEN_BITS, NgramTable
from foresay.errors import ModelLoadError, ModelNotFoundError, VocabularyMismatchError
from helpers.refusals import refused
from helpers.tables import MARK, UNKNOWN, level, small


def same(a: NgramTable, b: NgramTable) -> bool:
    arrays = [(a.successor, b.successor), *((x.starts, y.starts) for x, y in zip(a.levels, b.levels, strict=True))]
    arrays += [(x.keys, y.keys) for x, y in zip(a.levels, b.levels, strict=True)]
    arrays += [(x.successor, y.successor) for x, y in zip(a.levels, b.levels, strict=True)]
    if a.counts is not None and b.counts is not None:
        arrays.append((a.counts, b.counts))
    equal = all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in arrays)
    return equal and (a.fingerprint, a.corpus, a.counts is None) == (b.fingerprint, b.corpus, b.counts is None)


@pytest.mark.parametrize(
    "changes",
    [{}, {"levels": ()}, {"counts": None}, {"fingerprint": None}, {"corpus": None}, {"levels": (level({}, 6),)}],
)
def test_a_table_survives_its_file(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "table.safetensors"
    path.write_text("something old")
    with path.open() as old:
        small(**changes).save(path)
        assert old.read() == "something old"  # a reader sees one of the two files, whole, while it is replaced
    assert same(NgramTable.load(path), small(**changes))
    assert os.listdir(tmp_path) == ["table.safetensors"]


def test_others_may_read_a_table(tmp_path: Path) -> None:
    small().save(tmp_path / "table.safetensors")
    (tmp_path / "plain").touch()
    assert (tmp_path / "table.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.numpy.save_file", interrupted)
    path = tmp_path / "table.safetensors"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        small().save(path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["table.safetensors"]


def test_the_ending_names_the_format(tmp_path: Path) -> None:
    with refused("path"):
        small().save(tmp_path / "table.json")


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        NgramTable.load(path)
    message = str(caught.value)
    start = f"{str(path)!r} cannot be read as an n-gram table: "
    assert message.startswith(start) and "\n" not in message
    return message.removeprefix(start)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no such n-gram table: '.*nothing\.safetensors'"):
        NgramTable.load(tmp_path / "nothing.safetensors")
    assert refusal(tmp_path) == "it is a folder"
    path = tmp_path / "table.safetensors"
    for content in (b"", b"hello", b"\xff" * 100, b"\x80\x02]."):
        path.write_bytes(content)
        assert refusal(path).startswith("it is not a valid safetensors file")
    small().save(path)
    path.write_bytes(path.read_bytes()[:-8])
    assert refusal(path).startswith("it is not a valid safetensors file")
    for metadata in (None, {"format": "pt"}, {"kind": '"another"'}):
        save_file({"successor": np.zeros(3, dtype=np.int32)}, path, metadata)
        assert refusal(path) == "it is a safetensors file, but not an n-gram table"


Change = Callable[[dict[str, Any], dict[str, Any]], None]


def put(name: str, value: Any) -> Change:
    """Set an array."""
    return lambda arrays, facts: arrays.__setitem__(name, np.array(value))


def say(**values: Any) -> Change:
    """Set metadata."""
    return lambda arrays, facts: facts.update(values)


CORPUS = {"files": [], "num_tokens": 1, "num_documents": 1, "min_count": 1, "num_ngrams": []}
BROKEN: list[tuple[Change, str]] = [
    (say(format=2), "its format is 2, this version of foresay reads 1; build the table again"),
    (lambda arrays, facts: facts.pop("fingerprint"), "its metadata has no fingerprint"),
    (say(order=1), "order=1 must be an integer in [2, 5]"),
    (say(order="3"), "order='3' must be an integer in [2, 5]"),
    (
        say(order=2),
        "these arrays are missing or unexpected: level_3.keys, level_3.starts, level_3.successor, level_4.keys",
    ),
    (say(order=5), "these arrays are missing or unexpected: level_5.keys, level_5.starts, level_5.successor"),
    (lambda arrays, facts: arrays.pop("successor"), "these arrays are missing or unexpected: successor"),
    (put("extra", [1]), "these arrays are missing or unexpected: extra"),
    (say(vocab_size=7), "successor has 6 entries, vocab_size is 7"),
    (put("successor", 5), "successor has 1 entries, vocab_size is 6"),
    (say(vocab_size=0), "vocab_size=0 must be an integer in [1, 2097152]"),
    (say(fingerprint="abc"), "fingerprint='abc' must be 64 hexadecimal digits"),
    (say(fingerprint=5), "fingerprint=5 must be 64 hexadecimal digits"),
    (say(corpus=[]), "its description of the corpus is wrong"),
    (say(corpus={**CORPUS, "pages": 3}), "its description of the corpus is wrong"),
    (say(corpus={"files": []}), "its description of the corpus is wrong: 'num_ngrams'"),
    (say(corpus={**CORPUS, "files": [1]}), "files=(1,) must be names"),
    (say(corpus={**CORPUS, "num_tokens": -1}), "num_tokens=-1 must be an integer at least 0"),
    (say(corpus={**CORPUS, "num_ngrams": [0.5]}), "num_ngrams=0.5 must be an integer at least 0"),
    (put("successor", [0.0] * 6), "successor must be a list of integers, not float64 of shape (6,)"),
    (put("successor", [[1, 2]] * 6), "successor must be a list of integers, not int64 of shape (6, 2)"),
    (put("successor", [0, 1, 2, 3, 4, 6]), "successor contains 6, which is not in [-1, 5]"),
    (put("successor", [0, 1, 2, 3, 4, -2]), "successor contains -2, which is not in [-1, 5]"),
    (put("counts", [1, 2, 3]), "counts has 3 entries instead of 6"),
    (put("counts", [1, 2, 3, 4, 5, -1]), "counts contains -1, which is not in"),
    (put("level_3.starts", [0, 0, 3]), "level_3.starts has 3 entries instead of 7"),
    (put("level_3.starts", [0, 0, 2, 2, 3, 3, 4]), "level_3.starts contains 4, which is not in [0, 3]"),
    (put("level_3.starts", [0, 2, 1, 2, 3, 3, 3]), "level_3.starts must ascend from 0 to 3"),
    (put("level_3.starts", [0, 0, 2, 2, 2, 2, 2]), "level_3.starts must ascend from 0 to 3"),
    (put("level_3.starts", [1, 1, 2, 2, 3, 3, 3]), "level_3.starts must ascend from 0 to 3"),
    (put("level_3.keys", [5, 0, 2]), "level_3.keys must ascend within each last token"),
    (put("level_3.keys", [5, 5, 2]), "level_3.keys must ascend within each last token"),
    (put("level_3.keys", [-1, 5, 2]), "level_3.keys contains -1, which is not in [0, 2097151]"),
    (put("level_3.keys", [0, 6, 2]), "level_3.keys contains a token beyond the vocabulary of 6"),
    (put("level_4.keys", [2, 7 << TOKEN_BITS]), "level_4.keys contains a token beyond the vocabulary of 6"),
    (put("level_3.successor", [3, 4, -1]), "level_3.successor contains -1, which is not in [0, 5]"),
    (put("level_3.successor", [3, 4]), "level_3.successor has 2 entries instead of 3"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[f"{i}: {m[:40]}" for i, (_, m) in enumerate(BROKEN)])
def test_files_that_are_wrong(tmp_path: Path, change: Change, message: str) -> None:
    path = tmp_path / "table.safetensors"
    small().save(path)
    with safe_open(path, framework="numpy") as file:
        facts = {name: json.loads(text) for name, text in file.metadata().items()}
    arrays = load_file(path)
    assert set(facts) == {"kind", "format", "order", "vocab_size", "fingerprint", "corpus", "foresay_version"}
    change(arrays, facts)
    save_file(arrays, path, {name: json.dumps(value) for name, value in facts.items()})
    assert refusal(path).startswith(message)


def test_a_table_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied", "x")

    (tmp_path / "table.json").write_text("[1]")
    monkeypatch.setattr("foresay.drafters.ngram_table.read_limited", denied)
    assert refusal(tmp_path / "table.json") == "Permission denied"


def test_tables_too_large_to_pack() -> None:
    with refused("vocab_size", 2097153):
        NgramTable(np.full(MAX_VOCAB_SIZE + 1, UNKNOWN))
    with refused("vocab_size", 0):
        NgramTable(np.empty(0, dtype=np.int32))
    with refused("order", 6):
        small(levels=(level({}, 6),) * 4)


# -- the bigram lists of CS-Drafting ---------------------------------------------------------------------------------


def test_a_bigram_list(tmp_path: Path) -> None:
    path = tmp_path / "bigram.json"
    path.write_text("[3, null, 0, -1]")
    table = NgramTable.load(path)
    assert table.successor.tolist() == [3, -1, 0, -1] and table.successor.dtype == np.int32
    assert (table.order, table.vocab_size, table.fingerprint, table.counts, table.corpus) == (2, 4, None, None, None)
    assert table.continuation([2], 9) == [0, 3]
    table.check(MARK, 4)
    with pytest.raises(VocabularyMismatchError):
        table.check(MARK, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it is not JSON: "),
        ("[1, 2", "it is not JSON: "),
        ("\udcff", "it is not JSON: "),
        ("[" * 100_000, "it is not JSON: "),
        ("{}", "it must be a JSON list of token ids, with the id of the token after token i at entry i"),
        ("[]", "it must be a JSON list of token ids"),
        ("3", "it must be a JSON list of token ids"),
        ("[0, 1.0]", "entry 1 is 1.0, neither a token id nor null"),
        ("[0, true]", "entry 1 is True, neither a token id nor null"),
        ('["0"]', "entry 0 is '0', neither a token id nor null"),
        ("[[0]]", "entry 0 is [0], neither a token id nor null"),
        ("[0, 2]", "entry 1 is 2, which is not in [-1, 1]"),
        ("[-2]", "entry 0 is -2, which is not in [-1, 0]"),
        ("[1" + "0" * 30 + "]", "entry 0 is 1000000000000000000000000000000, which is not in [-1, 0]"),
    ],
)
def test_bigram_lists_that_are_wrong(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bigram.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert refusal(path).startswith(message)
