"""A KVCache over llama.cpp: each row is a sequence of a context, which is replaced by a larger one when it is full.

Owns the mapping from rows to sequences and the growth of the context. Knows no models and no distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foresay.decoding.protocols import KVCache, Move
from foresay.errors import ConfigError, OutOfMemoryError
from foresay.models.llama_cpp.binding import Weights
from foresay.models.llama_cpp.context import MAX_PASS_TOKENS, MAX_SEQUENCES, Context, FloatArray, IntArray, PassError

_INITIAL_CELLS, _INITIAL_SEQUENCES = 1024, 8


@dataclass(frozen=True, slots=True)
class SavedRow:
    """A copy of a row's state in llama.cpp. length: number of tokens in it."""

    data: npt.NDArray[np.uint8]
    length: int

    @property
    def nbytes(self) -> int:
        """Size of the copy in bytes."""
        return int(self.data.nbytes)


class LlamaCache(KVCache):
    """Rows of different lengths that share the cells of a context, one cell for each token."""

    def __init__(self, weights: Weights, token_bytes: int = 0) -> None:
        """token_bytes: size of a cell."""
        self._token_bytes = token_bytes
        self.lengths: list[int] = []
        self._sequences: list[int] = []
        """Sequence of each row."""
        self._free: list[int] = []
        self._weights = weights
        self._context: Context | None = None

    @property
    def nbytes(self) -> int:
        """Size of all cells in bytes, used or not."""
        return 0 if self._context is None else self._context.cells * self._token_bytes

    def add_rows(self, count: int) -> None:
        """Append empty rows. Raises ConfigError if there would be more than llama.cpp supports."""
        rows = len(self.lengths) + count
        if rows > MAX_SEQUENCES:
            raise ConfigError(f"llama.cpp supports {MAX_SEQUENCES} rows at most; set max_batch_size to at most that")
        if self._context is None or rows > self._context.sequences:
            self._grow(sequences=rows)
        for _ in range(count):
            self.lengths.append(0)
            self._sequences.append(self._free.pop())

    def truncate(self, lengths: Sequence[int]) -> None:
        """See KVCache."""
        for row, length in enumerate(lengths):
            if length < self.lengths[row]:
                self._active.truncate(self._sequences[row], length)
                self.lengths[row] = length

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """See KVCache. No cells are copied."""
        for source, target in moves:
            for items in (self.lengths, self._sequences):
                items[source], items[target] = items[target], items[source]
        for sequence in self._sequences[count:]:
            self._active.truncate(sequence, 0)
            self._free.append(sequence)
        del self.lengths[count:], self._sequences[count:]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Set row `target` to the first `length` tokens of row `source`; both rows share the cells."""
        self._active.truncate(self._sequences[target], 0)
        self._active.copy(self._sequences[source], self._sequences[target], length)
        self.lengths[target] = length

    def save_prefix(self, row: int, length: int) -> SavedRow:
        """Return a copy of a row's state, which contains all its tokens and not only the first `length`."""
        return SavedRow(self._active.save(self._sequences[row]), self.lengths[row])

    def load_prefix(self, row: int, saved: SavedRow, length: int) -> None:
        """Set row `row` to the first `length` tokens of a saved row."""
        self._active.truncate(self._sequences[row], 0)
        self.lengths[row] = 0
        needed = sum(self.lengths) + saved.length
        if needed > self._active.cells or not self._active.restore(self._sequences[row], saved.data):
            # the free cells may be fragmented, while those of a new context are contiguous
            self._grow(cells=max(needed, self._active.cells + 1))
            if not self._active.restore(self._sequences[row], saved.data):
                raise OutOfMemoryError(f"llama.cpp cannot fit {saved.length} tokens into {self._active.cells} cells")
        self._active.truncate(self._sequences[row], length)
        self.lengths[row] = length

    def decode(
        self, rows: IntArray, tokens: IntArray, positions: IntArray, wanted: npt.NDArray[np.bool_]
    ) -> FloatArray:
        """Append tokens to rows, and return the logits [number of wanted tokens, V] float32 after the wanted ones.

        rows, tokens, positions, wanted: [n]. The caller updates `lengths`. A failed pass raises PassError and leaves the rows as
        they were.
        """
        needed = sum(self.lengths) + len(tokens)
        if needed > self._active.cells:
            self._grow(cells=needed)
        try:
            return self._active.decode(tokens, positions, np.array(self._sequences)[rows], wanted)
        except PassError:
            for row in np.unique(rows).tolist():
                self._active.truncate(self._sequences[row], self.lengths[row])
            raise

    @property
    def _active(self) -> Context:
        """The context. There must be at least one admitted row."""
        assert self._context is not None, "no row was admitted"
        return self._context

    def _grow(self, *, cells: int = 0, sequences: int = 0) -> None:
        """Replace the context by a larger one and copy the rows into it."""
        old = self._context
        cells = _doubled(cells, _INITIAL_CELLS if old is None else old.cells)
        sequences = min(MAX_SEQUENCES, _doubled(sequences, _INITIAL_SEQUENCES if old is None else old.sequences))
        new = Context(self._weights, -(-cells // MAX_PASS_TOKENS) * MAX_PASS_TOKENS, sequences)
        for row, sequence in enumerate(self._sequences):
            if self.lengths[row]:
                assert old is not None
                if not new.restore(row, old.save(sequence)):
                    raise OutOfMemoryError(f"llama.cpp cannot fit {self.lengths[row]} tokens into {cells} cells")
        self._context = new
        self._sequences = list(range(len(self._sequences)))
        self._free = list(range(sequences - 1, len(self._sequences) - 1, -1))


def _doubled(wanted: int, size: int) -> int:
    """Return `size`, doubled until it is at least `wanted`."""
    while size < wanted:
        size *= 2
    return size
