"""One llama_context: a fixed number of sequences over a fixed number of cells, and passes over them.

Owns the pointers and the layout of a batch. Does not know the mapping from rows to sequences, and does not check for free cells.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from foresay import threads
from foresay.errors import OutOfMemoryError, UnsupportedModelError
from foresay.models.llama_cpp.binding import Weights, last_error, library

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
MAX_PASS_TOKENS = 256
"""Most tokens of one llama_decode call; longer passes are split."""
MAX_SEQUENCES = 256
"""Most sequences of a context; a constant of llama.cpp."""


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
        self._threads = threads.num_threads()
        params.n_threads = params.n_threads_batch = self._threads
        self.weights, self.cells, self.sequences = weights, cells, sequences
        self.pointer: int = c.llama_init_from_model(weights.pointer, params)
        if not self.pointer:
            raise OutOfMemoryError(
                f"llama.cpp cannot allocate a cache of {sequences} rows with {cells} tokens in all: {last_error()}"
            )
        weakref.finalize(self, _free, c.llama_free, self.pointer, weights)
        self._memory = c.llama_get_memory(self.pointer)
        self._width = int(c.llama_vocab_n_tokens(weights.vocab))
        self._batch = _Batch(MAX_PASS_TOKENS)

    def truncate(self, sequence: int, length: int) -> None:
        """Remove a sequence's tokens from position `length` on. Raises UnsupportedModelError if llama.cpp cannot do that."""
        if not library().llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise UnsupportedModelError(
                "llama.cpp cannot rewind this model's cache, so rejected tokens cannot be removed"
            )

    def copy(self, source: int, target: int, length: int) -> None:
        """Set an empty sequence to the first `length` tokens of another; both share the cells."""
        library().llama_memory_seq_cp(self._memory, source, target, 0, length)

    def save(self, sequence: int) -> npt.NDArray[np.uint8]:
        """Return a sequence's state as bytes for `restore`."""
        c = library()
        size = c.llama_state_seq_get_size(self.pointer, sequence)
        out = np.empty(size, dtype=np.uint8)
        written = c.llama_state_seq_get_data(self.pointer, _bytes(out), size, sequence)
        return out[:written]

    def restore(self, sequence: int, saved: npt.NDArray[np.uint8]) -> bool:
        """Load a saved state into an empty sequence. Return False if there are not enough contiguous free cells."""
        c = library()
        return bool(c.llama_state_seq_set_data(self.pointer, _bytes(saved), len(saved), sequence))

    def decode(
        self, tokens: IntArray, positions: IntArray, sequences: IntArray, wanted: npt.NDArray[np.bool_]
    ) -> FloatArray:
        """Append tokens to sequences, and return the logits [number of wanted tokens, V] after the wanted ones, in their order.

        tokens, positions, sequences, wanted: [n]. Raises PassError, with a part of the tokens possibly appended.
        """
        c = library()
        if self._threads != (now := threads.num_threads()):
            self._threads = now
            c.llama_set_n_threads(self.pointer, now, now)
        scores = np.empty((int(wanted.sum()), self._width), dtype=np.float32)
        done = 0
        for start in range(0, len(tokens), MAX_PASS_TOKENS):
            part = slice(start, start + MAX_PASS_TOKENS)
            count = int(wanted[part].sum())
            code = c.llama_decode(
                self.pointer, self._batch.filled(tokens[part], positions[part], sequences[part], wanted[part])
            )
            if code:
                raise PassError(f"llama.cpp's pass over {len(tokens[part])} tokens failed with code {code}")
            if count:
                found = np.ctypeslib.as_array(c.llama_get_logits(self.pointer), (count, self._width))
                scores[done : done + count] = found
                done += count
        return scores


class _Batch:
    """The arrays of a llama_batch, allocated once."""

    def __init__(self, size: int) -> None:
        c = library()
        self._tokens, self._positions, self._sequences = (np.zeros(size, dtype=np.int32) for _ in range(3))
        self._ones, self._wanted = np.ones(size, dtype=np.int32), np.zeros(size, dtype=np.int8)
        each = self._sequences.ctypes.data + np.arange(size, dtype=np.uintp) * self._sequences.itemsize
        self._pointers = each.astype(np.uintp)

        def at(array: npt.NDArray[Any], kind: Any) -> Any:
            return array.ctypes.data_as(ctypes.POINTER(kind))

        self._batch = c.llama_batch(
            n_tokens=0,
            token=at(self._tokens, ctypes.c_int32),
            embd=None,
            pos=at(self._positions, ctypes.c_int32),
            n_seq_id=at(self._ones, ctypes.c_int32),
            seq_id=at(self._pointers, ctypes.POINTER(ctypes.c_int32)),
            logits=at(self._wanted, ctypes.c_int8),
        )

    def filled(self, tokens: IntArray, positions: IntArray, sequences: IntArray, wanted: npt.NDArray[np.bool_]) -> Any:
        """Return the batch, filled with tokens that belong to one sequence each."""
        count = len(tokens)
        self._tokens[:count], self._positions[:count] = tokens, positions
        self._sequences[:count], self._wanted[:count] = sequences, wanted
        self._batch.n_tokens = count
        return self._batch


def _bytes(array: npt.NDArray[np.uint8]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _free(free: Callable[[int], None], pointer: int, weights: Weights) -> None:
    """Free a context. The argument `weights` keeps the weights alive until then."""
    free(pointer)
