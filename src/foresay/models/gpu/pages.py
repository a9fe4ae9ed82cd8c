"""Keys and values in pages of a pool that is allocated once: addresses never change.

A row is a list of page numbers. Rows join, leave, grow, rewind and share prefixes by editing numbers; a page that several rows
use is copied before it is written. Owns the pool, the rows' pages and their table on the device. Knows no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from threading import RLock
from weakref import finalize

import torch

from foresay.decoding.devices import to_device
from foresay.decoding.protocols import Move
from foresay.errors import OutOfMemoryError
from foresay.models.cache.slot_cache import moves_of
from foresay.models.gpu.attention import PAGE


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a layer's keys and values."""

    heads: int
    dim: int


class PagePool:
    """Pages of keys and values of all layers, and the number of rows that use each."""

    def __init__(self, layers: Sequence[LayerShape], pages: int, dtype: torch.dtype, device: torch.device) -> None:
        """pages: their number. A page has PAGE slots of every layer, and starts as zeros: a slot that a token does not see has
        the weight zero, and zero times NaN is NaN."""
        counts = Counter(layers)
        self._stores = {
            one: torch.zeros(2, count, pages, one.heads, PAGE, one.dim, dtype=dtype, device=device)
            for one, count in counts.items()
        }
        """Keys and values of all layers of a shape, so that a page of them is copied at once."""
        of_shape = {one: iter(store.unbind(1)) for one, store in self._stores.items()}
        pairs = [next(of_shape[layer]) for layer in layers]
        self.keys = [pair[0] for pair in pairs]
        """The keys of each layer, [pages, heads, PAGE, dim]."""
        self.values = [pair[1] for pair in pairs]
        self.lock = RLock()
        """Held by a thread from the inputs of a pass to its outputs, and while it counts the users of pages."""
        self._free = list(reversed(range(pages)))
        self._users = [0] * pages

    @property
    def num_pages(self) -> int:
        """Number of pages."""
        return len(self._users)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that all pages hold."""
        return self.num_pages * PAGE

    @property
    def num_free(self) -> int:
        """Number of pages without users."""
        return len(self._free)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return sum(store[0].nbytes for store in (*self.keys, *self.values))

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.page_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the pages without users."""
        return self.num_free * self.page_bytes

    def bytes_of(self, lengths: Sequence[int]) -> int:
        """Bytes of the pages of rows of these lengths that share none."""
        return sum(-(-length // PAGE) for length in lengths) * self.page_bytes

    def take(self) -> int:
        """Return a page for one user. Raises OutOfMemoryError if there is none."""
        with self.lock:
            if not self._free:
                raise OutOfMemoryError(
                    f"all {len(self._users)} pages of {PAGE} tokens are in use; decode fewer or shorter requests at once"
                )
            page = self._free.pop()
            self._users[page] = 1
            return page

    def share(self, pages: Sequence[int]) -> list[int]:
        """Add a user to each page; return the pages."""
        with self.lock:
            for page in pages:
                self._users[page] += 1
            return list(pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """Remove a user from each page."""
        with self.lock:
            for page in pages:
                self._users[page] -= 1
                if not self._users[page]:
                    self._free.append(page)

    def own(self, page: int) -> int:
        """Return a page with the same contents that has one user: this one, or a copy if others use it."""
        with self.lock:
            if self._users[page] == 1:
                return page
            new = self.take()
            for store in self._stores.values():
                store[:, :, new] = store[:, :, page]
            self.give_back([page])
            return new

    def move(self, source: torch.Tensor, old: torch.Tensor, target: torch.Tensor, new: torch.Tensor) -> None:
        """Copy slots `old` of pages `source` to slots `new` of pages `target`, [n] int64 each."""
        for store in self._stores.values():
            store[:, :, target, :, new] = store[:, :, source, :, old]


class SavedPages:
    """The first tokens of a row, kept after the row ends: its pages stay in use until this object is discarded."""

    def __init__(self, pool: PagePool, pages: list[int], length: int) -> None:
        self.pages, self.length = pages, length
        self.nbytes = len(pages) * pool.page_bytes
        finalize(self, pool.give_back, pages).atexit = False

    def prefix_length(self, length: int) -> int:
        """Return the length of the longest prefix of at most `length` tokens that can be copied."""
        return min(length, self.length)


class PagedCache:
    """Lengths of rows and their pages; see KVCache.

    With an owner it has lengths of its own over the owner's pages: for a draft model that consists of the target's first layers.
    What the draft writes is overwritten by the target's next pass.
    """

    def __init__(self, pool: PagePool, owner: PagedCache | None = None) -> None:
        self.pool, self.owner = pool, owner
        self.lengths: list[int] = []
        self.pages: list[list[int]] = [] if owner is None else owner.pages
        """Pages of each row, of which the last ones may be empty."""
        self.last_writer: object | None = None
        """See SlotCache."""
        self.is_lent = False
        """True if a draft reads or writes these pages, too: then a row's last token must not be among them between steps."""
        if owner is None:
            finalize(self, _give_all_back, pool, self.pages).atexit = False

    def add_rows(self, count: int) -> None:
        """Append empty rows; those of an owner are there already."""
        self.lengths += [0] * count
        if self.owner is None:
            self.pages += [[] for _ in range(count)]

    def reserve(self, row: int, count: int) -> None:
        """Make room for `count` tokens after a row's last one, in pages that no other row uses.

        Raises OutOfMemoryError if there are too few pages; the row keeps those that it got.
        """
        pages, length = self.pages[row], self.lengths[row]
        for index in range(length // PAGE, -(-(length + count) // PAGE)):
            if index < len(pages):
                pages[index] = self.pool.own(pages[index])
            else:
                pages.append(self.pool.take())

    def truncate(self, lengths: Sequence[int]) -> None:
        """Rewind row i to min(its length, lengths[i]); its pages stay, for the tokens that follow."""
        for i, length in enumerate(lengths):
            self.lengths[i] = min(self.lengths[i], length)

    @torch.inference_mode()
    def keep(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Move the kept tokens of the last pass to consecutive slots; see KVCache."""
        moves = [(self._at(row, one), self._at(row, other)) for row, one, other in moves_of(starts, paths)]
        if moves:
            device = self.pool.keys[0].device
            found = to_device(moves, device)
            (source, old), (target, new) = found[:, 0].unbind(1), found[:, 1].unbind(1)
            self.pool.move(source, old, target, new)
        self.truncate([start + len(path) for start, path in zip(starts, paths, strict=True)])

    def _at(self, row: int, slot: int) -> tuple[int, int]:
        return self.pages[row][slot // PAGE], slot % PAGE

    def read(self, layer: int, first_row: int, batch: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first `width` keys and values of rows, [B, heads, width, dim] each; copies.

        layer: index among those with keys and values of their own. Slots after a row's last one are meaningless.
        """
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        count = -(-width // PAGE)
        rows = [[*pages[:count], *[0] * (count - len(pages))] for pages in self.pages[first_row : first_row + batch]]
        index = to_device(rows, keys.device)
        found = [store[index].transpose(1, 2).flatten(2, 3)[:, :, :width] for store in (keys, values)]
        return found[0], found[1]

    def prefix_length(self, row: int, length: int) -> int:
        """Return the length of the longest prefix of at most `length` tokens that can be shared with another row."""
        return min(length, self.lengths[row])

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Let row `target`, which is empty, begin with the first `length` tokens of row `source`. Nothing is copied."""
        self._begin_with(target, self.pages[source], length)

    def save_prefix(self, row: int, length: int) -> SavedPages:
        """Return the first `length` tokens of a row, at most all of them, for rows to come."""
        length = min(length, self.lengths[row])
        return SavedPages(self.pool, self.pool.share(self.pages[row][: -(-length // PAGE)]), length)

    def load_prefix(self, row: int, saved: SavedPages, length: int) -> None:
        """Let a row, which is empty, begin with the first `length` tokens of a saved prefix."""
        self._begin_with(row, saved.pages, length)

    def _begin_with(self, row: int, pages: Sequence[int], length: int) -> None:
        shared = self.pool.share(pages[: -(-length // PAGE)])
        self.pool.give_back(self.pages[row])
        self.pages[row], self.lengths[row] = shared, length

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows; an owner exchanges their pages itself."""
        self.lengths[one], self.lengths[other] = self.lengths[other], self.lengths[one]
        if self.owner is None:
            self.pages[one], self.pages[other] = self.pages[other], self.pages[one]

    def rearrange(self, moves: Sequence[Move], count: int) -> None:
        """Move rows, then drop the rows from index `count` on and give their pages back, unless an owner does."""
        for source, target in moves:
            self.swap(source, target)
        del self.lengths[count:]
        if self.owner is None:
            for pages in self.pages[count:]:
                self.pool.give_back(pages)
            del self.pages[count:]

    @property
    def nbytes(self) -> int:
        """Bytes of the pages in use; a page that several rows use counts once, and those of an owner do not."""
        return (
            0
            if self.owner is not None
            else len({page for pages in self.pages for page in pages}) * self.pool.page_bytes
        )


def _give_all_back(pool: PagePool, rows: list[list[int]]) -> None:
    for pages in rows:
        pool.give_back(pages)
