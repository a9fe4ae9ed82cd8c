"""N-gram tables: lookup, the most frequent tokens, whose tokens they are, and their files, whatever is wrong with them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from foresay.drafters.ngram_table import MAX_VOCAB_SIZE, TOKEN_BITS, NgramTable
from foresay.errors import ModelLoadError, ModelNotFoundError, VocabularyMismatchError
from helpers.refusals import refused
from helpers.tables import MARK, OTHER, UNKNOWN, level, small

STRANGE = (6, -1, -6, MAX_VOCAB_SIZE, 2**40, -(2**40))
NEXT: list[tuple[list[int], int | None]] = [
    ([2, 0, 1], 5),  # three tokens known
    ([4, 0, 1], 0),
    ([3, 3, 4, 0, 1], 0),  # only the end counts
    ([3, 0, 1], 3),  # two
    ([5, 5, 1], 4),
    ([2, 3], 5),
    ([3, 1], 2),  # one
    ([1], 2),
    ([0, 1, 2], None),  # not even the last token
    ([], None),
    *(([*before, token], None) for token in STRANGE for before in ([], [2, 0])),
    *(([token, 0, 1], 3) for token in STRANGE),
    *(([0, token, 1], 2) for token in STRANGE),  # not what follows (0, 1)
]


def test_the_longest_known_context_decides() -> None:
    table = small()
    for context, expected in NEXT:
        found = table.next(np.array(context, dtype=np.int64))
        assert table.next(context) == found == expected and type(found) is type(expected), context
    near = small(levels=(level({(3, 1): 5, (3, 2): 5}, 6),))  # a missing key, between those of others
    assert [near.next([i, 1]) for i in range(6)] == [2, 2, 2, 5, 2, 2] and near.next([4, 5]) is None


def test_a_continuation_goes_on_from_itself() -> None:
    table = small()
    for context, count, expected in (([3, 0], 0, []), ([2, 0], 4, [1, 5]), ([1], 3, [2]), ([], 3, []), ([5], 3, [])):
        assert table.continuation(context, count) == expected
    assert small(levels=()).continuation(np.array([4]), 4) == [0, 1, 2]
    assert NgramTable(np.array([1, 0])).continuation([0], 5) == [1, 0, 1, 0, 1]


def test_facts_which_cannot_be_changed() -> None:
    table, bigram = small(), NgramTable(np.array([1, UNKNOWN, UNKNOWN]))
    assert (table.order, table.vocab_size, table.num_contexts, table.max_id) == (4, 6, (4, 3, 2), 5)
    assert (bigram.order, bigram.num_contexts, bigram.max_id) == (2, (1,), 1)
    assert NgramTable(np.array([UNKNOWN])).max_id == -1
    with pytest.raises(AttributeError):
        table.fingerprint = OTHER  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        table.successor[0] = 1
    for size in (MAX_VOCAB_SIZE + 1, 0):
        with refused("vocab_size", size):
            NgramTable(np.full(size, UNKNOWN))
    with refused("order", 6):
        small(levels=(level({}, 6),) * 4)


def test_the_most_frequent_tokens() -> None:
    """The smaller ids of equally frequent ones; the fewest that cover a share."""
    table = small()
    ranked = [5, 0, 1, 2, 3, 4]
    for count in (1, 3, 6):
        assert table.frequent(count).tolist() == sorted(ranked[:count]) and table.frequent(count).dtype == np.int64
    for coverage, count in ((0.01, 1), (0.4, 1), (0.41, 2), (0.65, 2), (0.8, 3), (0.95, 4), (1, 5)):
        assert table.frequent(coverage=coverage).tolist() == sorted(ranked[:count]), coverage
    even = NgramTable(np.full(100, UNKNOWN), np.ones(100, dtype=np.int64))  # 0.55 * 100 is 55.00000000000001
    assert [len(even.frequent(coverage=i / 100)) for i in range(1, 101)] == list(range(1, 101))
    arguments: list[dict[str, Any]] = [{}, {"count": 1, "coverage": 0.5}]
    arguments += [{"count": count} for count in (0, 7, 2.0, True)]
    arguments += [{"coverage": coverage} for coverage in (0.0, 1.1, float("nan"), "half", True)]
    for wrong in arguments:
        param = "coverage" if [*wrong] == ["coverage"] else "count"
        with refused(param, wrong.get(param) if wrong.get(param) == wrong.get(param) else ANY):
            table.frequent(**wrong)
    for counts in (None, np.zeros(6, dtype=np.int64)):
        with refused("counts"):
            small(counts=counts).frequent(2)


def test_a_table_is_for_one_vocabulary() -> None:
    """CS-Drafting's lists have no fingerprint; one of 6 tokens is not for a vocabulary of 9, whatever ids it has."""
    unmarked = small(fingerprint=None)
    fits = ((small(), MARK, 6), (small(), MARK, 1000), (small(), MARK, 9, 9), (small(), None, 6), (unmarked, OTHER, 6))
    for table, *given in (*fits, (unmarked, OTHER, 9, 6), (NgramTable(np.array([0, UNKNOWN])), None, 1)):
        table.check(*given)
    for table, given, problem in (
        (
            small(),
            (OTHER, 9),
            "another tokenizer (fingerprint 0123456789ab, 6 tokens) than the one in use (ffffffffffff, 9",
        ),
        (unmarked, (OTHER, 9, 9), "a vocabulary of 6 tokens, but the one in use has 9"),
        (small(), (None, 9, 9), "a vocabulary of 6 tokens, but the one in use has 9"),
        (unmarked, (OTHER, 5), "contains token 5, but the vocabulary in use has 5 tokens"),
    ):
        with pytest.raises(VocabularyMismatchError) as caught:
            table.check(*given)
        assert problem in str(caught.value) and "foresay distill TABLE --kind ngram" in str(caught.value)


