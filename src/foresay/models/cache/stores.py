"""The memory of a slot cache: keys and values of all layers.

Two layouts with one interface. `RowStores` gives each row a block of its own, so that memory follows tokens and a row that ends
gives its memory back; our kernels read it. `Stores` is one rectangle of rows by slots per layer, which PyTorch's operations and
captured passes need. Which slots contain something is the cache's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from foresay.models.cache.memory import trim

Pair = tuple[torch.Tensor, torch.Tensor]
WIDTH = 128
"""Slots grow in multiples of this."""
_GENEROUS = 1 << 28
"""Bytes up to which stores grow beyond what is asked for, so that they are copied less often."""
_SHRINK = 4
"""A rectangle is copied to a smaller one where that takes a quarter of the memory or less."""
_SMALL = 1 << 26
"""Bytes below which freed memory is kept for the next rows."""


def round_up(value: int, unit: int = WIDTH) -> int:
    """The least multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


class KeyValues(Protocol):
    """Keys and values of rows. A saved prefix has its bytes in `nbytes`."""

    made: int
    """Counts the times that tensors were made, moved or freed: while it stays the same, so do their addresses."""

    @property
    def num_layers(self) -> int:
        """Layers with keys and values."""
        ...

    def reserve(self, rows: int, first_row: int, slots: Sequence[int]) -> None:
        """Make room for `rows` rows, of which those from `first_row` on get so many slots."""
        ...

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, rows: Any, slots: torch.Tensor) -> None:
        """Store keys, values [B, heads, T, dim]. rows: [B, 1] int64. slots: [B, T] int64."""
        ...

    def read(self, layer: int, first_row: int, slots: Sequence[int], width: int) -> Pair:
        """Keys and values of rows, [B, heads, width, dim] each. slots: B, how many of each row are real."""
        ...

    def keep(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Move slots within rows. moves: (row, from, to)."""
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """Let row `target` be row `source`, of `length` slots."""
        ...

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange two rows, of `length` slots at most."""
        ...

    def drop(self, lengths: Sequence[int]) -> None:
        """Free the rows after the first ones, of these lengths, and memory that is no longer needed."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of a row to another."""
        ...

    def save(self, row: int, length: int) -> SavedSlots:
        """A copy of a row's first `length` slots."""
        ...

    def load(self, row: int, saved: SavedSlots, length: int) -> None:
        """Overwrite a row's first `length` slots from a copy."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory used."""
        ...


class SavedSlots:
    """A row's first slots in all layers, copied."""

    def __init__(self, parts: Sequence[Pair | None]) -> None:
        """parts: keys and values of each layer, [slots, heads, dim]; None of a layer that was never written."""
        self.parts = tuple(parts)

    @property
    def nbytes(self) -> int:
        """Bytes of memory used."""
        return sum(store.nbytes for part in self.parts for store in part or ())


class RowStores:
    """A block [2 * layers, slots, heads, dim] for each row: a layer's keys, its values, the next layer's keys, ..."""

    def __init__(self, layers: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        self._layers, self.heads, self.dim, self.dtype = layers, heads, dim, dtype
        self.blocks: list[torch.Tensor | None] = []
        """None of a row that has no slots yet."""
        self._used: list[int] = []
        """Slots reserved for each row; memory beyond them was never touched."""
        self.made = 0
        self._freed = 0

    @property
    def num_layers(self) -> int:
        """See KeyValues."""
        return self._layers

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self._layers * self.heads * self.dim * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """See KeyValues."""
        return sum(self._used) * self.slot_bytes

    def reserve(self, rows: int, first_row: int, slots: Sequence[int]) -> None:
        """See KeyValues. A row that outgrows its block gets one of twice its slots, at least."""
        if rows > len(self.blocks):
            self._used += [0] * (rows - len(self.blocks))
            self.blocks += [None] * (rows - len(self.blocks))
            self.made += 1
        for row, needed in enumerate(slots, first_row):
            old = self.blocks[row]
            if old is None or needed > old.shape[1]:
                self._grow(row, old, needed)
            self._used[row] = max(self._used[row], needed)

    def _grow(self, row: int, old: torch.Tensor | None, needed: int) -> None:
        used = self._used[row]
        slots = round_up(max(needed + WIDTH, 2 * used if used < 1024 else used + used // 4))
        new = torch.empty(2 * self._layers, slots, self.heads, self.dim, dtype=self.dtype)
        if old is not None:
            new[:, :used] = old[:, :used]
            self._freed += used * self.slot_bytes
        self.blocks[row] = new
        self.made += 1

    def _block(self, row: int) -> torch.Tensor:
        block = self.blocks[row]
        assert block is not None, f"row {row} has no slots"
        return block

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, rows: Any, slots: torch.Tensor) -> None:
        """See KeyValues."""
        for i, row in enumerate(rows[:, 0].tolist()):
            block = self._block(row)
            block[2 * layer, slots[i]] = keys[i].transpose(0, 1)
            block[2 * layer + 1, slots[i]] = values[i].transpose(0, 1)

    def read(self, layer: int, first_row: int, slots: Sequence[int], width: int) -> Pair:
        """See KeyValues. A copy, zeros after the real slots: zero times what is there by chance may be NaN."""
        out = torch.zeros(2, len(slots), width, self.heads, self.dim, dtype=self.dtype)
        for i, count in enumerate(slots):
            if count:
                out[:, i, :count] = self._block(first_row + i)[2 * layer : 2 * layer + 2, :count]
        return out[0].transpose(1, 2), out[1].transpose(1, 2)

    def keep(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """See KeyValues."""
        for row in sorted({row for row, _, _ in moves}):
            sources, targets = torch.tensor([(a, b) for one, a, b in moves if one == row]).unbind(1)
            block = self._block(row)
            block[:, targets] = block[:, sources]

    def move(self, source: int, target: int, length: int) -> None:
        """See KeyValues. Nothing is copied."""
        self.reserve(max(source, target) + 1, 0, ())
        self._freed += self._used[target] * self.slot_bytes
        self.blocks[target], self._used[target] = self.blocks[source], self._used[source]
        self.blocks[source], self._used[source] = None, 0
        self.made += 1

    def swap(self, one: int, other: int, length: int) -> None:
        """See KeyValues. Nothing is copied."""
        self.reserve(max(one, other) + 1, 0, ())
        self.blocks[one], self.blocks[other] = self.blocks[other], self.blocks[one]
        self._used[one], self._used[other] = self._used[other], self._used[one]
        self.made += 1

    def drop(self, lengths: Sequence[int]) -> None:
        """See KeyValues."""
        count = len(lengths)
        self._freed += sum(self._used[count:]) * self.slot_bytes
        if len(self.blocks) > count:
            del self.blocks[count:], self._used[count:]
            self.made += 1
        if not count and self._freed >= _SMALL:
            self._freed = 0
            trim()

    def copy(self, source: int, target: int, length: int) -> None:
        """See KeyValues."""
        self._block(target)[:, :length] = self._block(source)[:, :length]

    def save(self, row: int, length: int) -> SavedSlots:
        """See KeyValues."""
        copied = self._block(row)[:, :length].clone()
        return SavedSlots([(copied[i], copied[i + 1]) for i in range(0, len(copied), 2)])

    def load(self, row: int, saved: SavedSlots, length: int) -> None:
        """See KeyValues."""
        block = self._block(row)
        for i, part in enumerate(saved.parts):
            assert part is not None
            block[2 * i, :length], block[2 * i + 1, :length] = part[0][:length], part[1][:length]


class Stores:
    """Keys and values [rows, slots, heads, dim] of each layer, made when a layer is first written."""

    def __init__(self) -> None:
        self.layers: list[Pair | None] = []
        """None of a layer not written yet."""
        self.rows = self.slots = 0
        """What there is room for."""
        self.made = 0

    @property
    def num_layers(self) -> int:
        """See KeyValues."""
        return len(self.layers)

    def reserve(self, rows: int, first_row: int, slots: Sequence[int]) -> None:
        """See KeyValues. All rows get the slots of the longest, a layer at a time."""
        rows, needed = max(rows, first_row + len(slots)), max(slots, default=0)
        if rows <= self.rows and needed <= self.slots:
            return
        generous = max(rows, 2 * self.rows) if rows > self.rows else self.rows
        longer = max(needed, round_up(3 * self.slots // 2)) if needed > self.slots else self.slots
        if self.nbytes * generous * longer > _GENEROUS * max(1, self.rows * self.slots):
            generous, longer = max(rows, self.rows), max(needed, self.slots)
        self._resize(generous, longer)

    def _resize(self, rows: int, slots: int) -> None:
        self.rows, self.slots = rows, slots
        for i, layer in enumerate(self.layers):
            if layer is not None:
                self.layers[i] = (self._resized(layer[0]), self._resized(layer[1]))
        self.made += 1

    def _resized(self, old: torch.Tensor) -> torch.Tensor:
        # zeros, not empty: a masked slot still meets a weight of zero, and zero times NaN is NaN
        new = old.new_zeros(self.rows, self.slots, *old.shape[2:])
        new[: old.shape[0], : old.shape[1]] = old[: self.rows, : self.slots]
        return new

    def held(self, layer: int, like: torch.Tensor, keys: tuple[int, int], values: tuple[int, int]) -> Pair:
        """A layer's tensors, made like `like` where there are none. keys, values: (heads, dim)."""
        while len(self.layers) <= layer:
            self.layers.append(None)
        held = self.layers[layer]
        if held is None:
            made = [like.new_zeros(self.rows, self.slots, *shape) for shape in (keys, values)]
            held = self.layers[layer] = (made[0], made[1])
            self.made += 1
        return held

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, rows: Any, slots: torch.Tensor) -> None:
        """See KeyValues."""
        held = self.held(layer, keys, (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]))
        for store, new in zip(held, (keys, values), strict=True):
            store[rows, slots] = new.transpose(1, 2)

    def read(self, layer: int, first_row: int, slots: Sequence[int], width: int) -> Pair:
        """See KeyValues. Views."""
        held = self.layers[layer]
        assert held is not None
        end = first_row + len(slots)
        return held[0][first_row:end, :width].transpose(1, 2), held[1][first_row:end, :width].transpose(1, 2)

    def keep(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """See KeyValues."""
        for stores in self.layers:
            for store in stores or ():
                rows, sources, targets = torch.tensor(moves, device=store.device).unbind(1)
                store[rows, targets] = store[rows, sources]

    def move(self, source: int, target: int, length: int) -> None:
        """See KeyValues. A row that is empty may lie beyond the rows there is room for."""
        if length:
            self.copy(source, target, length)

    def swap(self, one: int, other: int, length: int) -> None:
        """See KeyValues."""
        self.reserve(max(one, other) + 1, 0, ())
        for layer in self.layers:
            for store in layer or ():
                kept = store[one, :length].clone()
                store[one, :length] = store[other, :length]
                store[other, :length] = kept

    def copy(self, source: int, target: int, length: int) -> None:
        """See KeyValues."""
        for layer in self.layers:
            for store in layer or ():
                store[target, :length] = store[source, :length]

    def drop(self, lengths: Sequence[int]) -> None:
        """See KeyValues. The rectangle becomes smaller where most of it is no longer needed."""
        rows, slots = len(lengths), round_up(max(lengths, default=0))
        on_cpu = any(layer is not None and layer[0].device.type == "cpu" for layer in self.layers)
        # a captured pass is lost when its tensors move
        if self.nbytes >= (_SMALL if on_cpu else Spare.MOST) and _SHRINK * rows * slots <= self.rows * self.slots:
            self._resize(rows, slots)
            trim()

    def save(self, row: int, length: int) -> SavedSlots:
        """See KeyValues."""
        return SavedSlots(
            [
                None if layer is None else (layer[0][row, :length].clone(), layer[1][row, :length].clone())
                for layer in self.layers
            ]
        )

    def load(self, row: int, saved: SavedSlots, length: int) -> None:
        """See KeyValues."""
        for i, part in enumerate(saved.parts):
            if part is None:
                continue
            (heads, dim), values = part[0].shape[1:], part[1].shape[1:]
            held = self.held(i, part[0], (heads, dim), (values[0], values[1]))
            for store, new in zip(held, part, strict=True):
                store[row, :length] = new[:length]

    @property
    def nbytes(self) -> int:
        """See KeyValues."""
        return sum(store.nbytes for layer in self.layers for store in layer or ())


class Spare:
    """The stores of a cache that nobody uses any more, for the next one: what is recorded over them stays good."""

    MOST = 1 << 30
    """Bytes above which stores are let go."""

    def __init__(self) -> None:
        self._stores: Stores | None = None

    def take(self) -> Stores:
        """Stores that nobody else uses."""
        found, self._stores = self._stores, None
        return Stores() if found is None else found

    def give(self, stores: Stores) -> None:
        """Stores that are free again; the larger ones are kept."""
        kept = 0 if self._stores is None else self._stores.nbytes
        if kept <= stores.nbytes <= self.MOST:
            self._stores = stores
