"""A KVCache over llama.cpp: each row is a sequence of a context, which is replaced by a larger one when it is full.

Owns the contexts, their batches, and the mapping from rows to sequences. Knows no models and no distributions.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foresay import threads
from foresay.decoding.protocols import KVCache, Move
from foresay.errors import ConfigError, OutOfMemoryError, UnsupportedModelError
from foresay.models.llama_cpp.binding import Weights, last_error, library

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
MAX_PASS_TOKENS = 256
"""Most tokens of one llama_decode call; longer passes are split."""
MAX_SEQUENCES = 256
"""Most sequences of a context; a constant of llama.cpp."""
_INITIAL_CELLS, _INITIAL_SEQUENCES = 1024, 8


class PassError(RuntimeError):
    """A forward pass of llama.cpp failed."""


class Context:
    """Sequences 0 to `sequences` - 1, which share `cells` cells. Raises OutOfMemoryError if they do not fit into memory."""

    def __init__(self, weights: Weights, cells: int, sequences: int) -> None:
        c = library()
        params = c.llama_context_default_params()
        params.n_ctx, params.n_seq_max = cells, sequences
        params.n_batch = params.n_ubatch = MAX_PASS_TOKENS
        # with separate buffers, rows of different lengths would need separate passes, each over all weights
        params.kv_unified = True
        params.swa_full = True  # a sliding window that drops old tokens cannot be rewound
        params.no_perf = True
        self._threads = params.n_threads = params.n_threads_batch = threads.num_threads()
        self.cells, self.sequences = cells, sequences
        self.pointer: int = c.llama_init_from_model(weights.pointer, params)
        if not self.pointer:
            raise OutOfMemoryError(
                f"llama.cpp cannot allocate a cache of {sequences} rows with {cells} tokens in all: {last_error()}"
            )
        weakref.finalize(self, _free, c.llama_free, self.pointer, weights)
        self._memory = c.llama_get_memory(self.pointer)
        self._width = int(c.llama_vocab_n_tokens(weights.vocab))
        self._batch = c.llama_batch_init(MAX_PASS_TOKENS, 0, 1)
        weakref.finalize(self, c.llama_batch_free, self._batch)
        names = ("token", "pos", "logits", "n_seq_id")
        self._arrays = {name: np.ctypeslib.as_array(getattr(self._batch, name), (MAX_PASS_TOKENS,)) for name in names}
        self._arrays["n_seq_id"][:] = 1

    def truncate(self, sequence: int, length: int) -> None:
        """Remove a sequence's tokens from position `length` on. Raises UnsupportedModelError if llama.cpp cannot do that."""
        if not library().llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise UnsupportedModelError("llama.cpp cannot rewind this model's cache to remove rejected tokens")

    def copy(self, source: int, target: int, length: int) -> None:
        """Set a sequence to the first `length` tokens of another; both share the cells."""
        self.truncate(target, 0)
        library().llama_memory_seq_cp(self._memory, source, target, 0, length)

    def save(self, sequence: int) -> Bytes:
        """Return a sequence's state as bytes for `restore`."""
        c = library()
        out = np.empty(c.llama_state_seq_get_size(self.pointer, sequence), dtype=np.uint8)
        return out[: c.llama_state_seq_get_data(self.pointer, _address(out), len(out), sequence)]

    def restore(self, sequence: int, saved: Bytes) -> bool:
        """Load a saved state into an empty sequence. Return False if there are not enough contiguous free cells."""
        return bool(library().llama_state_seq_set_data(self.pointer, _address(saved), len(saved), sequence))

    def load(self, sequence: int, saved: Bytes, length: int) -> None:
        """`restore`, in a new context. Raises OutOfMemoryError if the saved tokens do not fit."""
        if not self.restore(sequence, saved):
            raise OutOfMemoryError(f"llama.cpp cannot fit {length} tokens into {self.cells} cells")

    def decode(self, tokens: IntArray, positions: IntArray, sequences: IntArray, wanted: Flags) -> FloatArray:
        """Append tokens to sequences, and return the logits [number of wanted tokens, V] after the wanted ones, in their order.

        tokens, positions, sequences, wanted: [n]. Raises PassError, with a part of the tokens possibly appended.
        """
        c = library()
        if self._threads != (now := threads.num_threads()):
            self._threads = now
            c.llama_set_n_threads(self.pointer, now, now)
        scores, done = np.empty((int(wanted.sum()), self._width), dtype=np.float32), 0
        for start in range(0, len(tokens), MAX_PASS_TOKENS):
            part = slice(start, start + MAX_PASS_TOKENS)
            count, size = int(wanted[part].sum()), len(tokens[part])
            for name, values in (("token", tokens), ("pos", positions), ("logits", wanted)):
                self._arrays[name][:size] = values[part]
            for i, sequence in enumerate(sequences[part].tolist()):
                self._batch.seq_id[i][0] = sequence
            self._batch.n_tokens = size
            code = c.llama_decode(self.pointer, self._batch)
            if code:
                raise PassError(f"llama.cpp's pass over {size} tokens failed with code {code}")
            if count:
                scores[done : done + count] = np.ctypeslib.as_array(
                    c.llama_get_logits(self.pointer), (count, self._width)
                )
                done += count
        return scores


