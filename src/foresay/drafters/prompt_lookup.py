"""Prompt lookup: find the latest earlier occurrence of the context's longest suffix, and copy the tokens after it.

Each row has an index from n-gram to the end of its latest occurrence, extended with committed tokens only, so that a search
takes a few dictionary reads, independent of the context length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresay.decoding.rows import IntArray, Row
from foresay.drafters.ngram import NgramDrafter
from foresay.errors import ConfigError


class _Index:
    """End of the latest occurrence of each n-gram in a row's context, for n from `low` to `high`."""

    __slots__ = ("ends", "high", "indexed", "low", "matched")

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.ends: dict[tuple[int, ...], int] = {}
        self.indexed = self.matched = 0

    def extend(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Index the n-grams that end before `end`, so that the suffix of the context never matches itself.

        tokens: the context from position `start` on.
        """
        for stop in range(max(self.indexed, self.low - 1) + 1, end):
            for n in range(self.low, min(self.high, stop) + 1):
                self.ends[tuple(tokens[stop - n - start : stop - start])] = stop
        self.indexed = max(self.indexed, end - 1)

    def find(self, suffix: Sequence[int]) -> int | None:
        """Return the end of the latest earlier occurrence of the longest indexed suffix; None if there is none."""
        for n in range(min(self.high, len(suffix)), self.low - 1, -1):
            end = self.ends.get(tuple(suffix[-n:]))
            if end is not None:
                self.matched = n
                return end
        return None


class PromptLookup(NgramDrafter[_Index]):
    """Draft by copying from the row's own context, without weights or forward passes."""

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2, device: torch.device | str = "cpu") -> None:
        """max_ngram, min_ngram: longest and shortest suffix to search for, 1 <= min_ngram <= max_ngram <= 64."""
        super().__init__(device)
        for name, value in (("max_ngram", max_ngram), ("min_ngram", min_ngram)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError("must be an integer", param=name, value=value)
        if not 1 <= min_ngram <= max_ngram <= 64:
            text = "and {max_ngram} must satisfy 1 <= min_ngram <= max_ngram <= 64"
            raise ConfigError(text, param="min_ngram", value=min_ngram, max_ngram=max_ngram)
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def start(self, row: Row) -> _Index:
        """Return an empty index."""
        return _Index(self.min_ngram, self.max_ngram)

    def draft_tokens(self, row: Row, state: _Index, count: int) -> list[int]:
        """Copy the tokens after the match; past the context's end the copy repeats itself."""
        committed = row.committed.full_context
        start = max(0, state.indexed - self.max_ngram)
        state.extend(committed[start:].tolist(), start, len(committed))
        if count <= 0:
            return []
        context = committed if row is row.committed else row.full_context
        found = state.find(context[-self.max_ngram :].tolist())
        return [] if found is None else _copy(context, found, count)


def _copy(tokens: IntArray, start: int, count: int) -> list[int]:
    """Return `count` tokens from `start` on; past the end the copied tokens repeat, as in LZ77."""
    source = tokens[start : start + count].tolist()
    return [source[i % len(source)] for i in range(count)]