# -- files -----------------------------------------------------------------------------------------------------------


def content(table: NgramTable) -> tuple[list[Any], ...]:
    arrays = [
        table.successor,
        table.counts,
        *(x for one in table.levels for x in (one.starts, one.keys, one.successor)),
    ]
    return [None if one is None else (one.dtype, one.tolist()) for one in arrays], [table.fingerprint, table.corpus]


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    for changes in (
        {},
        {"levels": (), "fingerprint": None},
        {"counts": None, "levels": (level({}, 6),)},
        {"corpus": None},
    ):
        path.write_text("something old")
        with path.open() as old:
            small(**changes).save(path)
            assert old.read() == "something old"  # a reader sees one of the two files, whole, while it is replaced
        assert content(NgramTable.load(path)) == content(small(**changes))
        assert os.listdir(tmp_path) == ["table.safetensors"]
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode, "others may read it"
    with refused("path"):
        small().save(tmp_path / "table.json")


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        NgramTable.load(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.safetensors"
    with pytest.raises(ModelNotFoundError, match=r"table\.safetensors"):
        NgramTable.load(path)
    assert "a folder" in refusal(tmp_path)
    small().save(path)
    for written in (b"", b"hello", b"\xff" * 100, b"\x80\x02].", path.read_bytes()[:-8]):
        path.write_bytes(written)
        assert "not a valid safetensors file" in refusal(path)
    for metadata in (None, {"format": "pt"}, {"kind": '"another"'}):
        save_file({"successor": np.zeros(3, dtype=np.int32)}, path, metadata)
        assert "not an n-gram table" in refusal(path)

    def denied(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied", "x")

    (tmp_path / "table.json").write_text("[1]")
    monkeypatch.setattr("foresay.drafters.ngram_table.read_limited", denied)
    assert "Permission denied" in refusal(tmp_path / "table.json")


CORPUS = {"files": [], "num_tokens": 1, "num_documents": 1, "min_count": 1, "num_ngrams": []}
ABSENT = object()
WRONG_FACTS: list[tuple[str, Any, str]] = [
    ("format", 2, "its format is 2, this version of foresay reads 1"),
    ("fingerprint", ABSENT, "no fingerprint"),
    ("order", 1, "order=1"),
    ("order", "3", "order='3'"),
    ("order", 2, "level_3.keys, level_3.starts, level_3.successor, level_4.keys"),
    ("order", 5, "level_5.keys, level_5.starts, level_5.successor"),
    ("vocab_size", 7, "successor has 6 entries, vocab_size is 7"),
    ("vocab_size", 0, "vocab_size=0"),
    ("fingerprint", "abc", "fingerprint='abc'"),
    ("fingerprint", 5, "fingerprint=5"),
    ("corpus", [], "corpus"),
    ("corpus", {**CORPUS, "pages": 3}, "corpus"),
    ("corpus", {"files": []}, "'num_ngrams'"),
    ("corpus", {**CORPUS, "files": [1]}, "files=(1,)"),
    ("corpus", {**CORPUS, "num_tokens": -1}, "num_tokens=-1"),
    ("corpus", {**CORPUS, "num_ngrams": [0.5]}, "num_ngrams=0.5"),
]
WRONG_ARRAYS: list[tuple[str, Any, str]] = [
    ("successor", ABSENT, "unexpected: successor"),
    ("extra", [1], "unexpected: extra"),
    ("successor", 5, "successor has 1 entries, vocab_size is 6"),
    ("successor", [0.0] * 6, "successor must be a list of integers, not float64 of shape (6,)"),
    ("successor", [[1, 2]] * 6, "successor must be a list of integers, not int64 of shape (6, 2)"),
    ("successor", [0, 1, 2, 3, 4, 6], "successor contains 6, which is not in [-1, 5]"),
    ("successor", [0, 1, 2, 3, 4, -2], "successor contains -2"),
    ("counts", [1, 2, 3], "counts has 3 entries instead of 6"),
    ("counts", [1, 2, 3, 4, 5, -1], "counts contains -1"),
    ("level_3.starts", [0, 0, 3], "level_3.starts has 3 entries instead of 7"),
    ("level_3.starts", [0, 0, 2, 2, 3, 3, 4], "level_3.starts contains 4, which is not in [0, 3]"),
    ("level_3.starts", [0, 2, 1, 2, 3, 3, 3], "level_3.starts must ascend from 0 to 3"),
    ("level_3.starts", [0, 0, 2, 2, 2, 2, 2], "level_3.starts must ascend from 0 to 3"),
    ("level_3.starts", [1, 1, 2, 2, 3, 3, 3], "level_3.starts must ascend from 0 to 3"),
    ("level_3.keys", [5, 0, 2], "level_3.keys must ascend within each last token"),
    ("level_3.keys", [5, 5, 2], "level_3.keys must ascend within each last token"),
    ("level_3.keys", [-1, 5, 2], "level_3.keys contains -1"),
    ("level_3.keys", [0, 6, 2], "level_3.keys contains a token beyond the vocabulary of 6"),
    ("level_4.keys", [2, 7 << TOKEN_BITS], "level_4.keys contains a token beyond the vocabulary of 6"),
    ("level_3.successor", [3, 4, -1], "level_3.successor contains -1"),
    ("level_3.successor", [3, 4], "level_3.successor has 2 entries instead of 3"),
]


def test_files_that_are_wrong(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    small().save(path)
    with safe_open(path, framework="numpy") as file:
        facts = {name: json.loads(text) for name, text in file.metadata().items()}
    arrays = load_file(path)
    assert set(facts) == {"kind", "format", "order", "vocab_size", "fingerprint", "corpus", "foresay_version"}

    def changed(known: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
        return {key: one for key, one in {**known, name: value}.items() if one is not ABSENT}

    cases = [(arrays, changed(facts, name, value), problem) for name, value, problem in WRONG_FACTS]
    for name, value, problem in WRONG_ARRAYS:
        cases.append((changed(arrays, name, value if value is ABSENT else np.array(value)), facts, problem))
    for wrong_arrays, wrong_facts, problem in cases:
        save_file(wrong_arrays, path, {key: json.dumps(one) for key, one in wrong_facts.items()})
        assert problem in refusal(path)


def test_bigram_lists_of_cs_drafting(tmp_path: Path) -> None:
    path = tmp_path / "bigram.json"
    path.write_text("[3, null, 0, -1]")
    table = NgramTable.load(path)
    assert table.successor.tolist() == [3, -1, 0, -1] and table.successor.dtype == np.int32
    assert (table.order, table.vocab_size, table.fingerprint, table.counts, table.corpus) == (2, 4, None, None, None)
    assert table.continuation([2], 9) == [0, 3]
    for text, problem in (
        *((text, "it is not JSON: ") for text in ("", "[1, 2", "\udcff", "[" * 100_000)),
        *((text, "it must be a JSON list of token ids") for text in ("{}", "[]", "3")),
        ("[0, 1.0]", "entry 1 is 1.0"),
        ("[0, true]", "entry 1 is True"),
        ('["0"]', "entry 0 is '0'"),
        ("[[0]]", "entry 0 is [0]"),
        ("[0, 2]", "entry 1 is 2, which is not in [-1, 1]"),
        ("[-2]", "entry 0 is -2, which is not in [-1, 0]"),
        ("[1" + "0" * 30 + "]", "entry 0 is 1000000000000000000000000000000, which is not in [-1, 0]"),
    ):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        assert problem in refusal(path)
