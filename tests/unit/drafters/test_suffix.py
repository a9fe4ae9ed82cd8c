"""Suffix drafting: matches against brute force, the draft length, the memory of earlier requests, and the work per token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay import SamplingParams, TableModel
from foresay.drafters import Memory, SuffixDrafter
from foresay.drafters.memory.segment import DEPTH
from foresay.drafters.suffix_automaton import SuffixAutomaton
from helpers.lookups import admitted, drafted, propose
from helpers.racing import race
from helpers.support import run

texts = st.lists(st.integers(0, 2), min_size=1, max_size=20)


def continuations(text: Sequence[int], context: Sequence[int]) -> tuple[int, list[list[int]]]:
    """The length of the longest suffix of the context that something follows in the text, and what follows it there."""
    for n in range(len(context), 0, -1):
        piece = list(context[-n:])
        found = [list(text[end:]) for end in range(n, len(text)) if list(text[end - n : end]) == piece]
        if found:
            return n, found
    return 0, []


def remembered(*requests: Sequence[int], max_tokens: int = 1000) -> Memory:
    memory = Memory(max_tokens=max_tokens)
    for request in requests:
        memory.add("", np.array(request, dtype=np.int64))
    return memory


def kept(memory: Memory) -> list[list[int]]:
    """The texts of a memory, oldest first."""
    return [text.tolist() for texts in memory.owners().values() for text in texts]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_drafts_follow_the_longest_match_in_own_text_and_past(data: st.DataObject) -> None:
    """Own text comes first where both match as much. Requests do not run into each other."""
    requests = data.draw(st.lists(texts, max_size=4))
    scale, least = data.draw(st.sampled_from([0.1, 1.5, 4.0])), data.draw(st.integers(1, 3))
    drafter = SuffixDrafter(remembered(*requests), scale=scale, min_match=least)
    rows = admitted(drafter, data.draw(texts))
    row = rows[0]
    for _ in range(data.draw(st.integers(1, 4))):
        ahead = data.draw(st.lists(st.integers(0, 2), max_size=4))
        context = [*row.tokens.tolist(), *ahead]
        own = continuations(row.tokens.tolist(), context)
        found = [own, *(continuations(request, context) for request in requests)]
        longest = max(length for length, _ in found)
        ends = own[1] if own[0] == longest else [end for length, more in found if length == longest for end in more]
        wanted = [end[: min(5, max(1, int(scale * longest)))] for end in ends] if longest >= least else [[]]
        assert propose(drafter, rows.with_draft([ahead], 0), 5)[0] in wanted
        row.extend(data.draw(texts))


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ([2, 3, 8, 2, 3, 9, 2, 3], 5),  # the end before the one just written, not the first
        ([2, 3, 8, 2, 3, 9, 2, 3, 4, 2, 3], 8),
        ([1, 2, 8, 1, 2, 7, 2], 5),  # a substring that was never alone before
        ([5, 5], 1),
    ],
)
def test_of_several_matches_a_recent_one_is_copied(text: list[int], end: int) -> None:
    assert drafted(SuffixDrafter(scale=64.0), text, 9) == text[end:]
    assert drafted(SuffixDrafter(remembered([1, 2, 3], [1, 2, 4])), [1, 2], 1) == [4]


def test_finished_rows_are_remembered_once() -> None:
    memory = Memory(max_tokens=1000)
    drafter = SuffixDrafter(memory)
    rows = admitted(drafter, [1, 2], [3, 4], [5, 6])
    rows[1].extend([7])
    drafter.rearrange([(2, 1)], 2)
    assert kept(memory) == [[3, 4, 7]], "with the tokens since its last draft"
    for count in (1, 1, 0):
        drafter.rearrange([], count)
    assert kept(memory) == [[3, 4, 7], [5, 6], [1, 2]]
    memory.clear()
    admitted(drafter, [1, 2, 3])
    drafter.reset()  # a failing drafter is reset again and again with the same rows
    outputs = SuffixDrafter(memory, prompts=False)
    rows = admitted(outputs, [1, 2])
    rows[0].extend([7, 8])
    outputs.rearrange([], 0)
    assert kept(memory) == [[7, 8]], "outputs alone"


@given(st.integers(0, 60), st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=12))
@settings(max_examples=100, deadline=None)
def test_memory_is_bounded_and_the_newest_request_is_there(size: int, requests: list[list[int]]) -> None:
    memory = Memory(max_tokens=size)
    for request in requests:
        memory.add("", np.array(request, dtype=np.int64))
        assert memory.size <= size + 1
        if size >= 2 and request:
            assert kept(memory)[-1] == request[-(size // 2) :]


def test_a_memory_that_changes_while_a_row_is_decoded() -> None:
    memory = remembered([1, 2, 3, 4])
    drafter = SuffixDrafter(memory)
    rows = admitted(drafter, [9, 1, 2])
    assert propose(drafter, rows, 1) == [[3]]
    memory.add("", np.array([1, 2, 5, 6]))
    rows[0].extend([5])
    assert propose(drafter, rows, 1) == [[6]]
    memory.clear()
    assert memory.size == 0 and propose(drafter, rows, 3) == [[]]


def test_a_long_match_is_measured_beyond_the_sorted_tokens() -> None:
    context = [i * i % 251 for i in range(3 * DEPTH)]
    memory = remembered([*context, 77, 78], [250, *context[-DEPTH:], 79])
    drafter = SuffixDrafter(memory, scale=0.1, min_match=2 * DEPTH)
    found = drafted(drafter, [250, *context], 5)
    assert found == [77] + [78] * (int(0.3 * DEPTH) > 1), "the latest one matches fewer tokens"


def test_later_requests_of_a_run_draft_from_earlier_ones() -> None:
    model = TableModel.random(30, seed=5, concentration=0.3)
    memory, params = Memory(), SamplingParams(max_new_tokens=30)
    first, steps, _ = run(model, [[3]], params, drafter=SuffixDrafter(memory), gamma=8)
    accepted = memory.accepted
    again, fewer, engine = run(model, [[3]], params, drafter=SuffixDrafter(memory), gamma=8)
    assert again == first and engine.draft_failures == 0
    assert len(fewer) < len(steps) / 2
    assert memory.size == 2 * 32 and accepted == 0 and memory.accepted > 10


def test_several_threads_share_a_past() -> None:
    memory = Memory(max_tokens=400)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(12):
            drafter = SuffixDrafter(memory)
            rows = admitted(drafter, rng.integers(0, 3, 10).tolist())
            for _ in range(4):
                propose(drafter, rows, 4)
                rows[0].extend(rng.integers(0, 3, 5).tolist())
            drafter.rearrange([], 0)
            assert memory.size <= 400

    assert not race(work)


class Counting(dict[int, int]):
    """A state's transitions, counting how often any are looked at."""

    looks = 0

    def __contains__(self, key: object) -> bool:
        Counting.looks += 1
        return super().__contains__(key)

    def get(self, *args: int) -> int | None:  # type: ignore[override]
        Counting.looks += 1
        return super().get(*args)


class Counted(SuffixAutomaton):
    __slots__ = ()

    def _new(self, following: dict[int, int], length: int, first_end: int) -> int:
        return super()._new(Counting(following), length, first_end)


@pytest.mark.parametrize("period", [1, 2, 7, 50])
def test_adding_and_following_take_constant_work_per_token(period: int) -> None:
    text = [(i * i + i // 97) % period for i in range(3000)]
    automaton = Counted()
    automaton.next[0] = Counting()
    Counting.looks = 0
    automaton.extend(text)
    assert Counting.looks <= 7 * len(text)
    assert len(automaton.next) <= 2 * len(text) and sum(map(len, automaton.next)) <= 3 * len(text)
    Counting.looks = 0
    automaton.match([token if i % 11 else -1 for i, token in enumerate(text)])
    assert Counting.looks <= 3 * len(text)
