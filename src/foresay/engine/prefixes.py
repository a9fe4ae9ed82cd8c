"""Prompts that begin alike: a row starts from the slots that another one holds.

Looks among the live rows and, within a bound of bytes, among those that ended; the least lately used go first. What is copied
is what filling would compute again: models promise it with `SharesPrefixes`. Knows no model and no text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from foresay.checks import check_int
from foresay.decoding.protocols import KVCache
from foresay.decoding.rows import IntArray, Row, Rows, common_prefix

MIN_TOKENS = 16
"""Shorter beginnings are filled: looking and copying would take as long."""
_AT_ONCE = 64
"""Rows with something left to fill that are looked at before a chunk; more seldom fit into one."""


@runtime_checkable
class SharesPrefixes(Protocol):
    """A cache whose rows can begin with what others hold."""

    lengths: list[int]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Row `target` begins with the first `length` slots of row `source`."""
        ...

    def save_prefix(self, row: int, length: int) -> Any:
        """A copy of a row's first `length` slots, with its size in `nbytes`."""
        ...

    def load_prefix(self, row: int, saved: Any, length: int) -> None:
        """Row `row` begins with the first `length` slots of a copy."""
        ...


@dataclass(frozen=True, slots=True)
class _Saved:
    """A beginning of a row that ended: its tokens, slots and hidden states."""

    tokens: IntArray
    slots: Any
    hidden: Mapping[int, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.slots.nbytes) + sum(states.nbytes for states in self.hidden.values())


class PrefixStore:
    """Finds, copies and keeps beginnings of rows."""

    def __init__(self, max_bytes: int = 0) -> None:
        """max_bytes: kept of rows that ended, at most; 0 looks at live rows alone."""
        self.max_bytes = check_int("prefix_bytes", max_bytes, 0)
        self.hidden_layers: tuple[int, ...] = ()
        """Hidden states that a row must have of what it begins with, for a drafter that reads them."""
        self._saved: OrderedDict[bytes, _Saved] = OrderedDict()
        self.nbytes = 0
        """Bytes kept of rows that ended."""

    def __len__(self) -> int:
        """Beginnings kept of rows that ended."""
        return len(self._saved)

    def clear(self) -> None:
        """Forget those that ended."""
        self._saved.clear()
        self.nbytes = 0

    def fill(self, cache: KVCache, rows: Rows, first: int) -> frozenset[int]:
        """Let the rows to be filled, from place `first` on, begin with the longest beginning anyone holds.

        Returns the rows that had better wait for one that is filled before them, whose beginning they share, and those not
        looked at yet.
        """
        if not isinstance(cache, SharesPrefixes):
            return frozenset()
        unfilled = [i for i in range(first, len(rows)) if cache.lengths[i] < rows[i].size - 1]
        alike: dict[bytes, list[int]] = {}  # who shares less shares nothing that counts
        for i, row in enumerate(rows):
            alike.setdefault(row.tokens[:MIN_TOKENS].tobytes(), []).append(i)
        left, waiting = 0, set[int]()
        for place in unfilled:
            if left == _AT_ONCE:
                waiting.update(range(place, len(rows)))
                break
            if not cache.lengths[place] and rows[place].source is None:
                near = [i for i in alike[rows[place].tokens[:MIN_TOKENS].tobytes()] if i != place]
                before = [
                    i for i in near if i >= first and (cache.lengths[i] or rows[i].request_id < rows[place].request_id)
                ]
                if self._begin(cache, rows, place, near, before):
                    waiting.add(place)
                    continue
            left += cache.lengths[place] < rows[place].size - 1
        return frozenset(waiting)

    def _begin(self, cache: SharesPrefixes, rows: Rows, place: int, near: Sequence[int], before: Sequence[int]) -> bool:
        """Let a row begin with what is held; or say that it had better wait for a row before it.

        near: places of rows that may begin alike. before: those of them that have begun to be filled, or came before this one.
        """
        wanted, lengths = rows[place].tokens[:-1], cache.lengths
        live = [(common_prefix(rows[i].tokens[: min(lengths[i], self._shown(rows[i]))], wanted), i) for i in near]
        length, source = max(live, default=(0, -1))
        kept, key = max(((common_prefix(one.tokens, wanted), k) for k, one in self._saved.items()), default=(0, b""))
        coming = max((common_prefix(rows[i].tokens[:-1], wanted) for i in before), default=0)
        if coming >= MIN_TOKENS and coming > max(length, kept):
            return True
        if max(length, kept) < MIN_TOKENS:
            return False
        if kept > length:
            length = kept
            self._saved.move_to_end(key)
            cache.load_prefix(place, self._saved[key].slots, length)
            hidden = self._saved[key].hidden
        else:
            cache.copy_prefix(source, place, length)
            hidden = rows[source].prompt_hidden
        rows[place].prompt_hidden = {layer: hidden[layer][:length] for layer in self.hidden_layers}
        rows[place].num_cached = length
        return False

    def save(self, cache: KVCache, row: Row, place: int) -> None:
        """Keep what a row that ends holds."""
        length = min(cache.lengths[place], row.size - 1, self._shown(row))
        if not self.max_bytes or not isinstance(cache, SharesPrefixes) or row.source is not None or length < MIN_TOKENS:
            return
        tokens = row.tokens[:length].copy()
        for key, known in list(self._saved.items()):
            if common_prefix(known.tokens, tokens) == len(known.tokens):  # the new one holds all of it
                self._drop(key)
        hidden = {layer: row.prompt_hidden[layer][:length].clone() for layer in self.hidden_layers}
        saved = _Saved(tokens, cache.save_prefix(place, length), hidden)
        if saved.nbytes > self.max_bytes:
            return
        key = tokens.tobytes()
        self._drop(key)
        self._saved[key] = saved
        self.nbytes += saved.nbytes
        while self.nbytes > self.max_bytes:
            self._drop(next(iter(self._saved)))

    def _drop(self, key: bytes) -> None:
        if key in self._saved:
            self.nbytes -= self._saved.pop(key).nbytes

    def _shown(self, row: Row) -> int:
        """How much of a row others may begin with: what there are hidden states of, where they are needed."""
        held = row.prompt_hidden
        return min((len(held[layer]) if layer in held else 0 for layer in self.hidden_layers), default=row.size)
