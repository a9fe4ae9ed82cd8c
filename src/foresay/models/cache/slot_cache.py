"""The slot cache: keys and values at absolute slots, one row per request.

Owns the tensors and the lengths. A forward pass writes each row's tokens, padding included, at the row's own positions.
Rewinding only lowers a length, and rejected entries are overwritten later. Nothing is copied per step and nothing is
left-padded. Knows no model: a layer is created when it is first written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresay.decoding.devices import is_remote
from foresay.decoding.proposal import ancestors_of, depths_of
from foresay.decoding.protocols import Move
from foresay.models.cache.stores import WIDTH, KeyValues, RowStores, SavedSlots, Stores, round_up


def spans(width: int) -> list[tuple[int, int]]:
    """Split the first `width` slots into fixed ranges for attention on a CPU: 128, 128, 256, 256, 512, 512, ... slots.

    A matrix product over 192 keys and one over 256 sum in different orders, even where the additional keys have weight zero.
    The bits of a query's output would then depend on the longest row of its batch, or on its own draft. The ranges returned
    here depend on neither. They grow, so that a long context needs few of them, and slowly, so that little of the last one is
    wasted.
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
    """Return the number of slots that attention reads, so that at least `needed` are included."""
    return spans(needed)[-1][1] if not is_remote(device) else round_up(needed)


