"""Prefix cache: a new row copies the keys and values of a common prefix instead of prefilling it.

Searches the active rows and, within a limit of bytes, prefixes of rows that have ended (least recently used are dropped first),
always those of the row's own `cache_salt`: what others have computed can neither be read nor timed. A copy has the same bits as a
prefill: caches guarantee it by `SharesPrefixes`. Knows no model and no text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from foresay.checks import check_int
from foresay.decoding.protocols import KVCache
from foresay.decoding.rows import IntArray, Row, Rows, common_prefix

MIN_TOKENS = 16
"""Shorter prefixes are prefilled: searching and copying would take as long."""
_AT_ONCE = 64
"""Number of incomplete rows that are examined before a chunk; more rarely fit into one."""


@runtime_checkable
class SharesPrefixes(Protocol):
    """A cache whose rows can copy prefixes of other rows."""

    lengths: list[int]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of row `source` to row `target`."""
        ...

    def save_prefix(self, row: int, length: int) -> Any:
        """Return a copy of a row's first `length` slots, with its size in `nbytes`; `first(n)` returns the first n of them."""
        ...

    def load_prefix(self, row: int, saved: Any, length: int) -> None:
        """Copy the first `length` slots of a saved prefix to row `row`."""
        ...


@runtime_checkable
class RewindsToSnapshots(Protocol):
    """A cache whose prefixes can be copied only at some lengths. Copies in `save_prefix` have `prefix_length` without `row`."""

    def prefix_length(self, row: int, length: int) -> int:
        """Return the length of the longest prefix of at most `length` tokens that can be copied from a row."""
        ...

    def stored_length(self, row: int, length: int) -> int:
        """Return the length of the longest prefix of at most `length` tokens that can outlive the process."""
        ...


class KeepsPrefixes(Protocol):
    """Prefixes that outlive the process; see generation/kept_prompts.py."""

    def longest(self, salt: str, wanted: IntArray, layers: Sequence[int]) -> tuple[int, Any]:
        """Return the length and key of the longest kept prefix of tokens that has hidden states of layers; 0 for none."""
        ...

    def load(self, key: Any, layers: Sequence[int]) -> tuple[Any, Mapping[int, torch.Tensor]] | None:
        """Return its copy of slots, and hidden states; None if it cannot be read."""
        ...

    def keep(self, salt: str, tokens: IntArray, copy: Callable[[], tuple[Any, Mapping[int, torch.Tensor]]]) -> None:
        """Keep a prefix. copy: returns its slots and hidden states, which nothing changes; called if it is kept."""
        ...


