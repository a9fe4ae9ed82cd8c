"""The slot cache: keys and values at absolute slots, a row per request.

Owns the tensors and the lengths. A pass writes each row's tokens, pads included, at the row's own positions; rewinding
only lowers a length, and what was not accepted is overwritten. Nothing is copied per step, and nothing is left-padded.
Knows no model: layers appear when they are first written.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import finalize

import torch

from foresay.decoding.proposal import depths_of
from foresay.decoding.protocols import Move
from foresay.models.cache.stores import WIDTH, KeyValues, RowStores, SavedSlots, Spare, Stores, round_up


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

    @property
    def columns(self) -> int:
        """T, tokens of each row."""
        return int(self.slots.shape[1])

    @staticmethod
    def after(
        starts: torch.Tensor, columns: int, first_row: int, width: int, parents: torch.Tensor | None = None
    ) -> Placement:
        """`columns` tokens behind rows of the lengths `starts` [B] int64. parents: [B, T] as `ModelInput.parents`."""
        slots = starts[:, None] + torch.arange(columns, device=starts.device)
        if parents is None:
            return Placement(slots, first_row, width)
        return Placement(
            slots, first_row, width, positions=slots[:, :1] + depths_of(parents), ancestors=ancestors_of(parents)
        )

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


class SlotCache:
    """Lengths of rows, and the keys and values of their slots in all layers."""

    def __init__(self, stores: KeyValues | None = None, *, spare: Spare | None = None) -> None:
        """stores: where keys and values are; None makes a rectangle, from `spare` and back to it where that is given."""
        self.lengths: list[int] = []
        self.guest: object | None = None
        """The draft cache that last wrote to these slots; see BorrowedSlots."""
        if stores is None:
            stores = rectangle = Stores() if spare is None else spare.take()
            if spare is not None:
                finalize(self, spare.give, rectangle).atexit = False
        self._own: KeyValues = stores

    @staticmethod
    def over(stores: KeyValues) -> SlotCache:
        """A cache without rows over tensors that are another's too, for passes that are placed elsewhere."""
        return SlotCache(stores)

    @property
    def tensors(self) -> KeyValues:
        """Where the keys and values are."""
        return self._own

    @property
    def rows_in_use(self) -> int:
        """Rows from this on hold nothing."""
        return len(self.lengths)

    def add_rows(self, count: int) -> None:
        """Append empty rows."""
        self.lengths += [0] * count

    def begin_pass(
        self, first_row: int, batch: int, columns: int, device: torch.device, parents: torch.Tensor | None = None
    ) -> Placement:
        """Place `columns` tokens after each of `batch` rows, growing the capacity when they do not fit.

        parents: [B, T] as `ModelInput.parents`.
        """
        starts = self.lengths[first_row : first_row + batch]
        width = visible_width(max(starts) + columns, device)
        self.reserve(first_row, [start + columns for start in starts], width)
        return Placement.after(torch.tensor(starts, device=device), columns, first_row, width, parents)

    def reserve(self, first_row: int, slots: Sequence[int], width: int) -> None:
        """Make room for so many slots of the rows from `first_row` on. width: those that a pass over them looks at."""
        stores = self.tensors
        stores.reserve(self.rows_in_use, first_row, slots if isinstance(stores, RowStores) else [width] * len(slots))

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, at: Placement
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys, values [B, heads, T, dim] of a pass and return all that its rows see, [B, heads, width, dim]."""
        self.tensors.write(layer, keys, values, *at.place(keys.device))
        ends = [start + at.columns for start in self.lengths[at.first_row : at.first_row + at.batch]]
        ends += [at.width] * (at.batch - len(ends))  # a captured pass may have more rows than there are
        return self.tensors.read(layer, at.first_row, ends, at.width)

    def read(self, layer: int, first_row: int, batch: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that rows see, [B, heads, width, dim]."""
        return self.tensors.read(layer, first_row, self.lengths[first_row : first_row + batch], width)

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
            self._own.keep(moves)
        self.truncate([start + len(path) for start, path in zip(starts, paths, strict=True)])

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of row `source` to row `target`, whose length becomes `length`."""
        self.reserve(target, [length], round_up(length))
        self._own.copy(source, target, length)
        self.lengths[target] = length

    @torch.inference_mode()
    def save_prefix(self, row: int, length: int) -> SavedSlots:
        """A copy of a row's first `length` slots."""
        return self._own.save(row, length)

    @torch.inference_mode()
    def load_prefix(self, row: int, saved: SavedSlots, length: int) -> None:
        """Overwrite the start of row `row` with the first `length` slots of a copy; its length becomes `length`."""
        self.reserve(row, [length], round_up(length))
        self._own.load(row, saved, length)
        self.lengths[row] = length

    @torch.inference_mode()
    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        self._own.swap(one, other, max(self.lengths[one], self.lengths[other]))
        self.lengths[one], self.lengths[other] = self.lengths[other], self.lengths[one]

    @torch.inference_mode()
    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Carry out the moves of rows, then drop the rows from `count` on and free what they took."""
        for source, target in moves:
            self._own.move(source, target, self.lengths[source])
            self.lengths[target] = self.lengths[source]
        del self.lengths[count:]
        self._own.drop(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of memory used."""
        return self._own.nbytes


class BorrowedSlots(SlotCache):
    """Another cache's slots, read and written at lengths of its own.

    For a draft that is the first layers of the target: the target's cache of those layers is the draft's. What the draft
    writes after it is overwritten by the target's next pass, with the same values or with those of other tokens.
    """

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self._owner = owner

    @property
    def tensors(self) -> KeyValues:
        """The owner's."""
        return self._owner.tensors

    @property
    def rows_in_use(self) -> int:
        """The owner's too."""
        return max(len(self.lengths), self._owner.rows_in_use)

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Follow the moves; the owner moves what is cached."""
        for source, target in moves:
            self.lengths[target] = self.lengths[source]
        del self.lengths[count:]
