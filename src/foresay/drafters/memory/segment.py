"""A segment: texts that do not change, with an index that finds the longest suffix of a context in them.

The index is the order of all positions by the tokens before them, latest token first: a suffix array of the reversed text, sorted
by DEPTH tokens. Reversed tokens are stored as big-endian integers, so that comparing their bytes compares the tokens; a lookup is
a binary search.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

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

    __slots__ = ("_numbers", "order", "reversed", "size")

    def __init__(self, reversed_tokens: Any, order: Any) -> None:
        """reversed_tokens: buffer of the reversed text, each token in 4 bytes, big-endian. order: buffer of the index, uint32."""
        self.reversed, self.order = reversed_tokens, memoryview(order).cast("B").cast("I")
        self._numbers = np.frombuffer(reversed_tokens, dtype=">u4")
        self.size = len(self._numbers)
        """Tokens, separators included."""

    @staticmethod
    def build(text: Tokens) -> Segment:
        """Index a text, in which SEPARATOR follows each of its parts."""
        backwards = text[::-1]
        return Segment(backwards.astype(">u4").tobytes(), _order(backwards).tobytes())

    def text(self) -> Tokens:
        """Return the text."""
        return self._numbers[::-1].astype(np.uint32)

    def continuations(self, given: bytes, count: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (length of a match, up to `count` tokens after it) for suffixes of a context, the longest first.

        given: `pattern` of the context. Of the occurrences of a suffix the latest comes first.
        """
        length = self._longest(given[: DEPTH * _BYTES])
        while length:
            prefix = given[: length * _BYTES]
            low = bisect_left(self.order, prefix, key=lambda at: self._prefix(at, length))
            high = bisect_right(self.order, prefix, key=lambda at: self._prefix(at, length))
            found = sorted(self.order[low : min(high, low + _SEEN)])
            whole = {at: self._common(given, at) if length == DEPTH else length for at in found}
            for at in sorted(found, key=lambda at: -whole[at]):
                if after := self._after(at, count):
                    yield whole[at], after
            length = max(self._common_at(prefix, low - 1), self._common_at(prefix, high))

    def _longest(self, given: bytes) -> int:
        """Return the length of the longest match of at most DEPTH tokens: that of a neighbour in the index."""
        index = bisect_left(self.order, given, key=lambda at: self._prefix(at, DEPTH))
        return max(self._common_at(given, index - 1), self._common_at(given, index))

    def _prefix(self, at: int, length: int) -> bytes:
        return bytes(self.reversed[at * _BYTES : (at + length) * _BYTES])

    def _common_at(self, given: bytes, index: int) -> int:
        """Return how many tokens of a pattern the text at an entry of the index has in common with it."""
        return self._common(given, self.order[index]) if 0 <= index < self.size else 0

    def _common(self, given: bytes, at: int) -> int:
        """Return how many tokens of a pattern the reversed text from an index on has in common with it."""
        own = self._prefix(at, len(given) // _BYTES)
        if own == given:
            return len(own) // _BYTES
        size = min(len(own), len(given))
        differ = np.frombuffer(own[:size], np.uint32) != np.frombuffer(given[:size], np.uint32)
        return int(differ.argmax()) if differ.any() else size // _BYTES

    def _after(self, at: int, count: int) -> list[int]:
        """Return up to `count` tokens after the token at index `at` of the reversed text, within its part."""
        found: list[int] = self._numbers[max(0, at - count) : at][::-1].tolist()
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found


def merged(segments: Sequence[Segment]) -> Segment:
    """Return one segment with the texts of several, in their order."""
    return Segment.build(np.concatenate([one.text() for one in segments]))


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
