"""The slot cache: keys and values at absolute slots, a row per request.

Owns the tensors and the lengths. A pass writes each row's tokens, pads included, at the row's own positions; rewinding
only lowers a length, and what was not accepted is overwritten. Nothing is copied per step, and nothing is left-padded.
Knows no model: layers appear when they are first written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foresay.decoding.proposal import depths_of
from foresay.decoding.protocols import Move

_GENEROUS = 1 << 28
"""Bytes up to which a cache grows beyond what is asked for, so that it is copied less often."""
WIDTH = 128
"""Slots of the first two spans; slots grow in multiples of this."""


def round_up(value: int, unit: int = WIDTH) -> int:
    """The least multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


def spans(width: int) -> list[tuple[int, int]]:
    """The ranges in which the first `width` slots are attended to on a CPU: 128, 128, 256, 256, 512, 512, ... slots.

    A matrix product over 192 keys and one over 256 sum in different orders, even where the further ones weigh nothing, so
    what a query sees must not depend on how far the longest row of its batch, or its own draft, reaches. Spans depend on
    nothing. They grow, so that a long context takes few of them, and slowly, so that little of the last one is wasted.
    """
    out: list[tuple[int, int]] = []
    start, size = 0, WIDTH
    while start < width:
        out.append((start, start + size))
        start += size
        if len(out) % 2 == 0:
            size *= 2
    return out


def visible_width(needed: int, device: torch.device) -> int:
    """Slots that a pass looks at so that `needed` are among them."""
    return spans(needed)[-1][1] if device.type == "cpu" else round_up(needed)


