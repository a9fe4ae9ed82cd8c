"""Prompt lookup: the longest suffix of the context that occurs earlier, and what followed it there.

Each row keeps an index from n-gram to the place behind its latest occurrence, extended by the committed tokens only, so
a look-up costs a few dictionary reads however long the context is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresay.decoding.rows import IntArray, Row
from foresay.drafters.ngram import NgramDrafter
from foresay.errors import ConfigError


class _Index:
    """Where each n-gram of a row's context last ended, for n from `low` to `high`."""

    __slots__ = ("ends", "high", "indexed", "low", "matched")

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.ends: dict[tuple[int, ...], int] = {}
        self.indexed = self.matched = 0

    def extend(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Index the n-grams that end before `end` (so that the suffix of the context never finds itself)."""
        for stop in range(max(self.indexed, self.low - 1) + 1, end):
            for n in range(self.low, min(self.high, stop) + 1):
                self.ends[tuple(tokens[stop - n - start : stop - start])] = stop
        self.indexed = max(self.indexed, end - 1)

    def find(self, suffix: Sequence[int]) -> int | None:
        """The place behind the latest earlier occurrence of the longest indexed suffix."""
        for n in range(min(self.high, len(suffix)), self.low - 1, -1):
            place = self.ends.get(tuple(suffix[-n:]))
            if place is not None:
                self.matched = n
                return place
        return None


class PromptLookup(NgramDrafter[_Index]):
    """Guesses by copying from the row's own context (no weights, no cost in the model's time)."""

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2, device: torch.device | str = "cpu") -> None:
        """Suffixes of max_ngram down to min_ngram tokens are looked up."""
        super().__init__(device)
        for name, value in (("max_ngram", max_ngram), ("min_ngram", min_ngram)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name}={value!r} must be an integer")
        if not 1 <= min_ngram <= max_ngram <= 64:
            raise ConfigError(
                f"min_ngram={min_ngram}, max_ngram={max_ngram} must satisfy 1 <= min_ngram <= max_ngram <= 64"
            )
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def start(self, row: Row) -> _Index:
        """An empty index."""
        return _Index(self.min_ngram, self.max_ngram)

    def draft_tokens(self, row: Row, state: _Index, count: int) -> list[int]:
        """Copy what followed the longest suffix; a copy that reaches the context's end goes on into itself."""
        committed = row.committed.full_context
        start = max(0, state.indexed - self.max_ngram)
        state.extend(committed[start:].tolist(), start, len(committed))
        if count <= 0:
            return []
        context = committed if row is row.committed else row.full_context
        place = state.find(context[-self.max_ngram :].tolist())
        return [] if place is None else _copy(context, place, count)


def _copy(tokens: IntArray, place: int, count: int) -> list[int]:
    """`count` tokens from `place` on; past the end the copy repeats what it has copied, as LZ77 does."""
    source = tokens[place : place + count].tolist()
    return [source[i % len(source)] for i in range(count)]
