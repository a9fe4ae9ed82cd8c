"""Real tokens of a pass and the slots of its rows, as the compiled kernels read them: addresses, each checked."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from foresay.models.cache.slot_cache import Placement
from foresay.models.cache.stores import RowStores
from foresay.models.cpu import structs

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class FlatTokens:
    """The N real tokens of a pass, row after row.

    rows, slots, positions: cache row, slot and position of each token, [N] int64 each. starts: the slot of the first token of its
    row in this pass, [N] int64. ancestors: [N, T] uint8, nonzero for the columns of its row that a token attends to; None for
    chains. columns: T. ends: [N] int64, the last position that a token attends to in layers that are not causal; None for its
    own.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    positions: torch.Tensor
    ancestors: torch.Tensor | None
    columns: int
    ends: torch.Tensor | None = None

    @staticmethod
    def of(at: Placement, real: torch.Tensor | None) -> FlatTokens:
        """Flatten a placement. real: [B, T] bool, False for padding; None if there is no padding."""
        rows, slots = at.indices(torch.device("cpu"))
        shape = slots.shape
        tables = [rows.expand(shape), slots, slots[:, :1].expand(shape), at.positions.expand(shape)]
        flat = [(one.reshape(-1) if real is None else one[real]).contiguous() for one in tables]
        seen = at.ancestors
        if seen is not None:
            seen = (seen.reshape(-1, shape[1]) if real is None else seen[real]).to(torch.uint8).contiguous()
        return FlatTokens(flat[0], flat[1], flat[2], flat[3], seen, int(shape[1]))

    def __len__(self) -> int:
        return len(self.rows)

    def first(self, count: int) -> FlatTokens:
        """Return the first tokens, of a chain of the first row."""
        return FlatTokens(
            self.rows[:count], self.slots[:count], self.starts[:count], self.positions[:count], None, count
        )

    def addresses(self) -> dict[str, int | None]:
        """Return the address of each tensor, by its name in the struct Pass."""
        count, seen, ends = len(self.rows), self.ancestors, self.ends
        return {
            "rows": structs.address(self.rows, (count,), torch.int64),
            "slots": structs.address(self.slots, (count,), torch.int64),
            "starts": structs.address(self.starts, (count,), torch.int64),
            "positions": structs.address(self.positions, (count,), torch.int64),
            "ends": None if ends is None else structs.address(ends, (count,), torch.int64),
            "ancestors": None if seen is None else structs.address(seen, (count, self.columns), torch.uint8),
        }


class Addresses:
    """Addresses of the keys and values of each row.

    Only the cache references the blocks, so that a growing row can free its old block. The addresses are valid while the stores'
    `version` is unchanged.
    """

    def __init__(self, stores: RowStores) -> None:
        self.version, self.rows, self.width = stores.version, len(stores.blocks), stores.offsets[-1]
        capacities = [stores.slots(row) for row in range(self.rows)]
        addresses = [
            None if block is None else structs.address(block, (slots * self.width,), stores.dtype)
            for block, slots in zip(stores.blocks, capacities, strict=True)
        ]
        self.blocks = (ctypes.c_void_p * self.rows)(*addresses)
        self.capacities = (ctypes.c_int64 * self.rows)(*capacities)


def head_size(dim: int, dtype: torch.dtype) -> int:
    """Return the number of elements that a head's key or value of `dim` numbers has in a cache of a dtype."""
    return dim + _SCALE_BYTES if dtype is torch.int8 else dim
