"""Filling prompts between decoding steps: whose turn it is, and how many tokens at a time.

Rows that decode wait for about `wait_s` seconds at most: a piece has as many tokens as lately took that long. A long prompt keeps
nobody from starting either: the oldest row and the one with the least left take turns. Where the bits of a pass depend on its
shape, pieces keep their size. Knows no requests, and nothing of what comes after filling.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Protocol, runtime_checkable

from foresay.checks import check_float
from foresay.decoding.prefill import pending, prefill_chunk
from foresay.decoding.protocols import KVCache, LanguageModel
from foresay.decoding.rows import Row, Rows
from foresay.engine.prefixes import PrefixStore

WAIT_S = 0.3
"""Seconds that rows which decode wait for prompts between two steps, by default."""
OFFLINE_WAIT_S = 10.0
"""The same where nobody reads tokens as they come: larger pieces take less time in all."""
_TOKENS = 512
"""Tokens of a piece before any was timed, or without a clock, and of the largest one."""
_SHARE = 0.25
"""Of the wait, what filling gets even where steps take longer."""
_LEAST = 16
"""Tokens of the smallest piece."""


@runtime_checkable
class SwapsRows(Protocol):
    """A cache whose rows can change places, so that a row may be filled before one ahead of it."""

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        ...


class ChunkedPrefill:
    """Fills the prompts of an engine's rows."""

    def __init__(
        self,
        target: LanguageModel,
        prefixes: PrefixStore | None,
        wait_s: float = WAIT_S,
        clock: Callable[[], float] | None = perf_counter,
    ) -> None:
        """clock: by which pieces are sized, in seconds; None for processes that compute one model and must agree on them.

        Raises ConfigError for a wait that is not positive.
        """
        self._target, self._prefixes = target, prefixes
        self.wait_s = check_float("prefill_wait_s", wait_s, 0.001, 1e6)
        self._clock = clock if target.capabilities.prefill_in_any_pieces else None
        self._tokens_per_s: float | None = None
        self._turns = 0
        self._left = self.wait_s
        """Seconds that filling may take now."""

    def between_steps(
        self, cache: KVCache, items: list[Row], decoding: int, hidden_layers: tuple[int, ...], step_s: float
    ) -> int:
        """Fill prompts of the rows after the first `decoding`, and return how many rows decode then.

        items: rows in cache order; those that are filled change places with the ones before them. When no row decodes yet,
        filling goes on until one is filled, or for as long as rows that decode would wait. step_s: seconds of the last decoding
        step, which are a part of the wait.
        """
        filled = 0
        began = 0.0 if self._clock is None else self._clock()
        self._left = max(self.wait_s - (step_s if decoding else 0.0), _SHARE * self.wait_s)
        while decoding < len(items):
            rows = Rows(items)
            waiting = frozenset[int]() if self._prefixes is None else self._prefixes.fill(cache, rows, decoding)
            place = self._turn(cache, rows, decoding, waiting)
            until = min((i for i in waiting if i > place), default=None)
            count = self._fill(cache, rows, place, hidden_layers, until, filled if decoding else 0)
            before, decoding = decoding, self._joined(cache, items, decoding)
            filled += count
            late = self._clock is not None and self._clock() - began > self._left
            full = decoding > 0 and self._piece() - filled < _LEAST
            if late or full or (not count and decoding == before):
                break
        return decoding

    def _piece(self) -> int:
        """Tokens that may be filled between two steps."""
        if self._clock is None or self._tokens_per_s is None:
            return _TOKENS
        return int(min(max(self._tokens_per_s * self._left, _LEAST), _TOKENS))

    def _turn(self, cache: KVCache, rows: Rows, first: int, waiting: frozenset[int]) -> int:
        """The row to fill, by turns the shortest and the oldest. waiting: rows that wait for the beginning of another."""
        able = [i for i in range(first, len(rows)) if i not in waiting and pending(rows, cache, i) > 0]
        if not able or not isinstance(cache, SwapsRows):
            return first
        self._turns += 1
        if self._turns % 2:
            return min(able, key=lambda i: (pending(rows, cache, i), rows[i].request_id))
        return min(able, key=lambda i: rows[i].request_id)

    def _fill(
        self,
        cache: KVCache,
        rows: Rows,
        place: int,
        hidden_layers: tuple[int, ...],
        until: int | None,
        filled: int,
    ) -> int:
        """Fill one piece from a row on, and time it. filled: tokens since the last step, where rows decode."""
        if self._clock is None:
            return prefill_chunk(self._target, cache, rows, place, hidden_layers, until)
        began, piece = self._clock(), self._piece()
        count = prefill_chunk(self._target, cache, rows, place, hidden_layers, until, max(piece - filled, _LEAST))
        took = self._clock() - began
        known = self._tokens_per_s
        if count >= _LEAST or (count and known is None):  # a few tokens take as long as one: better than no estimate
            now = count / max(took, 1e-9)
            self._tokens_per_s = now if known is None else (known + now) / 2
        return count

    def _joined(self, cache: KVCache, items: list[Row], decoding: int) -> int:
        """Move filled rows before those that are not, as far as the cache can; returns how many rows decode."""
        for place in range(decoding, len(items)):
            if items[place].size - 1 > cache.lengths[place]:
                if isinstance(cache, SwapsRows):
                    continue
                break
            if place != decoding and isinstance(cache, SwapsRows):
                cache.swap(decoding, place)
                items[decoding], items[place] = items[place], items[decoding]
            decoding += 1
        return decoding
