"""Requests that would not fit the memory that is left: refused, or queued after those that are there."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import foresay
from foresay import Engine, OutOfMemoryError, Row, SamplingParams, TableModel
from foresay.engine.prefixes import PrefixStore
from foresay.models.cache import memory
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.cache.stores import Stores
from foresay.models.huggingface.causal import CausalModel
from helpers import tiny
from helpers.refusals import refused
from helpers.support import Loop

CPU = torch.device("cpu")


class Small(TableModel):
    """A model with room for some tokens: rows times the tokens of the longest."""

    room = 60

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        return len(lengths) * max(lengths)

    def free_bytes(self) -> int:
        return self.room


def engine(rows: int = 8) -> tuple[Engine, Small]:
    model = Small.random(8, seed=1)
    return Loop(model, gamma=0, max_batch_size=rows).engine, model


def outputs(decoder: Engine) -> tuple[dict[int, list[int]], int]:
    """(what each request wrote, the most rows at a time)."""
    out: dict[int, list[int]] = {}
    most = 0
    while decoder.has_work:
        for step in decoder.step():
            out.setdefault(step.request_id, []).extend(step.token_ids)
        most = max(most, decoder.num_active)
    return out, most


def test_a_request_that_would_not_fit_alone_is_refused() -> None:
    """One that was admitted goes on whatever became of the memory: waiting for what no one here holds would be for ever."""
    decoder, model = engine()
    with pytest.raises(OutOfMemoryError, match=r"61 tokens of prompt and output would take .* max_new_tokens"):
        decoder.submit([1], SamplingParams(max_new_tokens=60))
    decoder.submit([1], SamplingParams(max_new_tokens=59))
    decoder.submit([2], SamplingParams(max_new_tokens=40))
    model.room = 5
    written, most = outputs(decoder)
    assert most == 1 and [len(tokens) for tokens in written.values()] == [59, 40]


def test_others_wait_for_the_rows_that_fill_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Control: with room they decode together, and write the same."""
    found = []
    for room in (60, 1000):
        decoder, model = engine()
        model.room = room
        for i in range(7):
            decoder.submit([i % 8], SamplingParams(max_new_tokens=19))
        found.append(outputs(decoder))
        assert len(caplog.records) == 1 and "3 rows of up to 20 tokens" in caplog.text
    assert found[0][1] == 3 and found[1] == (found[0][0], 7)
    assert [len(one) for one in found[0][0].values()] == [19] * 7


def test_the_batch_fills_again_when_shorter_requests_follow() -> None:
    """And rooms that become free while the batch is wide are taken at once."""
    decoder, _ = engine(rows=6)
    for _ in range(4):
        decoder.submit([1], SamplingParams(max_new_tokens=29))
    for i in range(12):
        decoder.submit([2], SamplingParams(max_new_tokens=5 + i % 4))
    seen: list[int] = []
    while decoder.has_work:
        decoder.step()
        seen.append(decoder.num_active if decoder.num_waiting else 0)
    assert max(seen) == 6, "10 tokens each: six fit"
    wide = seen[seen.index(6) :]
    assert all(n >= 4 for n in wide if n), "it does not run empty before it takes others in"


def grown(cache: SlotCache, shape: tuple[int, int], layers: int, rows: int, length: int) -> int:
    """Add rows to a cache for a text of some length; return the number of all its slots."""
    cache.add_rows(rows)
    cache.begin_pass(len(cache.lengths) - rows, 1, length, CPU, None)
    assert isinstance(cache.tensors, Stores)
    for layer in range(layers):
        cache.tensors.layer_tensors(layer, torch.empty(0, device="meta"), shape, shape)  # which takes no memory
    return cache.tensors.rows * cache.tensors.slots


def test_what_a_cache_takes_is_known_in_advance() -> None:
    """A small one grows by doubling, a large one by what is needed."""
    model = CausalModel(tiny.llama(context=4096))
    config = model.model.config
    shape = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    for rows, length in ((1, 1), (3, 700), (5, 3000)):
        cache = model.new_cache()
        assert isinstance(cache, SlotCache)
        grown(cache, shape, config.num_hidden_layers, rows, length)
        assert model.cache_bytes([length, *[1] * (rows - 1)]) == cache.nbytes
    for width, slots in ((4, 4 * 128), (1 << 18, 3 * 128)):
        cache = SlotCache()
        assert [grown(cache, (2, width), 1, 1, 100) for _ in range(3)][-1] == slots


def test_the_room_is_what_machine_and_container_leave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.free_bytes(CPU) > 2700
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 1000\n")
    for most in ("5000", "max", "broken"):
        (tmp_path / "memory.max").write_text(f"{most}\n")
        assert memory.free_bytes(CPU) == 2700 if most == "5000" else memory.free_bytes(CPU) > 2700


