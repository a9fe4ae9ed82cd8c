"""The n-gram store against counting by brute force, and what its drafter learns of the target's passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.decoding.protocols import ModelOutput
from foresay.drafters import NgramStore, NgramStoreDrafter
from foresay.drafters.owners import MOST_SALTS
from helpers.lookups import admitted, drafted, propose
from helpers.racing import race

SEEN = 128
"""The weight of a committed token, compared with one that the target only found likely."""
texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)
Counts = dict[tuple[int, ...], dict[int, int]]


def best(text: Sequence[int], context: Sequence[int], n: int, levels: str) -> set[int]:
    """The most frequent tokens after the longest known end of the context, by a search of every position."""
    for size in range(n - 1, n - 2 if levels == "one" else 0, -1):
        if size > len(context):
            continue
        piece = list(context[-size:])
        seen = Counter(text[i] for i in range(size, len(text)) if list(text[i - size : i]) == piece)
        if seen:
            return {token for token, count in seen.items() if count == max(seen.values())}
    return set()


@given(
    texts,
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=4),
    st.integers(2, 5),
    st.sampled_from(["one", "all"]),
)
@settings(max_examples=150, deadline=None)
def test_a_draft_follows_the_counts_of_all_that_is_committed(
    prompt: list[int], outputs: list[list[int]], n: int, levels: str
) -> None:
    drafter = NgramStoreDrafter(n, levels=levels)
    rows = admitted(drafter, prompt)
    for output in [*outputs, []]:
        committed = rows[0].tokens.tolist()
        context = list(committed)
        for token in propose(drafter, rows, 5)[0]:
            assert token in best(committed, context, n, levels)
            context.append(token)
        assert len(context) == len(committed) + 5 or not best(committed, context, n, levels)
        rows[0].extend(output)


@given(st.lists(st.integers(0, 40), max_size=200))
@settings(max_examples=50, deadline=None)
def test_contexts_are_bounded_and_the_ones_unseen_for_longest_go(tokens: list[int]) -> None:
    store = NgramStore(2, max_contexts=16)
    store.learn(tokens, 0)
    recent = list(dict.fromkeys(reversed(tokens[:-1])))[:16]
    assert {token for token in range(41) if store.next([token])} == set(recent) and len(store) == len(recent)
    store.clear()
    assert len(store) == 0 and store.next(tokens) is None


def test_the_later_of_equally_frequent_tokens_is_drafted_and_a_likely_one_never_before_a_written_one() -> None:
    for text, wanted in (([1, 5, 1, 6, 1, 5, 1, 6], 6), ([1, 6, 1, 5, 1, 6, 1, 5], 5)):
        store = NgramStore(2)
        store.learn(text, 0)
        assert store.next([1]) == (wanted, 1)
    store = NgramStore(2)
    store.add([1], 5)
    for _ in range(200):
        store.add([1], 6, 4)
    assert store.next([1]) == (5, 1)


def test_an_unknown_context_ends_the_draft_or_repeats_its_last_token() -> None:
    assert drafted(NgramStoreDrafter(3), [1, 2, 3], 4) == []
    for n in (2, 3):
        assert drafted(NgramStoreDrafter(n, stop_unknown=False), [1, 2, 3], 4) == [3, 3, 3, 3]


def target(*top: Sequence[int]) -> ModelOutput:
    """Scores of one row whose likeliest tokens at each position are these, in order."""
    scores = torch.zeros(1, len(top), 10)
    for t, tokens in enumerate(top):
        for rank, token in enumerate(tokens):
            scores[0, t, token] = 10.0 - rank
    return ModelOutput(scores)


def learned(drafter: NgramStoreDrafter) -> Counts:
    return drafter._states[0].store._counts


@pytest.mark.parametrize(
    ("options", "known", "written", "top", "expected"),
    [
        (  # 6 is written instead of 4, and scores after 4 and 5 count too
            {"n": 3, "filler_top_k": 2, "levels": "one"},
            [1, 2, 3, 4, 5],
            [3, 6],
            ([3, 7], [6, 4], [8, 9], [0, 1]),
            {
                (1, 2): {3: 2 * SEEN, 7: 1},
                (2, 3): {4: SEEN, 6: 2 + SEEN},
                (3, 4): {5: SEEN, 8: 2, 9: 1},
                (4, 5): {0: 2, 1: 1},
            },
        ),
        (  # the output ends after the first of three draft tokens
            {"n": 2, "filler_top_k": 2},
            [2, 3, 4, 5],
            [3],
            ([3, 7], [4, 6], [5, 8], [9, 0]),
            {
                (1,): {2: SEEN},
                (2,): {3: 2 * SEEN, 7: 1},
                (3,): {4: SEEN, 6: 1},
                (4,): {5: SEEN, 8: 1},
                (5,): {9: 2, 0: 1},
            },
        ),
        (
            {"n": 2},
            [2, 3, 4, 5],
            [3],
            ([3, 7], [4, 6]),
            {(1,): {2: SEEN}, (2,): {3: 2 * SEEN}, (3,): {4: SEEN}, (4,): {5: SEEN}},
        ),
    ],
    ids=["rejected", "stopped", "without fillers"],
)
def test_the_targets_likeliest_tokens_are_learned_after_the_draft_they_were_scored_after(
    options: dict[str, Any], known: list[int], written: list[int], top: Sequence[Sequence[int]], expected: Counts
) -> None:
    drafter = NgramStoreDrafter(**options)
    rows = admitted(drafter, [1, 2])
    drafter._states[0].store.learn(known, 0)
    assert propose(drafter, rows, 3) == [[3, 4, 5]]
    rows[0].extend(written)
    drafter.observe(rows, None, target(*top))
    assert learned(drafter) == expected
    if (4, 5) in expected:
        assert drafter._states[0].store.next([4, 5]) == (0, 2), "the likelier of two that were learned together"


def test_what_is_written_is_learned_once_while_nothing_is_drafted() -> None:
    """So that a draft after many plain passes takes no longer than others; the prompt is learned when the row comes."""
    drafter = NgramStoreDrafter(2, filler_top_k=2)
    rows = admitted(drafter, [1])
    for token, top in ((2, [2, 9]), (3, [3, 8])):
        propose(drafter, rows, 0)
        rows[0].extend([token])
        drafter.observe(rows, None, target(top))
    expected = {(1,): {2: SEEN + 2, 9: 1}, (2,): {3: SEEN + 2, 8: 1}}
    assert learned(drafter) == expected, "by a pass, and as committed text"
    propose(drafter, rows, 1)
    assert learned(drafter) == expected


def test_of_a_draft_that_is_not_its_own_only_accepted_tokens_are_known() -> None:
    """Inside a cascade: rejected tokens are another drafter's, so the positions after them precompute nothing."""
    drafter = NgramStoreDrafter(2, filler_top_k=2)
    rows = admitted(drafter, [1, 2])
    assert propose(drafter, rows.with_draft([[1]], 0), 3) == [[2]]
    rows[0].extend([3, 6])
    drafter.observe(rows, None, target([3, 7], [6, 4], [8, 9], [0, 1]))
    assert learned(drafter) == {(1,): {2: SEEN}, (2,): {7: 1, 3: SEEN + 2}, (3,): {4: 1, 6: SEEN + 2}}
    drafter.observe(rows.with_draft([[6]], 0), None, target([3, 7]))
    assert (6,) not in learned(drafter), "a pass of a draft model teaches nothing"


