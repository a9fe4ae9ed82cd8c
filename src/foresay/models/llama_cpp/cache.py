"""What llama.cpp remembers of each row: rows as sequences of a context, which is made anew when they outgrow it.

Owns which row is which sequence, and the growing. Knows nothing of models and laws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foresay.decoding.protocols import KVCache, Move
from foresay.errors import ConfigError, OutOfMemoryError
from foresay.models.llama_cpp.binding import Weights
from foresay.models.llama_cpp.context import AT_ONCE, MAX_SEQUENCES, Context, FloatArray, IntArray, PassError

_FIRST_CELLS, _FIRST_SEQUENCES = 1024, 8


@dataclass(frozen=True, slots=True)
class SavedRow:
    """A copy of what llama.cpp held of so many tokens of a row."""

    data: npt.NDArray[np.uint8]
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return int(self.data.nbytes)


class LlamaCache(KVCache):
    """Ragged rows over the cells of a context."""

    def __init__(self, weights: Weights, token_bytes: int = 0) -> None:
        """token_bytes: of a cell."""
        self._token_bytes = token_bytes
        self.lengths: list[int] = []
        self._sequences: list[int] = []
        """Of each row."""
        self._free: list[int] = []
        self._weights = weights
        self._context: Context | None = None

    @property
    def nbytes(self) -> int:
        """What the cells take, full or not."""
        return 0 if self._context is None else self._context.cells * self._token_bytes

    def add_rows(self, count: int) -> None:
        """Empty rows behind the others. Raises ConfigError where they would be more than llama.cpp holds."""
        rows = len(self.lengths) + count
        if rows > MAX_SEQUENCES:
            raise ConfigError(f"llama.cpp holds {MAX_SEQUENCES} rows at most; set max_batch_size to that")
        if self._context is None or rows > self._context.sequences:
            self._grow(sequences=rows)
        for _ in range(count):
            self.lengths.append(0)
            self._sequences.append(self._free.pop())

    def truncate(self, lengths: Sequence[int]) -> None:
        """See KVCache."""
        for row, length in enumerate(lengths):
            if length < self.lengths[row]:
                self._held.cut(self._sequences[row], length)
                self.lengths[row] = length

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """See KVCache; nothing is copied."""
        for source, target in moves:
            for held in (self.lengths, self._sequences):
                held[source], held[target] = held[target], held[source]
        for sequence in self._sequences[count:]:
            self._held.cut(sequence, 0)
            self._free.append(sequence)
        del self.lengths[count:], self._sequences[count:]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Row `target` begins with the first `length` tokens of row `source`: the cells are both rows'."""
        self._held.cut(self._sequences[target], 0)
        self._held.copy(self._sequences[source], self._sequences[target], length)
        self.lengths[target] = length

    def save_prefix(self, row: int, length: int) -> SavedRow:
        """What is held of a row's first `length` tokens, and of those behind them."""
        return SavedRow(self._held.saved(self._sequences[row]), self.lengths[row])

    def load_prefix(self, row: int, saved: SavedRow, length: int) -> None:
        """Row `row` begins with the first `length` tokens of what was saved."""
        self._held.cut(self._sequences[row], 0)
        self.lengths[row] = 0
        needed = sum(self.lengths) + saved.length
        if needed > self._held.cells or not self._held.restore(self._sequences[row], saved.data):
            self._grow(
                cells=max(needed, self._held.cells + 1)
            )  # pieces that are free were too small; a new one is whole
            if not self._held.restore(self._sequences[row], saved.data):
                raise OutOfMemoryError(f"llama.cpp finds no room for {saved.length} tokens in {self._held.cells} cells")
        self._held.cut(self._sequences[row], length)
        self.lengths[row] = length

    def decode(
        self, rows: IntArray, tokens: IntArray, positions: IntArray, wanted: npt.NDArray[np.bool_]
    ) -> FloatArray:
        """Append tokens to rows, all [n], and score the wanted ones, [wanted, V]. `lengths` are the caller's to set.

        Where the pass fails, rows are left as they were.
        """
        needed = sum(self.lengths) + len(tokens)
        if needed > self._held.cells:
            self._grow(cells=needed)
        try:
            return self._held.decode(tokens, positions, np.array(self._sequences)[rows], wanted)
        except PassError:
            for row in np.unique(rows).tolist():
                self._held.cut(self._sequences[row], self.lengths[row])
            raise

    @property
    def _held(self) -> Context:
        assert self._context is not None, "no row was admitted"
        return self._context

    def _grow(self, *, cells: int = 0, sequences: int = 0) -> None:
        """A larger context, into which the rows go one by one."""
        old = self._context
        cells = _at_least(cells, _FIRST_CELLS if old is None else old.cells)
        sequences = min(MAX_SEQUENCES, _at_least(sequences, _FIRST_SEQUENCES if old is None else old.sequences))
        new = Context(self._weights, -(-cells // AT_ONCE) * AT_ONCE, sequences)
        for row, sequence in enumerate(self._sequences):
            if self.lengths[row]:
                assert old is not None
                if not new.restore(row, old.saved(sequence)):
                    raise OutOfMemoryError(f"llama.cpp finds no room for {self.lengths[row]} tokens in {cells} cells")
        self._context = new
        self._sequences = list(range(len(self._sequences)))
        self._free = list(range(sequences - 1, len(self._sequences) - 1, -1))


def _at_least(wanted: int, size: int) -> int:
    """`size`, doubled until it is enough."""
    while size < wanted:
        size *= 2
    return size
