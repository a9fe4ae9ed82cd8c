"""The cache of a fused model with recurrent layers: slots for its attention, and states that can be truncated.

A row has the states at two lengths, its *base* and its *end*, and in a ring the inputs of its last tokens, from which the
kernels compute the state at any length from the base on: a rejection costs nothing but those updates. Rewinding further ends at
a copy of the states at the end of a prefill pass, or at the row's start, and the tokens after it are fed again. Knows no model:
cpu/recurrent.h reads and writes the numbers of states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from foresay.decoding.protocols import Move
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.cache.snapshots import Snapshot, SnapshotRows, state_lengths, thin
from foresay.models.cache.stores import RowStores, SavedSlots, same

SLOTS = 24
"""Tokens whose inputs a row keeps: a rejected draft of up to 23 tokens costs nothing."""


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Numbers of a row's states over all layers, of a token's inputs, and the tokens before a base whose inputs it needs."""

    state: int
    entry: int
    tail: int

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the states at one length."""
        return 4 * (self.state + self.tail * self.entry)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row without copies for other rows."""
        return 2 * self.snapshot_bytes + 4 * SLOTS * self.entry


@dataclass(slots=True)
class State:
    """The states at one length: numbers of the layers [state], and inputs of the tokens before it, [tail, entry]."""

    numbers: torch.Tensor
    tail: torch.Tensor

    def copy(self) -> State:
        """Return a copy."""
        return State(self.numbers.clone(), self.tail.clone())

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return self.numbers.nbytes + self.tail.nbytes


@dataclass(frozen=True, slots=True)
class RowPass:
    """A pass of `count` tokens over a row of `length`; `base` and `first` of the row after it."""

    row: int
    length: int
    count: int
    base: int
    first: int


class RowStates:
    """The states of one row.

    The ring has the inputs of tokens [first, end), at their positions modulo SLOTS. `first` is the base, or after it if more
    tokens than the ring holds were fed since `mark`, the length at which the row was last truncated or prefilled: to that length
    a draft model rewinds after it has drafted token after token.
    """

    def __init__(self, sizes: StateSizes) -> None:
        self.base = self.first = self.end = self.mark = 0
        self.at_base = State(torch.zeros(sizes.state), torch.zeros(sizes.tail, sizes.entry))
        self.at_end = torch.zeros(sizes.state)
        self.ring = torch.zeros(SLOTS, sizes.entry)
        self.shared: list[Snapshot[State]] = []
        """States at the ends of prefill passes; they are never written."""

    def copy(self) -> RowStates:
        """Return a copy; shared states are referenced."""
        out = object.__new__(RowStates)
        out.base, out.first, out.end, out.mark = self.base, self.first, self.end, self.mark
        out.at_base, out.at_end, out.ring = self.at_base.copy(), self.at_end.clone(), self.ring.clone()
        out.shared = list(self.shared)
        return out

    def reach(self, length: int) -> int:
        """Return the longest length of at most `length` at which the row can go on."""
        if length == self.end or (self.first == self.base and self.base <= length <= self.end):
            return length
        known = [one.length for one in self.shared if one.length <= length]
        return max([0, *known, *([self.base] if self.base <= length else [])])

    def go_to(self, length: int) -> None:
        """Go on at a length that `reach` returns, without what was computed of later tokens."""
        self.shared, self.mark = [one for one in self.shared if one.length <= length], length
        within = self.base == length or (self.first == self.base and self.base <= length <= self.end)
        if within or length == self.end:
            return
        one = next((one for one in self.shared if one.length == length), None)
        if one is None or one.state is None:
            assert length == 0, "no state at this length"
            for tensor in (self.at_base.numbers, self.at_base.tail, self.at_end):
                tensor.zero_()
        else:
            self.at_base = one.state.copy()
            self.at_end.copy_(one.state.numbers)
        self.base = self.first = self.end = length

    def next_pass(self, row: int, length: int, count: int) -> RowPass:
        """Return the pass of `count` tokens at `length`. The base moves only when the ring is full, to the mark if it can."""
        base, first, whole = self.base, self.first, self.first == self.base
        fits = whole and length + count - base <= SLOTS
        if length != self.end or (self.mark == length and not fits):
            base = first = length
        elif whole and not fits and base <= self.mark:
            base = first = self.mark
        return RowPass(row, length, count, base, max(first, length + count - SLOTS))

    def passed(self, one: RowPass) -> None:
        """Record that a pass was computed."""
        self.base, self.first, self.end = one.base, one.first, one.length + one.count

    def share(self) -> None:
        """Keep the states at the end of a prefill pass for rows with a common prefix."""
        self.mark = self.end
        positions = range(self.end - len(self.at_base.tail), self.end)
        tail = [self.ring[p % SLOTS] if p >= self.first else self.at_base.tail[p - self.base] for p in positions]
        state = State(self.at_end.clone(), torch.stack(tail) if tail else self.at_base.tail.clone())
        self.shared.append(Snapshot(self.end, state))
        thin(self.shared)

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        shared = sum(one.state.nbytes for one in self.shared if one.state is not None)
        return self.at_base.nbytes + self.at_end.nbytes + self.ring.nbytes + shared


