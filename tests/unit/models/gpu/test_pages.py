"""Pages of rows: shared, copied before they are written, given back."""

from __future__ import annotations

import random

import pytest
import torch

from foresay.decoding.protocols import ModelInput
from foresay.errors import OutOfMemoryError
from foresay.models.gpu.attention import PAGE
from foresay.models.gpu.flat import PagedTokens, PageTable, size_of
from foresay.models.gpu.pages import LayerShape, PagedCache, PagePool
from helpers.refusals import refused


def make(pages: int = 8) -> tuple[PagePool, PagedCache]:
    pool = PagePool([LayerShape(1, 2), LayerShape(2, 2)], pages, torch.float32, torch.device("cpu"))
    return pool, PagedCache(pool)


def write(cache: PagedCache, row: int, values: list[int]) -> None:
    """Append one value a token, in both layers."""
    cache.reserve(row, len(values))
    for value in values:
        page, at = cache.pages[row][cache.lengths[row] // PAGE], cache.lengths[row] % PAGE
        for store in (*cache.pool.keys, *cache.pool.values):
            store[page, :, at] = float(value)
        cache.lengths[row] += 1


def read(cache: PagedCache, row: int) -> list[int]:
    found = [
        [int(store[cache.pages[row][i // PAGE], 0, i % PAGE, 0]) for i in range(cache.lengths[row])]
        for store in (*cache.pool.keys, *cache.pool.values)
    ]
    assert found.count(found[0]) == len(found)
    if found[0]:
        keys, values = cache.read(1, row, 1, len(found[0]))
        assert keys.shape == (1, 2, len(found[0]), 2) and keys[0, 1, :, 1].int().tolist() == found[0]
        assert torch.equal(keys, values)
    return found[0]


def test_rows_are_what_was_written_to_them() -> None:
    """Random edits of a few rows against lists, until every page is free again."""
    rng = random.Random(0)
    pool, cache = make(40)
    texts: list[list[int]] = []
    saved = []
    for step in range(400):
        act = rng.choice(["add", "write", "write", "write", "truncate", "copy", "save", "load", "swap", "drop"])
        row = rng.randrange(len(texts)) if texts else 0
        if act == "add" and len(texts) < 5:
            cache.add_rows(1)
            texts.append([])
        elif not texts:
            continue
        elif act == "write" and len(texts[row]) < 150:
            new = [step * 100 + i for i in range(rng.choice([1, 5, 70]))]
            write(cache, row, new)
            texts[row] += new
        elif act == "truncate":
            texts[row] = texts[row][: rng.choice([0, len(texts[row]), len(texts[row]) // 2])]
            cache.truncate([len(one) for one in texts])
        elif act in ("copy", "load"):
            other = rng.randrange(len(texts))
            length = rng.randrange(len(texts[other]) + 1)
            if act == "load" and saved:
                at = rng.randrange(len(saved))
                length = min(length, len(saved[at][1]))
                cache.load_prefix(row, saved[at][0], length)
                texts[row] = saved[at][1][:length]
            elif other != row:
                cache.copy_prefix(other, row, length)
                texts[row] = texts[other][:length]
        elif act == "save" and len(saved) < 3:
            saved.append((cache.save_prefix(row, len(texts[row])), list(texts[row])))
        elif act == "swap":
            other = rng.randrange(len(texts))
            cache.swap(row, other)
            texts[row], texts[other] = texts[other], texts[row]
        elif act == "drop":
            last = len(texts) - 1
            cache.rearrange([(last, row)] if row < last else [], last)
            texts[row] = texts[last]
            texts.pop()
        assert [read(cache, i) for i in range(len(texts))] == texts
    cache.rearrange([], 0)
    saved.clear()
    assert pool.num_free == 40 and cache.nbytes == 0


def test_a_shared_page_that_is_not_copied_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the test above."""
    monkeypatch.setattr(PagePool, "own", lambda self, page: page)
    with pytest.raises(AssertionError):
        test_rows_are_what_was_written_to_them()


def test_kept_tokens_of_a_tree_move_over_the_border_of_a_page() -> None:
    _, cache = make()
    cache.add_rows(2)
    for row in range(2):
        write(cache, row, list(range(PAGE - 2)))
        write(cache, row, [900, 901, 902, 903, 904])
    cache.keep([PAGE - 2] * 2, [[0, 2, 4], [1]])
    assert read(cache, 0)[-4:] == [PAGE - 3, 900, 902, 904] and read(cache, 1)[-2:] == [PAGE - 3, 901]


def test_a_discarded_cache_gives_its_pages_back() -> None:
    pool, cache = make()
    cache.add_rows(2)
    write(cache, 0, [1])
    write(cache, 1, [2] * 100)
    assert pool.num_free == 5
    del cache
    assert pool.num_free == 8


def test_a_pool_without_free_pages() -> None:
    _, cache = make(2)
    cache.add_rows(2)
    write(cache, 0, [1] * 100)
    with pytest.raises(OutOfMemoryError, match="all 2 pages of 64 tokens are in use"):
        write(cache, 1, [1])


def test_the_table_holds_the_rows_of_the_cache_that_runs() -> None:
    table = PageTable(3, 4 * PAGE, torch.device("cpu"))
    address = table.pages.data_ptr()
    for rows in ([[4, 2], [1]], [[4, 2, 7], [1]], [[5], [4, 2]]):
        table.update(rows)
        assert [table.pages[i, : len(one)].tolist() for i, one in enumerate(rows)] == rows
    assert table.pages.data_ptr() == address


def test_a_tree_of_too_many_nodes_is_refused() -> None:
    _, cache = make()
    cache.add_rows(1)
    parents = torch.tensor([[-1, *[0] * 65]])
    with refused("nodes", 65):
        PagedTokens.of(ModelInput(torch.zeros(1, 66, dtype=torch.int64), [66], parents=parents), cache, 4)


def test_passes_are_padded_to_the_next_size() -> None:
    assert [size_of(count) for count in (1, 5, 64, 65, 512)] == [1, 6, 64, 96, 512] and size_of(513) is None
