"""Counting of n-grams in a token stream in bounded memory, and the n-gram table built from the counts.

Owns the counts; reads no files. Tokens are collected in a buffer of fixed size. A full buffer is turned into sorted, distinct
n-grams with counts, which are merged, so that the result does not depend on how the stream was split. Letters: C columns of
packed tokens, N n-grams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import reduce
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foresay.checks import check_int
from foresay.decoding.rows import IntArray
from foresay.drafters.ngram_table import MAX_ORDER, MAX_VOCAB_SIZE, TOKEN_BITS, Corpus, Level, NgramTable, TokenArray
from foresay.errors import ConfigError
from foresay_lab.training.corpus import CorpusPiece, CorpusReader

MAX_ENTRIES = 10_000_000
"""Default limit on distinct n-grams: about 0.3 GB, and three times that during a merge."""
CHUNK_TOKENS = 1 << 20
"""Tokens that are sorted at once."""
BATCH_CHARS = 1 << 20
"""Characters that are tokenized at once."""
_BREAK = -1

KeyArray = npt.NDArray[np.uint64]


def count_corpus(
    counter: NgramCounter,
    reader: CorpusReader,
    tokenizer: Any,
    *,
    max_tokens: int | None = None,
    on_progress: Callable[[int, int], None] = lambda position, tokens: None,
) -> None:
    """Tokenize and count a reader's text, without special tokens, up to max_tokens.

    on_progress: called with (bytes read, tokens counted), a few times per second with a fast tokenizer. Raises ConfigError for
    max_tokens below 1, and the reader's errors.
    """
    check_counting(counter.order, max_tokens=max_tokens)
    with closing(reader.pieces()) as pieces:
        for batch in _batches(pieces):
            texts = [piece.text for piece in batch]
            encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            for piece, ids in zip(batch, encoded["input_ids"], strict=True):
                room = len(ids) if max_tokens is None else max_tokens - counter.num_tokens
                counter.add(ids[:room], more=piece.more)
            on_progress(reader.position, counter.num_tokens)
            if counter.num_tokens == max_tokens:
                return


def _batches(pieces: Iterable[CorpusPiece]) -> Iterator[list[CorpusPiece]]:
    """Yield batches of pieces, large enough to keep a fast tokenizer's threads busy."""
    batch: list[CorpusPiece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text) + 64
        if characters >= BATCH_CHARS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _Grams(NamedTuple):
    """Distinct n-grams in order, with their counts."""

    columns: KeyArray
    """[C, N]: the context's last token, the tokens before it in reading order, the next token; packed."""
    counts: IntArray
    """[N]."""


def check_counting(
    order: int, min_count: int = 1, max_entries: int = MAX_ENTRIES, max_tokens: int | None = None
) -> None:
    """Raise ConfigError for values that NgramCounter and count_corpus reject, before anything is read."""
    check_int("order", order, 2, MAX_ORDER)
    check_int("min_count", min_count, 1)
    check_int("max_entries", max_entries, 1)
    if max_tokens is not None:
        check_int("max_tokens", max_tokens, 1)


