"""Suffix drafting: matches against brute force, the draft length, and the memory of earlier requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Memory, SuffixDrafter
from foresay.drafters.memory.segment import DEPTH
from foresay.errors import ConfigError
from foresay.lengths import ConstantLength
from foresay.models.table import TableModel
from helpers.making import make_row
from helpers.racing import race
from helpers.support import run

POLICY = ConstantLength(4)
texts = st.lists(st.integers(0, 2), min_size=1, max_size=20)


def continuations(text: Sequence[int], context: Sequence[int]) -> tuple[int, list[list[int]]]:
    """The length of the longest suffix of the context that something follows in the text, and what follows it there."""
    for n in range(len(context), 0, -1):
        piece = list(context[-n:])
        found = [list(text[end:]) for end in range(n, len(text)) if list(text[end - n : end]) == piece]
        if found:
            return n, found
    return 0, []


def propose(drafter: SuffixDrafter, rows: Rows, *budget: int) -> list[list[int]]:
    proposal = drafter.propose(rows, budget, POLICY)
    assert proposal.distributions is None
    return [ids[:n] for ids, n in zip(proposal.token_ids.tolist(), proposal.num_tokens, strict=True)]


def admitted(*prompts: Sequence[int], memory: Memory | None = None, **options: Any) -> tuple[SuffixDrafter, Rows]:
    drafter, rows = SuffixDrafter(memory, **options), Rows([make_row(prompt) for prompt in prompts])
    drafter.admit(rows, 0)
    return drafter, rows


def remembered(*requests: Sequence[int], max_tokens: int = 1000) -> Memory:
    memory = Memory(max_tokens=max_tokens)
    for request in requests:
        memory.add("", np.array(request, dtype=np.int64))
    return memory


def kept(memory: Memory) -> list[list[int]]:
    """The texts of a memory, oldest first."""
    return [text.tolist() for texts in memory.owners().values() for text in texts]


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_guesses_follow_the_longest_match_in_own_text_and_past(data: st.DataObject) -> None:
    requests = data.draw(st.lists(texts, max_size=4))
    drafter, rows = admitted(data.draw(texts), memory=remembered(*requests), scale=1.5)
    row = rows[0]
    for _ in range(data.draw(st.integers(1, 4))):
        drafted = data.draw(st.lists(st.integers(0, 2), max_size=4))
        context = [*row.tokens.tolist(), *drafted]
        own = continuations(row.tokens.tolist(), context)
        found = [own, *(continuations(request, context) for request in requests)]
        longest = max(length for length, _ in found)
        ends = own[1] if own[0] == longest else [end for length, more in found if length == longest for end in more]
        wanted = [end[: min(5, max(1, int(1.5 * longest)))] for end in ends] or [[]]
        assert propose(drafter, rows.with_draft([drafted], 0), 5)[0] in wanted
        row.extend(data.draw(texts))


def test_the_longer_the_match_the_more_is_guessed() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for size in (1, 2, 3):
        for scale, wanted in ((0.1, 1), (1.0, size), (2.0, 2 * size), (64.0, 9 - size)):
            drafter, rows = admitted([*text, 0, *text[:size]], scale=scale)
            assert propose(drafter, rows, 9 - size) == [text[size : size + wanted]]
    assert propose(*admitted([*text, 0, 1, 2], scale=4.0), 3) == [[3, 4, 5]], "never past the budget"


def test_shorter_matches_than_the_minimum_guess_nothing() -> None:
    prompt = [1, 2, 3, 4, 9, 2, 3]
    assert propose(*admitted(prompt, min_match=2), 2) == [[4, 9]]
    assert propose(*admitted(prompt, min_match=3), 2) == [[]]
    assert propose(*admitted([2, 3], memory=remembered([1, 2, 3, 4]), min_match=3), 2) == [[]]
    assert propose(*admitted([1, 2, 3], memory=remembered([1, 2, 3, 4]), min_match=3), 2) == [[4]]


def test_a_longer_match_in_the_memory_wins_and_an_equal_one_does_not() -> None:
    memory = remembered([5, 1, 2, 7, 7])
    assert propose(*admitted([2, 9, 5, 1, 2], memory=memory), 2) == [[7, 7]]
    assert propose(*admitted([5, 1, 2, 9, 5, 1, 2], memory=memory), 2) == [[9, 5]]


def test_requests_do_not_run_into_each_other() -> None:
    memory = remembered([1, 2, 3], [4, 5, 6], [1, 2])
    assert propose(*admitted([0, 2], memory=memory), 5) == [[3]], "up to the end of its request, and no further"
    assert propose(*admitted([3, 4], memory=memory), 5) == [[5, 6]], "no request holds 3 4"
    assert propose(*admitted([0, 3], memory=memory), 5) == [[]], "3 ends a request"


def test_an_end_of_a_request_does_not_hide_other_continuations() -> None:
    assert propose(*admitted([1, 2], memory=remembered([1, 2, 3], [1, 2])), 2) == [[3]]
    assert propose(*admitted([1, 2], memory=remembered([2, 7, 7], [1, 2], [5, 5])), 2) == [[7, 7]]
    assert propose(*admitted([1, 2], memory=remembered([1, 2], [1, 2, 6], [1, 2])), 2) == [[6]]


def test_the_latest_of_equal_matches_is_copied() -> None:
    assert propose(*admitted([1, 2], memory=remembered([1, 2, 3], [1, 2, 4])), 1) == [[4]]


def test_a_finished_row_is_added_once() -> None:
    memory = Memory(max_tokens=1000)
    drafter, rows = admitted([1, 2], [3, 4], [5, 6], memory=memory)
    rows[1].extend([7])
    drafter.rearrange([(2, 1)], 2)
    assert kept(memory) == [[3, 4, 7]], "with the tokens since its last draft"
    drafter.rearrange([], 1)
    drafter.rearrange([], 1)
    drafter.rearrange([], 0)
    assert kept(memory) == [[3, 4, 7], [5, 6], [1, 2]]


def test_outputs_alone_are_kept() -> None:
    memory = Memory(max_tokens=1000)
    drafter, rows = admitted([1, 2], memory=memory, prompts=False)
    rows[0].extend([7, 8])
    drafter.rearrange([], 0)
    assert kept(memory) == [[7, 8]]


def test_reset_forgets_rows_that_have_not_ended() -> None:
    """A failing drafter is reset again and again with the same rows."""
    memory = Memory(max_tokens=1000)
    drafter, _ = admitted([1, 2, 3], memory=memory)
    drafter.reset()
    assert memory.size == 0


def test_a_cleared_memory_drafts_nothing() -> None:
    memory = remembered([1, 2, 3])
    later, rows = admitted([1, 2], memory=memory)
    assert propose(later, rows, 3) == [[3]]
    memory.clear()
    assert memory.size == 0 and propose(later, rows, 3) == [[]]


@given(st.integers(0, 60), st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=12))
@settings(max_examples=200, deadline=None)
def test_memory_is_bounded_and_the_newest_request_is_there(size: int, requests: list[list[int]]) -> None:
    memory = Memory(max_tokens=size)
    for request in requests:
        memory.add("", np.array(request, dtype=np.int64))
        assert memory.size <= size + 1
        if size >= 2 and request:
            assert kept(memory)[-1] == request[-(size // 2) :]


def test_a_memory_that_changes_while_a_row_is_decoded() -> None:
    memory = remembered([1, 2, 3, 4])
    drafter, rows = admitted([9, 1, 2], memory=memory)
    assert propose(drafter, rows, 1) == [[3]]
    memory.add("", np.array([1, 2, 5, 6]))
    rows[0].extend([5])
    assert propose(drafter, rows, 1) == [[6]]


def test_texts_of_another_owner_are_never_drafted() -> None:
    memory = remembered([1, 2, 3])
    memory.add("a", np.array([1, 2, 4]))
    for owner, token in (("", 3), ("a", 4), ("b", None)):
        row = Row(0, [1, 2], SamplingParams(owner=owner), limit=100)
        drafter, rows = SuffixDrafter(memory), Rows([row])
        drafter.admit(rows, 0)
        assert propose(drafter, rows, 1) == [[] if token is None else [token]]
        row.extend([5])
        drafter.rearrange([], 0)
        expected = {"": [1, 2, 5], "a": [1, 2, 5], "b": [1, 2, 5]}[owner]
        assert [text.tolist() for text in memory.texts(owner)][-1] == expected


def test_a_long_match_is_measured_beyond_the_sorted_tokens() -> None:
    context = [i * i % 251 for i in range(3 * DEPTH)]
    memory = remembered([*context, 77, 78], [250, *context[-DEPTH:], 79])
    drafter, rows = admitted([250, *context], memory=memory, scale=0.1, min_match=2 * DEPTH)
    assert propose(drafter, rows, 5) == [[77] + [78] * (int(0.3 * DEPTH) > 1)], "the latest one matches fewer tokens"


def test_what_an_encoder_read_is_matched_too() -> None:
    row = Row(0, [0], SamplingParams(), limit=100, source=[5, 6, 7])
    drafter, rows = SuffixDrafter(), Rows([row])
    drafter.admit(rows, 0)
    row.extend([6])
    assert propose(drafter, rows, 3) == [[7, 6]] == propose(drafter, rows.as_decoder_only(), 3)
    assert propose(drafter, rows.as_decoder_only().with_draft([[5]], 0), 1) == [[6]]


def test_later_requests_of_a_run_draft_from_earlier_ones() -> None:
    model = TableModel.random(30, seed=5, concentration=0.3)
    memory, params = Memory(), SamplingParams(max_new_tokens=30)
    first, steps, _ = run(model, [[3]], params, drafter=SuffixDrafter(memory), gamma=8)
    accepted = memory.accepted
    again, fewer, engine = run(model, [[3]], params, drafter=SuffixDrafter(memory), gamma=8)
    assert again == first == run(model, [[3]], params, gamma=0)[0] and engine.draft_failures == 0
    assert len(fewer) < len(steps) / 2
    assert memory.size == 2 * 32 and accepted == 0 and memory.accepted > 10


def test_several_threads_share_a_past() -> None:
    memory = Memory(max_tokens=400)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(12):
            drafter, rows = admitted(rng.integers(0, 3, 10).tolist(), memory=memory)
            for _ in range(4):
                propose(drafter, rows, 4)
                rows[0].extend(rng.integers(0, 3, 5).tolist())
            drafter.rearrange([], 0)
            assert memory.size <= 400

    assert not race(work)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.05}, "scale=0.05 must be a finite number in [0.1, 64]"),
        ({"min_match": 0}, "min_match=0 must be an integer in [1, 1024]"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SuffixDrafter(**options)
    assert str(caught.value) == message
    with pytest.raises(ConfigError) as caught:
        Memory(max_tokens=-1)
    assert str(caught.value) == "max_tokens=-1 must be an integer in [0, 1073741824]"
