"""The cache of a model with recurrent layers: states with snapshots, and slots for its attention layers, if it has any.

A rewound row ends at a snapshot, often before the requested length, and its slots are truncated to the same length. Knows no
model: a state is a mapping from a layer's names to tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from foresay.decoding.protocols import Move
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.cache.snapshots import Snapshot, SnapshotRows, Snapshots, state_lengths
from foresay.models.cache.stores import SavedSlots, same

State = Mapping[str, torch.Tensor]
"""Tensors [1, ...] of one row."""


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """A copy of a row's first slots, and its snapshots."""

    slots: SavedSlots
    snapshots: tuple[Snapshot[State], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return self.slots.nbytes + sum(_bytes(one.state) for one in self.snapshots)

    def prefix_length(self, length: int) -> int:
        """Return the length of the longest prefix of at most `length` tokens that can be copied."""
        return max((one.length for one in self.snapshots if one.length <= length), default=0)

    def first(self, length: int) -> SavedPrefix:
        """Return the first `length` tokens, without copying."""
        return SavedPrefix(self.slots.first(length), tuple(one for one in self.snapshots if one.length <= length))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, for a file."""
        states = [(one.length, one.state) for one in self.snapshots]
        return self.slots.tensors() | {
            f"state.{length}.{name}": tensor.contiguous()
            for length, state in states
            for name, tensor in (state or {}).items()
        }

    def restored(self, tensors: Mapping[str, torch.Tensor], count: int) -> SavedPrefix:
        """See SavedSlots; with the snapshots that the file has."""
        known = self.snapshots[-1].state or {}
        snapshots: list[Snapshot[State]] = [
            Snapshot(length, {n: same(tensors, f"state.{length}.{n}", one, len(one)) for n, one in known.items()})
            for length in state_lengths(tensors)
        ]
        return SavedPrefix(self.slots.restored(tensors, count), tuple(snapshots))


class RecurrentCache(SnapshotRows, SlotCache):
    """Recurrent states, and keys and values, of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.states: Snapshots[State] = Snapshots()

    def add_rows(self, count: int) -> None:
        """Append empty rows."""
        super().add_rows(count)
        self.states.add_rows(count)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Rewind row i to its longest snapshot of at most lengths[i] tokens."""
        for i, length in enumerate(lengths):
            self.lengths[i] = self.states.rewind(i, min(self.lengths[i], length))

    def prefix_length(self, row: int, length: int) -> int:
        """Return the length of the longest prefix of at most `length` tokens that can be copied from a row."""
        return self.states.longest(row, length).length

    stored_length = prefix_length
    """Longest prefix that a file can have; any other process goes on at a snapshot."""

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source`, which a snapshot of it has, to row `target`."""
        one = self.states.longest(source, length)
        assert one.length == length
        super().copy_prefix(source, target, length)
        self.states.restore(target, one)

    def save_prefix(self, row: int, length: int) -> SavedPrefix:  # type: ignore[override]
        """Return a copy of a row's first `length` tokens at most: as many as its longest snapshot has."""
        kept = [one for one in self.states.held(row) if 0 < one.length <= length]
        slots = super().save_prefix(row, max((one.length for one in kept), default=0))
        return SavedPrefix(slots, tuple(Snapshot(one.length, _copied(one.state)) for one in kept))

    def load_prefix(self, row: int, saved: SavedPrefix, length: int) -> None:  # type: ignore[override]
        """Overwrite the start of row `row` with the first `length` tokens of a copy, which a snapshot of it has."""
        super().load_prefix(row, saved.slots, length)
        self.states.restore(row, next(one for one in saved.snapshots if one.length == length))

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        super().swap(one, other)
        self.states.swap(one, other)

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Apply the moves of rows, then drop the rows from index `count` on and free their memory."""
        super().rearrange(moves, count)
        self.states.rearrange(moves, count)

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        held = {id(one): one for row in range(len(self.states)) for one in self.states.held(row)}
        return super().nbytes + sum(_bytes(one.state) for one in held.values())


def _bytes(state: State | None) -> int:
    return 0 if state is None else sum(tensor.nbytes for tensor in state.values())


def _copied(state: State | None) -> State | None:
    """Return a copy that does not keep the tensors of a whole batch alive."""
    return None if state is None else {name: tensor.clone() for name, tensor in state.items()}
