"""The memory of a slot cache: keys and values of all layers.

Two layouts share one interface. `RowStores` allocates a block per row, so that memory grows with tokens and is freed when a row
ends; our CPU kernels read it. `Stores` is one rectangle of rows by slots per layer, which PyTorch's operations need. Does not
know which slots are valid; the cache does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foresay.models.cache.memory import trim

Pair = tuple[torch.Tensor, torch.Tensor]
WIDTH = 128
"""Slots are allocated in multiples of this."""
_GENEROUS = 1 << 28
"""Stores up to this many bytes grow beyond the requested size, so that they are copied less often."""
_SHRINK = 4
"""A rectangle is copied to a smaller one if that needs at most a quarter of the memory."""
SMALL_BYTES = 1 << 26
"""Freed memory below this many bytes is kept for the next rows."""


def round_up(value: int, unit: int = WIDTH) -> int:
    """Round `value` up to a multiple of `unit`."""
    return -(-value // unit) * unit


@dataclass(frozen=True, slots=True)
class SavedSlots:
    """A copy of a row's first slots: keys and values of each layer, [slots, heads, dim] each; None for one never written."""

    parts: tuple[Pair | None, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return sum(store.nbytes for part in self.parts for store in part or ())

    def first(self, length: int) -> SavedSlots:
        """Return the first `length` slots, without copying."""
        return SavedSlots(tuple(part and (part[0][:length], part[1][:length]) for part in self.parts))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, for a file."""
        every = [one for part in self.parts for one in part or (None, None)]
        return {f"slots.{i}": one.contiguous() for i, one in enumerate(every) if one is not None}

    def restored(self, tensors: Mapping[str, torch.Tensor], count: int) -> SavedSlots:
        """Return the copy of `count` slots whose `tensors` a file has; of the same model as this one.

        Raises ValueError for other shapes, KeyError for a missing tensor.
        """
        return SavedSlots(
            tuple(
                part
                and (
                    same(tensors, f"slots.{2 * i}", part[0], count),
                    same(tensors, f"slots.{2 * i + 1}", part[1], count),
                )
                for i, part in enumerate(self.parts)
            )
        )


def same(tensors: Mapping[str, torch.Tensor], name: str, known: torch.Tensor, count: int) -> torch.Tensor:
    """Return a tensor [count, ...] with the dtype and further sizes of another. Raises ValueError for a different one."""
    found = tensors[name]
    if (found.dtype, found.shape) != (known.dtype, (count, *known.shape[1:])):
        raise ValueError(f"its tensor {name} is {found.dtype} {tuple(found.shape)}")
    return found


class RowStores:
    """Memory of each row: the keys of a layer, [slots, heads, dim], its values, then those of the next layer.

    Consecutive layers of one shape are one array.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        """shapes: (heads, dim) of each layer."""
        self.shapes, self.dtype = tuple(shapes), dtype
        self.offsets = [0, *itertools.accumulate(2 * heads * dim for heads, dim in self.shapes)]
        """Numbers of a slot before those of each layer, and of all layers."""
        self.blocks: list[torch.Tensor | None] = []
        """The memory of each row, [slots * numbers of a slot]; None for a row without slots."""
        self._used: list[int] = []
        """Slots reserved for each row; memory after them was never touched."""
        self.version = 0
        """Incremented whenever blocks are allocated, moved or freed: addresses are valid while it is unchanged."""
        self._freed = 0
        ends = [i for i in range(1, self.num_layers + 1) if self.shapes[i - 1 : i] != self.shapes[i : i + 1]]
        self._runs = list(itertools.pairwise([0, *ends]))

    @property
    def num_layers(self) -> int:
        """See Stores."""
        return len(self.shapes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.offsets[-1] * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """See Stores."""
        return sum(self._used) * self.slot_bytes

    def slots(self, row: int) -> int:
        """Return the allocated slots of a row."""
        block = self.blocks[row]
        return 0 if block is None else len(block) // self.offsets[-1]

    def reserve(self, rows: int, first_row: int, slots: Sequence[int]) -> None:
        """See Stores. A row that outgrows its block gets a larger one: twice its slots, or 5/4 of them from 1024 on."""
        if rows > len(self.blocks):
            self._used += [0] * (rows - len(self.blocks))
            self.blocks += [None] * (rows - len(self.blocks))
            self.version += 1
        for row, needed in enumerate(slots, first_row):
            if self.blocks[row] is None or needed > self.slots(row):
                self._grow(row, needed)
            self._used[row] = max(self._used[row], needed)

    def _grow(self, row: int, needed: int) -> None:
        used, old = self._used[row], None if self.blocks[row] is None else self._arrays(row)
        slots = round_up(max(needed + WIDTH, 2 * used if used < 1024 else used + used // 4))
        self.blocks[row] = torch.empty(slots * self.offsets[-1], dtype=self.dtype)
        if old is not None:
            for array, before in zip(self._arrays(row), old, strict=True):
                array[:, :used] = before[:, :used]
            self._freed += used * self.slot_bytes
        self.version += 1

    def _arrays(self, row: int) -> list[torch.Tensor]:
        """Return the arrays [2 * layers, slots, heads, dim] of a row."""
        return [self._array(row, first, end) for first, end in self._runs]

    def _array(self, row: int, first: int, end: int) -> torch.Tensor:
        """Return the array of consecutive layers of one shape."""
        block = self.blocks[row]
        assert block is not None, f"row {row} has no slots"
        slots, (low, high) = self.slots(row), (self.offsets[first], self.offsets[end])
        return block[low * slots : high * slots].view(2 * (end - first), slots, *self.shapes[first])

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, rows: Any, slots: torch.Tensor) -> None:
        """See Stores."""
        for i, row in enumerate(rows[:, 0].tolist()):
            array = self._array(row, layer, layer + 1)
            array[0, slots[i]] = keys[i].transpose(0, 1)
            array[1, slots[i]] = values[i].transpose(0, 1)

    def read(self, layer: int, first_row: int, slots: Sequence[int], width: int) -> Pair:
        """See Stores. Returns a copy with zeros after the valid slots: weight zero times uninitialized memory may be NaN."""
        out = torch.zeros(2, len(slots), width, *self.shapes[layer], dtype=self.dtype)
        for i, count in enumerate(slots):
            if count:
                out[:, i, :count] = self._array(first_row + i, layer, layer + 1)[:, :count]
        return out[0].transpose(1, 2), out[1].transpose(1, 2)

    def keep(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """See Stores."""
        for row in sorted({row for row, _, _ in moves}):
            sources, targets = torch.tensor([(a, b) for one, a, b in moves if one == row]).unbind(1)
            for array in self._arrays(row):
                array[:, targets] = array[:, sources]

    def move(self, source: int, target: int, length: int) -> None:
        """See Stores. Nothing is copied."""
        self.reserve(max(source, target) + 1, 0, ())
        self._freed += self._used[target] * self.slot_bytes
        self.blocks[target], self._used[target] = self.blocks[source], self._used[source]
        self.blocks[source], self._used[source] = None, 0
        self.version += 1

    def swap(self, one: int, other: int, length: int) -> None:
        """See Stores. Nothing is copied."""
        self.reserve(max(one, other) + 1, 0, ())
        self.blocks[one], self.blocks[other] = self.blocks[other], self.blocks[one]
        self._used[one], self._used[other] = self._used[other], self._used[one]
        self.version += 1

    def drop(self, lengths: Sequence[int]) -> None:
        """See Stores."""
        count = len(lengths)
        self._freed += sum(self._used[count:]) * self.slot_bytes
        if len(self.blocks) > count:
            del self.blocks[count:], self._used[count:]
            self.version += 1
        if not count and self._freed >= SMALL_BYTES:
            self._freed = 0
            trim()

    def copy(self, source: int, target: int, length: int) -> None:
        """See Stores."""
        for own, other in zip(self._arrays(target), self._arrays(source), strict=True):
            own[:, :length] = other[:, :length]

    def save(self, row: int, length: int) -> SavedSlots:
        """See Stores."""
        copied = [array[:, :length].clone() for array in self._arrays(row)]
        return SavedSlots(tuple((one[i], one[i + 1]) for one in copied for i in range(0, len(one), 2)))

    def load(self, row: int, saved: SavedSlots, length: int) -> None:
        """See Stores."""
        for layer, part in enumerate(saved.parts):
            assert part is not None
            array = self._array(row, layer, layer + 1)
            array[0, :length], array[1, :length] = part[0][:length], part[1][:length]


class Stores:
    """Keys and values [rows, slots, heads, dim] of each layer, allocated when a layer is first written."""

    def __init__(self) -> None:
        self.layers: list[Pair | None] = []
        """Keys and values of each layer; None for a layer that was not written yet."""
        self.rows = self.slots = 0
        """Allocated rows, and allocated slots of each row."""

    @property
    def num_layers(self) -> int:
        """Number of layers with keys and values."""
        return len(self.layers)

    def reserve(self, rows: int, first_row: int, slots: Sequence[int]) -> None:
        """Make room for `rows` rows, and for `slots[i]` slots of row `first_row + i`. All rows get as many as the longest."""
        rows, needed = max(rows, first_row + len(slots)), max(slots, default=0)
        if rows <= self.rows and needed <= self.slots:
            return
        new_rows = max(rows, 2 * self.rows) if rows > self.rows else self.rows
        new_slots = max(needed, round_up(3 * self.slots // 2)) if needed > self.slots else self.slots
        if self.nbytes * new_rows * new_slots > _GENEROUS * max(1, self.rows * self.slots):
            new_rows, new_slots = max(rows, self.rows), max(needed, self.slots)
        self._resize(new_rows, new_slots)

    def _resize(self, rows: int, slots: int) -> None:
        self.rows, self.slots = rows, slots
        for i, layer in enumerate(self.layers):
            if layer is not None:
                self.layers[i] = (self._resized(layer[0]), self._resized(layer[1]))

    def _resized(self, old: torch.Tensor) -> torch.Tensor:
        # zeros instead of empty: a masked slot is still multiplied by a weight of zero, and zero times NaN is NaN
        new = old.new_zeros(self.rows, self.slots, *old.shape[2:])
        new[: old.shape[0], : old.shape[1]] = old[: self.rows, : self.slots]
        return new

    def layer_tensors(self, layer: int, like: torch.Tensor, keys: tuple[int, int], values: tuple[int, int]) -> Pair:
        """Return a layer's keys and values, allocated if missing with the dtype and device of `like`.

        keys, values: (heads, dim) of each.
        """
        while len(self.layers) <= layer:
            self.layers.append(None)
        tensors = self.layers[layer]
        if tensors is None:
            new = [like.new_zeros(self.rows, self.slots, *shape) for shape in (keys, values)]
            tensors = self.layers[layer] = (new[0], new[1])
        return tensors

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, rows: Any, slots: torch.Tensor) -> None:
        """Store keys, values [B, heads, T, dim]. rows: [B, 1] int64. slots: [B, T] int64."""
        tensors = self.layer_tensors(layer, keys, (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]))
        for store, new in zip(tensors, (keys, values), strict=True):
            store[rows, slots] = new.transpose(1, 2)

    def read(self, layer: int, first_row: int, slots: Sequence[int], width: int) -> Pair:
        """Return keys and values of the rows from `first_row` on, [B, heads, width, dim] each, as views.

        slots: the B rows' valid slots.
        """
        tensors = self.layers[layer]
        assert tensors is not None
        end = first_row + len(slots)
        return tensors[0][first_row:end, :width].transpose(1, 2), tensors[1][first_row:end, :width].transpose(1, 2)

    def keep(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Move slots within rows. moves: (row, from, to)."""
        for stores in self.layers:
            for store in stores or ():
                rows, sources, targets = torch.tensor(moves, device=store.device).unbind(1)
                store[rows, targets] = store[rows, sources]

    def move(self, source: int, target: int, length: int) -> None:
        """Move row `source`, of `length` slots, to row `target`. An empty row may lie outside the allocated rows."""
        if length:
            self.copy(source, target, length)

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange two rows, of `length` slots at most."""
        self.reserve(max(one, other) + 1, 0, ())
        for layer in self.layers:
            for store in layer or ():
                kept = store[one, :length].clone()
                store[one, :length] = store[other, :length]
                store[other, :length] = kept

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of a row to another."""
        for layer in self.layers:
            for store in layer or ():
                store[target, :length] = store[source, :length]

    def drop(self, lengths: Sequence[int]) -> None:
        """Free all rows but the first len(lengths), which have these lengths. Shrinks the rectangle if most of it is unused."""
        rows, slots = len(lengths), round_up(max(lengths, default=0))
        if self.nbytes >= SMALL_BYTES and _SHRINK * rows * slots <= self.rows * self.slots:
            self._resize(rows, slots)
            trim()

    def save(self, row: int, length: int) -> SavedSlots:
        """Return a copy of a row's first `length` slots."""
        found = [None if layer is None else (layer[0][row, :length], layer[1][row, :length]) for layer in self.layers]
        return SavedSlots(tuple(None if one is None else (one[0].clone(), one[1].clone()) for one in found))

    def load(self, row: int, saved: SavedSlots, length: int) -> None:
        """Overwrite a row's first `length` slots from a copy."""
        for i, part in enumerate(saved.parts):
            if part is None:
                continue
            (heads, dim), values = part[0].shape[1:], part[1].shape[1:]
            tensors = self.layer_tensors(i, part[0], (heads, dim), (values[0], values[1]))
            for store, new in zip(tensors, part, strict=True):
                store[row, :length] = new[:length]

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return sum(store.nbytes for layer in self.layers for store in layer or ())


KeyValues = RowStores | Stores