@dataclass(frozen=True, slots=True)
class SavedRow:
    """A copy of a row's first slots, and of its states."""

    slots: SavedSlots
    states: RowStates

    def first(self, length: int) -> SavedRow:
        """Return the first `length` tokens, at which `stored_length` ends, without copying slots."""
        states = self.states.copy()
        states.go_to(length)
        return SavedRow(self.slots.first(length), states)

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return self.slots.nbytes + self.states.nbytes

    def prefix_length(self, length: int) -> int:
        """Return the length of the longest prefix of at most `length` tokens that can be copied."""
        return self.states.reach(length)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, for a file: of the states, those at the ends of prefill passes."""
        states = {one.length: one.state for one in self.states.shared if one.state is not None}
        numbers = {f"state.{length}.numbers": one.numbers for length, one in states.items()}
        return self.slots.tensors() | numbers | {f"state.{length}.tail": one.tail for length, one in states.items()}

    def restored(self, tensors: Mapping[str, torch.Tensor], count: int) -> SavedRow:
        """See SavedSlots; with the states that the file has."""
        known, out = self.states.at_base, object.__new__(RowStates)
        out.base = out.first = out.end = out.mark = -1  # it goes on at one of the ends of prefill passes
        out.at_base, out.at_end, out.ring = known.copy(), self.states.at_end.clone(), self.states.ring.clone()
        out.shared = [
            Snapshot(
                length,
                State(
                    same(tensors, f"state.{length}.numbers", known.numbers, len(known.numbers)),
                    same(tensors, f"state.{length}.tail", known.tail, len(known.tail)),
                ),
            )
            for length in state_lengths(tensors)
        ]
        return SavedRow(self.slots.restored(tensors, count), out)


class StateCache(SnapshotRows, SlotCache):
    """Keys and values of attention layers, and states of the others, for each row."""

    def __init__(self, stores: RowStores, sizes: StateSizes) -> None:
        super().__init__(stores)
        self.sizes = sizes
        self._rows: list[RowStates | None] = []
        """None for an empty row."""

    def add_rows(self, count: int) -> None:
        """Append empty rows."""
        super().add_rows(count)
        self._rows += [None] * count

    def states(self, row: int) -> RowStates:
        """Return the states of a row."""
        found = self._rows[row]
        if found is None:
            found = self._rows[row] = RowStates(self.sizes)
        return found

    def truncate(self, lengths: Sequence[int]) -> None:
        """Rewind row i to lengths[i] tokens, or to fewer if its states were not kept so far back."""
        for i, length in enumerate(lengths):
            if length < self.lengths[i]:
                self.rewind(i, length)
            elif (states := self._rows[i]) is not None:
                states.mark = self.lengths[i]

    def rewind(self, row: int, length: int) -> None:
        """Rewind one row."""
        states = self.states(row)
        self.lengths[row] = states.reach(length)
        states.go_to(self.lengths[row])

    def drop(self, row: int) -> None:
        """Rewind a row whose pass was interrupted to the end of a prefill pass, or to its start."""
        states = self.states(row)
        length = max((one.length for one in states.shared if one.length <= self.lengths[row]), default=0)
        states.base = states.first = states.end = -1  # neither of its states is known
        states.go_to(length)
        self.lengths[row] = length

    def share(self, first_row: int, counts: Sequence[int]) -> None:
        """Keep the states of rows that a prefill pass has fed for rows with a common prefix. counts: tokens of each row."""
        for row, count in enumerate(counts, first_row):
            if count:
                self.states(row).share()

    def prefix_length(self, row: int, length: int) -> int:
        """Return the length of the longest prefix of at most `length` tokens that can be copied from a row."""
        return self.states(row).reach(min(length, self.lengths[row]))

    def stored_length(self, row: int, length: int) -> int:
        """Return the longest prefix of at most `length` tokens that a file can have: it has states at ends of prefill passes."""
        known = [one.length for one in self.states(row).shared if one.length <= min(length, self.lengths[row])]
        return max(known, default=0)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source`, at which it can go on, to row `target`."""
        super().copy_prefix(source, target, length)
        self._put(target, self.states(source).copy(), length)

    def save_prefix(self, row: int, length: int) -> SavedRow:  # type: ignore[override]
        """Return a copy of a row's first `length` tokens at most: as many as its states reach."""
        states, length = self.states(row).copy(), self.prefix_length(row, length)
        states.go_to(length)
        return SavedRow(super().save_prefix(row, length), states)

    def load_prefix(self, row: int, saved: SavedRow, length: int) -> None:  # type: ignore[override]
        """Overwrite the start of row `row` with the first `length` tokens of a copy, at which it can go on."""
        super().load_prefix(row, saved.slots, length)
        self._put(row, saved.states.copy(), length)

    def _put(self, row: int, states: RowStates, length: int) -> None:
        assert states.reach(length) == length
        states.go_to(length)
        self._rows[row] = states

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        super().swap(one, other)
        self._rows[one], self._rows[other] = self._rows[other], self._rows[one]

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Apply the moves of rows, then drop the rows from index `count` on and free their memory."""
        super().rearrange(moves, count)
        for source, target in moves:
            self._rows[target] = self._rows[source]
        del self._rows[count:]

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return super().nbytes + sum(row.nbytes for row in self._rows if row is not None)