class Placement:
    """Where the tokens of one pass go: row `first_row + i`, column t into slot slots[i, t], with `width` slots in sight.

    In a chain a token's position is its slot. In a tree it is the row's length plus the token's depth; several columns share
    one position, and a column sees only the columns on its own path.
    """

    __slots__ = (
        "_placed",
        "_slot_positions",
        "ancestors",
        "batch",
        "first_row",
        "folded",
        "positions",
        "slots",
        "width",
    )

    def __init__(
        self,
        slots: torch.Tensor,
        first_row: int,
        width: int,
        *,
        positions: torch.Tensor | None = None,
        ancestors: torch.Tensor | None = None,
    ) -> None:
        """slots, positions: [B, T] int64 on any device. ancestors: [B, T, T] bool, whether column t sees column s; None for
        chains, where a position sees those before it."""
        self.slots, self.first_row, self.width = slots, first_row, width
        self.positions = slots if positions is None else positions
        self.ancestors = ancestors
        self.batch = int(slots.shape[0])
        self.folded: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]] = {}
        self._placed: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._slot_positions: torch.Tensor | None = None

    def place(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and slot indices of the pass on a device, [B, 1] and [B, T]."""
        if device not in self._placed:
            rows = torch.arange(self.first_row, self.first_row + self.batch, device=device)[:, None]
            self._placed[device] = (rows, self.slots.to(device, non_blocking=True))
        return self._placed[device]

    def slot_positions(self) -> torch.Tensor:
        """The position of the token in each slot in sight, [B or 1, width] int64."""
        if self._slot_positions is None:
            line = torch.arange(self.width, device=self.slots.device)[None]
            if self.ancestors is not None:
                line = line.repeat(self.batch, 1).scatter_(1, self.slots, self.positions)
            self._slot_positions = line
        return self._slot_positions

    def hides(self, seen: torch.Tensor) -> torch.Tensor:
        """The mask `seen`, less the columns on other paths of a tree. seen: [B or 1, 1, T, width] bool -> the same."""
        if self.ancestors is None:
            return seen
        columns = self.slots[:, None, None, :].expand(-1, 1, seen.shape[2], -1)
        seen = seen.expand(self.batch, -1, -1, -1)
        return seen.scatter(3, columns, seen.gather(3, columns) & self.ancestors[:, None])


def ancestors_of(parents: torch.Tensor) -> torch.Tensor:
    """Which columns lie on the path to each column, itself included. parents: [B, T] int64, -1 a root -> [B, T, T] bool."""
    batch, width = parents.shape
    out = torch.eye(width, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    rows = torch.arange(batch, device=parents.device)
    for column in range(1, width):
        above = parents[:, column]
        out[:, column] |= out[rows, above.clamp(min=0)] & (above >= 0)[:, None]
    return out


@dataclass(frozen=True, slots=True)
class SavedSlots:
    """A row's first slots in all layers, copied."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor] | None, ...]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(store.nbytes for layer in self.layers for store in layer or ())


class SlotCache:
    """Keys and values of all layers, [rows, slots, heads, dim] each, grown on demand, a layer at a time."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.guest: object | None = None
        """The draft cache that last wrote to these slots; see BorrowedSlots."""
        self._layers: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        self._rows = self._slots = 0
        self._made = 0

    @property
    def made(self) -> int:
        """Counts the times that a layer's stores were made or replaced: while it stays the same, so do they."""
        return self._made

    def add_rows(self, count: int) -> None:
        """Append empty rows."""
        self.lengths += [0] * count

    def begin_pass(
        self, first_row: int, batch: int, columns: int, device: torch.device, parents: torch.Tensor | None = None
    ) -> Placement:
        """Place `columns` tokens after each of `batch` rows, growing the capacity when they do not fit.

        parents: [B, T] as `Feed.parents`.
        """
        starts = self.lengths[first_row : first_row + batch]
        width = visible_width(max(starts) + columns, device)
        self._reserve(len(self.lengths), width)
        if batch == 1:
            slots = torch.arange(starts[0], starts[0] + columns, device=device)[None]
        else:
            slots = torch.tensor(starts, device=device)[:, None] + torch.arange(columns, device=device)
        if parents is None:
            return Placement(slots, first_row, width)
        return Placement(
            slots, first_row, width, positions=slots[:, :1] + depths_of(parents), ancestors=ancestors_of(parents)
        )

    def _reserve(self, rows: int, slots: int) -> None:
        if rows <= self._rows and slots <= self._slots:
            return
        generous = max(rows, 2 * self._rows) if rows > self._rows else self._rows
        longer = max(slots, round_up(3 * self._slots // 2)) if slots > self._slots else self._slots
        if self.nbytes * generous * longer > _GENEROUS * max(1, self._rows * self._slots):
            generous, longer = max(rows, self._rows), max(slots, self._slots)
        self._rows, self._slots = generous, longer
        for i, layer in enumerate(self._layers):
            if layer is not None:
                self._layers[i] = (self._grown(layer[0]), self._grown(layer[1]))
        self._made += 1

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        # zeros, not empty: a masked slot still meets a weight of zero, and zero times NaN is NaN
        new = old.new_zeros(self._rows, self._slots, *old.shape[2:])
        new[: old.shape[0], : old.shape[1]] = old
        return new

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, at: Placement
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys, values [B, heads, T, dim] of a pass and return all that its rows see, [B, heads, width, dim] views."""
        held = self._held(layer, keys, (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]))
        rows, slots = at.place(keys.device)
        for store, new in zip(held, (keys, values), strict=True):
            store[rows, slots] = new.transpose(1, 2)
        return self.read(layer, at.first_row, at.batch, at.width)

    def stores(self, layer: int, heads: int, dim: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values themselves, [rows, slots, heads, dim] each, to be written to; made like `like`."""
        return self._held(layer, like, (heads, dim), (heads, dim))

    def _held(
        self, layer: int, like: torch.Tensor, keys: tuple[int, int], values: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self._layers) <= layer:
            self._layers.append(None)
        held = self._layers[layer]
        if held is None:
            made = [like.new_zeros(self._rows, self._slots, *shape) for shape in (keys, values)]
            held = self._layers[layer] = (made[0], made[1])
            self._made += 1
        return held

    def read(self, layer: int, first_row: int, batch: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that rows see, [B, heads, width, dim] views."""
        held = self._layers[layer]
        assert held is not None
        end = first_row + batch
        return held[0][first_row:end, :width].transpose(1, 2), held[1][first_row:end, :width].transpose(1, 2)

    @property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """Keys and values of each layer, [rows, slots, heads, dim]; None of one not written yet."""
        return self._layers

    @property
    def num_layers(self) -> int:
        """Layers written so far."""
        return len(self._layers)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Rewind row i to min(its length, lengths[i]); rows after the given ones stay as they are."""
        for i, length in enumerate(lengths):
            self.lengths[i] = min(self.lengths[i], length)

    @torch.inference_mode()
    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Move the kept columns of the last pass to consecutive slots; see KVCache.keep."""
        moves = [
            (i, start + column, start + depth)
            for i, (start, path) in enumerate(zip(starts, paths, strict=True))
            for depth, column in enumerate(path)
            if depth != column
        ]
        if moves:
            for stores in self._layers:
                for store in stores or ():
                    rows, sources, targets = torch.tensor(moves, device=store.device).unbind(1)
                    store[rows, targets] = store[rows, sources]
        self.truncate([start + len(path) for start, path in zip(starts, paths, strict=True)])

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of row `source` to row `target`, whose length becomes `length`."""
        self._reserve(len(self.lengths), self._slots)
        for layer in self._layers:
            for store in layer or ():
                store[target, :length] = store[source, :length]
        self.lengths[target] = length

    def save_prefix(self, row: int, length: int) -> SavedSlots:
        """A copy of a row's first `length` slots."""
        return SavedSlots(
            tuple(
                None if layer is None else (layer[0][row, :length].clone(), layer[1][row, :length].clone())
                for layer in self._layers
            )
        )

    @torch.inference_mode()
    def load_prefix(self, row: int, saved: SavedSlots, length: int) -> None:
        """Overwrite the start of row `row` with the first `length` slots of a copy; its length becomes `length`."""
        self._reserve(len(self.lengths), round_up(length))
        while len(self._layers) < len(saved.layers):
            self._layers.append(None)
        for i, copied in enumerate(saved.layers):
            if copied is None:
                continue
            held = self._layers[i]
            if held is None:
                shapes = [(self._rows, self._slots, *x.shape[1:]) for x in copied]
                held = self._layers[i] = (copied[0].new_zeros(shapes[0]), copied[1].new_zeros(shapes[1]))
                self._made += 1
            for store, new in zip(held, copied, strict=True):
                store[row, :length] = new[:length]
        self.lengths[row] = length

    @torch.inference_mode()
    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Carry out the moves of rows, then drop the rows from `count` on."""
        for source, target in moves:
            size = self.lengths[source]
            for layer in self._layers:
                for store in layer or ():
                    store[target, :size] = store[source, :size]
            self.lengths[target] = size
        del self.lengths[count:]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(store.nbytes for layer in self._layers for store in layer or ())


class BorrowedSlots(SlotCache):
    """Another cache's slots, read and written at lengths of its own.

    For a draft that is the first layers of the target: the target's cache of those layers is the draft's. What the draft
    writes after it is overwritten by the target's next pass, with the same values or with those of other tokens.
    """

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self._owner = owner

    @property
    def made(self) -> int:
        """The owner's."""
        return self._owner.made

    def _reserve(self, rows: int, slots: int) -> None:
        self._owner._reserve(len(self._owner.lengths), slots)

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, at: Placement
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a pass in the owner's slots; see SlotCache.write."""
        return self._owner.write(layer, keys, values, at)

    def stores(self, layer: int, heads: int, dim: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The owner's; see SlotCache.stores."""
        return self._owner.stores(layer, heads, dim, like)

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Follow the moves; the owner moves what is cached."""
        for source, target in moves:
            self.lengths[target] = self.lengths[source]
        del self.lengths[count:]