class NgramCounter:
    """A counter of n-grams of 2 to `order` tokens. No n-gram spans two documents."""

    def __init__(
        self,
        order: int,
        vocab_size: int,
        min_count: int = 1,
        max_entries: int = MAX_ENTRIES,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        """Allocate the buffer.

        min_count: rarer n-grams are omitted from the table. max_entries: limit on distinct n-grams in memory; above it the
        rarest are dropped, and the table records their number. chunk_tokens: tokens sorted at once. Raises ConfigError for values
        out of range.
        """
        check_counting(order, min_count, max_entries)
        check_int("vocab_size", vocab_size, 1, MAX_VOCAB_SIZE)
        check_int("chunk_tokens", chunk_tokens, order + 1)
        self.order, self.vocab_size, self.min_count, self.max_entries = order, vocab_size, min_count, max_entries
        self.num_tokens = self.num_documents = self.num_pruned = 0
        self._pruned_count = 0
        self._unigrams: IntArray = np.zeros(vocab_size, dtype=np.int64)
        bits = max(1, (vocab_size - 1).bit_length())
        self._levels = [_Merged(k, bits) for k in range(2, order + 1)]
        self._buffer: TokenArray = np.empty(chunk_tokens, dtype=np.int32)
        self._size = self._counted = 0
        self._open = False

    def add(self, token_ids: Sequence[int] | IntArray | TokenArray, *, more: bool = False) -> None:
        """Count a document, or, with `more`, a piece of a document that the next call continues.

        token_ids: [T] integers. Raises ConfigError for another shape or type, and for ids outside the vocabulary.
        """
        tokens = np.asarray(token_ids)
        if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and len(tokens)):
            text = f"must be a list of integers, not {tokens.dtype} of shape {tokens.shape}"
            raise ConfigError(text, param="token_ids")
        if len(tokens):
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.vocab_size:
                text = f"must be in the vocabulary of {self.vocab_size} tokens"
                raise ConfigError(text, param="token_ids", value=low if low < 0 else high)
            self.num_tokens += len(tokens)
            self.num_documents += not self._open
            self._open = True
            self._append(tokens)
        if self._open and not more:
            self._append(np.array([_BREAK]))
            self._open = False

    def _append(self, tokens: npt.NDArray[np.integer]) -> None:
        """Append tokens to the buffer. The positions at which it is flushed depend only on the stream."""
        while len(tokens):
            room = len(self._buffer) - self._size
            part, tokens = tokens[:room], tokens[room:]
            self._buffer[self._size : self._size + len(part)] = part
            self._size += len(part)
            if self._size == len(self._buffer):
                self._flush()

    def _flush(self) -> None:
        """Count the n-grams that end in the uncounted part of the buffer. Keep the tokens with which later ones may start."""
        tokens = self._buffer[: self._size]
        positions = np.arange(self._size)
        # run: tokens since the document's start
        run = positions - np.maximum.accumulate(np.where(tokens == _BREAK, positions, -1))
        run[: self._counted] = 0
        self._unigrams += np.bincount(tokens[run > 0], minlength=self.vocab_size)
        for level in self._levels:
            level.add(tokens, np.flatnonzero(run >= level.length))
        keep = min(self.order - 1, self._size)
        self._buffer[:keep] = tokens[self._size - keep :]
        self._size = self._counted = keep
        if sum(level.size for level in self._levels) > self.max_entries:
            self._prune()

    def _prune(self) -> None:
        """Drop the rarest n-grams: all up to the lowest count that leaves at most max_entries."""
        counts_by_level = [level.merge().counts for level in self._levels]
        values, numbers = np.unique(np.concatenate(counts_by_level), return_counts=True)
        above = int(numbers.sum()) - np.cumsum(numbers)  # n-grams more frequent than each count
        if numbers.sum() <= self.max_entries:
            return
        limit = int(values[np.argmax(above <= self.max_entries)])
        self.num_pruned += sum(level.keep_above(limit) for level in self._levels)
        self._pruned_count = max(self._pruned_count, limit)

    def table(self, *, fingerprint: str | None = None, files: Sequence[str] = ()) -> NgramTable:
        """Return the table of all n-grams counted so far, including those of an unfinished document.

        fingerprint: the tokenizer's (`tokenizer_fingerprint` of text/tokenizer.py). files: the corpus, recorded by file name
        without folders.
        """
        if self._size > self._counted:
            self._flush()
        successor: TokenArray = np.full(self.vocab_size, -1, dtype=np.int32)
        contexts, successor_2 = self._levels[0].most_frequent(self.min_count)
        successor[contexts[0]] = successor_2
        names = tuple(PurePath(name).name or name for name in files)
        distinct = tuple(len(level.merge().counts) for level in self._levels)
        seen = self.num_tokens, self.num_documents, self.min_count
        corpus = Corpus(names, *seen, distinct, self.num_pruned, self._pruned_count)
        levels = tuple(self._level(level) for level in self._levels[1:])
        return NgramTable(successor, self._unigrams.copy(), levels, fingerprint, corpus)

    def _level(self, merged: _Merged) -> Level:
        (last, *older), successor = merged.most_frequent(self.min_count)
        keys = np.zeros(len(last), dtype=np.int64)
        for token in older:  # in reading order, so that the nearest token has the lowest bits
            keys = keys << TOKEN_BITS | token
        starts = np.concatenate([[0], np.cumsum(np.bincount(last, minlength=self.vocab_size))])
        return Level(starts, keys, successor)


