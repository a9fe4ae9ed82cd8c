"""Chunked prefill between decoding steps: which row is next, and how many tokens.

Decoding rows wait for about `wait_s` seconds at most: the size of a chunk is set by the measured prefill speed. The row with
the fewest tokens left is next, and several of them share a pass; for every _AGEING tokens that others were given while it
waited, a row counts as one token shorter, so that none waits for ever. If the bits of a pass depend on its shape, chunks have a
fixed size. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Protocol, runtime_checkable

from foresay.checks import check_float
from foresay.decoding.prefill import pending, prefill_chunk
from foresay.decoding.protocols import KVCache, LanguageModel
from foresay.decoding.rows import Row, Rows
from foresay.engine.prefixes import PrefixStore

WAIT_S = 0.3
"""Default time that decoding rows wait for prefill between two steps, in seconds."""
OFFLINE_WAIT_S = 10.0
"""The same if no tokens are streamed: larger chunks take less time in total."""
_MAX_CHUNK = 512
"""Tokens of the largest chunk, and of chunks before any was timed or without a clock."""
_MIN_SHARE = 0.25
"""Fraction of the wait that prefill gets even if decoding steps take longer."""
_MIN_CHUNK = 16
"""Tokens of the smallest chunk."""
_AGEING = 4
"""A prompt is delayed by others of at most about so many times its own length."""


def runs_ahead(target: LanguageModel, cache: KVCache) -> bool:
    """Return True if a row's last token may be cached before its step: unless a drafter reads or writes the target's cache."""
    return target.capabilities.runs_ahead and not getattr(cache, "is_lent", False)


@runtime_checkable
class SwapsRows(Protocol):
    """A cache whose rows can be exchanged, so that rows may be prefilled out of order."""

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        ...


class ChunkedPrefill:
    """Prefills the prompts of an engine's rows."""

    def __init__(
        self,
        target: LanguageModel,
        prefixes: PrefixStore | None,
        wait_s: float = WAIT_S,
        clock: Callable[[], float] | None = perf_counter,
    ) -> None:
        """clock: returns seconds, for the size of chunks; None for the processes of one model, which must use equal chunks.

        Raises ConfigError unless wait_s is positive.
        """
        self._target, self._prefixes = target, prefixes
        self.wait_s = check_float("prefill_wait_s", wait_s, 0.001, 1e6)
        self._clock = clock if target.capabilities.prefill_in_any_pieces else None
        self._tokens_per_s: float | None = None
        self._total = 0
        """Tokens that were prefilled so far."""
        self._since: dict[int, int] = {}
        """That number when a row was first seen, by request."""
        self._budget_s = self.wait_s
        """Time for prefill before the next step."""

    def between_steps(
        self, cache: KVCache, items: list[Row], decoding: int, hidden_layers: tuple[int, ...], step_s: float
    ) -> int:
        """Prefill rows after the first `decoding`; return the new number of decoding rows.

        items: rows in cache order; prefilled rows are exchanged with those before them. If no row decodes yet, prefill continues
        until one is complete, or for as long as decoding rows would wait. step_s: duration of the last decoding step, which is a
        part of the wait.
        """
        done = 0
        began = 0.0 if self._clock is None else self._clock()
        self._budget_s = max(self.wait_s - (step_s if decoding else 0.0), _MIN_SHARE * self.wait_s)
        while decoding < len(items):
            rows = Rows(items)
            waiting = {} if self._prefixes is None else self._prefixes.copy_into(cache, rows, decoding)
            index, until = self._arrange(cache, items, decoding, waiting)
            count = self._prefill(cache, Rows(items), index, hidden_layers, until, done if decoding else 0)
            before, decoding = decoding, self._join(cache, items, decoding)
            done += count
            self._total += count
            late = self._clock is not None and self._clock() - began > self._budget_s
            full = decoding > 0 and self._chunk() - done < _MIN_CHUNK
            if late or full or (not count and decoding == before):
                break
        return decoding

    def _chunk(self) -> int:
        """Number of tokens to prefill between two steps."""
        if self._clock is None or self._tokens_per_s is None:
            return _MAX_CHUNK
        return int(min(max(self._tokens_per_s * self._budget_s, _MIN_CHUNK), _MAX_CHUNK))

    def _arrange(
        self, cache: KVCache, items: list[Row], first: int, waiting: Mapping[int, int | None]
    ) -> tuple[int, int | None]:
        """Move the rows that are next to index `first`, in order; return the index of the first, and the end of those that may
        share its pass.

        waiting: rows that wait for a common prefix, with the row that prefills it, which is as urgent as they are.
        """
        rows = Rows(items)
        ready = [i for i in range(first, len(items)) if i not in waiting and pending(rows, cache, i) > 0]
        if not ready or not isinstance(cache, SwapsRows):
            return first, min((i for i in waiting if i > first), default=None)
        seen = self._since
        self._since = {row.request_id: seen.get(row.request_id, self._total) for row in items[first:]}
        left = {i: self._left(rows, cache, i) for i in range(first, len(items))}
        for i in waiting:
            awaited = waiting[i]
            while awaited is not None:
                left[awaited] = min(left[awaited], left[i])
                awaited = waiting.get(awaited)
        best = sorted(ready, key=lambda i: (left[i], items[i].request_id))
        if not self._target.capabilities.prefill_together:
            return best[0], None
        chosen, size = list[Row](), 0
        for i in best:
            chosen.append(items[i])
            if (size := size + pending(rows, cache, i)) >= _MAX_CHUNK:
                break
        for index, row in enumerate(chosen, first):
            if (now := items.index(row, index)) != index:
                cache.swap(index, now)
                items[index], items[now] = items[now], items[index]
        return first, first + len(chosen)

    def _left(self, rows: Rows, cache: KVCache, index: int) -> float:
        """Tokens that a row lacks, less its credit for those that others were given."""
        row = rows[index]
        others = self._total - self._since[row.request_id] - (cache.lengths[index] - row.num_cached)
        return pending(rows, cache, index) - max(0, others) / _AGEING

    def _prefill(
        self, cache: KVCache, rows: Rows, index: int, hidden_layers: tuple[int, ...], until: int | None, done: int
    ) -> int:
        """Prefill one chunk from a row on, and time it. done: tokens prefilled since the last step, if rows decode."""
        given, scored = (self._target, cache, rows, index, hidden_layers, until), runs_ahead(self._target, cache)
        if self._clock is None:
            return prefill_chunk(*given, scored=scored)
        began, chunk = self._clock(), self._chunk()
        count = prefill_chunk(*given, max(chunk - done, _MIN_CHUNK), scored=scored)
        elapsed = self._clock() - began
        old = self._tokens_per_s
        if count >= _MIN_CHUNK or (
            count and old is None
        ):  # a few tokens take as long as one: use them only as first estimate
            new = count / max(elapsed, 1e-9)
            self._tokens_per_s = new if old is None else (old + new) / 2
        return count

    def _join(self, cache: KVCache, items: list[Row], decoding: int) -> int:
        """Move complete rows before incomplete ones, if the cache supports it; return the number of decoding rows."""
        for i in range(decoding, len(items)):
            if items[i].size - 1 > cache.lengths[i]:
                if isinstance(cache, SwapsRows):
                    continue
                break
            if i != decoding and isinstance(cache, SwapsRows):
                cache.swap(decoding, i)
                items[decoding], items[i] = items[i], items[decoding]
            decoding += 1
        return decoding