def test_kept_prefixes_are_dropped_before_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes of ended requests hold the memory that new ones need; if they stayed, those would decode one at a time."""
    model = CausalModel(tiny.llama())
    one = model.cache_bytes([40])
    store = PrefixStore(1 << 20)
    decoder = Loop(model, gamma=0, max_batch_size=4, prefixes=store).engine

    def free(self: CausalModel) -> int:
        return 4 * one - decoder.cached_bytes - store.nbytes

    monkeypatch.setattr(CausalModel, "free_bytes", free)
    for start in range(3):
        decoder.submit([start + i for i in range(30)], SamplingParams(max_new_tokens=10, ignore_eos=True))
        outputs(decoder)
    kept = store.nbytes
    assert kept > one // 2 and decoder.prefix_bytes == kept
    for start in range(4):
        decoder.submit([50 + start + i for i in range(30)], SamplingParams(max_new_tokens=10, ignore_eos=True))
    decoder.step()
    assert decoder.num_active == 4 and store.nbytes < kept
    assert model.cache_bytes([40] * 4) + store.nbytes <= 4 * one


def test_a_limit_bounds_the_free_memory_and_refuses_long_texts() -> None:
    whole, used = memory.free_bytes(CPU), memory.resident_bytes()
    memory.check_limit(1 << 60)
    try:
        memory.limit_memory(used + (64 << 20))
        assert 0 < memory.free_bytes(CPU) <= (64 << 20) + memory.slack_bytes() + (16 << 20) < whole
        with refused("memory_limit", "0 MB"):
            memory.limit_memory(1000)
        memory.limit_memory(used + (256 << 20))
        memory.check_limit(1 << 20)
        with pytest.raises(OutOfMemoryError, match=r"may take 512 MB, and [\d,]+ of [\d,]+ MB are in use; try again"):
            memory.check_limit(512 * 10**6)
    finally:
        memory.limit_memory(None)
    assert memory.free_bytes(CPU) > whole / 2


def test_freed_memory_is_returned_once_it_is_much() -> None:
    """Small pieces that were freed are the allocator's slack until they are trimmed.

    The C library counts returned pages on as free; they are not returned again and again.
    """
    trimmer = memory.Trimmer()
    trimmer.check(idle=True)
    pieces = [bytearray(4000) for _ in range(16_000)]
    last = bytearray(4000)  # keeps the heap from shrinking
    before, slack = memory.resident_bytes(), memory.slack_bytes()
    pieces.clear()
    assert memory.slack_bytes() > slack or memory.slack_bytes() == slack == 0, "0 without glibc"
    returned = trimmer.check(idle=True)
    assert returned or memory.slack_bytes() == 0
    assert not returned or memory.resident_bytes() < before - (32 << 20)
    assert not trimmer.check(idle=True) and len(last) == 4000


def test_a_busy_process_keeps_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that were returned and used again count as free all the time: only resident memory shows it."""
    slack, rest, resident = [0], [1 << 30], [1 << 30]
    monkeypatch.setattr(memory, "slack_bytes", lambda: slack[0])
    monkeypatch.setattr(memory, "resident_bytes", lambda: resident[0])
    monkeypatch.setattr(memory, "trim", lambda: resident.__setitem__(0, rest[0]))
    trimmer, turns = (
        memory.Trimmer(),
        ((20, True), (40, False), (40, True), (60, True), (300, False), (0, True), (40, True)),
    )
    found = []
    for size, idle in turns:
        slack[0] = size << 20
        found.append(trimmer.check(idle=idle))
    assert found == [False, False, True, False, True, False, True]
    slack[0], rest[0], resident[0] = 300 << 20, 200 << 20, 200 << 20
    trimmer = memory.Trimmer()
    trimmer.check(idle=True)
    for _ in range(3):
        resident[0] = 500 << 20
        assert trimmer.check(idle=True) and resident[0] == 200 << 20
        assert not trimmer.check(idle=True)


def rows_left(drafter: str) -> int:
    """Rows in memory after three requests with shared prefixes have ended, before cycles are collected."""
    draft = {"draft": tiny.llama(1)} if drafter == "model" else {}
    session = foresay.load(tiny.llama(), drafter=drafter, **draft).session(prefix_bytes=1 << 20)
    gc.collect()
    before = num_rows()
    gc.disable()
    try:
        for first in range(3):
            session.submit([first + 1, 5, 6, 7, 8], max_new_tokens=6, ignore_eos=True)
        while session.has_work:
            session.step()
        return num_rows() - before
    finally:
        gc.enable()


def num_rows() -> int:
    return sum(issubclass(type(thing), Row) for thing in gc.get_objects())


@pytest.mark.parametrize("drafter", ["none", "suffix", "model"])
def test_ended_requests_are_freed_at_once(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_left(drafter) == 0

    def cyclic(self: Row, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self._committed = self

    init = Row.__init__
    monkeypatch.setattr(Row, "__init__", cyclic)
    assert rows_left(drafter) >= 3, "control: a row that refers to itself waits for the collector"
