"""The tensors of a slot cache: keys and values of all layers, made when a layer is first written, grown on demand.

Owns their sizes and their memory. Which of their slots hold something is the cache's matter.
"""

from __future__ import annotations

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
WIDTH = 128
"""Slots grow in multiples of this."""
_GENEROUS = 1 << 28
"""Bytes up to which stores grow beyond what is asked for, so that they are copied less often."""


def round_up(value: int, unit: int = WIDTH) -> int:
    """The least multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


class Stores:
    """Keys and values [rows, slots, heads, dim] of each layer."""

    def __init__(self) -> None:
        self.layers: list[Pair | None] = []
        """None of a layer not written yet."""
        self.rows = self.slots = 0
        """What there is room for."""
        self.made = 0
        """Counts the times that a layer's tensors were made or replaced: while it stays the same, so do they."""

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for rows of so many slots, a layer at a time."""
        if rows <= self.rows and slots <= self.slots:
            return
        generous = max(rows, 2 * self.rows) if rows > self.rows else self.rows
        longer = max(slots, round_up(3 * self.slots // 2)) if slots > self.slots else self.slots
        if self.nbytes * generous * longer > _GENEROUS * max(1, self.rows * self.slots):
            generous, longer = max(rows, self.rows), max(slots, self.slots)
        self.rows, self.slots = generous, longer
        for i, layer in enumerate(self.layers):
            if layer is not None:
                self.layers[i] = (self._grown(layer[0]), self._grown(layer[1]))
        self.made += 1

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        # zeros, not empty: a masked slot still meets a weight of zero, and zero times NaN is NaN
        new = old.new_zeros(self.rows, self.slots, *old.shape[2:])
        new[: old.shape[0], : old.shape[1]] = old
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

    @property
    def nbytes(self) -> int:
        """Bytes held."""
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
