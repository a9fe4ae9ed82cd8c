from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.models.cache import stores as stores_module
from foresay.models.cache.slot_cache import WIDTH, SlotCache
from foresay.models.cache.stores import RowStores, Stores
from helpers.histories import play

HEADS, DIM, LAYERS = 2, 3, 2
CPU = torch.device("cpu")


def states(values: Sequence[Sequence[float]]) -> torch.Tensor:
    """[B, heads, T, dim]: each token's number in every entry, so that a misplaced one shows."""
    return torch.tensor(values, dtype=torch.float32)[:, None, :, None].expand(-1, HEADS, -1, DIM).contiguous()


def model_input(
    cache: SlotCache, values: Sequence[Sequence[float]], counts: Sequence[int], first_row: int = 0
) -> torch.Tensor:
    """One pass as a model makes it; returns the keys the last layer's rows see, [B, width]."""
    at = cache.begin_pass(first_row, len(values), len(values[0]), CPU)
    for layer in range(LAYERS):
        keys, stored = cache.write(layer, states(values) * (layer + 1), states(values) * -(layer + 1), at)
        assert keys.shape == stored.shape == (len(values), HEADS, at.width, DIM)
        assert torch.equal(keys, -stored)
        assert torch.equal(keys, keys[:, :1, :, :1].expand_as(keys))
    for i, count in enumerate(counts):
        cache.lengths[first_row + i] += count
    return keys[:, 0, :, 0] / LAYERS


def held(cache: SlotCache, row: int) -> list[float]:
    """The tokens of a row in layer 0."""
    length = cache.lengths[row]
    return cache.tensors.read(0, row, [length], length)[0][0, 0, :, 0].tolist()


def layers_of(cache: SlotCache) -> list[torch.Tensor]:
    stores = cache.tensors
    if isinstance(stores, RowStores):
        return [block for block in stores.blocks if block is not None]
    assert isinstance(stores, Stores)
    return [store for layer in stores.layers for store in layer or ()]


def pointers(cache: SlotCache) -> list[int]:
    return [store.data_ptr() for store in layers_of(cache)]


def writes(cache: SlotCache) -> list[int]:
    return [store._version for store in layers_of(cache)]


def rectangle() -> SlotCache:
    return SlotCache()


def by_rows() -> SlotCache:
    return SlotCache(RowStores([(HEADS, DIM)] * LAYERS, torch.float32))


def filled(*rows: Sequence[float], make: Callable[[], SlotCache] = rectangle) -> SlotCache:
    cache = make()
    cache.add_rows(len(rows))
    width = max(map(len, rows))
    model_input(cache, [[*row, *[99.0] * (width - len(row))] for row in rows], [len(row) for row in rows])
    return cache


def test_ragged_rows_are_written_at_their_own_slots() -> None:
    """Slots in sight that were not written are zero; what a pass sees is the store itself, written once."""
    cache = filled([1, 2, 3], [4])
    versions = writes(cache)
    seen = model_input(cache, [[5, 6], [7, 8]], [1, 2])
    assert writes(cache) == [version + 1 for version in versions]
    assert cache.lengths == [4, 3] and seen.shape == (2, WIDTH)
    assert seen[0, :5].tolist() == [1, 2, 3, 5, 6] and not seen[0, 5:].any()
    assert seen[1, :3].tolist() == [4, 7, 8] and not seen[1, 3:].any()
    assert (held(cache, 0), held(cache, 1)) == ([1, 2, 3, 5], [4, 7, 8])
    at = cache.begin_pass(0, 2, 1, CPU)
    keys, values = cache.write(0, states([[3], [4]]), states([[3], [4]]), at)
    assert [keys.data_ptr(), values.data_ptr()] == pointers(cache)[:2]


def test_rewinding_allocates_and_copies_nothing() -> None:
    cache = filled([1, 2, 3], [4])
    before, versions = pointers(cache), writes(cache)
    cache.truncate([1, 0])
    assert pointers(cache) == before and writes(cache) == versions
    for _ in range(50):
        model_input(cache, [[5, 6, 7, 8], [5, 6, 7, 8]], [4, 4])
        cache.truncate([2, 1])
    assert pointers(cache) == before and len(before) == 2 * LAYERS


def test_growth_is_rare() -> None:
    cache = filled([0.0])
    seen = set()
    for i in range(40 * WIDTH):
        assert cache.tensors.slots == WIDTH or cache.lengths[0] >= WIDTH
        at = cache.begin_pass(0, 1, 1, CPU)
        cache.write(0, states([[i]]), states([[i]]), at)
        cache.lengths[0] += 1
        seen.add(cache.tensors.slots)
    assert max(seen) < 1.5 * 40 * WIDTH + WIDTH
    assert len(seen) <= 10


