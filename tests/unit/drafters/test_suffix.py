"""Suffix drafting: matches against brute force, how much is guessed, and the memory of earlier requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import PastRequests, SuffixDrafter
from foresay.drafters.suffix import _REMATCH
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


def admitted(*prompts: Sequence[int], past: PastRequests | None = None, **options: Any) -> tuple[SuffixDrafter, Rows]:
    drafter, rows = SuffixDrafter(past, **options), Rows([make_row(prompt) for prompt in prompts])
    drafter.admit(rows, 0)
    return drafter, rows


def remembered(*requests: Sequence[int], max_tokens: int = 1000) -> PastRequests:
    past = PastRequests(max_tokens)
    for request in requests:
        past.add(np.array(request, dtype=np.int64))
    return past


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_guesses_follow_the_longest_match_in_own_text_and_past(data: st.DataObject) -> None:
    requests = data.draw(st.lists(texts, max_size=4))
    drafter, rows = admitted(data.draw(texts), past=remembered(*requests), scale=1.5)
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
    assert propose(*admitted([2, 3], past=remembered([1, 2, 3, 4]), min_match=3), 2) == [[]]
    assert propose(*admitted([1, 2, 3], past=remembered([1, 2, 3, 4]), min_match=3), 2) == [[4]]


def test_a_longer_match_in_the_past_wins_and_an_equal_one_does_not() -> None:
    past = remembered([5, 1, 2, 7, 7])
    assert propose(*admitted([2, 9, 5, 1, 2], past=past), 2) == [[7, 7]]
    assert propose(*admitted([5, 1, 2, 9, 5, 1, 2], past=past), 2) == [[9, 5]]


def test_requests_do_not_run_into_each_other() -> None:
    past = remembered([1, 2, 3], [4, 5, 6], [1, 2])
    assert propose(*admitted([0, 2], past=past), 5) == [[3]], "up to the end of its request, and no further"
    assert propose(*admitted([3, 4], past=past), 5) == [[5, 6]], "no request holds 3 4"
    assert propose(*admitted([0, 3], past=past), 5) == [[]], "3 ends a request"


def test_an_end_of_a_request_does_not_hide_what_follows_elsewhere() -> None:
    assert propose(*admitted([1, 2], past=remembered([1, 2, 3], [1, 2])), 2) == [[3]]
    assert propose(*admitted([1, 2], past=remembered([2, 7, 7], [1, 2], [5, 5])), 2) == [[7, 7]]
    assert propose(*admitted([1, 2], past=remembered([1, 2], [1, 2, 6], [1, 2])), 2) == [[6]]


def test_a_finished_row_is_handed_over_once() -> None:
    past = PastRequests()
    drafter, rows = admitted([1, 2], [3, 4], [5, 6], past=past)
    rows[1].extend([7])
    drafter.rearrange([(2, 1)], 2)
    assert past.halves[0].text == [-1, 3, 4, 7], "what it wrote since the last guess too"
    drafter.rearrange([], 1)
    assert past.halves[0].text == [-1, 3, 4, 7, -5, 5, 6]
    drafter.rearrange([], 1)
    drafter.rearrange([], 0)
    drafter.reset()
    assert past.halves[0].text == [-1, 3, 4, 7, -5, 5, 6, -8, 1, 2]


def test_reset_remembers_those_at_work_and_a_new_row_finds_them() -> None:
    past = PastRequests()
    drafter, _ = admitted([1, 2, 3], past=past)
    drafter.reset()
    later, rows = admitted([1, 2], past=past)
    assert propose(later, rows, 3) == [[3]]
    past.clear()
    assert len(past) == 0 and propose(later, rows, 3) == [[]]


@given(st.integers(0, 60), st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=12))
@settings(max_examples=200, deadline=None)
def test_memory_is_bounded_and_the_newest_request_is_there(size: int, requests: list[list[int]]) -> None:
    past = PastRequests(size)
    for request in requests:
        past.add(np.array(request, dtype=np.int64))
        assert len(past) <= size
        if size >= 4 and request:
            kept = request[-(size // 2 - 1) :]
            assert past.halves[-1].text[-len(kept) :] == kept and past.halves[-1].text[-len(kept) - 1] < 0
        for half in past.halves:
            assert half.automaton.size == len(half.text)


def test_the_older_half_is_forgotten_when_the_newer_is_full() -> None:
    past = remembered([1, 2, 3], [4, 5, 6], max_tokens=16)
    assert len(past.halves) == 1 and len(past) == 8
    past.add(np.array([7, 8, 9]))
    assert len(past.halves) == 2 and len(past) == 12
    assert propose(*admitted([1, 2], past=past), 1) == [[3]]
    past.add(np.array([1, 1, 1, 1]))
    assert [half.text[1:] for half in past.halves] == [[7, 8, 9], [1, 1, 1, 1]]
    assert propose(*admitted([4, 5], past=past), 1) == [[]]


def test_a_past_that_changes_while_a_row_is_at_work() -> None:
    past = remembered([1, 2, 3, 4], max_tokens=20)
    drafter, rows = admitted([9, 1, 2], past=past)
    assert propose(drafter, rows, 1) == [[3]]
    past.add(np.array([1, 2, 5, 6]))
    rows[0].extend([5])
    assert propose(drafter, rows, 1) == [[6]], "found in what was added to the half it had matched"
    past.add(np.array([2, 5, 7]))
    past.add(np.array([5, 2, 5, 8, 0, 0, 0]))
    assert [half.text[1:] for half in past.halves] == [[2, 5, 7], [5, 2, 5, 8, 0, 0, 0]]
    rows[0].extend([7, 5, 2, 5])
    assert propose(drafter, rows, 1) == [[8]]
    assert all(match.past in past.halves for match in drafter._states[0].matches.values())


def test_a_match_grows_with_the_past_and_not_by_itself() -> None:
    past = remembered([1, 1, 7, 7, 7, 7])
    drafter, rows = admitted([1], past=past, scale=1.0)
    assert len(propose(drafter, rows, 4)[0]) == len(propose(drafter, rows, 4)[0]) == 1
    drafter, rows = admitted([3, 1], past=past, scale=1.0)
    assert len(propose(drafter, rows, 4)[0]) == 1
    past.add(np.array([3, 1, 5, 6]))
    assert propose(drafter, rows, 4) == [[5, 6]]


def test_a_long_context_is_matched_anew_by_its_end() -> None:
    context = [i * i % 251 for i in range(3 * _REMATCH)]
    past = remembered([*context, 77, 78])
    drafter, rows = admitted([250, *context], past=past, scale=0.1, min_match=_REMATCH)
    assert propose(drafter, rows, 5) == [[77] + [78] * (int(0.1 * _REMATCH) > 1)]
    past.add(np.array([1]))
    rows[0].extend([77])
    assert propose(drafter, rows, 1) == [[78]]


def test_what_an_encoder_read_is_matched_too() -> None:
    row = Row(0, [0], SamplingParams(), limit=100, source=[5, 6, 7])
    drafter, rows = SuffixDrafter(), Rows([row])
    drafter.admit(rows, 0)
    row.extend([6])
    assert propose(drafter, rows, 3) == [[7, 6]] == propose(drafter, rows.as_decoder_only(), 3)
    assert propose(drafter, rows.as_decoder_only().with_draft([[5]], 0), 1) == [[6]]


def test_later_requests_of_a_run_draft_from_earlier_ones() -> None:
    model = TableModel.random(30, seed=5, concentration=0.3)
    past, params = PastRequests(), SamplingParams(max_new_tokens=30)
    first, steps, _ = run(model, [[3]], params, drafter=SuffixDrafter(past), gamma=8)
    again, fewer, engine = run(model, [[3]], params, drafter=SuffixDrafter(past), gamma=8)
    assert again == first == run(model, [[3]], params, gamma=0)[0] and engine.draft_failures == 0
    assert len(fewer) < len(steps) / 2
    assert len(past) == 2 * 32


def test_several_threads_share_a_past() -> None:
    past = PastRequests(400)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(12):
            drafter, rows = admitted(rng.integers(0, 3, 10).tolist(), past=past)
            for _ in range(4):
                propose(drafter, rows, 4)
                rows[0].extend(rng.integers(0, 3, 5).tolist())
            drafter.rearrange([], 0)
            assert len(past) <= 400

    assert not race(work)
    assert all(half.automaton.size == len(half.text) for half in past.halves)


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
        PastRequests(-1)
    assert str(caught.value) == "max_tokens=-1 must be an integer in [0, 67108864]"
