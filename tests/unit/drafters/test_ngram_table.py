"""N-gram tables: lookup, back-off, the most frequent tokens, and whose tokens they are."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from foresay.drafters.ngram_table import MAX_VOCAB_SIZE, NgramTable
from foresay.errors import VocabularyMismatchError
from helpers.refusals import refused
from helpers.tables import MARK, OTHER, UNKNOWN, level, small

# -- lookup ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ([2, 0, 1], 5),  # three tokens known
        ([4, 0, 1], 0),
        ([3, 3, 4, 0, 1], 0),  # only the end counts
        ([3, 0, 1], 3),  # two
        ([0, 1], 3),
        ([5, 5, 1], 4),
        ([2, 3], 5),
        ([3, 1], 2),  # one
        ([1], 2),
        ([0, 1, 2], None),  # not even the last token
        ([5], None),
        ([], None),
    ],
)
def test_the_longest_known_context_decides(context: list[int], expected: int | None) -> None:
    table = small()
    assert table.next(context) == expected
    assert table.next(tuple(context)) == expected
    assert table.next(np.array(context, dtype=np.int64)) == expected
    assert type(table.next(np.array(context, dtype=np.int64))) is type(expected)


@pytest.mark.parametrize("strange", [6, -1, -6, MAX_VOCAB_SIZE, 2**40, -(2**40)])
def test_ids_outside_the_vocabulary_are_unknown(strange: int) -> None:
    table = small()
    assert table.next([strange]) is None
    assert table.next([2, 0, strange]) is None
    assert table.next([strange, 0, 1]) == 3
    assert table.next([0, strange, 1]) == 2  # not what follows (0, 1)


def test_a_context_is_not_mistaken_for_its_neighbours() -> None:
    """The position found for a missing key belongs to another key, or to another last token."""
    table = small(levels=(level({(3, 1): 5, (3, 2): 5}, 6),))
    assert [table.next([i, 1]) for i in range(6)] == [2, 2, 2, 5, 2, 2]
    assert table.next([4, 5]) is None


def test_a_continuation_goes_on_from_itself() -> None:
    table = small()
    assert table.continuation([3, 0], 0) == []
    assert table.continuation([2, 0], 4) == [1, 5]  # after (2, 0, 1) comes 5, after which nothing is known
    assert table.continuation([1], 3) == [2]
    assert table.continuation([], 3) == table.continuation([5], 3) == []
    bigram = small(levels=())
    assert bigram.continuation(np.array([4]), 4) == [0, 1, 2]
    cycle = NgramTable(np.array([1, 0]))
    assert cycle.continuation([0], 5) == [1, 0, 1, 0, 1]


def test_facts() -> None:
    table = small()
    assert (table.order, table.vocab_size, table.num_contexts, table.max_id) == (4, 6, (4, 3, 2), 5)
    bigram = NgramTable(np.array([1, UNKNOWN, UNKNOWN]))
    assert (bigram.order, bigram.num_contexts, bigram.max_id) == (2, (1,), 1)
    assert NgramTable(np.array([UNKNOWN])).max_id == -1


def test_a_table_cannot_be_changed() -> None:
    table = small()
    with pytest.raises(AttributeError):
        table.fingerprint = OTHER  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        table.successor[0] = 1


# -- frequent tokens -------------------------------------------------------------------------------------------------


def test_the_most_frequent_tokens() -> None:
    table = small()
    assert table.frequent(1).tolist() == [5]
    assert table.frequent(3).tolist() == [0, 1, 5]  # 1 and 2 are equally frequent: the smaller id
    assert table.frequent(6).tolist() == [0, 1, 2, 3, 4, 5]
    assert table.frequent(2).dtype == np.int64


@pytest.mark.parametrize(
    ("coverage", "expected"),
    [
        (0.01, [5]),
        (0.4, [5]),
        (0.41, [0, 5]),
        (0.65, [0, 5]),
        (0.8, [0, 1, 5]),
        (0.95, [0, 1, 2, 5]),
        (1, [0, 1, 2, 3, 5]),
    ],
)
def test_the_fewest_tokens_that_cover(coverage: float, expected: list[int]) -> None:
    assert small().frequent(coverage=coverage).tolist() == expected


def test_coverage_is_not_rounded() -> None:
    """0.55 * 100 is 55.00000000000001 in floating point."""
    table = NgramTable(np.full(100, UNKNOWN), np.ones(100, dtype=np.int64))
    assert [len(table.frequent(coverage=i / 100)) for i in range(1, 101)] == list(range(1, 101))


@pytest.mark.parametrize(
    ("arguments", "param", "value"),
    [
        ({}, "count", None),
        ({"count": 1, "coverage": 0.5}, "count", 1),
        ({"count": 0}, "count", 0),
        ({"count": 7}, "count", 7),
        ({"count": 2.0}, "count", 2.0),
        ({"count": True}, "count", True),
        ({"coverage": 0.0}, "coverage", 0.0),
        ({"coverage": 1.1}, "coverage", 1.1),
        ({"coverage": float("nan")}, "coverage", ANY),
        ({"coverage": "half"}, "coverage", "half"),
        ({"coverage": True}, "coverage", True),
    ],
)
def test_frequent_refuses(arguments: dict[str, Any], param: str, value: Any) -> None:
    with refused(param, value):
        small().frequent(**arguments)


@pytest.mark.parametrize("counts", [None, np.zeros(6, dtype=np.int64)])
def test_frequent_needs_counts(counts: Any) -> None:
    with refused("counts"):
        small(counts=counts).frequent(2)


# -- vocabularies ----------------------------------------------------------------------------------------------------


def test_the_right_tokenizer_passes() -> None:
    small().check(MARK, 6)
    small().check(MARK, 1000)  # embeddings may be padded
    small().check(None, 6)
    small(fingerprint=None).check(OTHER, 6)


def test_another_tokenizer_is_refused() -> None:
    with pytest.raises(VocabularyMismatchError) as caught:
        small().check(OTHER, 9)
    assert str(caught.value) == (
        "the n-gram table was built with another tokenizer (fingerprint 0123456789ab, 6 tokens) than the one in use "
        "(ffffffffffff, 9 tokens); build a table with this tokenizer: foresay distill TABLE --kind ngram --text FILE --model NAME"
    )


def test_a_table_without_a_fingerprint_must_have_the_vocabularys_size() -> None:
    """CS-Drafting's lists have none; one of 6 tokens is not for a vocabulary of 9, whatever ids it holds."""
    for table, mark in ((small(fingerprint=None), OTHER), (small(), None), (small(fingerprint=None), None)):
        with pytest.raises(VocabularyMismatchError) as caught:
            table.check(mark, 9, 9)
        assert str(caught.value).startswith(
            "the n-gram table was built for a vocabulary of 6 tokens, but the one in use has 9; build a table"
        )
        table.check(mark, 9, 6)  # 3 ids are padding, or were added
    small().check(MARK, 9, 9)  # the same tokenizer: ids without a name at its end


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(
        VocabularyMismatchError, match="contains token 5, but the vocabulary in use has 5 tokens; build a"
    ):
        small(fingerprint=None).check(OTHER, 5)
    NgramTable(np.array([0, UNKNOWN])).check(None, 1)  # the second id does not occur