class LlamaCppRow(NamedTuple):
    """A copy of a row's state in llama.cpp. nbytes: its size. length: number of tokens in it."""

    data: Bytes
    nbytes: int
    length: int


class LlamaCache(KVCache):
    """Rows of different lengths that share the cells of a context, one cell for each token."""

    def __init__(self, weights: Weights, token_bytes: int = 0) -> None:
        """token_bytes: size of a cell."""
        self._weights, self._token_bytes = weights, token_bytes
        self.lengths: list[int] = []
        self._sequences: list[int] = []
        """Sequence of each row."""
        self._free: list[int] = []
        self._context: Context | None = None

    @property
    def nbytes(self) -> int:
        """Size of all cells in bytes, used or not."""
        return 0 if self._context is None else self._context.cells * self._token_bytes

    def add_rows(self, count: int) -> None:
        """Append empty rows. Raises ConfigError if there would be more than llama.cpp supports."""
        rows = len(self.lengths) + count
        if rows > MAX_SEQUENCES:
            raise ConfigError(f"must be at most {MAX_SEQUENCES} in llama.cpp", param="max_batch_size", value=rows)
        if self._context is None or rows > self._context.sequences:
            self._grow(sequences=rows)
        self.lengths += [0] * count
        self._sequences += [self._free.pop() for _ in range(count)]

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
        self._active.copy(self._sequences[source], self._sequences[target], length)
        self.lengths[target] = length

    def save_prefix(self, row: int, length: int) -> LlamaCppRow:
        """Return a copy of a row's state, which contains all its tokens and not only the first `length`."""
        data = self._active.save(self._sequences[row])
        return LlamaCppRow(data, data.nbytes, self.lengths[row])

    def load_prefix(self, row: int, saved: LlamaCppRow, length: int) -> None:
        """Set row `row` to the first `length` tokens of a saved row."""
        self._active.truncate(self._sequences[row], 0)
        self.lengths[row] = 0
        needed = sum(self.lengths) + saved.length
        if needed > self._active.cells or not self._active.restore(self._sequences[row], saved.data):
            # the free cells may be fragmented, while those of a new context are contiguous
            self._grow(cells=max(needed, self._active.cells + 1))
            self._active.load(self._sequences[row], saved.data, saved.length)
        self._active.truncate(self._sequences[row], length)
        self.lengths[row] = length

    def decode(self, rows: IntArray, tokens: IntArray, positions: IntArray, wanted: Flags) -> FloatArray:
        """Append tokens to rows; see `Context.decode`. rows: [n].

        The caller updates `lengths`. A failed pass raises PassError and leaves the rows as they were.
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
        sizes = (_INITIAL_CELLS, _INITIAL_SEQUENCES) if old is None else (old.cells, old.sequences)
        cells, sequences = (
            size << max(0, -(-wanted // size) - 1).bit_length()
            for wanted, size in zip((cells, sequences), sizes, strict=True)
        )
        sequences = min(MAX_SEQUENCES, sequences)
        new = Context(self._weights, cells, sequences)
        for row, sequence in enumerate(self._sequences):
            if self.lengths[row]:
                assert old is not None
                new.load(row, old.save(sequence), self.lengths[row])
        self._context = new
        self._sequences = list(range(len(self._sequences)))
        self._free = list(range(sequences - 1, len(self._sequences) - 1, -1))


def _address(array: Bytes) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _free(free: Callable[[int], None], pointer: int, weights: Weights) -> None:
    """Free a context. The argument `weights` keeps the weights alive until then."""
    free(pointer)