@dataclass(frozen=True, slots=True)
class _Saved:
    """Prefix of a row that has ended: its tokens, slots and hidden states."""

    salt: str
    tokens: IntArray
    slots: Any
    hidden: Mapping[int, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Size of slots and hidden states in bytes."""
        return int(self.slots.nbytes) + sum(states.nbytes for states in self.hidden.values())

    def first(self, length: int) -> tuple[Any, Mapping[int, torch.Tensor]]:
        """Return slots and hidden states of the first `length` tokens, without copying: nothing changes them."""
        return self.slots.first(length), {layer: states[:length] for layer, states in self.hidden.items()}

    def prefix_length(self, wanted: IntArray) -> int:
        """Return the length of the longest prefix in common with other tokens that can be copied."""
        length = common_prefix(self.tokens, wanted)
        return int(self.slots.prefix_length(length)) if hasattr(self.slots, "prefix_length") else length


_Key = tuple[str, bytes]
"""Salt and tokens of a prefix."""
_NO_KEY: _Key = ("", b"")


def _key(row: Row, length: int) -> _Key:
    return row.params.cache_salt, row.tokens[:length].tobytes()


class PrefixStore:
    """Finds, copies and stores prefixes of rows."""

    def __init__(self, max_bytes: int = 0, kept: KeepsPrefixes | None = None) -> None:
        """max_bytes: size limit of prefixes of ended rows; 0 searches active rows only. kept: those that outlive a process."""
        self.max_bytes = check_int("prefix_bytes", max_bytes, 0)
        self.hidden_layers: tuple[int, ...] = ()
        """Layers whose hidden states must be available for the whole prefix, for a drafter that reads them."""
        self._saved: OrderedDict[_Key, _Saved] = OrderedDict()
        self.nbytes = 0
        """Size of the prefixes of ended rows in bytes."""
        self._kept = kept
        self._used_again: dict[int, int] = {}
        """Tokens of the prefix that an active row shares with an earlier one, by request."""

    def __len__(self) -> int:
        """Number of prefixes of ended rows."""
        return len(self._saved)

    def clear(self) -> None:
        """Drop the prefixes of ended rows."""
        self._saved.clear()
        self._used_again.clear()
        self.nbytes = 0

    def make_room(self, num_bytes: int) -> None:
        """Drop prefixes of ended rows, the least recently used first, until so many bytes are free or none is left."""
        least = self.nbytes - num_bytes
        while self._saved and self.nbytes > least:
            self._drop(next(iter(self._saved)))

    def copy_into(self, cache: KVCache, rows: Rows, first: int) -> dict[int, int | None]:
        """Copy the longest known prefix into each empty row from index `first` on.

        Returns the indices of rows that should wait with that of the row that they wait for, because it is about to prefill a
        longer common prefix; None for rows that were not examined yet.
        """
        if not isinstance(cache, SharesPrefixes):
            return {}
        incomplete = [i for i in range(first, len(rows)) if cache.lengths[i] < rows[i].size - 1]
        by_start: dict[_Key, list[int]] = {}  # rows in different groups share fewer than MIN_TOKENS tokens, or nothing
        for i, row in enumerate(rows):
            by_start.setdefault(_key(row, MIN_TOKENS), []).append(i)
        examined, waiting = 0, dict[int, int | None]()
        for i in incomplete:
            if examined == _AT_ONCE:
                waiting |= dict.fromkeys(range(i, len(rows)))
                break
            if not cache.lengths[i] and rows[i].source is None:
                similar = [j for j in by_start[_key(rows[i], MIN_TOKENS)] if j != i]
                earlier = [
                    j for j in similar if j >= first and (cache.lengths[j] or rows[j].request_id < rows[i].request_id)
                ]
                if (awaited := self._copy_or_wait(cache, rows, i, similar, earlier)) is not None:
                    waiting[i] = awaited
                    continue
            examined += cache.lengths[i] < rows[i].size - 1
        return waiting

    def _copy_or_wait(
        self, cache: SharesPrefixes, rows: Rows, index: int, similar: Sequence[int], earlier: Sequence[int]
    ) -> int | None:
        """Copy the longest known prefix into a row, or return the index of the earlier row that it should wait for instead.

        similar: rows with the same salt and first tokens. earlier: those of them that are being prefilled or arrived first.
        """
        wanted, lengths = rows[index].tokens[:-1], cache.lengths
        active = [
            (common_prefix(rows[i].tokens[: min(lengths[i], self._reusable(rows[i]))], wanted), i) for i in similar
        ]
        if isinstance(cache, RewindsToSnapshots):
            active = [(cache.prefix_length(i, common), i) for common, i in active]
        length, source = max(active, default=(0, -1))
        own = [
            (one.prefix_length(wanted), k)
            for k, one in self._saved.items()
            if one.salt == rows[index].params.cache_salt
        ]
        saved, key = max(own, default=(0, _NO_KEY))
        kept, file = (0, None)
        if self._kept is not None:
            kept, file = self._kept.longest(rows[index].params.cache_salt, wanted, self.hidden_layers)
        upcoming, awaited = max(((common_prefix(rows[i].tokens[:-1], wanted), i) for i in earlier), default=(0, -1))
        if upcoming >= MIN_TOKENS and upcoming > max(length, saved, kept):
            return awaited
        found = None if self._kept is None or kept <= max(length, saved) else self._kept.load(file, self.hidden_layers)
        if found is None and max(length, saved) < MIN_TOKENS:
            return None
        if found is not None:
            length, (slots, hidden) = kept, found
            cache.load_prefix(index, slots, length)
        elif saved > length:
            length = saved
            self._saved.move_to_end(key)
            cache.load_prefix(index, self._saved[key].slots, length)
            hidden = self._saved[key].hidden
        else:
            cache.copy_prefix(source, index, length)
            hidden = rows[source].prompt_hidden
        rows[index].prompt_hidden = {layer: hidden[layer][:length] for layer in self.hidden_layers}
        rows[index].num_cached = length
        self._used_again[rows[index].request_id] = length
        return None

    def save(self, cache: KVCache, row: Row, index: int) -> None:
        """Store the prefix of a row that ends."""
        again = self._used_again.pop(row.request_id, 0)
        length = min(cache.lengths[index], row.size - 1, self._reusable(row))
        if not isinstance(cache, SharesPrefixes) or row.source is not None or length < MIN_TOKENS:
            return
        lasting = self._lasting(cache, row, index, min(length, row.prompt_length if row.params.keep_prompt else again))
        if not (length := length if self.max_bytes else lasting):
            return
        tokens, salt = row.tokens[:length].copy(), row.params.cache_salt
        saved = _Saved(salt, tokens, cache.save_prefix(index, length), self._hidden(row, length))
        if lasting:
            assert self._kept is not None
            self._kept.keep(salt, tokens[:lasting], lambda: saved.first(lasting))
        if saved.nbytes > self.max_bytes:
            return
        for key, known in list(self._saved.items()):
            if known.salt == salt and common_prefix(known.tokens, tokens) == len(
                known.tokens
            ):  # the new one contains it
                self._drop(key)
        key = _key(row, length)
        self._drop(key)
        self._saved[key] = saved
        self.nbytes += saved.nbytes
        while self.nbytes > self.max_bytes:
            self._drop(next(iter(self._saved)))

    def _lasting(self, cache: SharesPrefixes, row: Row, index: int, length: int) -> int:
        """Return how many of a row's first `length` tokens will outlive the process: 0 if none, or if all of them do already."""
        if self._kept is None:
            return 0
        if isinstance(cache, RewindsToSnapshots):
            length = cache.stored_length(index, length)
        is_kept = self._kept.longest(row.params.cache_salt, row.tokens[:length], self.hidden_layers)[0] >= length
        return 0 if is_kept or length < MIN_TOKENS else length

    def _hidden(self, row: Row, length: int) -> dict[int, torch.Tensor]:
        """Return a copy of the hidden states of a row's first tokens."""
        return {layer: row.prompt_hidden[layer][:length].clone() for layer in self.hidden_layers}

    def _drop(self, key: _Key) -> None:
        if key in self._saved:
            self.nbytes -= self._saved.pop(key).nbytes

    def _reusable(self, row: Row) -> int:
        """Length of a row's prefix that other rows may copy: as far as the required hidden states are available."""
        return min((row.num_prompt_hidden(layer) for layer in self.hidden_layers), default=row.size)
