"""A segment: texts that do not change, with an index that finds the longest suffix of a context in them.

The index is the order of all positions by the tokens before them, latest token first: a suffix array of the reversed text, sorted
by DEPTH tokens. Reversed tokens are stored as big-endian integers, so that comparing their bytes compares the tokens; a lookup is
a binary search.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

DEPTH = 32
"""Tokens by which positions are sorted."""
MAX_MATCH = 1024
"""Longest match that is measured, in tokens: of the occurrences of the last DEPTH tokens, the best one is chosen."""
SEPARATOR = 0xFFFF_FFFF
"""Ends each text."""
_BYTES = 4
_SEEN = 64
"""Occurrences of a match that are looked at for the latest one."""
Tokens = npt.NDArray[np.uint32]


def pattern(context: npt.NDArray[np.int64]) -> bytes:
    """Return the last tokens of a context as `Segment.continuations` takes them."""
    return context[-MAX_MATCH:][::-1].astype(">u4").tobytes()


class Segment:
    """Some texts and their index."""

    def __init__(self, tokens: bytes, order: bytes) -> None:
        """tokens: the reversed texts, SEPARATOR before each, a token in 4 bytes, big-endian. order: the index, uint32."""
        self.tokens, self.order = tokens, memoryview(order).cast("I")
        self._numbers = np.frombuffer(tokens, dtype=">u4")
        self.size = len(self.order)
        """Tokens, separators included."""

    @staticmethod
    def build(*parts: npt.ArrayLike) -> Segment:
        """Index reversed texts, which follow each other."""
        backwards = np.concatenate(parts).astype(np.uint32)
        return Segment(backwards.astype(">u4").tobytes(), _order(backwards).tobytes())

    @staticmethod
    def of(text: npt.NDArray[np.int64]) -> Segment:
        """Index one text."""
        return Segment.build([SEPARATOR], text[::-1])

    def merged(self, newer: Segment) -> Segment:
        """Return one segment with the texts of both."""
        return Segment.build(newer._numbers, self._numbers)

    def texts(self) -> list[Tokens]:
        """Return the texts, oldest first, without their separators."""
        whole = self._numbers[::-1].astype(np.uint32)
        return [part[:-1] for part in np.split(whole, 1 + np.flatnonzero(whole == SEPARATOR))[:-1]]

    def continuations(self, given: bytes, count: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (length of a match, up to `count` tokens after it) for suffixes of a context, the longest first.

        given: `pattern` of the context. Of the occurrences of a suffix the latest comes first.
        """
        prefix = given[: DEPTH * _BYTES]
        low = high = bisect_left(self.order, prefix, key=lambda at: self._prefix(at, DEPTH))
        while length := max(self._common_at(prefix, low - 1), self._common_at(prefix, high)):
            prefix = prefix[: length * _BYTES]
            low = bisect_left(self.order, prefix, key=lambda at: self._prefix(at, length))
            high = bisect_right(self.order, prefix, key=lambda at: self._prefix(at, length))
            found = sorted(self.order[low : min(high, low + _SEEN)])
            whole = {at: self._common(given, at) if length == DEPTH else length for at in found}
            for at in sorted(found, key=lambda at: -whole[at]):
                if after := self._after(at, count):
                    yield whole[at], after

    def _prefix(self, at: int, length: int) -> bytes:
        return self.tokens[at * _BYTES : (at + length) * _BYTES]

    def _common_at(self, given: bytes, index: int) -> int:
        """Return how many tokens of a pattern the text at an entry of the index has in common with it."""
        return self._common(given, self.order[index]) if 0 <= index < self.size else 0

    def _common(self, given: bytes, at: int) -> int:
        """Return how many tokens of a pattern the reversed text from an index on has in common with it."""
        own = self._prefix(at, len(given) // _BYTES)
        differ = np.frombuffer(own, np.uint32) != np.frombuffer(given[: len(own)], np.uint32)
        return int(differ.argmax()) if differ.any() else len(differ)

    def _after(self, at: int, count: int) -> list[int]:
        """Return up to `count` tokens after the token at index `at` of the reversed text, within its part."""
        found: list[int] = self._numbers[max(0, at - count) : at][::-1].tolist()
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found


def _order(backwards: Tokens) -> npt.NDArray[np.uint32]:
    """Return the indices of a text in the order of its suffixes, compared by DEPTH tokens; equal ones keep their order.

    Prefix doubling: a suffix's rank by 2 k tokens follows from the ranks of its two halves by k tokens.
    """
    size, length = len(backwards), 1
    rank = np.unique(backwards, return_inverse=True)[1].astype(np.int64) + 1
    order = np.argsort(rank, kind="stable")
    while length < DEPTH and size > 1:
        key = rank * (size + 1)
        key[:-length] += rank[length:]
        order = np.argsort(key, kind="stable")
        sorted_keys = key[order]
        rank[order] = np.concatenate([[1], 1 + np.cumsum(sorted_keys[1:] != sorted_keys[:-1])])
        length *= 2
    return order.astype(np.uint32)
