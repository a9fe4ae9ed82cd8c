"""A pass as a flat list of tokens, so that its shape is its number of tokens alone: not rows, columns or context.

Owns the layout of the list, its sizes, and the buffers at fixed addresses that captured passes read. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from foresay.decoding.devices import moved, to_device
from foresay.decoding.proposal import ancestors_of
from foresay.decoding.protocols import ModelInput
from foresay.errors import ConfigError
from foresay.models.gpu.attention import NODES, PAGE, Visible
from foresay.models.gpu.pages import PagedCache

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 320, 384, 512)
"""Numbers of tokens of captured passes. A pass is padded to the next of these; a larger one is not captured."""
FIELDS = ("rows", "positions", "slots", "firsts", "ends", "tile_starts", "tile_counts", "row_ends", "indices")


@dataclass(frozen=True, slots=True)
class PagedTokens:
    """The real tokens of a pass, row by row, on the host as those of chains; see attention.Visible."""

    columns: npt.NDArray[np.int64]
    """[N], index of each token in the flattened token ids of the input."""
    fields: npt.NDArray[np.int32]
    """[len(FIELDS), N]."""
    trees: _Trees | None = None

    @staticmethod
    def of(model_input: ModelInput, cache: PagedCache, tile: int) -> PagedTokens:
        """Return the tokens of a pass over the rows of a cache, for which it reserves room. tile: tokens per tile of attention.

        Raises OutOfMemoryError if the pool has too few pages.
        """
        (batch, width), first_row = model_input.token_ids.shape, model_input.first_row
        for i, count in enumerate(model_input.num_tokens):
            if count:
                cache.reserve(first_row + i, count)
        counts, rows = np.array(model_input.num_tokens), np.arange(batch)
        starts = np.array(cache.lengths[first_row : first_row + batch])
        before = counts.cumsum() - counts
        """Tokens of the rows before each."""
        row, own, start, end, skipped = np.stack(
            [first_row + rows, rows * width, starts, starts + counts, before]
        ).repeat(counts, 1)
        indices = np.arange(len(row)) - skipped
        slots = start + indices
        described = np.zeros((len(FIELDS), len(row)), dtype=np.int32)
        described[0], described[1:4], described[4], described[7], described[8] = row, slots, slots + 1, end, indices
        begins = np.flatnonzero(indices % tile == 0)
        described[5, : len(begins)] = begins
        described[6, : len(begins)] = np.minimum(tile, (end - slots)[begins])
        parents = model_input.parents
        trees = None if parents is None else _Trees.of(parents, model_input.num_tokens)
        return PagedTokens(own + indices, described, trees)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def num_tiles(self) -> int:
        """Number of tiles of attention."""
        return int(np.count_nonzero(self.fields[6]))


@dataclass(frozen=True, slots=True)
class _Trees:
    """Differences of each token of trees from one of a chain, [B * T] each, on the device of their parents."""

    positions: torch.Tensor
    """Added to the positions."""
    firsts: torch.Tensor
    """Added to `firsts`."""
    seen: torch.Tensor

    @staticmethod
    def of(parents: torch.Tensor, counts: Sequence[int]) -> _Trees:
        """Return the differences of rows of trees. parents: [B, T], see ModelInput. counts: [B], real tokens.

        Columns that every later one follows are seen like cached tokens; the others are nodes.
        """
        width = parents.shape[1]
        columns = torch.arange(width, device=parents.device)
        real = columns < to_device(counts, parents.device)[:, None]
        branches = real & (parents != columns - 1)
        trunk = torch.where(branches, parents + 1, width).amin(-1, keepdim=True)
        if width > NODES:  # waits for the device; smaller passes need no check
            most = int((to_device(counts, parents.device)[:, None] - trunk).max())
            if most > NODES:
                raise ConfigError(f"must be at most {NODES} in one row of a tree", param="nodes", value=most)
        above, is_node = ancestors_of(parents), columns >= trunk
        bits = (above & is_node[:, None]).long() << (columns - trunk).clamp(0, NODES - 1)[:, None]
        depths = above.sum(-1) - 1
        each = (depths - columns, torch.where(is_node, trunk - columns, 0), torch.where(is_node, bits.sum(-1), 1))
        return _Trees(*(one.flatten() for one in each))


class Buffers:
    """Inputs of passes of one size at fixed addresses."""

    def __init__(
        self,
        size: int,
        pages: torch.Tensor,
        tile: int,
        features: torch.Tensor | None = None,
        *,
        key_heads: int,
        num_tiles: int | None = None,
    ) -> None:
        """pages: the table of all rows' pages, [rows, P] int32. tile: tokens per tile of attention. features: [0, F], for passes
        that read features, too. key_heads: most of a layer. num_tiles: of the prompts that are read, in a pass of their own; None
        for other passes."""
        device, is_prompt = pages.device, num_tiles is not None
        self.size = size
        self.features = None if features is None else features.new_zeros(size, features.shape[1])
        """[N, F]; None for passes that read token ids alone."""
        self.token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.fields = torch.zeros(len(FIELDS), size, dtype=torch.int32, device=device)
        """[len(FIELDS), N]."""
        self._seen = torch.zeros(size, dtype=torch.int64, device=device)
        self.fields[2] = -1  # a pass that is run to be captured must write nowhere
        self.slots = self.fields[2]
        """[N] int32, where keys and values are written; -1 for padding."""
        self.tiles = torch.zeros(size if num_tiles is None else num_tiles, 2, dtype=torch.int32, device=device)
        rows, positions, _, firsts, ends, _, _, row_ends, self.indices = self.fields
        """Index of each token among those of its row."""
        counts = torch.zeros(len(self.tiles) * key_heads, dtype=torch.int32, device=device)
        shared = self.tiles, pages, counts, tile, is_prompt
        self.visible = Visible(rows, positions, firsts, self._seen, ends, *shared)
        self.whole = Visible(rows, positions, row_ends, torch.zeros_like(self._seen), row_ends, *shared)
        """For tokens that see those of their row after them, too."""

    def fill(self, tokens: PagedTokens, token_ids: torch.Tensor, features: torch.Tensor | None = None) -> None:
        """Copy a pass of at most `size` tokens, without waiting for the device. token_ids, features: [B, T] and [B, T, F]."""
        count = len(tokens)
        fields = np.zeros((len(FIELDS), self.size), dtype=np.int32)
        fields[2] = -1
        fields[:, :count] = tokens.fields
        self.fields.copy_(self._moved(fields), non_blocking=True)
        self.tiles.copy_(self.fields[5:7, : len(self.tiles)].T)
        columns = moved(torch.from_numpy(tokens.columns), token_ids.device)
        self._seen.fill_(1)
        if tokens.trees is not None:
            self.fields[1, :count] += tokens.trees.positions[columns]
            self.fields[3, :count] += tokens.trees.firsts[columns]
            self._seen[:count] = tokens.trees.seen[columns]
        self.token_ids[:count].copy_(token_ids.reshape(-1)[columns], non_blocking=True)
        if self.features is not None:
            assert features is not None
            self.features[:count].copy_(features.flatten(0, 1)[columns], non_blocking=True)

    def _moved(self, values: npt.NDArray[np.int32]) -> torch.Tensor:
        return moved(torch.from_numpy(values), self.fields.device)


class PageTable:
    """The pages of all rows on the device, at a fixed address."""

    def __init__(self, rows: int, max_length: int, device: torch.device) -> None:
        self.pages = torch.zeros(rows, -(-max_length // PAGE), dtype=torch.int32, device=device)
        """[rows, P]."""
        self.num_rows = rows
        self._held: list[list[int]] = [[] for _ in range(rows)]

    def update(self, rows: Sequence[Sequence[int]]) -> None:
        """Copy the pages of rows that changed, without waiting for the device."""
        changed = [i for i, pages in enumerate(rows) if pages != self._held[i]]
        if not changed:
            return
        width = max(len(rows[i]) for i in changed)
        lines = np.zeros((len(changed), width), dtype=np.int32)
        for line, i in zip(lines, changed, strict=True):
            line[: len(rows[i])] = rows[i]
            self._held[i] = list(rows[i])
        device = self.pages.device
        self.pages[to_device(changed, device), :width] = moved(torch.from_numpy(lines), device)


def size_of(count: int) -> int | None:
    """Return the number of tokens that a pass is padded to; None if it is not captured."""
    return next((size for size in SIZES if size >= count), None)
