"""Counting n-grams against brute force: however the stream is cut, whatever the vocabulary, with and without pruning."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.drafters.ngram_table import MAX_VOCAB_SIZE, NgramTable
from foresay.text.tokenizer import tokenizer_fingerprint, tokenizer_size
from foresay_lab.training.corpus import CorpusReader
from foresay_lab.training.ngrams import NgramCounter, count_corpus
from helpers.refusals import refused

Documents = list[list[int]]
Successors = dict[tuple[int, ...], int]


def brute(documents: Documents, order: int, min_count: int = 1) -> Successors:
    """The likeliest successor of every context, by counting each; the smaller id among equals."""
    grams: Counter[tuple[int, ...]] = Counter()
    for tokens in documents:
        for n in range(2, order + 1):
            grams.update(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
    best: Successors = {}
    for gram, _ in sorted(grams.items(), key=lambda pair: (-pair[1], pair[0][-1])):
        if grams[gram] >= min_count:
            best.setdefault(gram[:-1], gram[-1])
    return best


def expected(best: Successors, context: Sequence[int], order: int) -> int | None:
    for start in range(max(0, len(context) - order + 1), len(context)):
        if tuple(context[start:]) in best:
            return best[tuple(context[start:])]
    return None


def counted(documents: Documents, order: int, vocab_size: int, cuts: Sequence[int] = (), **options: Any) -> NgramTable:
    """The table of documents that come in pieces of the sizes `cuts`, over and over."""
    counter = NgramCounter(order, vocab_size, **options)
    sizes = [size for size in cuts if size] or [10**9]
    i = 0
    for tokens in documents:
        start = 0
        while start + sizes[i % len(sizes)] < len(tokens):
            counter.add(tokens[start : start + sizes[i % len(sizes)]], more=True)
            start += sizes[i % len(sizes)]
            i += 1
        counter.add(np.array(tokens[start:], dtype=np.int32))
    return counter.table()


def agrees(table: NgramTable, documents: Documents, order: int, min_count: int = 1) -> None:
    best = brute(documents, order, min_count)
    lengths = Counter(len(context) for context in best)
    assert table.num_contexts == tuple(lengths[n] for n in range(1, order))
    for context, successor in best.items():
        assert table.next(context) == successor
    for tokens in documents:
        for end in range(len(tokens) + 1):
            assert table.next(tokens[:end]) == expected(best, tokens[:end], order)


@settings(deadline=None, max_examples=150)
@given(
    documents=st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=8),
    order=st.integers(2, 5),
    min_count=st.integers(1, 3),
    chunk=st.integers(6, 40),
    cuts=st.lists(st.integers(1, 9), max_size=4),
)
def test_chunks_do_not_show(documents: Documents, order: int, min_count: int, chunk: int, cuts: list[int]) -> None:
    table = counted(documents, order, 6, cuts, min_count=min_count, chunk_tokens=chunk)
    agrees(table, documents, order, min_count)
    assert table.counts is not None and table.corpus is not None
    assert table.counts.tolist() == [sum(tokens.count(i) for tokens in documents) for i in range(6)]
    assert table.corpus.num_tokens == sum(map(len, documents))
    assert table.corpus.num_documents == sum(map(bool, documents))
    distinct = [
        len({tuple(d[i : i + n]) for d in documents for i in range(len(d) - n + 1)}) for n in range(2, order + 1)
    ]
    assert table.corpus.num_ngrams == tuple(distinct) and table.corpus.num_pruned == 0


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 49_152, 65_536, 65_537, 250_000, MAX_VOCAB_SIZE])
@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_no_vocabulary_overflows(vocab_size: int, order: int) -> None:
    """The highest and lowest ids, mixed: keys that overflow or share bits would meet."""
    generator = np.random.default_rng(order)
    ids = np.unique([0, vocab_size // 2, max(0, vocab_size - 2), vocab_size - 1])
    documents = [generator.choice(ids, 60).tolist() for _ in range(4)]
    table = counted(documents, order, vocab_size, chunk_tokens=50)
    agrees(table, documents, order)


def test_a_document_may_come_in_pieces_and_counting_go_on_after_a_table() -> None:
    counter = NgramCounter(3, 6, chunk_tokens=6)
    assert counter.table().num_contexts == (0, 0) and counter.table().next([1, 2, 3]) is None, "nothing is counted"
    counter.add([1, 2], more=True)
    counter.add([], more=True)
    assert counter.table().next([1]) == 2
    counter.add([3, 1, 4])
    counter.add([])
    counter.add([1, 4])
    agrees(counter.table(), [[1, 2, 3, 1, 4], [1, 4]], 3)
    assert counter.num_documents == 2 and counter.num_tokens == 7


def test_what_a_table_holds_of_its_corpus() -> None:
    counter = NgramCounter(2, 6, 2)
    counter.add([1, 2, 1, 2, 3])
    table = counter.table(fingerprint="0" * 64, files=["/somewhere/a.txt", "-"])
    assert table.fingerprint == "0" * 64 and table.corpus is not None
    assert (table.corpus.files, table.corpus.min_count, table.corpus.num_ngrams) == (("a.txt", "-"), 2, (3,))
    assert table.num_contexts == (1,) and table.next([2]) is None


def test_the_rarest_are_dropped() -> None:
    """Equally rare ones together: which of them stay must not depend on their ids."""
    documents = [[0, 1]] * 5 + [[2, 3]] * 3 + [[4, 5], [5, 4]]
    for some, room, pruned, count, contexts in (
        (documents, 2, 2, 1, 2),
        (documents, 1, 3, 3, 1),
        ([[0, 1], [2, 3], [4, 5]], 2, 3, 1, 0),
    ):
        table = counted(some, 2, 6, max_entries=room)
        assert table.corpus is not None and table.counts is not None
        assert (table.corpus.num_pruned, table.corpus.pruned_count, table.num_contexts) == (pruned, count, (contexts,))
        assert table.counts.sum() == sum(map(len, some)), "tokens are never dropped"
    table = counted(documents, 2, 6, max_entries=2)
    assert table.successor.tolist() == [1, -1, 3, -1, -1, -1]


def test_room_for_all_prunes_nothing() -> None:
    """Equal n-grams that wait in several parts to be merged must not count as distinct."""
    for documents in ([[0, 1, 0, 1, 0, 1]] * 50, [[0, 1, 2, 3, 4, 5], [0, 1], [0, 1], [0, 1]]):
        distinct = len({pair for tokens in documents for pair in pairwise(tokens)})
        table = counted(documents, 2, 6, max_entries=distinct, chunk_tokens=8)
        assert table.corpus is not None and table.corpus.num_pruned == 0 and table.corpus.num_ngrams == (distinct,)


@settings(deadline=None, max_examples=60)
@given(
    documents=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=30), min_size=1, max_size=12),
    order=st.integers(2, 4),
    room=st.integers(1, 20),
    cuts=st.lists(st.integers(1, 9), max_size=4),
)
def test_a_pruned_table_is_smaller_repeatable_and_never_invents(
    documents: Documents, order: int, room: int, cuts: list[int]
) -> None:
    options: dict[str, Any] = {"max_entries": room, "chunk_tokens": 16}
    table, again = (counted(documents, order, 6, c, **options) for c in (cuts, ()))
    assert table.corpus == again.corpus and table.num_contexts == again.num_contexts
    assert table.corpus is not None and sum(table.corpus.num_ngrams) <= room
    whole = {tuple(d[i : i + n]) for d in documents for n in range(2, order + 1) for i in range(len(d) - n + 1)}
    for context in brute(documents, order):
        assert table.next(context) == again.next(context)
        successor = table.next(context)
        if successor is not None:
            assert (context[-1], successor) in whole


def test_counters_and_tokens_that_cannot_be() -> None:
    for name, value in (
        *(("order", 1), ("order", 6), ("vocab_size", 0), ("vocab_size", 2**21 + 1)),
        *(("min_count", 0), ("max_entries", 0), ("chunk_tokens", 3)),
    ):
        with refused(name, value):
            NgramCounter(**{"order": 3, "vocab_size": 6, name: value})
    counter = NgramCounter(2, 6)
    wrong: list[Any] = [[1, 6], [-1, 6], [1.0], [[1]]]
    for tokens in wrong:
        with refused("token_ids"):
            counter.add(tokens)
    assert counter.num_tokens == 0


class Letters:
    """A tokenizer of letters, a to f."""

    def __init__(self, names: str = "abcdef") -> None:
        self.names = names

    def get_vocab(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def __call__(self, texts: list[str], **options: bool) -> dict[str, Documents]:
        assert options.pop("add_special_tokens") is False
        return {"input_ids": [[self.names.index(c) for c in text] for text in texts]}


def test_count_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(tmp_path / f"{i}.txt") for i in range(2)]
    Path(names[0]).write_text("abc\nad\nad")
    Path(names[1]).write_text("bc")
    reader, seen = CorpusReader(names, separator="line"), list[tuple[int, int]]()
    counter = NgramCounter(3, 6)
    count_corpus(counter, reader, Letters(), on_progress=lambda *now: seen.append(now))
    agrees(counter.table(), [[0, 1, 2], [0, 3], [0, 3], [1, 2]], 3)
    assert seen == [(reader.size, 9)]
    counter = NgramCounter(3, 6)
    count_corpus(counter, reader, Letters(), max_tokens=4)
    agrees(counter.table(), [[0, 1, 2], [0]], 3)
    assert counter.num_tokens == 4
    with refused("max_tokens", 0):
        count_corpus(counter, reader, Letters(), max_tokens=0)
    monkeypatch.setattr("foresay_lab.training.ngrams.BATCH_CHARS", 200)
    Path(names[0]).write_text("abcdef\n" * 50)
    seen.clear()
    counter, reader = NgramCounter(2, 6), CorpusReader(names[:1], separator="line")
    count_corpus(counter, reader, Letters(), on_progress=lambda *now: seen.append(now))
    assert len(seen) == 17 and seen[-1][1] == 300 and counter.num_documents == 50, "text is tokenized in batches"


def test_fingerprints_tell_vocabularies_apart() -> None:
    mark = tokenizer_fingerprint(Letters())
    pairs = b'[["a", 0], ["b", 1], ["c", 2], ["d", 3], ["e", 4], ["f", 5]]'
    assert mark == hashlib.sha256(pairs).hexdigest()  # files hold it: it must stay what it is
    shuffled = Letters()
    shuffled.get_vocab = lambda: dict(reversed(Letters().get_vocab().items()))  # type: ignore[method-assign]
    assert tokenizer_fingerprint(shuffled) == mark  # whatever the order
    assert tokenizer_fingerprint(Letters("abcdfe")) != mark != tokenizer_fingerprint(Letters("abcde"))
    assert tokenizer_size(Letters()) == 6