class Placement:
    """Slots of the tokens of one forward pass: column t of row `first_row + i` is stored in slot slots[i, t].

    In a chain a token's position is its slot. In a tree it is the row's length plus the token's depth: several columns share
    one position, and a column attends only to the columns on its own path. Attention reads `width` slots of each row.
    """

    __slots__ = (
        "_indices",
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
        """slots, positions: [B, T] int64 on any device. ancestors: [B, T, T] bool, True if column t attends to column s; None for
        chains, where a token attends to every position up to its own."""
        self.slots, self.first_row, self.width = slots, first_row, width
        self.positions = slots if positions is None else positions
        self.ancestors = ancestors
        self.batch = int(slots.shape[0])
        self.folded: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]] = {}
        self._indices: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._slot_positions: torch.Tensor | None = None

    @property
    def columns(self) -> int:
        """T, the number of tokens per row."""
        return int(self.slots.shape[1])

    @staticmethod
    def after(
        starts: torch.Tensor, columns: int, first_row: int, width: int, parents: torch.Tensor | None = None
    ) -> Placement:
        """Return the placement of `columns` tokens after rows of lengths `starts` [B]. parents: see `ModelInput.parents`."""
        slots = starts[:, None] + torch.arange(columns, device=starts.device)
        if parents is None:
            return Placement(slots, first_row, width)
        return Placement(
            slots, first_row, width, positions=slots[:, :1] + depths_of(parents), ancestors=ancestors_of(parents)
        )

    def indices(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return row and slot indices of the tokens on a device, [B, 1] and [B, T] int64."""
        if device not in self._indices:
            rows = torch.arange(self.first_row, self.first_row + self.batch, device=device)[:, None]
            self._indices[device] = (rows, self.slots.to(device, non_blocking=True))
        return self._indices[device]

    def slot_positions(self) -> torch.Tensor:
        """Return the position of the token in each of the `width` slots, [B or 1, width] int64."""
        if self._slot_positions is None:
            line = torch.arange(self.width, device=self.slots.device)[None]
            if self.ancestors is not None:
                line = line.repeat(self.batch, 1).scatter_(1, self.slots, self.positions)
            self._slot_positions = line
        return self._slot_positions

    def mask_other_paths(self, seen: torch.Tensor) -> torch.Tensor:
        """Clear the columns on other paths of a tree from the mask `seen`, [B or 1, 1, T, width] bool -> [B, 1, T, width].

        Returns `seen` unchanged for chains.
        """
        if self.ancestors is None:
            return seen
        columns = self.slots[:, None, None, :].expand(-1, 1, seen.shape[2], -1)
        seen = seen.expand(self.batch, -1, -1, -1)
        return seen.scatter(3, columns, seen.gather(3, columns) & self.ancestors[:, None])


def moves_of(starts: Sequence[int], paths: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Return (row, from slot, to slot) of the tokens of the last pass that are kept; see KVCache.keep."""
    return [
        (i, start + column, start + depth)
        for i, (start, path) in enumerate(zip(starts, paths, strict=True))
        for depth, column in enumerate(path)
        if depth != column
    ]


class SlotCache:
    """Lengths of rows, with the keys and values of their slots in all layers.

    With an owner it is a view of that cache's slots with separate lengths: for a draft model that consists of the target's first
    layers and shares the target's cache of these layers. The entries that the draft writes are overwritten by the target's next
    pass, with the same values or with those of other tokens.
    """

    def __init__(
        self, stores: KeyValues | None = None, *, owner: SlotCache | None = None, sources: SlotCache | None = None
    ) -> None:
        """stores: the memory of keys and values; None for a new rectangle. sources: the cross-attention keys and values of each
        row's source, for an encoder-decoder."""
        self.lengths: list[int] = []
        self.owner = owner
        self.sources: SlotCache | None = sources if owner is None else owner.sources
        self._own: KeyValues = Stores() if stores is None else stores
        self.last_writer: object | None = None
        """The draft cache that last wrote to these slots as their borrower."""

    @property
    def tensors(self) -> KeyValues:
        """The memory of keys and values."""
        return self._own if self.owner is None else self.owner.tensors

    @property
    def rows_in_use(self) -> int:
        """Number of rows in use, by this cache or its owner; rows from this index on are empty."""
        return len(self.lengths) if self.owner is None else max(len(self.lengths), self.owner.rows_in_use)

    def add_rows(self, count: int) -> None:
        """Append empty rows, whose sources are not encoded yet."""
        self.lengths += [0] * count
        if self.owner is None and self.sources is not None:
            self.sources.add_rows(count)

    def begin_pass(
        self, first_row: int, batch: int, columns: int, device: torch.device, parents: torch.Tensor | None = None
    ) -> Placement:
        """Assign slots to `columns` tokens after each of `batch` rows, and reserve memory for them.

        parents: [B, T] as `ModelInput.parents`.
        """
        starts = self.lengths[first_row : first_row + batch]
        width = visible_width(max(starts) + columns, device)
        self.reserve(first_row, [start + columns for start in starts], width)
        return Placement.after(torch.tensor(starts, device=device), columns, first_row, width, parents)

    def reserve(self, first_row: int, slots: Sequence[int], width: int) -> None:
        """Make room for `slots[i]` slots of row `first_row + i`. width: the number of slots that attention over them reads."""
        stores = self.tensors
        stores.reserve(self.rows_in_use, first_row, slots if isinstance(stores, RowStores) else [width] * len(slots))

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, at: Placement
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [B, heads, T, dim] of a pass; return all that its rows attend to, [B, heads, width, dim] each."""
        self.tensors.write(layer, keys, values, *at.indices(keys.device))
        ends = [start + at.columns for start in self.lengths[at.first_row : at.first_row + at.batch]]
        return self.tensors.read(layer, at.first_row, ends, at.width)

    def read(self, layer: int, first_row: int, batch: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first `width` keys and values of rows, [B, heads, width, dim] each."""
        return self.tensors.read(layer, first_row, self.lengths[first_row : first_row + batch], width)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Rewind row i to min(its length, lengths[i]); rows after the given ones stay as they are."""
        for i, length in enumerate(lengths):
            self.lengths[i] = min(self.lengths[i], length)

    @torch.inference_mode()
    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Move the kept columns of the last pass to consecutive slots; see KVCache.keep."""
        if moves := moves_of(starts, paths):
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
        """Return a copy of a row's first `length` slots."""
        return self._own.save(row, length)

    @torch.inference_mode()
    def load_prefix(self, row: int, saved: SavedSlots, length: int) -> None:
        """Overwrite the start of row `row` with the first `length` slots of a copy; its length becomes `length`."""
        self.reserve(row, [length], round_up(length))
        self._own.load(row, saved, length)
        self.lengths[row] = length

    @torch.inference_mode()
    def swap(self, one: int, other: int) -> None:
        """Exchange two rows and their sources."""
        if self.owner is None and self.sources is not None:
            self.sources.swap(one, other)
        self._own.swap(one, other, max(self.lengths[one], self.lengths[other]))
        self.lengths[one], self.lengths[other] = self.lengths[other], self.lengths[one]

    @torch.inference_mode()
    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Apply the moves of rows and their sources, then drop the rows from index `count` on and free their memory.

        The owner of borrowed slots moves them itself.
        """
        if self.owner is None and self.sources is not None:
            self.sources.rearrange(moves, count)
        for source, target in moves:
            if self.owner is None:
                self._own.move(source, target, self.lengths[source])
            self.lengths[target] = self.lengths[source]
        del self.lengths[count:]
        if self.owner is None:
            self._own.drop(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use, without borrowed memory."""
        sources = 0 if self.sources is None or self.owner is not None else self.sources.nbytes
        return self._own.nbytes + sources