def test_requests_learn_for_themselves_or_for_all_of_an_owner() -> None:
    drafter = NgramStoreDrafter(2)
    assert propose(drafter, admitted(drafter, [1, 2, 1], [1, 1, 1]), 1, 1) == [[2], [1]]
    store = NgramStore(2)
    drafter = NgramStoreDrafter(2, store=store)
    assert propose(drafter, admitted(drafter, [1, 2, 1], [3, 1]), 0, 1) == [[], [2]]
    assert drafted(NgramStoreDrafter(2, store=store), [1], 1) == [2], "it outlives the drafter's rows"
    first, other = store.of_owner("key\n0"), store.of_owner("other\n0")
    assert store.of_owner("key\n0") is first is not store
    for i in range(1, MOST_SALTS + 1):
        store.of_owner(f"key\n{i}")
    assert store.of_owner("other\n0") is other and store.of_owner("key\n0") is not first, "salts of a key are few"


def test_a_shared_store_bears_several_threads() -> None:
    store = NgramStore(3, max_contexts=16)

    def work(seed: int) -> None:
        for i in range(2000):
            store.add([i % 7, (i * seed) % 5], i % 3)
            store.next([i % 7, i % 5])

    assert not race(work) and len(store) <= 16
    assert store._counts.keys() == store._best.keys()
