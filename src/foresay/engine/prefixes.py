"""Prompts that begin alike: a row starts from the slots that another one holds.

Looks among the live rows and, within a bound of bytes, among those that ended; the least lately used go first. What is copied
is what filling would compute again: models promise it with `SharesPrefixes`. Knows no model and no text.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol, runtime_checkable

from foresay.checks import check_int
from foresay.decoding.protocols import KVCache
from foresay.decoding.rows import IntArray, Row, Rows, common_prefix

MIN_TOKENS = 16
"""Shorter beginnings are filled: looking and copying would take as long."""


@runtime_checkable
class SharesPrefixes(Protocol):
    """A cache whose rows can begin with what others hold."""

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Row `target` begins with the first `length` slots of row `source`."""
        ...

    def save_prefix(self, row: int, length: int) -> Any:
        """A copy of a row's first `length` slots, with its size in `nbytes`."""
        ...

    def load_prefix(self, row: int, saved: Any, length: int) -> None:
        """Row `row` begins with the first `length` slots of a copy."""
        ...


class PrefixStore:
    """Finds, copies and keeps beginnings of rows."""

    def __init__(self, max_bytes: int = 0) -> None:
        """max_bytes: kept of rows that ended, at most; 0 looks at live rows alone."""
        self.max_bytes = check_int("prefix_bytes", max_bytes, 0)
        self._saved: OrderedDict[bytes, tuple[IntArray, Any]] = OrderedDict()
        self.nbytes = 0
        """Bytes kept of rows that ended."""

    def __len__(self) -> int:
        """Beginnings kept of rows that ended."""
        return len(self._saved)

    def clear(self) -> None:
        """Forget those that ended."""
        self._saved.clear()
        self.nbytes = 0

    def fill(self, cache: KVCache, rows: Rows, first: int) -> int:
        """Let the rows to be filled, from place `first` on, begin with the longest beginning anyone holds.

        Returns the place of the first row that had better wait for one before it, whose beginning it shares; len(rows) for none.
        """
        if not isinstance(cache, SharesPrefixes):
            return len(rows)
        unfilled = [i for i in range(first, len(rows)) if cache.lengths[i] < rows[i].size - 1]
        for place in unfilled:
            if cache.lengths[place] or rows[place].source is not None:
                continue
            wanted = rows[place].tokens[:-1]
            live = [
                (common_prefix(row.tokens[: cache.lengths[i]], wanted), i) for i, row in enumerate(rows) if i != place
            ]
            length, source = max(live, default=(0, -1))
            kept = max(
                ((common_prefix(tokens, wanted), key) for key, (tokens, _) in self._saved.items()), default=(0, b"")
            )
            coming = max((common_prefix(rows[i].tokens[:-1], wanted) for i in unfilled if i < place), default=0)
            if coming >= MIN_TOKENS and coming > max(length, kept[0]):
                return place
            if max(length, kept[0]) < MIN_TOKENS:
                continue
            if kept[0] > length:
                length = kept[0]
                self._saved.move_to_end(kept[1])
                cache.load_prefix(place, self._saved[kept[1]][1], length)
            else:
                cache.copy_prefix(source, place, length)
            rows[place].num_cached = length
        return len(rows)

    def save(self, cache: KVCache, row: Row, place: int) -> None:
        """Keep what a row that ends holds."""
        length = min(cache.lengths[place], row.size - 1)
        if not self.max_bytes or not isinstance(cache, SharesPrefixes) or row.source is not None or length < MIN_TOKENS:
            return
        tokens = row.tokens[:length].copy()
        for key, (known, _) in list(self._saved.items()):
            if common_prefix(known, tokens) == len(known):  # the new one holds all of it
                self._drop(key)
        saved = cache.save_prefix(place, length)
        if saved.nbytes > self.max_bytes:
            return
        key = tokens.tobytes()
        self._drop(key)
        self._saved[key] = (tokens, saved)
        self.nbytes += saved.nbytes
        while self.nbytes > self.max_bytes:
            self._drop(next(iter(self._saved)))

    def _drop(self, key: bytes) -> None:
        if key in self._saved:
            self.nbytes -= self._saved.pop(key)[1].nbytes