@pytest.mark.parametrize("make", [rectangle, by_rows])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_history_holds_what_lists_hold(make: Callable[[], SlotCache], data: st.DataObject) -> None:
    cache = make()

    def reserve() -> None:
        """Room in some rows alone, as a pass that failed leaves it."""
        first = data.draw(st.integers(0, len(cache.lengths) - 1))
        cache.begin_pass(first, 1, data.draw(st.sampled_from([1, 300])), CPU)

    def run(row: int, values: list[list[int]], counts: list[int]) -> None:
        model_input(cache, values, counts, row)

    def read(row: int) -> list[float]:
        if not any(cache.lengths):
            return []
        if row == 0:
            model_input(cache, [[0.0]] * len(cache.lengths), [0] * len(cache.lengths))
        return held(cache, row)

    play(data, cache, run, read, reserve=reserve)


# -- rows that leave before they have slots -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [rectangle, by_rows])
def test_rows_that_were_never_fed_move_and_leave(make: Callable[[], SlotCache]) -> None:
    """As a draft model's cache is left by requests that were never drafted for."""
    cache = filled([1, 2], [3], make=make)
    cache.add_rows(1)
    cache.rearrange([(2, 0)], 2)
    assert cache.lengths == [0, 1] and held(cache, 1) == [3]
    model_input(cache, [[5], [6]], [1, 1])
    assert (held(cache, 0), held(cache, 1)) == ([5], [3, 6])
    cache = make()
    cache.add_rows(3)
    cache.rearrange([(2, 0)], 2)
    cache.rearrange([], 0)
    cache.add_rows(1)
    model_input(cache, [[5]], [1])
    assert held(cache, 0) == [5]


# -- memory --------------------------------------------------------------------------------------------------------------

TOKEN = LAYERS * 2 * HEADS * DIM * 4


def test_memory_follows_tokens() -> None:
    assert SlotCache().nbytes == 0 and filled([1], [2]).nbytes == 2 * WIDTH * TOKEN
    cache = by_rows()
    cache.add_rows(25)
    model_input(cache, [[1.0] * 4500], [4500])
    model_input(cache, [[2.0] * 50] * 24, [50] * 24, 1)
    assert cache.nbytes == (4500 + 24 * 50) * TOKEN
    blocks = sum(block.nbytes for block in layers_of(cache))
    assert blocks < 2 * cache.nbytes, "control: a rectangle of rows by slots takes 20 times as much"
    flat = rectangle()
    flat.add_rows(25)
    model_input(flat, [[1.0] * 4500], [4500])
    assert flat.nbytes > 15 * cache.nbytes


def test_rows_that_end_give_their_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed memory is given back when the last row has left; a little is kept for the next rows."""
    trims: list[int] = []
    monkeypatch.setattr(stores_module, "trim", lambda: trims.append(1))
    monkeypatch.setattr(stores_module, "SMALL_BYTES", 1000 * TOKEN)
    cache = filled([1.0] * 2000, [2.0] * 5, make=by_rows)
    cache.rearrange([(1, 0)], 1)
    assert cache.nbytes <= 2000 * TOKEN  # both were fed in one pass
    cache.rearrange([], 0)
    assert cache.nbytes == 0 and trims == [1]
    cache.add_rows(1)
    model_input(cache, [[1.0]], [1])
    cache.rearrange([], 0)
    assert trims == [1]
    monkeypatch.setattr(stores_module, "SMALL_BYTES", 2400 * TOKEN)
    cache = filled(*[[1.0] * 100] * 25, make=by_rows)
    for count in range(24, -1, -1):  # the first row ends, and the last one takes its position, which counts as freed
        cache.rearrange([(count, 0)] if count else [], count)
    assert trims == [1, 1]


@torch.inference_mode()
def test_a_rectangle_shrinks_when_most_of_it_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_module, "SMALL_BYTES", 0)
    cache = filled([1.0] * 3000, [2.0, 3.0], [4.0])
    before = cache.nbytes
    cache.rearrange([(2, 0)], 2)
    assert cache.nbytes < before / 8
    assert (held(cache, 0), held(cache, 1)) == ([4], [2, 3])
    model_input(cache, [[5], [6]], [1, 1])
    assert (held(cache, 0), held(cache, 1)) == ([4, 5], [2, 3, 6])


def test_moving_and_growing_rows_of_their_own_leave_others_where_they_are() -> None:
    cache = filled([1, 2, 3], [4, 5], [6], make=by_rows)
    first, second, third = pointers(cache)
    cache.rearrange([(2, 0)], 2)
    assert pointers(cache) == [third, second] != [first, second]
    for token in range(700):
        model_input(cache, [[float(token)]], [1])
    assert held(cache, 0) == [6, *map(float, range(700))] and pointers(cache)[1] == second