class _Merged:
    """The distinct n-grams of one length: a large sorted part, and smaller parts to be merged into it."""

    def __init__(self, length: int, bits: int) -> None:
        self.length, self._bits = length, np.uint64(bits)
        self._per_column = 64 // bits
        self._column_starts = range(0, length, self._per_column)
        self._parts: list[_Grams] = []

    @property
    def size(self) -> int:
        """N-grams in memory. An n-gram in several unmerged parts counts several times."""
        return sum(len(part.counts) for part in self._parts)

    def add(self, tokens: TokenArray, ends: IntArray) -> None:
        """Count the n-grams of tokens [T] that end at these positions."""
        if not len(ends):
            return
        digits = [tokens[ends - back].astype(np.uint64) for back in [1, *range(self.length - 1, 1, -1), 0]]
        pack = lambda column, digit: column << self._bits | digit  # noqa: E731
        columns = np.stack([reduce(pack, digits[i : i + self._per_column]) for i in self._column_starts])
        self._parts.append(_distinct(_Grams(columns, np.ones(len(ends), dtype=np.int64))))
        if 2 * len(self._parts[0].counts) <= self.size:  # each n-gram is moved O(log n) times
            self.merge()

    def merge(self) -> _Grams:
        """Merge all parts into one and return it."""
        if not self._parts:
            self._parts = [_Grams(np.empty((len(self._column_starts), 0), np.uint64), np.empty(0, np.int64))]
        if len(self._parts) > 1:
            columns, counts = zip(*self._parts, strict=True)
            self._parts = [_distinct(_Grams(np.concatenate(columns, axis=1), np.concatenate(counts)))]
        return self._parts[0]

    def keep_above(self, count: int) -> int:
        """Drop the n-grams with at most `count` occurrences. Return the number dropped."""
        columns, counts = self.merge()
        kept = counts > count
        self._parts = [_Grams(columns[:, kept], counts[kept])]
        return len(counts) - int(kept.sum())

    def most_frequent(self, min_count: int) -> tuple[list[IntArray], TokenArray]:
        """Return (contexts, the most frequent next token of each [N]), in order of the contexts.

        contexts: a column [N] for each of the length - 1 tokens of a context: the last token first, then the others in reading
        order. Of equally frequent next tokens, the smallest id is chosen. N-grams with fewer than min_count occurrences are
        omitted.
        """
        columns, counts = self.merge()
        frequent = counts >= min_count
        columns, counts = columns[:, frequent], counts[frequent]
        if not len(counts):
            return [np.empty(0, np.int64)] * (self.length - 1), np.empty(0, np.int32)
        context = columns.copy()
        context[-1] >>= self._bits
        starts = _starts(context)
        best = np.repeat(np.maximum.reduceat(counts, starts), np.diff(starts, append=len(counts)))
        positions = np.arange(len(counts))
        first = np.minimum.reduceat(np.where(counts == best, positions, len(counts)), starts)
        *contexts, successor = self._unpacked(columns[:, first])
        return contexts, successor.astype(np.int32)

    def _unpacked(self, columns: KeyArray) -> list[IntArray]:
        """Return the tokens of each n-gram, in packing order."""
        mask = (np.uint64(1) << self._bits) - np.uint64(1)
        digits = []
        for start, column in zip(self._column_starts, columns, strict=True):
            width = min(self._per_column, self.length - start)
            digits += [
                (column >> np.uint64(digit_index) * self._bits & mask).astype(np.int64)
                for digit_index in range(width - 1, -1, -1)
            ]
        return digits


def _distinct(grams: _Grams) -> _Grams:
    """Sort n-grams and add the counts of equal ones."""
    columns, counts = grams
    order = np.argsort(columns[0], kind="stable") if len(columns) == 1 else np.lexsort(columns[::-1])
    columns = columns[:, order]
    starts = _starts(columns)
    return _Grams(columns[:, starts], np.add.reduceat(counts[order], starts))


def _starts(columns: KeyArray) -> IntArray:
    """Return the positions in sorted columns [C, N >= 1] where a new key starts."""
    changed = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
    return np.concatenate([[0], np.flatnonzero(changed) + 1])
