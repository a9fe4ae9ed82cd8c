"""Snapshots of states that cannot be truncated, such as those of recurrent layers.

A row rewinds to the latest snapshot that is not longer than the requested length. The tokens in between are fed again by the next
pass, since every pass feeds all tokens that a cache lacks. States are immutable: a snapshot is a reference, and costs no copy.
Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from foresay.decoding.protocols import Move

S = TypeVar("S")

MAX_BACKLOG = 16
"""Committed tokens that a pass feeds again at most in front of a draft. A longer backlog is fed alone, and makes a snapshot."""
_MAX_UNDO = 64
"""Snapshots since the last rewinding that are kept: more than a draft model makes while it drafts."""
MAX_SHARED = 3
"""Snapshots of a prompt that are kept for rows with a common prefix."""


class SnapshotRows:
    """Base of caches whose rows rewind to snapshots; see FeedsAgain."""

    lengths: list[int]

    def shortened(self, budget: Sequence[int], sizes: Sequence[int], free: Sequence[bool]) -> list[int]:
        """See FeedsAgain. A row has no draft while more than MAX_BACKLOG tokens are fed again."""
        again = [size - 1 - length for size, length in zip(sizes, self.lengths, strict=False)]
        return [0 if a > MAX_BACKLOG else max(0, n - a * may) for n, a, may in zip(budget, again, free, strict=True)]


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[S]):
    """The state after `length` tokens; None for the initial state."""

    length: int
    state: S | None


def state_lengths(names: Iterable[str]) -> list[int]:
    """Return the lengths of the states of a file, by its names of tensors "state.LENGTH.NAME"."""
    return sorted({int(name.split(".")[1]) for name in names if name.startswith("state.")})


def thin(shared: list[Snapshot[S]]) -> None:
    """Drop one of too many snapshots, by ascending length: the one whose removal leaves the smallest gap, but not the last."""
    if len(shared) > MAX_SHARED:
        ends = [0, *(kept.length for kept in shared)]
        del shared[min(range(len(shared) - 1), key=lambda i: ends[i + 2] - ends[i])]


@dataclass(slots=True)
class _History(Generic[S]):
    """Snapshots of one row, by ascending length."""

    shared: list[Snapshot[S]] = field(default_factory=list)
    """Snapshots at ends of prefill passes."""
    undo: list[Snapshot[S]] = field(default_factory=lambda: [Snapshot(0, None)])
    """Snapshots since the last rewinding; the last one is the row's present state."""

    def longest(self, length: int) -> Snapshot[S]:
        """Return the longest snapshot of at most `length` tokens."""
        found = [one for one in (*self.shared, *self.undo) if one.length <= length]
        return max(found, key=lambda one: one.length, default=Snapshot(0, None))

    def share(self, one: Snapshot[S]) -> None:
        """Keep a snapshot for other rows."""
        self.shared.append(one)
        thin(self.shared)


class Snapshots(Generic[S]):
    """Present states and snapshots of rows."""

    def __init__(self) -> None:
        self._rows: list[_History[S]] = []

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def add_rows(self, count: int) -> None:
        """Append rows in the initial state."""
        self._rows += [_History() for _ in range(count)]

    def present(self, row: int) -> Snapshot[S]:
        """Return a row's present state."""
        return self._rows[row].undo[-1]

    def record(self, row: int, length: int, state: S, *, replace: bool = False, share: bool = False) -> None:
        """Make `state` a row's present state. replace: drop the state before it. share: keep it for rows with a common prefix."""
        history, one = self._rows[row], Snapshot(length, state)
        if replace:
            history.undo.pop()
        elif len(history.undo) == _MAX_UNDO:
            del history.undo[0]
        history.undo.append(one)
        if share:
            history.share(one)

    def rewind(self, row: int, length: int) -> int:
        """Rewind a row to its longest snapshot of at most `length` tokens; return its length. Other snapshots are dropped."""
        history = self._rows[row]
        found = history.longest(length)
        history.undo = [found]
        history.shared = [one for one in history.shared if one.length <= found.length]
        return found.length

    def longest(self, row: int, length: int) -> Snapshot[S]:
        """Return a row's longest snapshot of at most `length` tokens."""
        return self._rows[row].longest(length)

    def restore(self, row: int, one: Snapshot[S]) -> None:
        """Make a snapshot, of this row or another, a row's present state."""
        self._rows[row] = _History(undo=[one])
        if one.length:
            self._rows[row].share(one)

    def held(self, row: int) -> Sequence[Snapshot[S]]:
        """Return a row's snapshots, each once, by ascending length."""
        history = self._rows[row]
        return sorted({id(one): one for one in (*history.shared, *history.undo)}.values(), key=lambda one: one.length)

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        self._rows[one], self._rows[other] = self._rows[other], self._rows[one]

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Apply the moves of rows, then drop the rows from index `count` on."""
        for source, target in moves:
            self._rows[target] = self._rows[source]
        del self._rows[count:]
